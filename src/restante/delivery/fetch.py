"""
The storage boundary of staged files: stage, get, mark fetched, acknowledge, expire, sweep.

Whoever handles an upload goes through here; where the bytes are is known only to `store.blobs`.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

import structlog

from restante.database.pool import Database, Tx
from restante.delivery import quota_store as quotas
from restante.delivery import store as uploads
from restante.delivery.blobs.postgres import Blobs
from restante.delivery.intake import Intake
from restante.delivery.receive import Staging
from restante.delivery.rules import CHUNK_BYTES, Swept, Upload
from restante.delivery.store import Expired, Reopening
from restante.errors import RestanteError, UploadGone
from restante.feed.rules import announcement
from restante.ids import FileId, WorkspaceId

log = structlog.get_logger()

_GONE = "There is no such file here, or no longer."


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that is already in memory."""

    name: str
    mimetype: str
    content: bytes


class Batch:
    """Files that were taken in, to become part of a transaction of the caller's."""

    def __init__(self, staging: Staging, intake: Intake) -> None:
        self._staging = staging
        self._intake = intake
        self.is_staged = False

    async def stage_in(self, tx: Tx) -> list[FileId]:
        """Store and announce the files when, and only if, this transaction commits."""
        await self._staging.publish_in(tx, self._intake)
        self.is_staged = True
        return [file.file_id for file in self._intake.files]


