"""The feed: append a row, read pages after a cursor, acknowledge, trim."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from msgspec import Raw

from restante import wire
from restante.database import driver_errors, sql
from restante.database.pool import Connection, Row, Tx
from restante.feed.message_rules import id_slots, remembered_since
from restante.feed.rules import (
    MAX_PAGE_BYTES,
    UNBOUNDED,
    UNLIMITED,
    Fill,
    Filter,
    LeftOut,
    Marks,
    NewActivity,
    SenderPart,
    WriteLimits,
)
from restante.ids import ActivityId, WorkspaceId, lowest_activity_id, new_activity_id

queries = sql.load("restante.feed")

# The counters of so many feeds are locked while so many rows of each are summed: for milliseconds.
_WORKSPACES_PER_TRIM = 50
_ROWS_PER_TRIM = 200
_ROWS_PER_TRIM_OF_ONE = 5000
# An acknowledgement subtracts the bytes of so many rows; a step of `settle` those of so many more.
_ROWS_PER_ACK = 1000
_ROWS_PER_SETTLEMENT = 10_000
# Deleting so many bytes takes a tenth of a second.
_ROWS_PER_DELETION = 1000
_BYTES_PER_DELETION = 16 * 1024 * 1024
# Among so many of the largest feeds, those are found that can be trimmed.
_LARGEST_LOOKED_AT = 200
_WORKSPACES_PER_LOOK = 1000
# A sender with more rows than these is not found out by its older ones.
_ROWS_PER_PART = 200_000
# Rows of one time have ids made within this span; at most this many of them are read.
_AROUND = timedelta(milliseconds=2)
_ROWS_AROUND = 1000
_LAGS_SHOWN = 20
_WRITERS_SHOWN = 20
_NULL = Raw(b"null")


@dataclass(frozen=True, slots=True)
class Appended:
    """The row is in the feed: with this seq, or, as it was a repetition, from before."""

    seq: int | None

    @property
    def is_repetition(self) -> bool:
        return self.seq is None


REPETITION = Appended(None)


@dataclass(frozen=True, slots=True)
class Cursor:
    """A reader's position: the seq of its row, if the row exists, and the feed's marks."""

    seq: int | None
    marks: Marks


async def append(  # noqa: PLR0913 - each argument is one fact, named by its caller
    connection: Connection,
    workspace_id: WorkspaceId,
    row: NewActivity,
    *,
    now: datetime,
    limits: WriteLimits = UNLIMITED,
    row_id: ActivityId | None = None,
) -> Appended | None:
    """
    Append one row, with a new id or this one; None if the workspace has no feed or no room in it.

    It is a repetition if a row with its digest was appended within a day, or at the same time.
    """
    try:
        seq = await connection.fetchval(
            queries.append,
            row_id or new_activity_id(now),
            workspace_id,
            row.activity_type,
            row.source_id,
            row.method,
            row.summary,
            row.request_body,
            row.status,
            now,
            row.bytes,
            limits.max_feed_bytes,
            limits.max_written_bytes,
            limits.max_kept_bytes,
            row.response_body,
            row.digest,
            *remembered_since(now),
            *id_slots(now),
        )
    except driver_errors.FROM_THE_DRIVER as error:
        if not driver_errors.violates_key(error, "message_ids"):
            raise
        return REPETITION
    if seq is not None:
        return Appended(seq)
    return REPETITION if await is_queued(connection, workspace_id, row, now=now) else None


async def is_queued(
    connection: Connection, workspace_id: WorkspaceId, row: NewActivity, *, now: datetime
) -> bool:
    """Whether a row with the same digest was appended within the last day."""
    if row.digest is None:
        return False
    since = remembered_since(now)
    return await connection.fetchval(queries.is_queued, workspace_id, row.digest, *since)


async def fill_of(connection: Connection, workspace_id: WorkspaceId) -> Fill | None:
    """How full the feed is, and what was written this hour; None if there is no such feed."""
    row = await connection.fetchrow(queries.fill_of, workspace_id)
    return Fill(**row) if row else None


async def writers(connection: Connection, *, now: datetime) -> Sequence[wire.WriterView]:
    """The workspaces for which most was written."""
    rows = await connection.fetch(queries.writers, now, _WRITERS_SHOWN)
    return [wire.WriterView(**row) for row in rows]


async def cursor(
    connection: Connection, workspace_id: WorkspaceId, since: ActivityId | None
) -> Cursor | None:
    """Look a cursor up by key; None if the workspace has no feed."""
    row = await connection.fetchrow(queries.cursor, workspace_id, since or UUID(int=0))
    return Cursor(row["seq"], _marks(row)) if row else None


async def seq_of(
    connection: Connection, workspace_id: WorkspaceId, row_id: ActivityId
) -> int | None:
    """The seq of a row; None if there is no such row."""
    return await connection.fetchval(queries.seq_of, workspace_id, row_id)


async def marks(connection: Connection, workspace_id: WorkspaceId) -> Marks | None:
    """The feed's marks; None if the workspace has no feed."""
    row = await connection.fetchrow(queries.marks, workspace_id)
    return _marks(row) if row else None


