"""The feed: append a row, read pages after a cursor, move the mark of what was handled."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from restante.database import sql
from restante.database.pool import Row, Tx
from restante.feed.rules import Activity, Filter, Marks, NewActivity, new_activity_id
from restante.ids import ActivityId, WorkspaceId

queries = sql.load("restante.feed")

CHANNEL = "restante_feed"


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a reader stands: its row's seq, if the row is there, and the feed's marks."""

    seq: int | None
    marks: Marks


async def append(
    connection: Tx, workspace_id: WorkspaceId, row: NewActivity, *, now: datetime
) -> int | None:
    """Append one row; returns its seq, or None if the workspace has no feed."""
    return await connection.fetchval(
        queries.append,
        new_activity_id(),
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
    connection: Tx, workspace_id: WorkspaceId, since: ActivityId | None
) -> Cursor | None:
    """Look a cursor up by key; None if the workspace has no feed."""
    row = await connection.fetchrow(queries.cursor, workspace_id, since or UUID(int=0))
    return Cursor(row["seq"], _marks(row)) if row else None


async def marks(connection: Tx, workspace_id: WorkspaceId) -> Marks | None:
    """Where the feed stands."""
    row = await connection.fetchrow(queries.marks, workspace_id)
    return _marks(row) if row else None


async def rows_after(
    connection: Tx, workspace_id: WorkspaceId, seq: int, wanted: Filter, limit: int
) -> list[Activity]:
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
    connection: Tx, workspace_id: WorkspaceId, wanted: Filter, limit: int
) -> list[Activity]:
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


async def acknowledge(connection: Tx, workspace_id: WorkspaceId, seq: int) -> int | None:
    """Move the mark forward; returns where it stands now."""
    return await connection.fetchval(queries.acknowledge, workspace_id, seq)


async def notify(connection: Tx, payload: str) -> None:
    """Tell the other processes which feeds have grown."""
    await connection.execute(queries.notify, payload)


def _marks(row: Row) -> Marks:
    return Marks(row["last_seq"], row["trimmed_seq"], row["acked_seq"])


def _activity(row: Row) -> Activity:
    return Activity(**dict(row))
