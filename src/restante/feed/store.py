"""The feed: append a row, read pages after a cursor, acknowledge, trim."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from msgspec import Raw

from restante import wire
from restante.database import sql
from restante.database.pool import Connection, Row
from restante.feed.rules import Filter, Marks, NewActivity
from restante.ids import ActivityId, WorkspaceId, new_activity_id

queries = sql.load("restante.feed")

_WORKSPACES_PER_TRIM = 500
_LAGS_SHOWN = 20
_NULL = Raw(b"null")


@dataclass(frozen=True, slots=True)
class Cursor:
    """A reader's position: the seq of its row, if the row exists, and the feed's marks."""

    seq: int | None
    marks: Marks


async def append(
    connection: Connection, workspace_id: WorkspaceId, row: NewActivity, *, now: datetime
) -> int | None:
    """Append one row; returns its seq, or None if the workspace has no feed."""
    return await connection.fetchval(
        queries.append,
        new_activity_id(now),
        workspace_id,
        row.activity_type,
        row.source_id,
        row.method,
        row.summary,
        row.request_body.decode(),
        row.status,
        now,
    )


async def cursor(
    connection: Connection, workspace_id: WorkspaceId, since: ActivityId | None
) -> Cursor | None:
    """Look a cursor up by key; None if the workspace has no feed."""
    row = await connection.fetchrow(queries.cursor, workspace_id, since or UUID(int=0))
    return Cursor(row["seq"], _marks(row)) if row else None


async def marks(connection: Connection, workspace_id: WorkspaceId) -> Marks | None:
    """The feed's marks; None if the workspace has no feed."""
    row = await connection.fetchrow(queries.marks, workspace_id)
    return _marks(row) if row else None


async def rows_after(
    connection: Connection, workspace_id: WorkspaceId, seq: int, wanted: Filter, limit: int
) -> list[wire.ActivityRow]:
    """Rows after a seq, oldest first."""
    rows = await connection.fetch(
        queries.rows_after,
        workspace_id,
        seq,
        wanted.activity_type,
        wanted.from_agents,
        wanted.not_before,
        limit,
    )
    return [_activity(row) for row in rows]


async def newest_rows(
    connection: Connection, workspace_id: WorkspaceId, wanted: Filter, limit: int
) -> list[wire.ActivityRow]:
    """The newest rows, newest first."""
    rows = await connection.fetch(
        queries.newest_rows,
        workspace_id,
        wanted.activity_type,
        wanted.from_agents,
        wanted.not_before,
        limit,
    )
    return [_activity(row) for row in rows]


async def acknowledge(
    connection: Connection, workspace_id: WorkspaceId, seq: int, row: ActivityId | None = None
) -> int | None:
    """
    Move the acknowledged mark forward; returns the mark, or None if there is no feed.

    With a row, only if the row with this seq is that one.
    """
    return await connection.fetchval(queries.acknowledge, workspace_id, seq, row)


async def trim(connection: Connection, partition: str) -> None:
    """Record, for every workspace, that the rows of this partition are no longer kept."""
    statement = queries.trim % sql.quoted(partition)
    last: UUID | None = UUID(int=0)
    while last is not None:
        last = await connection.fetchval(statement, last, _WORKSPACES_PER_TRIM)


async def lags(connection: Connection) -> Sequence[wire.LagView]:
    """The workspaces with most unacknowledged rows."""
    rows = await connection.fetch(queries.lags, _LAGS_SHOWN)
    return [wire.LagView(**row) for row in rows]


def _marks(row: Row) -> Marks:
    return Marks(row["last_seq"], row["trimmed_seq"], row["acked_seq"])


def _activity(row: Row) -> wire.ActivityRow:
    columns = dict[str, Any](row)
    for name in ("request_body", "response_body"):
        columns[name] = _raw(columns[name])
    return wire.ActivityRow(**columns)


def _raw(json: str | None) -> Raw:
    return _NULL if json is None else Raw(json.encode())
