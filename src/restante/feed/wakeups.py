"""
Wakes those who wait for a feed to grow: in this process after the commit, in others by one notice.

A waiter is told that something happened, never what: it reads the feed again.  So a notice may be
lost, doubled or late, and nothing goes wrong but a delay.  What is told on is a set of ids, so a
notice that could not be given is given later, and the memory for it does not grow with the commits.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import structlog

from restante.database.pool import Database, Listener
from restante.errors import RestanteError, TooManyAtOnce
from restante.feed import store as feed
from restante.ids import WorkspaceId, as_uuid

log = structlog.get_logger()

# How long notices are gathered: one per commit would cost most of the throughput.
_GATHER_SECONDS = 0.01
_TELL_AGAIN_SECONDS = 1.0
_LISTEN_AGAIN_SECONDS = 1.0
_IDS_PER_NOTICE = 200  # a notice may hold 8000 bytes, an id and its comma take 37
_MAX_WAITERS = 100  # of one workspace, in one process


class Waiter:
    """One who waits; `changed` is set when the feed may have grown or the server stops."""

    __slots__ = ("changed", "is_watcher")

    def __init__(self, *, is_watcher: bool) -> None:
        self.changed = asyncio.Event()
        self.is_watcher = is_watcher

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
        self._name = secrets.token_hex(8)  # by which we know our own notices when we hear them
        self._waiters: dict[WorkspaceId, set[Waiter]] = {}  # no entry is empty
        self._to_tell: set[WorkspaceId] = set()
        self._something_to_tell = asyncio.Event()
        self.stopping = False

    @asynccontextmanager
    async def waiting(
        self, workspace_id: WorkspaceId, *, is_watcher: bool = False
    ) -> AsyncIterator[Waiter]:
        """
        Be woken while inside; enter before reading the feed, so that nothing falls between.

        Watchers and polls are counted apart: who looks on must not keep the workspace from polling.
        """
        others = self._waiters.get(workspace_id, ())
        if sum(other.is_watcher == is_watcher for other in others) >= _MAX_WAITERS:
            raise TooManyAtOnce(
                f"{_MAX_WAITERS} requests wait for this feed already; let one of them end first."
            )
        waiter = Waiter(is_watcher=is_watcher)
        together = self._waiters.setdefault(workspace_id, set())
        together.add(waiter)
        try:
            yield waiter
        finally:
            together.discard(waiter)
            if not together:
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
            try:
                await self.tell_now()
            except RestanteError as error:
                log.warning("notice_failed", reason=str(error))
                await asyncio.sleep(_TELL_AGAIN_SECONDS)
            except Exception:
                log.exception("notice_failed")
                await asyncio.sleep(_TELL_AGAIN_SECONDS)

    async def tell_now(self) -> None:
        """Tell what was gathered so far; what could not be told stays to be told."""
        gathered = list(self._to_tell)
        for start in range(0, len(gathered), _IDS_PER_NOTICE):
            await self._notify(gathered[start : start + _IDS_PER_NOTICE])
        if not self._to_tell:
            self._something_to_tell.clear()

    async def _notify(self, grown: Collection[WorkspaceId]) -> None:
        self._to_tell.difference_update(grown)  # before the notice: what grows after it is new
        try:
            async with self._db.connection() as connection:
                await feed.notify(connection, ",".join([self._name, *map(str, grown)]))
        except BaseException:
            self._to_tell.update(grown)
            raise

    async def listen(self) -> None:
        """Hear the other processes, for ever; after a gap in hearing, everyone looks again."""
        while True:
            try:
                async with self._listener.listening(feed.CHANNEL, self._heard) as lost:
                    self._wake_all()
                    await lost.wait()
                log.warning("listening_failed", reason="The connection was lost.")
            except RestanteError as error:
                log.warning("listening_failed", reason=str(error))
            except Exception:
                log.exception("listening_failed")
            await asyncio.sleep(_LISTEN_AGAIN_SECONDS)

    def _heard(self, payload: str) -> None:
        """Wake those that another process named; our own were woken at the commit."""
        sender, *ids = payload.split(",")
        if sender == self._name:
            return
        for part in ids:
            workspace_id = as_uuid(part)  # anyone on this database may send nonsense
            if workspace_id is not None:
                self._wake(WorkspaceId(workspace_id))
