"""The rows of quotas: what a workspace and the server use, and what arriving uploads reserve."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from restante.database import sql
from restante.database.pool import Connection
from restante.delivery.rules import Quota, Usage
from restante.feed.rules import UNLIMITED, WriteLimits
from restante.ids import FileId, WorkspaceId

queries = sql.load("restante.delivery")

# Long enough to lose the database for a moment, short enough for what a killed server leaves.
RESERVED_FOR = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for an upload that is still arriving."""

    id: UUID
    workspace_id: WorkspaceId
    room: Usage
    bucket: datetime | None = (
        None  # not dropped while the reservation exists; None: the current one
    )
    lasts: timedelta = RESERVED_FOR
    counted_bytes: int = 0  # to count as written now
    expected_bytes: int = 0  # refused at once if this can not fit


class Reserved(NamedTuple):
    """The bucket of a reservation, and whether there was none before."""

    bucket: datetime
    is_new: bool


async def reserve(
    connection: Connection,
    reservation: Reservation,
    quota: Quota,
    limits: WriteLimits = UNLIMITED,
) -> Reserved | None:
    """Reserve this much before bytes are stored, or instead of before; None if there is no room."""
    row = await connection.fetchrow(
        queries.reserve,
        reservation.id,
        reservation.workspace_id,
        reservation.room.bytes,
        reservation.room.files,
        quota.max_bytes,
        quota.max_files,
        reservation.lasts,
        reservation.bucket,
        reservation.counted_bytes,
        limits.max_written_bytes,
        reservation.expected_bytes,
    )
    return Reserved(**row) if row else None


async def renew(connection: Connection, reservations: Collection[UUID]) -> set[UUID]:
    """Let these reservations last from now on; skips and does not return those that are locked."""
    rows = await connection.fetch(queries.renew, list(reservations), RESERVED_FOR)
    return {row["id"] for row in rows}


async def is_kept(
    connection: Connection, bucket: datetime, workspace_id: WorkspaceId, file_id: FileId
) -> bool:
    """Whether the bytes of a file that is arriving stay, after a reservation that names them."""
    return bool(await connection.fetchval(queries.is_kept, bucket, workspace_id, file_id))


async def release(connection: Connection, reservation: UUID) -> None:
    """Delete a reservation and free its room.  Idempotent."""
    await connection.execute(queries.release, reservation)


async def count_expired_reservations(connection: Connection, *, now: datetime, limit: int) -> int:
    """How many reservations have expired, up to the limit."""
    return await connection.fetchval(queries.count_expired_reservations, now, limit)


async def release_expired(connection: Connection, *, now: datetime, limit: int) -> int:
    """Release one batch of reservations of uploads that never ended; returns how many."""
    return await connection.fetchval(queries.release_expired, now, limit)


async def usage_of(connection: Connection, workspace_id: WorkspaceId) -> Usage | None:
    """The unacknowledged and reserved bytes and files of one workspace; None if it is unknown."""
    row = await connection.fetchrow(queries.usage_of_workspace, workspace_id)
    return Usage(**row) if row else None


@dataclass(frozen=True, slots=True)
class ServerUsage:
    """The same for all workspaces, with what is reserved apart."""

    waiting_bytes: int
    waiting_files: int
    reserved_bytes: int
    reserved_files: int


async def usage_of_server(connection: Connection) -> ServerUsage:
    """The sum over all workspaces."""
    row = await connection.fetchrow(queries.usage_of_server)
    assert row is not None  # noqa: S101 - an aggregate has one row
    return ServerUsage(**row)


async def workspace_frees_at(connection: Connection, workspace_id: WorkspaceId) -> datetime | None:
    """When the first unacknowledged file of a workspace expires."""
    return await connection.fetchval(queries.workspace_frees_at, workspace_id)
