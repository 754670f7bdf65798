"""Does work once for all who ask at the same time, so that asking often costs nothing more."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Work whose result is the same for everybody."""

    def __init__(self, work: Callable[[], Awaitable[T]], *, at_most_every_seconds: float) -> None:
        self._work = work
        self._pause_seconds = at_most_every_seconds
        self._next: asyncio.Task[T] | None = None  # has not begun, so it serves all who ask now
        self._running = asyncio.Lock()
        self._began_at = -math.inf

    async def result(self) -> T:
        """The result of work that began after this call, or what it raised."""
        if self._next is None:
            # Not in the context of the one who asked first: it works for the others too.
            self._next = asyncio.create_task(self._run(), context=Context())
            self._next.add_done_callback(_retrieve)
        return await asyncio.shield(self._next)

    async def _run(self) -> T:
        clock = asyncio.get_running_loop().time
        async with self._running:
            await asyncio.sleep(max(0.0, self._began_at + self._pause_seconds - clock()))
            self._next, self._began_at = None, clock()
            return await self._work()


def _retrieve(done: "asyncio.Task[Any]") -> None:
    """Take the exception, which the event loop would log if everybody who asked has gone."""
    if not done.cancelled():
        done.exception()
