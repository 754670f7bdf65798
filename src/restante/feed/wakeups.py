"""
Wakes readers that wait for a feed to grow: in this process after the commit, in others by NOTIFY.

A waiter is only told that something happened; it reads the feed again.  So a notification may be
lost, doubled or late, and the only effect is a delay.  Pending notifications are a set of ids: one
that fails is sent again later, and the set does not grow with the number of commits.

It is also told when permissions of a workspace have changed, so that a token that was revoked ends
its open requests at once.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import chain

import structlog

from restante import wire
from restante.database.listener import Listener
from restante.database.pool import Database
from restante.errors import OutcomeUnknown, RestanteError, TooManyAtOnce
from restante.http import turns
from restante.ids import WorkspaceId, as_uuid

log = structlog.get_logger()

CHANNEL = "restante_feed"

# One NOTIFY for all commits of this time: one per commit would cost most of the throughput.
_GATHER_SECONDS = 0.01
_RETRY_SECONDS = 1.0
_IDS_PER_NOTIFICATION = 200  # a payload may have 8000 bytes, an id takes 38 with its marks
_MAX_WAITERS = 100  # of one workspace, in one process
_MAX_WAITERS_FOR_ALL = 32
_MAX_NEWS = 100  # that a waiter for all has not taken yet
# Before the id of a workspace whose permissions have changed.  The previous release ignores these.
_CHECK = "!"
_MAX_GROWN = 10_000  # feeds that a waiter for all has not looked at yet


class Waiter:
    """A waiting reader; `changed` is set when the feed may have grown or the server stops."""

    __slots__ = ("changed", "is_watcher", "must_check")

    def __init__(self, *, is_watcher: bool) -> None:
        self.changed = asyncio.Event()
        self.is_watcher = is_watcher
        self.must_check = False  # it may have lost its permission

    async def wait(self, seconds: float | None) -> bool:
        """Wait for a change and clear it; False on timeout."""
        turns.pause()
        try:
            async with asyncio.timeout(seconds):
                await self.changed.wait()
        except TimeoutError:
            has_changed = False
        else:
            has_changed = True
            self.changed.clear()
        await turns.resume()
        return has_changed


class WaiterForAll(Waiter):
    """
    A reader of all feeds: it is told which of them grew, in the order in which they did.

    If that is not known, or there are too many, it is told to look for them itself.
    """

    __slots__ = ("grown", "must_search", "news")

    def __init__(self) -> None:
        super().__init__(is_watcher=True)
        self.grown: dict[WorkspaceId, None] = {}
        self.must_search = False
        self.news: deque[wire.NodeEvent] = deque(maxlen=_MAX_NEWS)

    def notify(self, workspace_id: WorkspaceId) -> None:
        """A feed may have grown."""
        if len(self.grown) < _MAX_GROWN:
            self.grown[workspace_id] = None
        elif workspace_id not in self.grown:
            self.must_search = True
        self.changed.set()

    def announce(self, event: wire.NodeEvent) -> None:
        """Something has happened that is in no feed."""
        self.news.append(event)
        self.changed.set()

    def search(self) -> None:
        """Any feed may have grown, or the server stops."""
        self.must_search = True
        self.changed.set()


class Wakeups:
    """The waiters of this process, and the notifications from and to other processes."""

    def __init__(self, db: Database, listener: Listener) -> None:
        self._db = db
        self._listener = listener
        self._name = secrets.token_hex(8)  # tells our own notifications from others
        self._waiters: dict[WorkspaceId, set[Waiter]] = {}  # no set is empty
        self._for_all: set[WaiterForAll] = set()
        self._to_notify: set[str] = set()
        self._has_news = asyncio.Event()
        self._stopped = asyncio.Event()

    @property
    def stopping(self) -> bool:
        """Whether the server stops: nobody waits any longer."""
        return self._stopped.is_set()

    @asynccontextmanager
    async def waiting(
        self, workspace_id: WorkspaceId, *, is_watcher: bool = False
    ) -> AsyncIterator[Waiter]:
        """
        Register a waiter; enter before reading the feed, so that no row falls in between.

        Watchers and polls are counted separately, so that watchers cannot keep the workspace from
        polling.
        """
        others = self._waiters.get(workspace_id, ())
        if sum(other.is_watcher == is_watcher for other in others) >= _MAX_WAITERS:
            raise TooManyAtOnce(
                f"{_MAX_WAITERS} requests wait for this feed already; let one of them end first."
            )
        waiter = Waiter(is_watcher=is_watcher)
        if self.stopping:  # nobody would wake it
            waiter.changed.set()
        together = self._waiters.setdefault(workspace_id, set())
        together.add(waiter)
        try:
            yield waiter
        finally:
            together.discard(waiter)
            if not together:
                del self._waiters[workspace_id]

    @contextmanager
    def waiting_for_all(self) -> Iterator[WaiterForAll]:
        """Register a waiter for all feeds; enter before reading any of them."""
        if len(self._for_all) >= _MAX_WAITERS_FOR_ALL:
            raise TooManyAtOnce(
                f"{_MAX_WAITERS_FOR_ALL} requests watch all workspaces already; let one of them "
                f"end first, or watch a single workspace."
            )
        waiter = WaiterForAll()
        if self.stopping:
            waiter.search()
        self._for_all.add(waiter)
        try:
            yield waiter
        finally:
            self._for_all.discard(waiter)

    def grew(self, workspace_id: WorkspaceId) -> None:
        """Call after a commit: wakes waiters here at once, and in other processes soon."""
        self._wake(workspace_id)
        self._tell_others(str(workspace_id))

    def permissions_changed(self, workspace_id: WorkspaceId) -> None:
        """Call after a commit: whoever waits, here or elsewhere, is checked again at once."""
        self._check(workspace_id)
        self._tell_others(f"{_CHECK}{workspace_id}")

    def _tell_others(self, word: str) -> None:
        self._to_notify.add(word)
        self._has_news.set()

    @contextmanager
    def growing(self, workspace_id: WorkspaceId) -> Iterator[None]:
        """Around a commit: wakes readers after it, and also if its outcome is unknown."""
        try:
            yield
        except OutcomeUnknown:
            self.grew(workspace_id)
            raise
        self.grew(workspace_id)

    def announce(self, event: wire.NodeEvent) -> None:
        """Tell those who watch all feeds at this server; nobody is told later."""
        for waiter in self._for_all:
            waiter.announce(event)

    def silent_seconds(self) -> float:
        """Time since notifications of other processes were last known to arrive."""
        return self._listener.silent_seconds()

    def stop(self) -> None:
        """Wake everyone: waiting requests answer with what there is."""
        self._stopped.set()
        self._wake_everyone()

    async def pause(self, seconds: float) -> None:
        """Wait for so long, whatever grows meanwhile; only the stop of the server ends it."""
        turns.pause()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        await turns.resume()

    def _wake(self, workspace_id: WorkspaceId) -> None:
        for waiter in self._waiters.get(workspace_id, ()):
            waiter.changed.set()
        for waiter in self._for_all:
            waiter.notify(workspace_id)

    def _check(self, workspace_id: WorkspaceId) -> None:
        for waiter in self._waiters.get(workspace_id, ()):
            waiter.must_check = True
            waiter.changed.set()

    def _wake_everyone(self) -> None:
        for waiter in chain.from_iterable(self._waiters.values()):
            waiter.changed.set()
        for waiter in self._for_all:
            waiter.search()

    async def keep_notifying(self) -> None:
        """Notify the other processes until cancelled."""
        while True:
            await self._has_news.wait()
            await asyncio.sleep(_GATHER_SECONDS)
            try:
                await self.notify_others()
            except RestanteError as error:
                log.warning("notice_failed", reason=str(error))
                await asyncio.sleep(_RETRY_SECONDS)
            except Exception:
                log.exception("notice_failed")
                await asyncio.sleep(_RETRY_SECONDS)

    async def notify_others(self) -> None:
        """Send what is pending; what cannot be sent stays pending."""
        pending = list(self._to_notify)
        for start in range(0, len(pending), _IDS_PER_NOTIFICATION):
            batch = pending[start : start + _IDS_PER_NOTIFICATION]
            self._to_notify.difference_update(batch)  # before sending: what grows later is news
            try:
                await self._db.notify(CHANNEL, ",".join([self._name, *batch]))
            except BaseException:
                self._to_notify.update(batch)
                raise
        if not self._to_notify:
            self._has_news.clear()

    async def keep_listening(self) -> None:
        """Receive the others' notifications until cancelled; after a gap, everyone looks again."""
        while True:
            try:
                async with self._listener.listening(CHANNEL, self._on_notification) as lost:
                    self._wake_everyone()
                    await lost.wait()
                log.warning("listening_failed", reason="The connection was lost or is silent.")
            except RestanteError as error:
                log.warning("listening_failed", reason=str(error))
            except Exception:
                log.exception("listening_failed")
            await asyncio.sleep(_RETRY_SECONDS)

    def _on_notification(self, payload: str) -> None:
        """Wake the waiters that another process names; our own were woken at the commit."""
        sender, *words = payload.split(",")
        if sender == self._name:
            return
        for word in words:
            workspace_id = as_uuid(word.removeprefix(_CHECK))  # any session may send anything
            if workspace_id is not None:
                wake = self._check if word.startswith(_CHECK) else self._wake
                wake(WorkspaceId(workspace_id))
