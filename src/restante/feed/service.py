"""A workspace's feed: append, read after a cursor, wait for new rows, acknowledge."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import datetime

import structlog

from restante import wire
from restante.database.outcomes import decided
from restante.database.pool import Connection, Database
from restante.errors import DiskLow, OutcomeUnknown, ServerFull, WorkspaceUnknown
from restante.feed import room, row_events, store
from restante.feed.pages import Look, Reader, cursor_gone
from restante.feed.readers import LargeRoom, ReadTurns, SharedRate
from restante.feed.room import SenderParts
from restante.feed.row_events import RowEvent
from restante.feed.rules import (
    ROWS_PER_LOOK,
    ROWS_PER_SCAN,
    SCAN_SECONDS,
    LeftOut,
    NewActivity,
    Page,
    Query,
    WriteLimits,
)
from restante.feed.store import REPETITION, Appended
from restante.feed.total import FeedTotal, TotalLimit
from restante.feed.wakeups import Wakeups
from restante.http.body_room import BodyRoom
from restante.ids import ActivityId, WorkspaceId, new_activity_id
from restante.retention.disk import Disk
from restante.workspaces import store as workspaces

log = structlog.get_logger()

# So that those who watch all workspaces leave connections to everybody else.
_READS_OF_ALL = 2
# Large rows that are being sent, to readers and to watchers, of all workspaces.  A client with
# 512 KiB/s gets the largest row in the time for which it is guaranteed its room.
_LARGE_BYTES = 256 * 1024 * 1024
_GUARANTEED_SECONDS = 30.0


class Feed:
    """Appends to feeds and reads them."""

    def __init__(
        self,
        db: Database,
        wakeups: Wakeups,
        limits: WriteLimits,
        disk: Disk,
        total_limit: TotalLimit | None = None,
    ) -> None:
        self._db = db
        self._scans = ReadTurns("search rows")
        self._parts = SenderParts(db, self._scans)
        # Separate, so that watchers cannot keep the workspace from polling.
        self.large_answers = BodyRoom(_LARGE_BYTES, guaranteed_seconds=_GUARANTEED_SECONDS)
        self.large_events = BodyRoom(_LARGE_BYTES, guaranteed_seconds=_GUARANTEED_SECONDS)
        self.answer_rate = SharedRate()
        self._large_reads = ReadTurns("read large rows")
        self.reads_of_all = asyncio.Semaphore(_READS_OF_ALL)
        self.wakeups = wakeups
        self._limits = limits
        self._disk = disk
        self.total = FeedTotal(db, total_limit or TotalLimit(disk=disk))

    async def append(
        self, workspace_id: WorkspaceId, row: NewActivity, *, now: datetime
    ) -> Appended:
        """
        Append one row in a synced commit, and wake waiting readers.

        A row with a digest is appended once a day; for a repetition nothing happens.  Raises
        WorkspaceUnknown, FeedFull, TooMuchWritten, ServerFull, DiskLow and OutcomeUnknown.
        """
        try:
            self._disk.take(row.bytes)
            async with self.total.adding(row.bytes):
                appended = await self._append(workspace_id, row, now=now)
        except (ServerFull, DiskLow):
            async with self._db.connection() as connection:
                if not await store.is_queued(connection, workspace_id, row, now=now):
                    raise
            appended = REPETITION
        of_row = {"workspace": str(workspace_id), "method": row.method}
        if appended.is_repetition:
            log.info("message_repeated", **of_row)
        else:
            log.info("message_queued", **of_row, seq=appended.seq)
        return appended

    async def _append(
        self, workspace_id: WorkspaceId, row: NewActivity, *, now: datetime
    ) -> Appended:
        """The same in a feed that may be full, on a server that is not."""
        limits = self._limits.for_source(row.source_id)
        try:
            appended = await self._append_or_make_room(workspace_id, row, limits, now=now)
        except OutcomeUnknown:
            self.wakeups.grew(workspace_id)
            raise
        if appended is None:
            async with self._db.connection() as connection:
                raise await room.refusal(connection, workspace_id, limits, row.bytes)
        if not appended.is_repetition:
            self.wakeups.grew(workspace_id)
        return appended

    async def _append_or_make_room(
        self, workspace_id: WorkspaceId, row: NewActivity, limits: WriteLimits, *, now: datetime
    ) -> Appended | None:
        row_id = new_activity_id(now)

        async def appended_before(connection: Connection) -> Appended | None:
            seq = await store.seq_of(connection, workspace_id, row_id)
            return None if seq is None else Appended(seq)

        async def append(limits: WriteLimits) -> Appended | None:
            return await decided(
                self._db,
                lambda c: store.append(c, workspace_id, row, now=now, row_id=row_id, limits=limits),
                appended_before,
            )

        appended = await append(limits.for_any_sender)
        if appended is None:
            await self._make_room(workspace_id, row, limits, now=now)
            appended = await append(limits)
        return appended

    async def _make_room(
        self, workspace_id: WorkspaceId, row: NewActivity, limits: WriteLimits, *, now: datetime
    ) -> None:
        """Free what can be freed, and refuse a sender that has filled its part of the feed."""
        async with self._db.connection() as connection:
            await room.free(connection, workspace_id, limits, row.bytes, now=now)
            fill = await store.fill_of(connection, workspace_id)
        if row.source_id is None or fill is None:
            return
        if not fill.fits_anybody(limits, row.bytes):
            await self._parts.take(
                workspace_id, row.source_id, row.bytes, fill=fill, limits=limits, now=now
            )

    async def read(self, workspace_id: WorkspaceId, query: Query) -> Page:
        """
        The rows a reader asks for, at once or when the first of them arrives.

        Raises CursorGone if `since_id` is not, or no longer, a row of this feed, and if `since_seq`
        lies outside of it: a reader is told that rows may be missing, never left with a hole.
        The wait also ends, without rows, when the permissions of the workspace have changed.
        """
        if query.wait_seconds <= 0:
            return (await self._search(workspace_id, query)).page
        ends_at = time.monotonic() + query.wait_seconds
        async with self.wakeups.waiting(workspace_id) as waiter:
            found = await self._search(workspace_id, query)
            # Without a cursor it can go on with new rows, however few of the old were searched.
            may_wait = found.is_enough or query.is_newest_first
            while found.page.is_empty and may_wait and not self.wakeups.stopping:
                left = ends_at - time.monotonic()
                if left <= 0:
                    break
                await waiter.wait(left)
                if waiter.must_check:
                    break
                found = await self._search(workspace_id, query, after_seq=found.page.read_seq)
                may_wait = found.is_enough or query.is_newest_first
            return found.page

    async def read_large(
        self,
        workspace_id: WorkspaceId,
        query: Query,
        left_out: LeftOut,
        room: LargeRoom,
    ) -> Page:
        """
        Read a page of which rows were left out, when there is room for it.

        The room must be kept until the page is sent.  Raises TooManyAtOnce and CursorGone.
        """
        while True:
            await room.take(left_out.page_bytes)
            sized = query.with_room(left_out.page_bytes)
            page = (await self._search(workspace_id, sized, after_seq=left_out.after_seq)).page
            # A larger row may have come to the front meanwhile.
            if page.rows or page.left_out is None:
                return page
            left_out = page.left_out

    async def _search(
        self, workspace_id: WorkspaceId, query: Query, *, after_seq: int | None = None
    ) -> Look:
        """
        The rows of a query; those after a seq, if all rows up to it were looked at before.

        A look at a few rows is enough, unless a filter lets too few of them pass.  Then more of the
        feed is scanned, in slices.  Scans take turns, or they would take the connections of
        everybody.
        """
        found = await self._look(workspace_id, query, after_seq, at_most=ROWS_PER_LOOK)
        ends_at = time.monotonic() + SCAN_SECONDS
        below: int | None = None
        while not found.is_enough:
            if query.is_newest_first:
                # The first slice repeats the few rows of the look, so that the page is whole.
                found = await self._scan(workspace_id, query, after_seq, before_seq=below)
                below = found.next_seq
            else:
                found = await self._scan(workspace_id, query, found.next_seq)
            if not found.page.is_empty or query.can_go_on or time.monotonic() >= ends_at:
                break
        return found

    async def _scan(
        self,
        workspace_id: WorkspaceId,
        query: Query,
        after_seq: int | None,
        *,
        before_seq: int | None = None,
    ) -> Look:
        async with self._scans.turn(workspace_id):
            return await self._look(
                workspace_id, query, after_seq, at_most=ROWS_PER_SCAN, before_seq=before_seq
            )

    async def _look(
        self,
        workspace_id: WorkspaceId,
        query: Query,
        after_seq: int | None,
        *,
        at_most: int,
        before_seq: int | None = None,
    ) -> Look:
        async with AsyncExitStack() as stack:
            if query.needs_room:
                await stack.enter_async_context(self._large_reads.turn(workspace_id))
            connection = await stack.enter_async_context(self._db.connection())
            reader = Reader(connection, workspace_id, query)
            return await reader.look(after_seq, at_most=at_most, before_seq=before_seq)

    async def seq_of(self, workspace_id: WorkspaceId, row: ActivityId) -> int:
        """The seq of a row of this feed, after which all rows are kept; raises CursorGone."""
        async with self._db.connection() as connection:
            seq, marks = await Reader(connection, workspace_id, Query()).cursor(row)
        if not marks.all_kept_after(seq):
            raise cursor_gone(marks)
        return seq

    async def newest(self, workspace_id: WorkspaceId) -> tuple[int, ActivityId | None]:
        """The seq and id of the newest row; without rows, the seq up to which they were trimmed."""
        async with self._db.connection() as connection:
            newest = await store.newest(connection, workspace_id)
            marks = await store.marks(connection, workspace_id)
        trimmed_seq = marks.trimmed_seq if marks else 0
        return newest if newest and newest[0] > trimmed_seq else (trimmed_seq, None)

    async def events_of(self, rows: Sequence[wire.ActivityRow]) -> list[RowEvent]:
        """The events of some rows of one feed, in order."""
        name = ""
        if any(map(row_events.may_be_answer, rows)):
            async with self._db.connection() as connection:
                found = await workspaces.get(connection, WorkspaceId(rows[0].workspace_id))
            name = found.name if found else ""
        return [event for row in rows for event in row_events.events_of(row, name)]

    async def acknowledge(
        self, workspace_id: WorkspaceId, seq: int, row: ActivityId | None = None
    ) -> int:
        """Move the acknowledged mark forward, if the row is still this one; returns the mark."""

        async def move(connection: Connection) -> int | None:
            return await store.acknowledge(connection, workspace_id, seq, row)

        mark = await decided(self._db, move, move)
        if mark is None:
            raise WorkspaceUnknown
        return mark

    async def acknowledge_notifications(self, workspace_id: WorkspaceId, seq: int) -> None:
        """
        Acknowledge up to this row, if nothing else waits before it.

        For a workspace that does not poll: it would find its feed full of what it said itself.
        """
        async with self._db.connection() as connection:
            if await store.has_only(connection, workspace_id, wire.NOTIFY, up_to_seq=seq):
                await store.acknowledge(connection, workspace_id, seq)