@dataclass(frozen=True, slots=True)
class Extent:
    """Which rows to look at, and how many of them to return: so many, and so many bytes."""

    after_seq: int
    up_to_seq: int
    limit: int
    max_bytes: int = MAX_PAGE_BYTES
    read_bytes: int = UNBOUNDED  # of the rows beyond this, only the sizes are read


@dataclass(frozen=True, slots=True)
class Found:
    """Rows in the order that was asked for, and what is missing at their end."""

    rows: list[wire.ActivityRow]
    left_out: LeftOut | None = None
    is_cut: bool = False  # there are more of them than fit into the bytes of a page


async def rows_after(
    connection: Connection, workspace_id: WorkspaceId, wanted: Filter, extent: Extent
) -> Found:
    """The first rows of an extent, oldest first; one row may exceed the bytes of a page."""
    found = await _rows(connection, queries.rows_after, workspace_id, wanted, extent)
    return _found(found, is_cut=False)


async def newest_rows(
    connection: Connection, workspace_id: WorkspaceId, wanted: Filter, extent: Extent
) -> Found:
    """The last rows of an extent, newest first; one row may exceed the bytes of a page."""
    found = await _rows(connection, queries.newest_rows, workspace_id, wanted, extent)
    return _found(found, is_cut=bool(found) and len(found) < found[0]["found"])


def _found(found: Sequence[Row], *, is_cut: bool) -> Found:
    rows = [_activity(row) for row in found if row["is_read"]]
    if len(rows) == len(found):
        return Found(rows, is_cut=is_cut)
    size = sum(row["body_bytes"] for row in found)
    return Found(rows, LeftOut(size, min(row["seq"] for row in found) - 1), is_cut)


async def _rows(
    connection: Connection,
    statement: str,
    workspace_id: WorkspaceId,
    wanted: Filter,
    extent: Extent,
) -> Sequence[Row]:
    return await connection.fetch(
        statement,
        workspace_id,
        extent.after_seq,
        extent.up_to_seq,
        wanted.activity_type,
        wanted.from_agents,
        wanted.not_before,
        extent.limit,
        extent.max_bytes,
        wanted.peer_id,
        wanted.before,
        extent.read_bytes,
    )


async def newest(
    connection: Connection, workspace_id: WorkspaceId
) -> tuple[int, ActivityId] | None:
    """The seq and the id of the newest row; None if there is none."""
    row = await connection.fetchrow(queries.newest, workspace_id)
    return (row["seq"], row["id"]) if row else None


async def last_before(connection: Connection, workspace_id: WorkspaceId, moment: datetime) -> int:
    """The seq of the last row that was made before this moment; 0 if there is none."""
    lowest = lowest_activity_id(moment)
    return await connection.fetchval(queries.last_before, workspace_id, lowest) or 0


async def first_from(
    connection: Connection, workspace_id: WorkspaceId, moment: datetime
) -> int | None:
    """The seq of the first row that was not made before this moment; None if there is none."""
    return await connection.fetchval(queries.first_from, workspace_id, lowest_activity_id(moment))


async def seqs_at(
    connection: Connection, workspace_id: WorkspaceId, moment: datetime
) -> tuple[int, int] | None:
    """The seqs of the first and the last row with exactly this time; None if no row has it."""
    ids = lowest_activity_id(moment - _AROUND), lowest_activity_id(moment + _AROUND)
    row = await connection.fetchrow(queries.seqs_at, workspace_id, *ids, moment, _ROWS_AROUND)
    return (row["first"], row["last"]) if row and row["first"] is not None else None


async def acknowledge(
    connection: Connection, workspace_id: WorkspaceId, seq: int, row: ActivityId | None = None
) -> int | None:
    """
    Move the acknowledged mark forward; returns the mark, or None if there is no feed.

    With a row, only if the row with this seq is that one.
    """
    return await connection.fetchval(queries.acknowledge, workspace_id, seq, row, _ROWS_PER_ACK)


async def has_only(
    connection: Connection, workspace_id: WorkspaceId, method: str, *, up_to_seq: int
) -> bool:
    """Whether all unacknowledged rows up to there have this method."""
    return await connection.fetchval(queries.has_only, workspace_id, up_to_seq, method)


async def settle(connection: Connection, workspace_id: WorkspaceId) -> bool:
    """Subtract the bytes of some acknowledged rows; returns whether more are left."""
    row = await connection.fetchrow(
        queries.acknowledge, workspace_id, 0, None, _ROWS_PER_SETTLEMENT
    )
    return bool(row and row["has_more"])


async def recount(connection: Connection, workspace_id: WorkspaceId) -> None:
    """Correct the counters of a feed that the previous release has trimmed; of no other."""
    await connection.execute(queries.recount, workspace_id)


