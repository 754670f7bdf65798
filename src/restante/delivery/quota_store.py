"""Room for what is still arriving: promised, released, and counted."""

from datetime import datetime
from uuid import UUID

from restante.database import sql
from restante.database.pool import Tx
from restante.delivery.quotas import Quota, Reservation, Usage
from restante.ids import WorkspaceId

queries = sql.load("restante.delivery")

_BATCH = 1000


async def reserve(connection: Tx, reservation: Reservation, quota: Quota) -> bool:
    """Promise room to an upload before its bytes are stored; False if there is none."""
    reserved = await connection.fetchval(
        queries.reserve,
        reservation.id,
        reservation.workspace_id,
        reservation.bytes,
        reservation.files,
        quota.max_bytes,
        quota.max_files,
        reservation.expires_at,
        reservation.bucket,
    )
    return reserved is not None


async def release(connection: Tx, reservation: UUID) -> None:
    """Take a promise back; a second time changes nothing."""
    await connection.execute(queries.release, reservation)


async def forget_expired(connection: Tx, *, now: datetime) -> int:
    """Clean up after uploads that never ended and keys that are too old; returns how many."""
    expired = await connection.fetch(queries.expired_reservations, now, _BATCH)
    for row in expired:
        await release(connection, row["id"])
    forgotten = await connection.execute(queries.forget_answers, now, _BATCH)
    return len(expired) + int(forgotten.split()[-1])


async def usage_of(connection: Tx, workspace_id: WorkspaceId) -> Usage:
    """What waits for one workspace."""
    row = await connection.fetchrow(queries.usage_of_workspace, workspace_id)
    return Usage(**dict(row)) if row else Usage(0, 0)


async def usage_of_server(connection: Tx) -> Usage:
    """What waits for all of them."""
    row = await connection.fetchrow(queries.usage_of_server)
    return Usage(**dict(row)) if row else Usage(0, 0)


async def workspace_frees_at(connection: Tx, workspace_id: WorkspaceId) -> datetime | None:
    """When the first of what waits for a workspace expires."""
    return await connection.fetchval(queries.workspace_frees_at, workspace_id)


async def server_frees_at(connection: Tx) -> datetime | None:
    """When the first of everything that waits expires."""
    return await connection.fetchval(queries.server_frees_at)
