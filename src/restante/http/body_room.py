"""
Room for large bodies: all of them together take a bounded part of the memory.

A body that does not fit waits for a moment, and then is refused.  The caller that has least of the
room is next.  A body has its room for a few seconds in any case, which is enough for what arrives
fast.  After that it gives way to those that wait, as long as it waits for its sender or its
receiver: slow ones do not keep others out.
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
_GUARANTEED_SECONDS = 5.0
_RETRY_AFTER_SECONDS = 5


@dataclass(eq=False, slots=True)
class Place:
    """One body, which may have room, or wait for it."""

    room: "BodyRoom"
    size: int
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
        self._inside: list[Place] = []  # by the time of their entry
        self._waiting: list[Place] = []
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
        self._give()
        if not place.given.done():
            turns.pause()
            try:
                await self._until_given(place)
            finally:
                if place in self._waiting:
                    self._waiting.remove(place)
            await turns.resume()

    async def _until_given(self, place: Place) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self.longest_wait_seconds
        while not place.given.done():
            seconds = min(ends_at, self._make_way(place.size, now=loop.time())) - loop.time()
            await asyncio.wait({place.given}, timeout=max(seconds, 0))
            if not place.given.done() and loop.time() >= ends_at:
                raise _refusal("Too many large bodies are on their way.")

    def _make_way(self, size: int, *, now: float) -> float:
        """End those that have had their time, until there is room; when the next one has."""
        coming = self._free
        for one in (one for one in self._inside if one.gives_way):
            if coming >= size:
                return math.inf
            if one.since + self.guaranteed_seconds > now:
                return one.since + self.guaranteed_seconds
            coming += one.size
            if not one.limit.expired():
                one.limit.reschedule(now)
        return math.inf

    def _give(self) -> None:
        while fitting := [one for one in self._waiting if one.size <= self._free]:
            one = min(fitting, key=self._has)
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
            self._give()


def _refusal(why: str) -> TooManyAtOnce:
    return TooManyAtOnce(
        f"{why} Send this body again later.", retry_after_seconds=_RETRY_AFTER_SECONDS
    )
