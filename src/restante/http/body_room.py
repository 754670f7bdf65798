"""
Room for large bodies: all of them together take a bounded part of the memory.

A body that does not fit waits for a moment, and then is refused.  The next one is of the caller
that has least of the room, and the smallest of those.  A body keeps its room while it arrives fast.
After that it gives way to those that wait, as long as it waits for its sender or its receiver: slow
ones do not keep others out.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from restante.database import shares
from restante.errors import TooManyAtOnce
from restante.http import turns

_MAX_BYTES = 64 * 1024 * 1024
# A body up to this size takes no room; how many of them a caller sends at once is limited.
SMALL_BYTES = 64 * 1024
_LONGEST_WAIT_SECONDS = 5.0
# A whole body is guaranteed its room for this time, and a part of it for that part of the time.
_GUARANTEED_SECONDS = 5.0
_GRACE_SECONDS = 0.5
_RETRY_AFTER_SECONDS = 5


@dataclass(eq=False, slots=True)
class Place:
    """One body, which may have room, or wait for it."""

    room: "BodyRoom"
    size: int  # when it is whole
    caller: Hashable
    limit: asyncio.Timeout
    arrived: int = 0
    since: float = math.inf  # when it got its room
    gives_way: bool = True  # it waits for somebody else, not for us
    given: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    async def grow(self, size: int) -> None:
        """So much more has arrived; raises TooManyAtOnce if there is no room for the body."""
        self.arrived += size
        if self.arrived > SMALL_BYTES and not self.given.done():
            await self.room.enter(self)

    def wait_for_client(self) -> None:
        """Give way from now on: only a client is waited for."""
        self.gives_way = True
        self.room.arrange()

    @property
    def guaranteed_until(self) -> float:
        """A sender that stands still does not keep the room that it has announced."""
        seconds = self.room.guaranteed_seconds
        grace = min(_GRACE_SECONDS, seconds)
        return self.since + max(grace, seconds * min(self.arrived / self.size, 1))


class BodyRoom:
    """The bodies that have room, and those that wait for it."""

    def __init__(
        self,
        max_bytes: int = _MAX_BYTES,
        *,
        guaranteed_seconds: float = _GUARANTEED_SECONDS,
        longest_wait_seconds: float = _LONGEST_WAIT_SECONDS,
    ) -> None:
        self._free = max_bytes
        self.guaranteed_seconds = guaranteed_seconds
        self.longest_wait_seconds = longest_wait_seconds
        self._inside: list[Place] = []
        self._waiting: list[Place] = []
        self._timer: asyncio.TimerHandle | None = None
        self.decoding = asyncio.Lock()  # for what takes a multiple of a body's size

    @property
    def free_bytes(self) -> int:
        return self._free

    @property
    def callers(self) -> list[Hashable]:
        """Whose bodies have room, by the time of their entry."""
        return [one.caller for one in self._inside]

    @property
    def waiting(self) -> int:
        """How many bodies wait for room."""
        return len(self._waiting)

    @asynccontextmanager
    async def place(self, size: int) -> AsyncIterator[Place]:
        """For a body of at most this size, as long as it is in memory; raises TooManyAtOnce."""
        limit = asyncio.timeout(None)
        place = Place(self, size, shares.caller.get(), limit)
        try:
            async with limit:
                yield place
        except TimeoutError as error:
            if limit.expired():
                raise _refusal("It took too long while others waited.") from error
            raise
        finally:
            self._leave(place)

    async def enter(self, place: Place) -> None:
        """Wait for room; raises TooManyAtOnce."""
        self._waiting.append(place)
        self.arrange()
        if place.given.done():
            return
        turns.pause()
        try:
            async with asyncio.timeout(self.longest_wait_seconds):
                await asyncio.shield(place.given)
        except TimeoutError as error:
            raise _refusal("Too many large bodies are on their way.") from error
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
        await turns.resume()

    def arrange(self) -> None:
        """Give free room away, and end bodies that have had their time for all that wait."""
        self._give()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        due_at = self._make_way(sum(one.size for one in self._waiting), now=loop.time())
        if due_at < math.inf:
            self._timer = loop.call_at(due_at, self.arrange)

    def _make_way(self, size: int, *, now: float) -> float:
        """End those that have had their time, until there is room; when the next one has."""
        ending = [one for one in self._inside if one.limit.expired()]
        coming = self._free + sum(one.size for one in ending)
        others = (one for one in self._inside if one.gives_way and one not in ending)
        for one in sorted(others, key=lambda one: one.guaranteed_until):
            if coming >= size:
                break
            if one.guaranteed_until > now:
                return one.guaranteed_until
            coming += one.size
            one.limit.reschedule(now)
        return math.inf

    def _give(self) -> None:
        while fitting := [one for one in self._waiting if one.size <= self._free]:
            one = min(fitting, key=lambda one: (self._has(one), one.size))
            self._waiting.remove(one)
            self._free -= one.size
            one.since = asyncio.get_running_loop().time()
            self._inside.append(one)
            one.given.set_result(None)

    def _has(self, place: Place) -> int:
        return sum(one.size for one in self._inside if one.caller == place.caller)

    def _leave(self, place: Place) -> None:
        if place in self._inside:
            self._inside.remove(place)
            self._free += place.size
            self.arrange()


def _refusal(why: str) -> TooManyAtOnce:
    return TooManyAtOnce(
        f"{why} Send this body again later.", retry_after_seconds=_RETRY_AFTER_SECONDS
    )
