"""
Wakes those who wait for a feed to grow: in this process after the commit, in others by one notice.

A waiter is told that something happened, never what: it reads the feed again.  So a notice may be
lost, doubled or late, and nothing goes wrong but a delay.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from uuid import UUID

import structlog

from restante.errors import RestanteError, TooManyAtOnce
from restante.ids import WorkspaceId
from restante.store import feed
from restante.store.database import Database, Listener

log = structlog.get_logger()

# How long notices are gathered: one per commit would cost most of the throughput.
_GATHER_SECONDS = 0.01
_LISTEN_AGAIN_SECONDS = 1.0
_IDS_PER_NOTICE = 200  # a notice may hold 8000 bytes, an id takes 33
_MAX_WAITERS = 100  # of one workspace, in one process


class Waiter:
    """One who waits; `changed` is set when the feed may have grown or the server stops."""

    __slots__ = ("changed",)

    def __init__(self) -> None:
        self.changed = asyncio.Event()

    async def wait(self, seconds: float | None) -> bool:
        """Wait for a change and take note of it; False if none came in time."""
        try:
            async with asyncio.timeout(seconds):
                await self.changed.wait()
        except TimeoutError:
            return False
        self.changed.clear()
        return True


class Wakeups:
    """The waiters of this process, and its line to the other processes."""

    def __init__(self, db: Database, listener: Listener) -> None:
        self._db = db
        self._listener = listener
        self._waiters: defaultdict[WorkspaceId, set[Waiter]] = defaultdict(set)
        self._to_tell: set[WorkspaceId] = set()
        self._something_to_tell = asyncio.Event()
        self.stopping = False

    @asynccontextmanager
    async def waiting(self, workspace_id: WorkspaceId) -> AsyncIterator[Waiter]:
        """Be woken while inside; enter before reading the feed, so that nothing falls between."""
        if len(self._waiters[workspace_id]) >= _MAX_WAITERS:
            raise TooManyAtOnce(
                f"{_MAX_WAITERS} requests wait for this feed already; let one of them end first."
            )
        waiter = Waiter()
        self._waiters[workspace_id].add(waiter)
        try:
            yield waiter
        finally:
            self._waiters[workspace_id].discard(waiter)
            if not self._waiters[workspace_id]:
                del self._waiters[workspace_id]

    def grew(self, workspace_id: WorkspaceId) -> None:
        """Call after a commit: wakes waiters here at once, and elsewhere soon."""
        self._wake(workspace_id)
        self._to_tell.add(workspace_id)
        self._something_to_tell.set()

    def stop(self) -> None:
        """Wake everyone: whoever waits answers with what there is."""
        self.stopping = True
        self._wake_all()

    def _wake(self, workspace_id: WorkspaceId) -> None:
        for waiter in self._waiters.get(workspace_id, ()):
            waiter.changed.set()

    def _wake_all(self) -> None:
        for workspace_id in self._waiters:
            self._wake(workspace_id)

    async def tell(self) -> None:
        """Tell the other processes, for ever; one notice for all that was gathered."""
        while True:
            await self._something_to_tell.wait()
            await asyncio.sleep(_GATHER_SECONDS)
            self._something_to_tell.clear()
            grown, self._to_tell = self._to_tell, set()
            try:
                await self._notify(grown)
            except RestanteError as error:
                log.warning("notice_failed", reason=str(error))

    async def _notify(self, grown: Iterable[WorkspaceId]) -> None:
        ids = [workspace_id.hex for workspace_id in grown]
        async with self._db.connection() as connection:
            for start in range(0, len(ids), _IDS_PER_NOTICE):
                await feed.notify(connection, ",".join(ids[start : start + _IDS_PER_NOTICE]))

    async def listen(self) -> None:
        """Hear the other processes, for ever; after a gap in hearing, everyone looks again."""
        while True:
            try:
                async with self._listener.listening(feed.CHANNEL, self._heard) as lost:
                    self._wake_all()
                    await lost.wait()
            except RestanteError as error:
                log.warning("listening_failed", reason=str(error))
            await asyncio.sleep(_LISTEN_AGAIN_SECONDS)

    def _heard(self, payload: str) -> None:
        for part in payload.split(","):
            self._wake(WorkspaceId(UUID(hex=part)))
