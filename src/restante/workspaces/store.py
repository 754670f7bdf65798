"""The rows of workspaces."""

from datetime import datetime
from uuid import UUID

from restante.database import sql
from restante.database.pool import Row, Tx
from restante.ids import WorkspaceId
from restante.workspaces.rules import Details, Workspace

queries = sql.load("restante.workspaces")


async def insert(
    connection: Tx, workspace_id: WorkspaceId, details: Details, token_hash: bytes, secret: str
) -> bool:
    """Register a new id; False if it is taken."""
    return bool(
        await connection.fetchval(
            queries.insert, workspace_id, *_columns(details), token_hash, secret
        )
    )


async def revive(
    connection: Tx, workspace_id: WorkspaceId, details: Details, token_hash: bytes, secret: str
) -> bool:
    """Bring a removed workspace back with a new token."""
    return bool(
        await connection.fetchval(
            queries.revive, workspace_id, *_columns(details), token_hash, secret
        )
    )


def _columns(details: Details) -> tuple[str, str, str | None, str]:
    return (details.name, details.delivery_mode, details.url, details.agent_card)


async def update(connection: Tx, workspace_id: WorkspaceId, details: Details) -> bool:
    """Change what the workspace is; False if it is not there."""
    changed = await connection.fetchval(
        queries.update, workspace_id, *_columns(details), details.parent_id
    )
    return changed is not None


async def get(connection: Tx, workspace_id: WorkspaceId) -> Workspace | None:
    """The workspace in any state."""
    return _workspace(await connection.fetchrow(queries.get, workspace_id))


async def get_to_change(tx: Tx, workspace_id: WorkspaceId) -> Workspace | None:
    """The workspace in any state, held for this transaction."""
    return _workspace(await tx.fetchrow(queries.get_to_change, workspace_id))


async def by_token(connection: Tx, token_hash: bytes) -> Workspace | None:
    """The workspace whose token has this hash."""
    return _workspace(await connection.fetchrow(queries.by_token, token_hash))


async def page(connection: Tx, *, after: UUID, limit: int) -> list[Workspace]:
    """Workspaces in the order of their ids."""
    return [Workspace(**dict(row)) for row in await connection.fetch(queries.page, after, limit)]


async def heartbeat(
    connection: Tx, workspace_id: WorkspaceId, active_tasks: int, current_task: str
) -> None:
    """Note a sign of life and what the workspace is doing."""
    await connection.execute(queries.heartbeat, workspace_id, active_tasks, current_task)


async def remove(connection: Tx, workspace_id: WorkspaceId) -> bool:
    """Mark as removed and forget the token; False if it is not there."""
    return bool(await connection.fetchval(queries.remove, workspace_id))


async def forget_removed(connection: Tx, *, seen_before: datetime, limit: int) -> int:
    """Forget removed workspaces of which nothing else is kept; returns how many."""
    return await connection.fetchval(queries.forget_removed, seen_before, limit)


async def set_token(connection: Tx, workspace_id: WorkspaceId, token_hash: bytes | None) -> bool:
    """Replace the token, or take it away; False if the workspace is not there."""
    return bool(await connection.fetchval(queries.set_token, workspace_id, token_hash))


def _workspace(row: Row | None) -> Workspace | None:
    return Workspace(**dict(row)) if row else None
