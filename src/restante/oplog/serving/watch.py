"""
Wakes those who wait for new ops.

Writers do not notify: they are any application's transactions, and a NOTIFY in each commit takes a
lock on the whole cluster, which cut throughput to a quarter.  Instead one task per process looks at
the clock of the log and at the horizon, while somebody waits; otherwise nothing runs.  Every op
moves the clock, a sequence, which is seen before the transaction has committed.  From then on the
waiting are woken whenever the horizon moves, until it has passed all transactions of that time.
"""

import asyncio
import contextvars
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from restante.database.pool import Database
from restante.errors import RestanteError
from restante.oplog.serving import log as oplog

log = structlog.get_logger()

_LOOK_SECONDS = 0.015
_PAUSE_AFTER_FAILURE_SECONDS = 1.0


class Waiting:
    """One who waits; what happens after `waiting` was entered is not missed."""

    def __init__(self, watcher: "Watcher") -> None:
        self._watcher = watcher
        self._seen = watcher.changes

    @property
    def is_over(self) -> bool:
        """Whether the server stops: what there is must be answered now."""
        return self._watcher.is_stopping

    async def next(self, timeout_seconds: float) -> bool:
        """Wait until there may be something new; False if the time is over, or the server stops."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._seen == self._watcher.changes and not self._watcher.is_stopping:
                    await self._watcher.changed.wait()
        except TimeoutError:
            return False
        self._seen = self._watcher.changes
        return not self._watcher.is_stopping


class Watcher:
    """Looks at the log for all who wait in this process."""

    def __init__(self, db: Database, *, look_seconds: float = _LOOK_SECONDS) -> None:
        self._db = db
        self._look_seconds = look_seconds
        self._waiting = 0
        self._looking: asyncio.Task[None] | None = None
        self.changes = 0
        self.changed = asyncio.Event()
        self.is_stopping = False

    def stop(self) -> None:
        """Let nobody wait any longer: the server stops."""
        self.is_stopping = True
        self._wake()

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[Waiting]:
        """Wait for new ops inside; enter it before reading the log."""
        self._waiting += 1
        if self._looking is None:
            # Not for the caller that happens to be the first.
            self._looking = asyncio.create_task(self._look(), context=contextvars.Context())
        try:
            yield Waiting(self)
        finally:
            self._waiting -= 1
            if not self._waiting:
                await self._stop()

    async def _stop(self) -> None:
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
            await asyncio.wait({looking})

    async def _look(self) -> None:
        before: oplog.Clock | None = None
        unsettled = 0  # ops of transactions below this may still appear
        while True:
            try:
                async with self._db.connection() as connection:
                    now = await oplog.clock(connection)
                    if before is None or now.clock != before.clock:
                        unsettled = await oplog.new_xid(connection)
            except RestanteError as error:
                log.warning("op_watch_failed", reason=str(error))
                self._wake()  # those who wait find out themselves
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_SECONDS)
                before = None
                continue
            is_moved = before is None or now.oldest_xid != before.oldest_xid
            if is_moved and (before is None or before.oldest_xid < unsettled):
                self._wake()
            before = now
            await asyncio.sleep(self._look_seconds)

    def _wake(self) -> None:
        self.changes += 1
        self.changed.set()
        self.changed = asyncio.Event()
