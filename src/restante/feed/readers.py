"""
Bounds what the readers of one workspace take from the others: connections and memory.

Long scans take turns, one at a time in a workspace and a few in the process; so do reads of large
rows, of which Postgres and we make several copies.  Large rows have room until they are sent, and
the large answers of a workspace share a rate.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from restante.database import shares
from restante.errors import TooManyAtOnce
from restante.http.body_room import BodyRoom
from restante.ids import WorkspaceId

# Of one process; the pool has connections left for everybody else.
_AT_ONCE = 4
# Of one workspace with several large answers; one alone has no limit.
_BYTES_PER_SECOND = 64 * 1024 * 1024
# The size of an old row is estimated, and it must have room in any case.
_LARGEST_PAGE_BYTES = 32 * 1024 * 1024
_MAX_QUEUE = 100  # of one workspace
# Turns are short.  A request that gets none in this time would only make the queue longer.
_LONGEST_QUEUE_SECONDS = 5.0
_RETRY_AFTER_SECONDS = 2


class ReadTurns:
    """The turns of reads that cost much, of one kind."""

    def __init__(self, kind: str) -> None:
        self._kind = kind  # what they do, for refusals
        self._running = asyncio.Semaphore(_AT_ONCE)
        self._locks: dict[WorkspaceId, asyncio.Lock] = {}
        self._queued = Counter[WorkspaceId]()

    @asynccontextmanager
    async def turn(self, workspace_id: WorkspaceId) -> AsyncIterator[None]:
        """
        Wait a while until no other read of this workspace runs; raises TooManyAtOnce.

        A workspace waits with one read for its turn among all, however many it has begun.
        """
        if self._queued[workspace_id] >= _MAX_QUEUE:
            raise TooManyAtOnce(
                f"{_MAX_QUEUE} requests {self._kind} of this feed already; let one end first.",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        self._queued[workspace_id] += 1
        try:
            async with AsyncExitStack() as turn:
                try:
                    async with asyncio.timeout(_LONGEST_QUEUE_SECONDS):
                        lock = self._locks.setdefault(workspace_id, asyncio.Lock())
                        await turn.enter_async_context(lock)
                        await turn.enter_async_context(self._running)
                except TimeoutError as error:
                    raise TooManyAtOnce(
                        f"Too many requests {self._kind} of feeds; try again later.",
                        retry_after_seconds=_RETRY_AFTER_SECONDS,
                    ) from error
                # The holder of a turn must not wait for its own share: others wait for the turn.
                with shares.for_the_server():
                    yield
        finally:
            self._queued[workspace_id] -= 1
            if not self._queued[workspace_id]:
                del self._queued[workspace_id], self._locks[workspace_id]


class LargeRoom(AsyncExitStack):
    """
    The room for the large rows of one reader, which it has until this block ends.

    It may be taken back for others.  That cancels the task in which the block is, and the block
    then raises TooManyAtOnce.
    """

    def __init__(self, room: BodyRoom, *, copies: int = 1) -> None:
        super().__init__()
        self._room = room
        self._copies = copies  # that are in memory while a row is sent

    async def take(self, size: int) -> None:
        """Take room for rows of this size, instead of what it has; raises TooManyAtOnce."""
        await self.aclose()
        size = self._copies * min(size, _LARGEST_PAGE_BYTES)
        place = await self.enter_async_context(self._room.place(size))
        await place.grow(size)


class SharedRate:
    """How fast several large answers of one workspace are sent."""

    def __init__(self) -> None:
        self._answers = Counter[WorkspaceId]()

    @contextmanager
    def sending(self, workspace_id: WorkspaceId) -> Iterator[None]:
        """Count an answer of this workspace while it is sent."""
        self._answers[workspace_id] += 1
        try:
            yield
        finally:
            self._answers[workspace_id] -= 1
            if not self._answers[workspace_id]:
                del self._answers[workspace_id]

    def pause_after(self, workspace_id: WorkspaceId, size: int) -> float:
        """How many seconds an answer waits after so many bytes, for the others of its workspace."""
        answers = self._answers[workspace_id]
        return answers * size / _BYTES_PER_SECOND if answers > 1 else 0.0
