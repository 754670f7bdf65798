"""
Reserves room for uploads that are still arriving, and keeps it while they do.

A reservation lasts half a minute unless it is renewed.  One statement renews all of this process's
every ten seconds, however slowly their bytes arrive; so a process that is killed, or loses its
database, holds its room for half a minute more.  A reservation that expired meanwhile is made again
when its upload goes on, if there is still room.
"""

import asyncio
import math
import time
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID, uuid4

from restante.database.pool import Connection, Database
from restante.delivery import quotas
from restante.delivery.rules import NOTHING, Quota, Usage
from restante.errors import RestanteError, UploadTooSlow
from restante.feed.rules import WriteLimits
from restante.ids import FileId, WorkspaceId

_RENEWED_EVERY_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class Room:
    """What one upload has reserved."""

    workspace_id: WorkspaceId
    expected_bytes: int  # refused at once if this can not fit
    id: UUID = field(default_factory=uuid4)
    usage: Usage = NOTHING
    counted_bytes: int = 0  # as written
    bucket: datetime | None = None  # where its bytes are; None: nothing was reserved yet
    written: FileId | None = None  # a file that has bytes in the bucket
    renewed_at: float = -math.inf

    def covers(self, wanted: Usage) -> bool:
        """Whether that much is reserved, and was renewed not long ago."""
        is_fresh = time.monotonic() - self.renewed_at < 2 * _RENEWED_EVERY_SECONDS
        return is_fresh and wanted.bytes <= self.usage.bytes


class Reservations:
    """The reservations of this process."""

    def __init__(self, db: Database, quota: Quota, limits: WriteLimits) -> None:
        self._db = db
        self._quota = quota
        self._limits = limits
        self._kept: dict[UUID, Room] = {}
        self._unreleased: set[UUID] = set()
        self._renewing: asyncio.Task[None] | None = None

    async def reserve(self, connection: Connection, room: Room, wanted: Usage) -> bool:
        """
        Reserve this much in all, or the same again for longer; False if there is no room.

        Raises UploadTooSlow if the reservation had expired and the bytes are gone.
        """
        # Kept before the statement ends: one that is cancelled may have been committed.
        self._keep(room)
        began, growth = time.monotonic(), max(wanted.bytes - room.counted_bytes, 0)
        reserved = await quotas.reserve(
            connection,
            quotas.Reservation(
                room.id,
                room.workspace_id,
                wanted,
                bucket=room.bucket,
                counted_bytes=growth,
                expected_bytes=room.expected_bytes,
            ),
            self._quota,
            self._limits,
        )
        if reserved is None:
            return False
        room.bucket, room.usage, room.renewed_at = reserved.bucket, wanted, began
        room.counted_bytes += growth
        if reserved.is_new and room.written:
            await _check_is_kept(connection, room, room.written)
        return True

    async def release(self, room: Room) -> None:
        """Free the room; what cannot be released now is tried again, or expires."""
        if room.id not in self._kept:
            return
        self.forget(room)
        try:
            async with self._db.connection() as connection:
                await quotas.release(connection, room.id)
        except RestanteError:
            self._unreleased.add(room.id)
            self._start_renewing()

    def forget(self, room: Room) -> None:
        """Renew it no longer: it was published, or its transaction decides about it."""
        self._kept.pop(room.id, None)
        if self._renewing and not self._kept and not self._unreleased:
            self._renewing.cancel()

    async def renew(self) -> None:
        """Renew what is kept, and release what could not be released before."""
        began, kept = time.monotonic(), list(self._kept.values())
        async with self._db.connection() as connection:
            for reservation in list(self._unreleased):
                await quotas.release(connection, reservation)
                self._unreleased.discard(reservation)
            renewed = await quotas.renew(connection, [room.id for room in kept])
        for room in kept:
            # What was locked or is gone is reserved again, with a wait, before its upload goes on.
            room.renewed_at = began if room.id in renewed else -math.inf

    def _keep(self, room: Room) -> None:
        self._kept[room.id] = room
        self._start_renewing()

    def _start_renewing(self) -> None:
        if self._renewing is None or self._renewing.done() or self._renewing.cancelling():
            # It works for every upload, so it must not wait for the share of the one that began it.
            self._renewing = asyncio.create_task(self._keep_renewing(), context=Context())

    async def _keep_renewing(self) -> None:
        while self._kept or self._unreleased:
            await asyncio.sleep(_RENEWED_EVERY_SECONDS)
            with suppress(RestanteError):  # the database is away; what is not renewed expires
                await self.renew()


async def _check_is_kept(connection: Connection, room: Room, written: FileId) -> None:
    """The bucket may have been dropped while no reservation named it."""
    assert room.bucket is not None  # noqa: S101 - it was reserved
    if not await quotas.is_kept(connection, room.bucket, room.workspace_id, written):
        raise UploadTooSlow("The bytes that had arrived are no longer kept; send the upload again.")
