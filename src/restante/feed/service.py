"""A workspace's feed: append, read after a cursor, wait for new rows, acknowledge."""

import time
from datetime import datetime

import structlog

from restante.database.pool import Database
from restante.errors import WorkspaceUnknown
from restante.feed import store
from restante.feed.pages import Look, Reader
from restante.feed.rules import ROWS_PER_LOOK, NewActivity, Page, Query
from restante.feed.turns import Places, Scans
from restante.feed.wakeups import Wakeups
from restante.ids import ActivityId, WorkspaceId

log = structlog.get_logger()

_LARGE_ANSWERS = 8  # of one workspace at a time; each takes a page of memory
_ALL_ROWS = 2**62  # a seq plus this is still a bigint


class Feed:
    """Appends to feeds and reads them."""

    def __init__(self, db: Database, wakeups: Wakeups) -> None:
        self._db = db
        self._scans = Scans()
        # Separate, so that watchers cannot keep the workspace from polling.
        self.large_answers = Places(_LARGE_ANSWERS)
        self.large_events = Places(_LARGE_ANSWERS)
        self.wakeups = wakeups

    async def append(self, workspace_id: WorkspaceId, row: NewActivity, *, now: datetime) -> int:
        """Append one row in a synced commit, and wake waiting readers."""
        async with self._db.connection() as connection:
            seq = await store.append(connection, workspace_id, row, now=now)
        if seq is None:
            raise WorkspaceUnknown
        self.wakeups.grew(workspace_id)
        log.info("message_queued", workspace=str(workspace_id), method=row.method, seq=seq)
        return seq

    async def read(self, workspace_id: WorkspaceId, query: Query) -> Page:
        """
        The rows a reader asks for, at once or when the first of them arrives.

        Raises CursorGone if `since_id` is not, or no longer, a row of this feed, and if `since_seq`
        lies outside of it: a reader is told that rows may be missing, never left with a hole.
        """
        if query.wait_seconds <= 0:
            return await self._page(workspace_id, query)
        ends_at = time.monotonic() + query.wait_seconds
        async with self.wakeups.waiting(workspace_id) as waiter:
            page = await self._page(workspace_id, query)
            while not page.rows and not self.wakeups.stopping:
                left = ends_at - time.monotonic()
                if left <= 0:
                    break
                await waiter.wait(left)
                page = await self._page(workspace_id, query, after_seq=page.read_seq)
            return page

    async def _page(
        self, workspace_id: WorkspaceId, query: Query, *, after_seq: int | None = None
    ) -> Page:
        """
        The rows of a query; those after a seq, if all rows up to it were looked at before.

        A look at a few rows is enough, unless a filter lets too few of them pass.  Then the rest of
        the feed is scanned.  Scans take turns, or they would take the connections of everybody.
        """
        first = await self._look(workspace_id, query, after_seq, at_most=ROWS_PER_LOOK)
        if first.is_enough:
            return first.page
        if not query.is_newest_first:
            after_seq = first.page.read_seq
        async with self._scans.turn(workspace_id):
            scanned = await self._look(workspace_id, query, after_seq, at_most=_ALL_ROWS)
        return scanned.page

    async def _look(
        self, workspace_id: WorkspaceId, query: Query, after_seq: int | None, *, at_most: int
    ) -> Look:
        async with self._db.connection() as connection:
            reader = Reader(connection, workspace_id, query)
            return await reader.look(after_seq, at_most=at_most)

    async def seq_of(self, workspace_id: WorkspaceId, row: ActivityId) -> int:
        """The seq of a row of this feed; raises CursorGone."""
        async with self._db.connection() as connection:
            seq, _marks = await Reader(connection, workspace_id, Query()).cursor(row)
        return seq

    async def acknowledge(self, workspace_id: WorkspaceId, seq: int) -> int:
        """Move the acknowledged mark forward; returns the mark."""
        async with self._db.connection() as connection:
            mark = await store.acknowledge(connection, workspace_id, seq)
        if mark is None:
            raise WorkspaceUnknown
        return mark
