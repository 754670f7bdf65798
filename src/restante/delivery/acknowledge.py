"""A workspace acknowledges a file, or takes that back while the file is kept."""

from datetime import datetime, timedelta

import structlog

from restante.database.outcomes import decided
from restante.database.pool import Connection, Database
from restante.delivery import store
from restante.delivery.fetch import GONE
from restante.delivery.receive import Receiver
from restante.delivery.rules import Upload
from restante.errors import FeedFull, RestanteError, UploadGone
from restante.feed import room as feed_room, store as feed
from restante.feed.rules import WriteLimits
from restante.ids import FileId, WorkspaceId, new_activity_id

log = structlog.get_logger()


async def acknowledge(
    db: Database, workspace_id: WorkspaceId, file_id: FileId, *, now: datetime
) -> bool:
    """
    The workspace has the file.  Idempotent: the first time stays.

    False if the sweep deleted the upload in the same moment.  Raises UploadGone if there is nothing
    to acknowledge.
    """

    async def commit(connection: Connection) -> store.Acknowledged | None:
        return await store.acknowledge(connection, workspace_id, file_id, now=now)

    acked = await decided(db, commit, commit)
    if acked is None:
        raise UploadGone(GONE)
    if acked.is_first:
        _log("upload_acked", workspace_id, file_id, acked.size, acked.name)
    return not acked.is_gone


async def reopen(
    receiver: Receiver,
    workspace_id: WorkspaceId,
    file_id: FileId,
    *,
    ack_retention: timedelta,
    now: datetime,
) -> None:
    """
    Make an acknowledged file fetchable again while it is kept, and announce it again.

    Raises UploadGone if it does not exist, was never acknowledged, or is due to be swept; and, as
    for everything that is stored, DiskLow, FeedFull and TooMuchWritten.
    """
    db, limits = receiver.db, receiver.limits
    async with db.connection() as connection:
        found = await store.get_acked(connection, workspace_id, file_id)
    if found is None or (found.acked_at and found.acked_at < now - ack_retention):
        raise UploadGone(GONE)
    receiver.disk.take(store.reopened_bytes(found))
    row_id = new_activity_id(now)

    async def commit(connection: Connection) -> int:
        if not await store.reopen(
            connection,
            found,
            row_id=row_id,
            now=now,
            acked_since=now - ack_retention,
            expires_at=now + ack_retention,
            quota=receiver.policy.quota,
            limits=limits,
        ):
            raise await _not_reopened(connection, found, limits, now=now)
        return True

    with receiver.wakeups.growing(workspace_id):
        await decided(db, commit, lambda c: feed.seq_of(c, workspace_id, row_id))
    _log("upload_reopened", workspace_id, file_id, found.size, found.name)


async def _not_reopened(
    connection: Connection, upload: Upload, limits: WriteLimits, *, now: datetime
) -> RestanteError:
    """A limit is reached, or the upload was reopened or swept in the same moment."""
    fill = await feed.fill_of(connection, upload.workspace_id)
    announced = store.announced_bytes(upload.workspace_id, [upload])
    refusal = fill and fill.refusal(limits, feed=announced, written=store.reopened_bytes(upload))
    if isinstance(refusal, FeedFull) and await feed_room.free(
        connection, upload.workspace_id, limits, announced, now=now
    ):
        return feed_room.freed_meanwhile()
    return refusal or UploadGone(GONE)


def _log(event: str, workspace_id: WorkspaceId, file_id: FileId, size: int, name: str) -> None:
    log.info(event, workspace=str(workspace_id), file=str(file_id), size=size, name=name)
