"""The horizon of transactions that have ended, and which rows are below it (decision 25)."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from restante.database import sql
from restante.database.pool import Connection
from restante.ids import WorkspaceId, lowest_activity_id

queries = sql.load("restante.feed")

# From the id of a row to its commit; an application may keep its own transaction open for long.
_LONGEST_TRANSACTION = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Horizon:
    """A moment: all transactions below this id had ended."""

    xid: int
    at: datetime


async def current(connection: Connection) -> Horizon:
    """The horizon of now; a row that is committed later is not below it."""
    row = await connection.fetchrow(queries.horizon)
    assert row is not None  # noqa: S101 - it has no table
    return Horizon(**row)


async def changed_since(
    connection: Connection, horizon: Horizon, *, limit: int
) -> dict[WorkspaceId, int]:
    """The feeds that may have rows from after the horizon, each with its newest seq."""
    rows = await connection.fetch(queries.changed_since, horizon.xid, limit)
    return {row["workspace_id"]: row["last_seq"] for row in rows}


async def seen_seqs(
    connection: Connection, workspace_ids: Sequence[WorkspaceId], horizon: Horizon
) -> dict[WorkspaceId, int]:
    """The seq of the last row below the horizon, for those that have a feed."""
    oldest = lowest_activity_id(horizon.at - _LONGEST_TRANSACTION)
    rows = await connection.fetch(queries.seen_seqs, workspace_ids, horizon.xid, oldest)
    return {row["workspace_id"]: row["seq"] for row in rows}
