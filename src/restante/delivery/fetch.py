"""A workspace lists its unacknowledged files and fetches their bytes."""

from collections.abc import AsyncIterator
from datetime import datetime
from uuid import UUID

import structlog

from restante import wire
from restante.database.pool import Database
from restante.delivery import store
from restante.delivery.blobs import BEGUN_WAIT_SECONDS, Blobs
from restante.delivery.rules import CHUNK_BYTES, Upload
from restante.errors import RestanteError, UploadGone
from restante.ids import FileId, WorkspaceId

log = structlog.get_logger()

GONE = "There is no such file here, or no longer."


async def get(  # noqa: PLR0913 - each argument is one fact, named by its caller
    db: Database,
    workspace_id: WorkspaceId,
    file_id: FileId,
    *,
    or_acked: bool = False,
    wait_seconds: float | None = None,
    now: datetime,
) -> Upload:
    """The upload if this workspace can fetch it; raises UploadGone whatever the reason."""
    async with db.connection(wait_seconds=wait_seconds) as connection:
        found = await store.get(connection, workspace_id, file_id, or_acked=or_acked, now=now)
    if found is None:
        raise UploadGone(GONE)
    return found


async def read(  # noqa: PLR0913 - each argument is one fact, named by its caller
    db: Database, blobs: Blobs, upload: Upload, first: int, last: int, *, now: datetime
) -> AsyncIterator[bytes]:
    """
    The bytes from the first to the last, both included.

    If the bytes are moved to another bucket meanwhile, the upload is looked up again, as of `now`:
    a download that has begun may end after the file was acknowledged or has expired.  Raises
    UploadGone when the bytes are gone; never ends early as if that were all.
    """
    position = first
    while position <= last:
        before = position
        has_begun = position > first
        async for piece in _read_range(blobs, upload, position, last, has_begun=has_begun):
            yield piece
            position += len(piece)
        if position <= last:
            wait = BEGUN_WAIT_SECONDS if position > first else None
            moved = await get(
                db,
                upload.workspace_id,
                upload.file_id,
                or_acked=True,
                wait_seconds=wait,
                now=now,
            )
            if moved.bucket == upload.bucket and position == before:
                raise UploadGone(GONE)
            upload = moved


async def _read_range(
    blobs: Blobs, upload: Upload, first: int, last: int, *, has_begun: bool
) -> AsyncIterator[bytes]:
    first_chunk, last_chunk = first // CHUNK_BYTES, last // CHUNK_BYTES
    at = first_chunk * CHUNK_BYTES
    async for chunk in blobs.read(upload, first_chunk, last_chunk, has_begun=has_begun):
        begin, end = max(first - at, 0), min(last + 1 - at, len(chunk))
        yield chunk if (begin, end) == (0, len(chunk)) else chunk[begin:end]
        at += len(chunk)


async def unacked(
    db: Database, workspace_id: WorkspaceId, *, after: UUID | None, limit: int, now: datetime
) -> list[wire.PendingUpload]:
    """
    The workspace's unacknowledged files, oldest first, after the given file.

    That file may have been acknowledged meanwhile; raises UploadGone if it does not exist.
    """
    async with db.connection() as connection:
        start = store.BEGINNING
        if after:
            created_at = await store.created_at(connection, workspace_id, FileId(after))
            if created_at is None:
                raise UploadGone(GONE)
            start = (created_at, after)
        return await store.unacked(connection, workspace_id, after=start, limit=limit, now=now)


async def mark_fetched(db: Database, upload: Upload, *, now: datetime) -> None:
    """Record that the body was sent.  Best effort: a failure is only logged."""
    facts = {
        "workspace": str(upload.workspace_id),
        "file": str(upload.file_id),
        "size": upload.size,
        "name": upload.name,
    }
    log.info("upload_fetched", **facts)
    try:
        async with db.connection() as connection:
            await store.mark_fetched(connection, upload.workspace_id, upload.file_id, now=now)
    except RestanteError as error:
        log.warning("fetch_not_noted", reason=str(error), **facts)
