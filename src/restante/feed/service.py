"""A workspace's feed: append, read after a cursor, wait for new rows, acknowledge."""

import time
from dataclasses import dataclass
from datetime import datetime

import structlog

from restante.database.pool import Connection, Database
from restante.errors import CursorGone, WorkspaceUnknown
from restante.feed import store
from restante.feed.rules import DEFAULT_PAGE, EVERYTHING, Filter, Marks, NewActivity, Page
from restante.feed.wakeups import Wakeups
from restante.ids import ActivityId, WorkspaceId

log = structlog.get_logger()

_NO_FEED = Marks(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Query:
    """What a reader asks for."""

    since_id: ActivityId | None = None
    since_seq: int | None = None  # not beside since_id
    wanted: Filter = EVERYTHING
    limit: int = DEFAULT_PAGE
    wait_seconds: float = 0


class Feed:
    """Appends to feeds and reads them."""

    def __init__(self, db: Database, wakeups: Wakeups) -> None:
        self._db = db
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
            while True:
                page = await self._page(workspace_id, query)
                left = ends_at - time.monotonic()
                if page.rows or left <= 0 or self.wakeups.stopping:
                    return page
                await waiter.wait(left)

    async def _page(self, workspace_id: WorkspaceId, query: Query) -> Page:
        async with self._db.connection() as connection:
            if query.since_seq is not None:
                marks = await self._marks(connection, workspace_id)
                seq = query.since_seq
            elif query.since_id is not None:
                seq, marks = await self._cursor(connection, workspace_id, query.since_id)
            else:
                rows = await store.newest_rows(connection, workspace_id, query.wanted, query.limit)
                return Page(rows, await self._marks(connection, workspace_id))
            return await self._page_after(connection, workspace_id, seq, marks, query)

    async def _cursor(
        self, connection: Connection, workspace_id: WorkspaceId, since: ActivityId
    ) -> tuple[int, Marks]:
        """The seq of a row, and the marks at the time of the look-up."""
        cursor = await store.cursor(connection, workspace_id, since)
        if cursor is None or cursor.seq is None:
            raise _cursor_gone(cursor.marks if cursor else _NO_FEED)
        return cursor.seq, cursor.marks

    async def _page_after(
        self,
        connection: Connection,
        workspace_id: WorkspaceId,
        seq: int,
        marks: Marks,
        query: Query,
    ) -> Page:
        """
        The rows after a seq, then the marks: in this order, a trim in between is noticed.

        DROP TABLE ignores the snapshots of readers, so marks that were read first could confirm a
        page that has lost its beginning.
        """
        rows = []
        if seq < marks.last_seq:
            rows = await store.rows_after(connection, workspace_id, seq, query.wanted, query.limit)
            marks = await self._marks(connection, workspace_id)
        if not marks.all_kept_after(seq):
            raise _cursor_gone(marks, query.since_seq)
        return Page(rows, marks)

    async def rows_after(self, workspace_id: WorkspaceId, seq: int, limit: int) -> Page:
        """The rows after a seq, for readers that follow a feed; raises CursorGone after a trim."""
        async with self._db.connection() as connection:
            marks = await self._marks(connection, workspace_id)
            query = Query(limit=limit)
            return await self._page_after(connection, workspace_id, seq, marks, query)

    async def seq_of(self, workspace_id: WorkspaceId, row: ActivityId) -> int:
        """The seq of a row of this feed; raises CursorGone."""
        async with self._db.connection() as connection:
            seq, _marks = await self._cursor(connection, workspace_id, row)
        return seq

    async def _marks(self, connection: Connection, workspace_id: WorkspaceId) -> Marks:
        return await store.marks(connection, workspace_id) or _NO_FEED

    async def acknowledge(
        self, workspace_id: WorkspaceId, seq: int, row: ActivityId | None = None
    ) -> int:
        """Move the acknowledged mark forward, if the row is still this one; returns the mark."""
        async with self._db.connection() as connection:
            mark = await store.acknowledge(connection, workspace_id, seq, row)
        if mark is None:
            raise WorkspaceUnknown
        return mark


def _cursor_gone(marks: Marks, since_seq: int | None = None) -> CursorGone:
    """Rows may be missing; the facts tell a reader how many, and where to start over."""
    sentence = "since_id is not a row of this feed, or no longer; omit since_id to start over."
    if since_seq is not None:
        sentence = (
            f"since_seq {since_seq} is outside of the rows that this feed keeps; "
            f"start over with since_seq={marks.trimmed_seq}."
        )
    return CursorGone(sentence, lowest_seq=marks.lowest_seq, latest_seq=marks.last_seq)
