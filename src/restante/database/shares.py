"""
Fair shares of the pool: no caller uses more than its share of the connections at once.

A caller with a thousand requests waits for itself, first come, first served.  Others find free
connections, and an event loop that is not busy with a thousand answers.
"""

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from restante.errors import TooManyAtOnce

_RETRY_AFTER_SECONDS = 1

# Who the work of this task is done for; None: for the server itself, without a limit.
caller: ContextVar[Hashable | None] = ContextVar("caller", default=None)


@dataclass(slots=True)
class _Share:
    free: asyncio.Semaphore
    users: int = 0  # with a connection, or waiting for one


class Shares:
    """How many connections each caller uses."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._shares: dict[Hashable, _Share] = {}

    @asynccontextmanager
    async def one(self, *, timeout_seconds: float) -> AsyncIterator[None]:
        """Wait until the caller may use one more connection; raises TooManyAtOnce."""
        who = caller.get()
        if who is None:
            yield
            return
        share = self._shares.setdefault(who, _Share(asyncio.Semaphore(self._limit)))
        share.users += 1
        try:
            await _acquired(share.free, timeout_seconds)
            try:
                yield
            finally:
                share.free.release()
        finally:
            share.users -= 1
            if not share.users:
                del self._shares[who]

    def __len__(self) -> int:
        return len(self._shares)


async def _acquired(free: asyncio.Semaphore, timeout_seconds: float) -> None:
    try:
        async with asyncio.timeout(timeout_seconds):
            await free.acquire()
    except TimeoutError as error:
        raise TooManyAtOnce(
            "Too many requests of this caller wait for the database; send fewer at once.",
            retry_after_seconds=_RETRY_AFTER_SECONDS,
        ) from error
