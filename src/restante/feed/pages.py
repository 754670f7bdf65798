"""
Reads one page of a feed: the newest rows, or those after a cursor.

Rows are read first and marks after, so that a trim in between is noticed: DROP TABLE ignores the
snapshots of readers, and marks that were read first could confirm a page that has lost its
beginning.
"""

from dataclasses import dataclass, replace

from restante.database.pool import Connection
from restante.errors import CursorGone
from restante.feed import store
from restante.feed.rules import CLOCK_SKEW, Filter, Marks, Page, Query
from restante.feed.store import Extent, Found
from restante.ids import ActivityId, WorkspaceId

_NO_FEED = Marks(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a feed has found."""

    page: Page
    next_seq: int | None = None  # where to go on; None: the page is full, or all was looked at

    @property
    def is_enough(self) -> bool:
        """Whether no other look is needed."""
        return self.next_seq is None


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads for one query on one connection."""

    connection: Connection
    workspace_id: WorkspaceId
    query: Query

    async def look(
        self, after_seq: int | None, *, at_most: int, before_seq: int | None = None
    ) -> Look:
        """
        Look at so many rows: where the query says, or after a seq up to which all was looked at.

        The newest rows can be looked for below a seq: all from there on were looked at.  Raises
        CursorGone.
        """
        if self.query.is_newest_first:
            return await self._look_back(after_seq, before_seq, at_most)
        if after_seq is None:
            seq, marks = await self._beginning()
        else:
            seq, marks = after_seq, await self._marks()
        return await self._look_ahead(seq, marks, at_most)

    async def _look_ahead(self, seq: int, marks: Marks, at_most: int) -> Look:
        """The rows after a seq, oldest first."""
        found, read_seq, is_cut = Found([]), seq, False
        if seq < marks.last_seq:
            start = await self._skip_old(seq)
            # All rows up to the newest mark were committed before it was read.
            last, wanted = await self._skip_new(marks.last_seq)
            end = min(start + at_most, last)
            is_cut = end < last
            read_seq = end if is_cut else marks.last_seq
            found = await store.rows_after(
                self.connection, self.workspace_id, wanted, self._extent(start, end)
            )
            marks = await self._marks()
        if not marks.all_kept_after(seq):
            raise cursor_gone(marks, self.query.since_seq)
        if found.rows:
            return Look(Page(found.rows, marks, found.rows[-1].seq, found.left_out))
        if found.left_out:
            return Look(Page([], marks, found.left_out.after_seq, found.left_out))
        return Look(Page([], marks, read_seq), read_seq if is_cut else None)

    async def _look_back(self, after_seq: int | None, before_seq: int | None, at_most: int) -> Look:
        """The newest rows, newest first."""
        marks = await self._marks()
        last, wanted = await self._skip_new(marks.last_seq)
        last = last if before_seq is None else min(last, before_seq - 1)
        floor = await self._skip_old(marks.trimmed_seq if after_seq is None else after_seq)
        start, newest = max(floor, last - at_most), Found([])
        if start < last:
            newest = await store.newest_rows(
                self.connection, self.workspace_id, wanted, self._extent(start, last)
            )
        page = Page(newest.rows, marks, marks.last_seq, newest.left_out)
        is_full = newest.is_cut or newest.left_out or len(newest.rows) == self.query.limit
        return Look(page, None if is_full or start <= floor else start + 1)

    def _extent(self, after_seq: int, up_to_seq: int) -> Extent:
        query = self.query
        return Extent(after_seq, up_to_seq, query.limit, query.max_bytes, query.read_bytes)

    async def _skip_old(self, seq: int) -> int:
        """The seq, or a later one if the rows up to that one are older than the query wants."""
        if self.query.wanted.not_before is None:
            return seq
        moment = self.query.wanted.not_before - CLOCK_SKEW
        return max(seq, await store.last_before(self.connection, self.workspace_id, moment))

    async def _skip_new(self, seq: int) -> tuple[int, Filter]:
        """
        The seq, or an earlier one if the rows after that one are newer than the query wants.

        A reader that pages back sends the time of the oldest row it has.  The page then goes on
        right below that row, as the feed is in the order of the seqs: rows that were committed out
        of the order of their times are neither skipped nor sent twice.  The previous release gave
        one time to all rows of an upload.  Some of those are sent again, as long as the page gets
        past them.
        """
        wanted = self.query.wanted
        if wanted.before is None:
            return seq, wanted
        at = await store.seqs_at(self.connection, self.workspace_id, wanted.before)
        if at is not None:
            first, last = at
            below = last if last - first < self.query.limit else first
            return min(seq, below - 1), replace(wanted, before=None)
        moment = wanted.before + CLOCK_SKEW
        newer = await store.first_from(self.connection, self.workspace_id, moment)
        return (seq if newer is None else min(seq, newer - 1)), wanted

    async def _beginning(self) -> tuple[int, Marks]:
        """The seq of the cursor, and the marks at the time of the look-up."""
        if self.query.since_id is not None:
            return await self.cursor(self.query.since_id)
        return self.query.since_seq or 0, await self._marks()

    async def cursor(self, since: ActivityId) -> tuple[int, Marks]:
        """The seq of a row of this feed, and the marks; raises CursorGone."""
        cursor = await store.cursor(self.connection, self.workspace_id, since)
        if cursor is None or cursor.seq is None:
            raise cursor_gone(cursor.marks if cursor else _NO_FEED)
        return cursor.seq, cursor.marks

    async def _marks(self) -> Marks:
        return await store.marks(self.connection, self.workspace_id) or _NO_FEED


def cursor_gone(marks: Marks, since_seq: int | None = None) -> CursorGone:
    """Rows may be missing; the facts tell a reader how many, and where to start over."""
    sentence = "since_id is not a row of this feed, or no longer; omit since_id to start over."
    if since_seq is not None:
        sentence = (
            f"since_seq {since_seq} is outside of the rows that this feed keeps; "
            f"start over with since_seq={marks.trimmed_seq}."
        )
    return CursorGone(sentence, lowest_seq=marks.lowest_seq, latest_seq=marks.last_seq)
