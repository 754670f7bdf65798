"""The rows of staged files: publish, find, list, mark as fetched, acknowledge, expire, sweep."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from restante.database import sql
from restante.database.pool import Row, Tx
from restante.delivery.quotas import Quota
from restante.delivery.rules import Chunk, NewUpload, Standing, State, Swept, Upload
from restante.feed.rules import RECEIVED, UPLOAD_METHOD, NewActivity, new_activity_id
from restante.ids import FileId, WorkspaceId

queries = sql.load("restante.delivery")

SWEEP_BATCH = 1000


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to remember for a request that may come again."""

    key: str
    fingerprint: bytes
    json: str
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Everything that one commit makes visible."""

    workspace_id: WorkspaceId
    bucket: datetime
    created_at: datetime
    expires_at: datetime
    files: Sequence[NewUpload]
    announcements: Sequence[NewActivity]  # one per file, in the same order
    last_chunks: Sequence[Chunk]
    quota: Quota
    reservation: UUID | None = None
    answer: Answer | None = None

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)


async def publish(connection: Tx, publication: Publication) -> int | None:
    """
    Make the files visible and announce them, in one statement.

    Returns the feed's seq after them, or None, with nothing stored, if there is no room or the key
    of the answer is taken.
    """
    p, answer = publication, publication.answer
    return await connection.fetchval(
        queries.publish,
        p.workspace_id,
        answer and answer.key,
        answer and answer.fingerprint,
        answer and answer.json,
        answer and answer.expires_at,
        p.reservation,
        len(p.files),
        p.total_bytes,
        p.quota.max_bytes,
        p.quota.max_files,
        p.bucket,
        p.created_at,
        p.expires_at,
        [file.file_id for file in p.files],
        [file.name for file in p.files],
        [file.mimetype for file in p.files],
        [file.size for file in p.files],
        [file.sha256 for file in p.files],
        [chunk.file_id for chunk in p.last_chunks],
        [chunk.seq for chunk in p.last_chunks],
        [chunk.bytes for chunk in p.last_chunks],
        RECEIVED,
        UPLOAD_METHOD,
        "ok",
        [new_activity_id() for _ in p.files],
        [row.summary for row in p.announcements],
        [row.request_body.decode() for row in p.announcements],
    )


async def remembered(
    connection: Tx, workspace_id: WorkspaceId, key: str, *, now: datetime
) -> tuple[bytes, str] | None:
    """The fingerprint and the answer of the request that used this key first."""
    row = await connection.fetchrow(queries.remembered_answer, workspace_id, key, now)
    return (row["fingerprint"], row["answer"]) if row else None


async def get(
    connection: Tx, workspace_id: WorkspaceId, file_id: FileId, *, now: datetime
) -> Upload | None:
    """The upload if it is this workspace's and waits to be fetched."""
    row = await connection.fetchrow(queries.get_upload, workspace_id, file_id, now)
    return _upload(row) if row else None


async def waiting(
    connection: Tx,
    workspace_id: WorkspaceId,
    *,
    after: tuple[datetime, UUID],
    limit: int,
    now: datetime,
) -> list[Upload]:
    """What waits for this workspace, oldest first."""
    rows = await connection.fetch(queries.waiting_uploads, workspace_id, now, *after, limit)
    return [_upload(row) for row in rows]


async def created_at(connection: Tx, workspace_id: WorkspaceId, file_id: FileId) -> datetime | None:
    """When an upload came, whatever its state; None if it is not, or no longer, there."""
    return await connection.fetchval(queries.created_at, workspace_id, file_id)


async def mark_fetched(
    connection: Tx, workspace_id: WorkspaceId, file_id: FileId, *, now: datetime
) -> None:
    """Note that the whole body was sent."""
    await connection.execute(queries.mark_fetched, workspace_id, file_id, now)


async def exists(
    connection: Tx, workspace_id: WorkspaceId, file_id: FileId, *, now: datetime
) -> bool:
    """Whether there is an upload to acknowledge, be it for the second time."""
    return bool(await connection.fetchval(queries.find_upload, workspace_id, file_id, now))


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What was acknowledged, and whether nobody had done it before."""

    first_time: bool
    name: str
    size: int


async def acknowledge(
    connection: Tx, workspace_id: WorkspaceId, file_id: FileId, *, now: datetime
) -> Acknowledged | None:
    """
    Note that the workspace has the file, and give its room back.

    When it was acknowledged before, that time stays.  None if it is gone.
    """
    row = await connection.fetchrow(queries.acknowledge, workspace_id, file_id, now)
    return Acknowledged(**dict(row)) if row else None


async def get_acked(connection: Tx, workspace_id: WorkspaceId, file_id: FileId) -> Upload | None:
    """The upload if it was acknowledged and is still there."""
    row = await connection.fetchrow(queries.get_acked, workspace_id, file_id)
    return _upload(row) if row else None


@dataclass(frozen=True, slots=True)
class Reopening:
    """When a file may wait again, and for how long."""

    now: datetime
    acked_since: datetime
    waits_until: datetime


async def reopen(
    connection: Tx, upload: Upload, announcement: NewActivity, times: Reopening
) -> bool:
    """Let an acknowledged file wait again and announce it; False if its time is over."""
    reopened = await connection.fetchrow(
        queries.reopen,
        upload.workspace_id,
        upload.file_id,
        times.acked_since,
        times.waits_until,
        new_activity_id(),
        times.now,
        announcement.activity_type,
        announcement.method,
        announcement.summary,
        announcement.request_body.decode(),
        announcement.status,
    )
    return reopened is not None


@dataclass(frozen=True, slots=True)
class Expired:
    """What waits no longer and since when; but for one that was acknowledged nothing was done."""

    first_time: bool
    acked_at: datetime | None
    expired_at: datetime
    name: str
    size: int


async def expire(
    connection: Tx, workspace_id: WorkspaceId, file_id: FileId, *, now: datetime
) -> Expired | None:
    """
    Let an upload wait no longer, unless it was acknowledged; None if it is gone.

    When it had expired before, that time stays.
    """
    row = await connection.fetchrow(queries.expire, workspace_id, file_id, now)
    return Expired(**dict(row)) if row else None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which uploads, whosever they are; None: all."""

    workspace_id: WorkspaceId | None = None
    file_id: FileId | None = None
    state: State | None = None


async def standing(
    connection: Tx, wanted: Wanted, *, after: tuple[datetime, UUID], limit: int, now: datetime
) -> list[Standing]:
    """Uploads in any state, oldest first."""
    rows = await connection.fetch(
        queries.standing, now, wanted.workspace_id, wanted.file_id, wanted.state, *after, limit
    )
    return [_standing(dict(row)) for row in rows]


async def leaf_of(connection: Tx, upload: Upload) -> str | None:
    """The leaf that has its bytes, if they are there."""
    return await connection.fetchval(
        queries.leaf_of, upload.bucket, upload.workspace_id, upload.file_id
    )


async def sweep(connection: Tx, *, acked_before: datetime, expired_before: datetime) -> Swept:
    """Delete one batch of what is due; call again while the batch was full."""
    row = await connection.fetchrow(queries.sweep, acked_before, expired_before, SWEEP_BATCH)
    assert row is not None  # noqa: S101 - an aggregate has one row
    return Swept(acked=row["acked"], expired=row["expired"])


def _standing(row: dict[str, Any]) -> Standing:
    state = row.pop("state")
    return Standing(Upload(**row), state)


def _upload(row: Row) -> Upload:
    return Upload(**dict(row))
