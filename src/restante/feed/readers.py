"""
Bounds what the readers of one workspace take from the others: connections and memory.

Long scans take turns, one at a time in a workspace and a few in the process.  Large answers that
are being sent have places, a few in a workspace.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from restante.database import shares
from restante.errors import TooManyAtOnce
from restante.ids import WorkspaceId

# Of one process; the pool has connections left for everybody else.
_SCANS_AT_ONCE = 4
# Of one process, and of one workspace; they are in memory until their clients have read them.
_LARGE_BYTES_AT_ONCE = 256 * 1024 * 1024
_LARGE_BYTES_PER_WORKSPACE = 32 * 1024 * 1024
# Of one workspace with several large answers; one alone has no limit.
_BYTES_PER_SECOND = 64 * 1024 * 1024
_MAX_QUEUE = 100  # of one workspace
# Turns are short.  A request that gets none in this time would only make the queue longer.
_LONGEST_QUEUE_SECONDS = 5.0
_RETRY_AFTER_SECONDS = 2


class Scans:
    """The turns of scans: a filter lets so little pass that many rows are searched."""

    def __init__(self) -> None:
        self._running = asyncio.Semaphore(_SCANS_AT_ONCE)
        self._locks: dict[WorkspaceId, asyncio.Lock] = {}
        self._queued = Counter[WorkspaceId]()

    @asynccontextmanager
    async def turn(self, workspace_id: WorkspaceId) -> AsyncIterator[None]:
        """
        Wait a while until no other scan of this workspace runs; raises TooManyAtOnce.

        A workspace waits with one scan for its turn among all, however many it has begun.
        """
        if self._queued[workspace_id] >= _MAX_QUEUE:
            raise TooManyAtOnce(
                f"{_MAX_QUEUE} requests search this feed already; let one of them end first.",
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
                        "Too many requests search feeds; try again later.",
                        retry_after_seconds=_RETRY_AFTER_SECONDS,
                    ) from error
                # The holder of a turn must not wait for its own share: others wait for the turn.
                with shares.for_the_server():
                    yield
        finally:
            self._queued[workspace_id] -= 1
            if not self._queued[workspace_id]:
                del self._queued[workspace_id], self._locks[workspace_id]


class Places:
    """The places of large answers: a few in a workspace, and as many as fit in the process."""

    def __init__(self, per_workspace: int) -> None:
        self._per_workspace = per_workspace
        self._taken = Counter[WorkspaceId]()
        self._bytes = Counter[WorkspaceId]()

    @property
    def taken(self) -> int:
        """How many places are taken."""
        return self._taken.total()

    @contextmanager
    def place(self, workspace_id: WorkspaceId, size: int) -> Iterator[None]:
        """
        Take a place until an answer of this size is sent; raises TooManyAtOnce.

        Nobody queues for one, because the answer is in memory already.
        """
        if not self._is_free(workspace_id, size):
            raise TooManyAtOnce(
                "Too many large answers from feeds are being sent already; let one of yours end "
                "first, or try again later.",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        self._taken[workspace_id] += 1
        self._bytes[workspace_id] += size
        try:
            yield
        finally:
            self._taken[workspace_id] -= 1
            self._bytes[workspace_id] -= size
            if not self._taken[workspace_id]:
                del self._taken[workspace_id], self._bytes[workspace_id]

    def _is_free(self, workspace_id: WorkspaceId, size: int) -> bool:
        """One row may be larger than what a workspace has, and must be read all the same."""
        taken, held = self._taken[workspace_id], self._bytes[workspace_id]
        is_own_full = taken and held + size > _LARGE_BYTES_PER_WORKSPACE
        is_full = self._bytes.total() + size > _LARGE_BYTES_AT_ONCE
        return taken < self._per_workspace and not is_own_full and not is_full

    def pause_after(self, workspace_id: WorkspaceId, size: int) -> float:
        """How many seconds an answer waits after so many bytes, for the others of its workspace."""
        taken = self._taken[workspace_id]
        return taken * size / _BYTES_PER_SECOND if taken > 1 else 0.0
