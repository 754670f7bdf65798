"""The rows of workspaces."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from msgspec import Raw

from restante import wire
from restante.database import sql
from restante.database.pool import Connection, Row, Tx
from restante.ids import WorkspaceId, lowest_activity_id
from restante.workspaces.rules import ONLINE_WITHIN, Details, Workspace

queries = sql.load("restante.workspaces")

RESET_BATCH = 1000


async def insert(
    connection: Connection,
    workspace_id: WorkspaceId,
    details: Details,
    token_hash: bytes,
    secret: str,
) -> bool:
    """Register a new id; False if it is taken."""
    return bool(
        await connection.fetchval(
            queries.insert, workspace_id, *_columns(details), token_hash, secret
        )
    )


async def revive(
    connection: Connection,
    workspace_id: WorkspaceId,
    details: Details,
    token_hash: bytes,
    secret: str,
) -> bool:
    """Activate a removed workspace with a new token; False if it is not removed."""
    return bool(
        await connection.fetchval(
            queries.revive, workspace_id, *_columns(details), token_hash, secret
        )
    )


def _columns(details: Details) -> tuple[str, str, str | None, str | None]:
    return (details.name, details.delivery_mode, details.url, details.agent_card)


async def update(connection: Connection, workspace_id: WorkspaceId, details: Details) -> bool:
    """Change an active workspace; False if there is none."""
    changed = await connection.fetchval(
        queries.update, workspace_id, *_columns(details), details.parent_id
    )
    return changed is not None


async def get(connection: Connection, workspace_id: WorkspaceId) -> Workspace | None:
    """The workspace in any state."""
    row = await connection.fetchrow(queries.get, workspace_id)
    return Workspace(**dict(row)) if row else None


async def get_for_update(tx: Tx, workspace_id: WorkspaceId) -> Workspace | None:
    """The workspace in any state, locked until the transaction ends."""
    row = await tx.fetchrow(queries.get_for_update, workspace_id)
    return Workspace(**dict(row)) if row else None


async def by_token(connection: Connection, token_hash: bytes) -> Workspace | None:
    """The workspace whose token has this hash."""
    row = await connection.fetchrow(queries.by_token, token_hash)
    return Workspace(**dict(row)) if row else None


async def view(connection: Connection, workspace_id: WorkspaceId) -> wire.WorkspaceView | None:
    """The workspace in any state, as the operator sees it."""
    row = await connection.fetchrow(queries.view, workspace_id, ONLINE_WITHIN)
    return _view(row) if row else None


def _view(row: Row) -> wire.WorkspaceView:
    columns = dict[str, Any](row)
    columns["agent_card"] = Raw(columns["agent_card"].encode())
    return wire.WorkspaceView(**columns)


async def page(connection: Connection, *, after: UUID, limit: int) -> list[wire.WorkspaceEntry]:
    """Workspaces in any state, in order of their ids."""
    rows = await connection.fetch(queries.page, after, limit, ONLINE_WITHIN)
    return [wire.WorkspaceEntry(**row) for row in rows]


async def recent(
    connection: Connection, *, limit: int, with_removed: bool = False, name: str | None = None
) -> list[wire.WorkspaceEntry]:
    """Workspaces, of this name if one is given; those first that were seen last."""
    rows = await connection.fetch(queries.recent, name, with_removed, limit, ONLINE_WITHIN)
    return [wire.WorkspaceEntry(**row) for row in rows]


async def names(connection: Connection, ids: Collection[UUID]) -> dict[UUID, str]:
    """The names of these workspaces, and of all active ones that share a name with them."""
    rows = await connection.fetch(queries.names, list(ids))
    return {row["id"]: row["name"] for row in rows}


async def heartbeat(
    connection: Connection, workspace_id: WorkspaceId, active_tasks: int, current_task: str
) -> None:
    """Record that the workspace is alive and what it is doing."""
    await connection.execute(queries.heartbeat, workspace_id, active_tasks, current_task)


async def mark_seen(
    connection: Connection, ids: Sequence[WorkspaceId], *, every: timedelta
) -> list[WorkspaceId]:
    """Record that these were seen now; returns those for which that was not recorded of late."""
    rows = await connection.fetch(queries.mark_seen, ids, every)
    return [row["id"] for row in rows]


async def remove(connection: Connection, workspace_id: WorkspaceId) -> bool:
    """Mark as removed and delete the token; False if there is no active workspace."""
    return bool(await connection.fetchval(queries.remove, workspace_id))


async def set_token(
    connection: Connection, workspace_id: WorkspaceId, token_hash: bytes | None
) -> bool:
    """Replace or delete the token; False if there is no active workspace."""
    return bool(await connection.fetchval(queries.set_token, workspace_id, token_hash))


async def count_forgettable(connection: Connection, *, seen_before: datetime, limit: int) -> int:
    """How many removed workspaces `delete_forgettable` would delete, counted up to the limit."""
    return await connection.fetchval(queries.count_forgettable, seen_before, limit)


async def delete_forgettable(connection: Connection, *, seen_before: datetime, limit: int) -> int:
    """Delete removed workspaces that have no file and no feed row left; returns how many."""
    return await connection.fetchval(queries.delete_forgettable, seen_before, limit)


async def count_active(connection: Connection) -> int:
    """How many workspaces are registered and not removed."""
    return await connection.fetchval(queries.count_active)


@dataclass(frozen=True, slots=True)
class Reset:
    """A workspace whose tasks were reset, and how many it had."""

    workspace_id: WorkspaceId
    active_tasks: int


async def reset_silent(connection: Connection, *, silent_since: datetime) -> list[Reset]:
    """Reset the tasks of one batch of busy workspaces without a feed row since then."""
    rows = await connection.fetch(
        queries.reset_silent, lowest_activity_id(silent_since), silent_since, RESET_BATCH
    )
    return [Reset(row["id"], row["active_tasks"]) for row in rows]
