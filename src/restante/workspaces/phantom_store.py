"""Workspaces that are busy on paper only."""

from dataclasses import dataclass
from datetime import datetime

from restante.database import partitions as leaves
from restante.database import sql
from restante.database.pool import Tx
from restante.ids import WorkspaceId

queries = sql.load("restante.workspaces")

BATCH = 1000


@dataclass(frozen=True, slots=True)
class Reset:
    """A workspace whose tasks were reset, and what they were."""

    workspace_id: WorkspaceId
    active_tasks: int
    current_task: str


async def reset(connection: Tx, *, silent_since: datetime) -> list[Reset]:
    """Reset one batch of workspaces with tasks and no feed row since then."""
    first_id = leaves.FEED.key(silent_since)
    rows = await connection.fetch(queries.reset, first_id, silent_since, BATCH)
    return [Reset(row["id"], row["active_tasks"], row["current_task"]) for row in rows]