class Delivery:
    """Hands files over."""

    def __init__(
        self, db: Database, blobs: Blobs, staging: Staging, *, ack_retention: timedelta
    ) -> None:
        self._db = db
        self._blobs = blobs
        self._ack_retention = max(ack_retention, timedelta(0))
        self.staging = staging

    async def stage(self, workspace_id: WorkspaceId, file: NewFile) -> FileId:
        """Store one file and announce it."""
        return (await self.stage_batch(workspace_id, [file]))[0]

    async def stage_batch(
        self, workspace_id: WorkspaceId, files: Sequence[NewFile]
    ) -> list[FileId]:
        """Store the files and announce them: the workspace sees all of them or none."""
        async with self._taken_in(workspace_id, files) as intake:
            await self.staging.publish(intake)
        return [file.file_id for file in intake.files]

    @asynccontextmanager
    async def batch(
        self, workspace_id: WorkspaceId, files: Sequence[NewFile]
    ) -> AsyncIterator[Batch]:
        """
        The same as part of a transaction of the caller's, which begins and ends inside.

            async with delivery.batch(workspace_id, files) as batch, db.transaction() as tx:
                ids = await batch.stage_in(tx)

        Leaving without an error wakes who waits for the files; with one, they were never staged.
        """
        async with self._taken_in(workspace_id, files) as intake:
            batch = Batch(self.staging, intake)
            yield batch
            if batch.is_staged:
                self.staging.announce(intake)
            else:
                await intake.abandon()

    @asynccontextmanager
    async def _taken_in(
        self, workspace_id: WorkspaceId, files: Sequence[NewFile]
    ) -> AsyncIterator[Intake]:
        total = sum(len(file.content) for file in files)
        async with self.staging.intake(workspace_id, total) as intake:
            for file in files:
                await intake.begin_file(file.name, file.mimetype)
                await intake.write(file.content)
                await intake.end_file()
            yield intake

    async def get(self, workspace_id: WorkspaceId, file_id: FileId) -> Upload:
        """The upload if it waits for this workspace; raises UploadGone whatever the reason."""
        async with self._db.connection() as connection:
            found = await uploads.get(connection, workspace_id, file_id, now=datetime.now(UTC))
        if found is None:
            raise UploadGone(_GONE)
        return found

    async def read(self, upload: Upload, first: int, last: int) -> AsyncIterator[bytes]:
        """
        The bytes from the first to the last, both included.

        If the bytes have moved meanwhile the upload is looked up again; raises UploadGone when they
        are gone.  Never ends early as if that were all.
        """
        position = first
        while position <= last:
            before = position
            async for piece in self._stretch(upload, position, last):
                yield piece
                position += len(piece)
            if position <= last:
                moved = await self.get(upload.workspace_id, upload.file_id)
                if moved.bucket == upload.bucket and position == before:
                    raise UploadGone(_GONE)
                upload = moved

    async def _stretch(self, upload: Upload, first: int, last: int) -> AsyncIterator[bytes]:
        first_chunk, last_chunk = first // CHUNK_BYTES, last // CHUNK_BYTES
        at = first_chunk * CHUNK_BYTES
        async for chunk in self._blobs.read(upload, first_chunk, last_chunk):
            begin, end = max(first - at, 0), min(last + 1 - at, len(chunk))
            yield chunk if (begin, end) == (0, len(chunk)) else chunk[begin:end]
            at += len(chunk)

    async def waiting(
        self, workspace_id: WorkspaceId, *, after: UUID | None, limit: int
    ) -> list[Upload]:
        """
        What waits for this workspace, oldest first, after the given file.

        That file may have been acknowledged meanwhile; raises UploadGone if it is not there at all.
        """
        async with self._db.connection() as connection:
            start = (datetime.fromtimestamp(0, UTC), UUID(int=0))
            if after:
                created_at = await uploads.created_at(connection, workspace_id, FileId(after))
                if created_at is None:
                    raise UploadGone(_GONE)
                start = (created_at, after)
            return await uploads.waiting(
                connection, workspace_id, after=start, limit=limit, now=datetime.now(UTC)
            )

    async def mark_fetched(self, upload: Upload) -> None:
        """Note that the body was sent.  Best effort: a failure is logged, and the fetch stands."""
        log.info("upload_fetched", **_named(upload))
        try:
            async with self._db.connection() as connection:
                await uploads.mark_fetched(
                    connection, upload.workspace_id, upload.file_id, now=datetime.now(UTC)
                )
        except RestanteError as error:
            log.warning("fetch_not_noted", reason=str(error), **_named(upload))

    async def acknowledge(self, workspace_id: WorkspaceId, file_id: FileId) -> bool:
        """
        The workspace has the file; a second time changes nothing.

        True if the upload was still there; False if the sweep took it between our look and the
        acknowledgement.  Raises UploadGone if there was nothing to acknowledge.
        """
        now = datetime.now(UTC)
        async with self._db.connection() as connection:
            if not await uploads.exists(connection, workspace_id, file_id, now=now):
                raise UploadGone(_GONE)
            acked = await uploads.acknowledge(connection, workspace_id, file_id, now=now)
        if acked and acked.first_time:
            log.info(
                "upload_acked",
                workspace=str(workspace_id),
                file=str(file_id),
                size=acked.size,
                name=acked.name,
            )
        return acked is not None

    async def reopen(self, workspace_id: WorkspaceId, file_id: FileId) -> Upload:
        """
        Let an acknowledged file wait again, as long as its retention lasts, and announce it again.

        Raises UploadGone if it is not there, was never acknowledged, or may go at any moment.
        """
        now = datetime.now(UTC)
        times = Reopening(now, now - self._ack_retention, now + self._ack_retention)
        async with self._db.connection() as connection:
            found = await uploads.get_acked(connection, workspace_id, file_id)
            if found is None or not await uploads.reopen(
                connection, found, announcement(workspace_id, found), times
            ):
                raise UploadGone(_GONE)
        self.staging.wake(workspace_id)
        log.info("upload_reopened", **_named(found))
        return found

    def reopenable_until(self, upload: Upload) -> datetime | None:
        """Until when an acknowledgement can be taken back; None if there is none."""
        return upload.acked_at and upload.acked_at + self._ack_retention

    async def expire(self, workspace_id: WorkspaceId, file_id: FileId) -> Expired:
        """
        Let a file wait no longer: it is not fetched from now on, and the next sweep deletes it.

        A second time changes nothing.  Raises UploadGone if it is not there or was acknowledged.
        """
        now = datetime.now(UTC)
        async with self._db.connection() as connection:
            expired = await uploads.expire(connection, workspace_id, file_id, now=now)
        if expired is None:
            raise UploadGone(_GONE)
        if expired.acked_at:
            raise UploadGone(
                f"Its workspace acknowledged the file at {expired.acked_at:%Y-%m-%d %H:%M:%S} UTC, "
                "so it does not expire; a sweep deletes it when its retention is over."
            )
        if expired.first_time:
            log.info(
                "upload_expired",
                workspace=str(workspace_id),
                file=str(file_id),
                size=expired.size,
                name=expired.name,
            )
        return expired

    async def sweep(self, *, now: datetime) -> Swept:
        """Delete everything that is due."""
        swept = Swept()
        async for batch in self.sweep_by_batches(now=now):
            swept += batch
        return swept

    async def sweep_by_batches(self, *, now: datetime) -> AsyncIterator[Swept]:
        """Delete what is due, in batches small enough not to be felt; stop where you like."""
        acked_before = now - self._ack_retention
        while True:
            async with self._db.connection() as connection:
                batch = await uploads.sweep(
                    connection, acked_before=acked_before, expired_before=now
                )
            yield batch
            if batch.total < uploads.SWEEP_BATCH:
                return

    async def forget_expired(self, *, now: datetime) -> int:
        """Release the room of uploads that never ended, and forget keys that are too old."""
        async with self._db.connection() as connection:
            return await quotas.forget_expired(connection, now=now)


def _named(upload: Upload) -> dict[str, object]:
    return {
        "workspace": str(upload.workspace_id),
        "file": str(upload.file_id),
        "size": upload.size,
        "name": upload.name,
    }