async def part_of(
    connection: Connection, workspace_id: WorkspaceId, sender: UUID, *, held_since: datetime
) -> SenderPart:
    """How many bytes of a feed are from one sender, and unacknowledged or not older than that."""
    since = lowest_activity_id(held_since)
    row = await connection.fetchrow(queries.part_of, workspace_id, sender, _ROWS_PER_PART, since)
    return SenderPart(**row) if row else SenderPart(0, 0)


async def total_bytes(connection: Connection) -> int:
    """What all feeds together keep."""
    return await connection.fetchval(queries.total_bytes)


async def lock(tx: Tx, workspace_id: WorkspaceId) -> None:
    """Keep others from changing a feed until the transaction ends."""
    await tx.execute(queries.lock, workspace_id)


async def trim_oldest(
    tx: Tx,
    workspace_id: WorkspaceId,
    *,
    stored_before: datetime,
    at_least: int = 2**60,
    is_removed: bool = False,
) -> int:
    """
    Delete some of the oldest rows of a feed that is locked, and raise its mark; returns how many.

    Only rows that were stored before that, and are acknowledged unless the workspace is removed; no
    more than take at least so many bytes together.
    """
    size = min(at_least, _BYTES_PER_DELETION)
    statement, rows = queries.trim_oldest, _ROWS_PER_DELETION
    args = (workspace_id, stored_before, rows, size, is_removed)
    return await tx.fetchval(statement, *args) or 0


async def trim_largest(tx: Tx, *, stored_before: datetime) -> int:
    """Trim the largest feed that has rows which nobody needs; returns how many; 0 if none has."""
    found = await tx.fetchrow(queries.lock_largest, stored_before, _LARGEST_LOOKED_AT)
    if found is None:
        return 0
    return await trim_oldest(
        tx, found["workspace_id"], stored_before=stored_before, is_removed=found["is_removed"]
    )


async def count_unneeded(connection: Connection, stored_before: datetime, *, limit: int) -> int:
    """How many rows of the largest feeds nobody needs, up to a limit."""
    return await connection.fetchval(
        queries.count_unneeded, stored_before, _LARGEST_LOOKED_AT, limit
    )


@dataclass(frozen=True, slots=True)
class Needed:
    """How many workspaces need rows, and which of them has the largest feed."""

    workspaces: int
    largest_id: UUID | None = None
    largest_bytes: int | None = None


async def needed_in(connection: Connection, partition: str, *, removed_before: datetime) -> Needed:
    """The workspaces that need rows of this partition; one removed before that needs none."""
    statement, last = queries.in_partition % ((sql.quoted(partition),) * 3), UUID(int=0)
    needed = list[Row]()
    while found := await connection.fetch(statement, last, _WORKSPACES_PER_LOOK):
        last = found[-1]["workspace_id"]
        ids, seqs = [one["workspace_id"] for one in found], [one["seq"] for one in found]
        needed += await connection.fetch(queries.needing, ids, seqs, removed_before)
    if not needed:
        return Needed(0)
    largest = max(needed, key=lambda one: one["feed_bytes"])
    return Needed(len(needed), largest["workspace_id"], largest["feed_bytes"])


async def largest(connection: Connection) -> Needed:
    """The largest feed."""
    row = await connection.fetchrow(queries.largest)
    return Needed(1, row["workspace_id"], row["feed_bytes"]) if row else Needed(0)


async def trim(connection: Connection, partition: str) -> None:
    """
    Record, for every workspace, that the rows of this partition are no longer kept.

    Idempotent: a trim that was interrupted is repeated.
    """
    statement, last = queries.in_partition % ((sql.quoted(partition),) * 3), UUID(int=0)
    while found := await connection.fetch(statement, last, _WORKSPACES_PER_TRIM):
        last = found[-1]["workspace_id"]
        for large in await _trim(connection, found, _ROWS_PER_TRIM):
            left = [large]
            while left:
                left = await _trim(connection, left, _ROWS_PER_TRIM_OF_ONE)


async def _trim(connection: Connection, feeds: Sequence[Row], rows: int) -> Sequence[Row]:
    """Raise the marks of these feeds by so many rows; returns those that need more."""
    ids, seqs = [feed["workspace_id"] for feed in feeds], [feed["seq"] for feed in feeds]
    return await connection.fetch(queries.trim, ids, seqs, rows)


async def lags(connection: Connection) -> Sequence[wire.LagView]:
    """The workspaces with most unacknowledged rows."""
    rows = await connection.fetch(queries.lags, _LAGS_SHOWN)
    return [wire.LagView(**row) for row in rows]


def _marks(row: Row) -> Marks:
    return Marks(row["last_seq"], row["trimmed_seq"], row["acked_seq"])


def _activity(row: Row) -> wire.ActivityRow:
    columns = dict[str, Any](row)
    for name in ("body_bytes", "is_read", "found"):
        columns.pop(name, None)
    for name in ("request_body", "response_body"):
        columns[name] = _raw(columns[name])
    return wire.ActivityRow(**columns)


def _raw(json: bytes | None) -> Raw:
    return _NULL if json is None else Raw(json)
