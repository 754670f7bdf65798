"""The rows of uploads and of what belongs to them: chunks, remembered answers."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID

from restante import wire
from restante.database import sql
from restante.database.pool import SEARCH_PATH, Connection, transaction
from restante.delivery import rules
from restante.delivery.rules import (
    UPLOAD_METHOD,
    Chunk,
    IncomingFile,
    Quota,
    Upload,
)
from restante.feed.rules import RECEIVED, UNLIMITED, WriteLimits, row_bytes
from restante.ids import ActivityId, FileId, WorkspaceId, new_activity_id

queries = sql.load("restante.delivery")

# What a file takes beside its bytes and its feed row: rows in two tables, entries in six indexes.
FILE_BYTES = 1024

BEGINNING = (datetime.fromtimestamp(0, UTC), UUID(int=0))

# Publishing --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to remember for a request with an idempotency key."""

    key: str
    fingerprint: bytes
    json: str
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Everything that one commit makes visible."""

    workspace_id: WorkspaceId
    bucket: datetime | None = None  # None: the current one
    created_at: datetime
    expires_at: datetime
    source_id: WorkspaceId | None = None  # the sender; None: the canvas
    files: Sequence[IncomingFile]
    chunks: Sequence[Chunk]  # those that were not written ahead
    quota: Quota
    limits: WriteLimits = UNLIMITED
    reservation: UUID | None = None
    counted_bytes: int = 0  # as written, with the reservation
    answer: Answer | None = None
    activity_ids: Sequence[ActivityId] = field(init=False)  # known before the commit

    def __post_init__(self) -> None:
        ids = [new_activity_id(self.created_at) for _ in self.files]
        object.__setattr__(self, "activity_ids", ids)

    @property
    def feed_bytes(self) -> int:
        """How much its announcements count in the feed."""
        return announced_bytes(self.workspace_id, self.files)

    @property
    def written_bytes(self) -> int:
        """What it writes and was not counted before; negative if less came than was counted."""
        answer_bytes = len(self.answer.json) if self.answer else 0
        stored = sum(file.size + FILE_BYTES for file in self.files)
        return stored + answer_bytes + self.feed_bytes - self.counted_bytes


async def publish(connection: Connection, batch: Batch) -> int | None:
    """
    Make the files visible and announce them, in one statement.

    Returns the feed's seq after them, or None, with nothing stored, if there is no room or the
    idempotency key is taken.
    """
    files, chunks, answer = batch.files, batch.chunks, batch.answer
    lines = [_announcement(batch.workspace_id, file) for file in files]
    return await connection.fetchval(
        queries.publish,
        batch.workspace_id,
        answer and answer.key,
        answer and answer.fingerprint,
        answer and answer.json,
        answer and answer.expires_at,
        batch.reservation,
        len(files),
        sum(file.size for file in files),
        batch.quota.max_bytes,
        batch.quota.max_files,
        batch.bucket,
        batch.created_at,
        batch.expires_at,
        [file.file_id for file in files],
        [file.name for file in files],
        [file.mimetype for file in files],
        [file.size for file in files],
        [file.sha256 for file in files],
        [chunk.file_id for chunk in chunks],
        [chunk.seq for chunk in chunks],
        [chunk.bytes for chunk in chunks],
        RECEIVED,
        UPLOAD_METHOD,
        "ok",
        batch.activity_ids,
        [summary for _, summary, _ in lines],
        [body for _, _, body in lines],
        [row_bytes(*line) for line in lines],
        batch.feed_bytes,
        batch.written_bytes,
        batch.limits.max_feed_bytes,
        batch.limits.max_written_bytes,
        batch.limits.max_kept_bytes,
        [_other_name(file) for file in files],
        batch.source_id,
    )


def _other_name(file: IncomingFile) -> str | None:
    """What is stored as the display name; most have none beside their name."""
    return None if file.display_name == file.name else file.display_name


def _announcement(workspace_id: WorkspaceId, file: IncomingFile | Upload) -> tuple[str, str, str]:
    summary = f"{UPLOAD_METHOD}: {file.name}"
    return UPLOAD_METHOD, summary, rules.announcement(workspace_id, file)


async def publish_with_key(connection: Connection, batch: Batch) -> int | None:
    """The same in a transaction: a key must not be remembered for files that found no room."""
    with suppress(_NothingStored):
        async with transaction(connection) as tx:
            seq = await publish(tx, batch)
            if seq is None:
                raise _NothingStored
            return seq
    return None


class _NothingStored(Exception):
    """Rolls the transaction back."""


@asynccontextmanager
async def in_our_schema(connection: Connection) -> AsyncIterator[None]:
    """
    Run our statements in an application's own transaction.

    The search_path is restored; a failure aborts the transaction anyway.  A commit that publishes
    files must be synced, so `synchronous_commit = off` is turned on for the transaction.
    """
    before = await connection.fetchval(queries.current_search_path)
    await connection.execute(queries.enter_schema, SEARCH_PATH)
    yield
    await connection.execute(queries.leave_schema, before)


async def remembered(
    connection: Connection, workspace_id: WorkspaceId, key: str, *, now: datetime
) -> tuple[bytes, str] | None:
    """The fingerprint and the answer of the request that used this key first."""
    row = await connection.fetchrow(queries.remembered_answer, workspace_id, key, now)
    return (row["fingerprint"], row["answer"]) if row else None


async def count_expired_answers(connection: Connection, *, now: datetime, limit: int) -> int:
    """How many remembered answers have expired, up to the limit."""
    return await connection.fetchval(queries.count_expired_answers, now, limit)


async def delete_expired_answers(connection: Connection, *, now: datetime, limit: int) -> int:
    """Delete one batch of expired answers; returns how many."""
    return await connection.fetchval(queries.delete_expired_answers, now, limit)


# Single uploads ----------------------------------------------------------------------------------


async def get(
    connection: Connection,
    workspace_id: WorkspaceId,
    file_id: FileId,
    *,
    or_acked: bool = False,
    now: datetime,
) -> Upload | None:
    """The upload if it is this workspace's, and waits; or was acknowledged, if that may be."""
    row = await connection.fetchrow(queries.get_upload, workspace_id, file_id, now, or_acked)
    return Upload(**row) if row else None


async def unacked(
    connection: Connection,
    workspace_id: WorkspaceId,
    *,
    after: tuple[datetime, UUID],
    limit: int,
    now: datetime,
) -> list[wire.PendingUpload]:
    """The unacknowledged files of a workspace, oldest first."""
    rows = await connection.fetch(queries.unacked_uploads, workspace_id, now, *after, limit)
    return [
        wire.PendingUpload(uri=rules.pending_uri(workspace_id, row["file_id"]), **row)
        for row in rows
    ]


async def created_at(
    connection: Connection, workspace_id: WorkspaceId, file_id: FileId
) -> datetime | None:
    """When an upload was created, in any state; None if it does not exist."""
    return await connection.fetchval(queries.created_at, workspace_id, file_id)


async def mark_fetched(
    connection: Connection, workspace_id: WorkspaceId, file_id: FileId, *, now: datetime
) -> None:
    """Record that the whole body was sent."""
    await connection.execute(queries.mark_fetched, workspace_id, file_id, now)


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What was acknowledged: for the first time, again, or just as the sweep deleted it."""

    is_first: bool
    is_gone: bool
    name: str
    size: int


async def acknowledge(
    connection: Connection, workspace_id: WorkspaceId, file_id: FileId, *, now: datetime
) -> Acknowledged | None:
    """
    Record that the workspace has the file, and free its room.

    A second acknowledgement keeps the first time.  None if there is nothing to acknowledge.
    """
    row = await connection.fetchrow(queries.acknowledge, workspace_id, file_id, now)
    return Acknowledged(**row) if row else None


async def get_acked(
    connection: Connection, workspace_id: WorkspaceId, file_id: FileId
) -> Upload | None:
    """The upload if it was acknowledged and still exists."""
    row = await connection.fetchrow(queries.get_acked, workspace_id, file_id)
    return Upload(**row) if row else None


async def reopen(  # noqa: PLR0913 - each argument is one fact, named by its caller
    connection: Connection,
    upload: Upload,
    *,
    row_id: ActivityId,
    now: datetime,
    acked_since: datetime,
    expires_at: datetime,
    quota: Quota,
    limits: WriteLimits = UNLIMITED,
) -> bool:
    """
    Make an acknowledged file fetchable again and announce it.

    It expires then at the earliest, and exactly then if it exceeds the quota.  False, with nothing
    changed, if it is too late or a limit is reached.
    """
    method, summary, body = _announcement(upload.workspace_id, upload)
    seq = await connection.fetchval(
        queries.reopen,
        upload.workspace_id,
        upload.file_id,
        acked_since,
        expires_at,
        row_id,
        now,
        RECEIVED,
        method,
        summary,
        body,
        "ok",
        row_bytes(method, summary, body),
        limits.max_feed_bytes,
        limits.max_kept_bytes,
        reopened_bytes(upload),
        limits.max_written_bytes,
        quota.max_bytes,
        quota.max_files,
        upload.source_id,
    )
    return seq is not None


def reopened_bytes(upload: Upload) -> int:
    """What a reopening writes: the upload's row and index entries anew, and a feed row."""
    return FILE_BYTES + announced_bytes(upload.workspace_id, [upload])


def announced_bytes(
    workspace_id: WorkspaceId, files: Sequence[IncomingFile] | Sequence[Upload]
) -> int:
    """How much the announcements of these files count in the feed."""
    return sum(row_bytes(*_announcement(workspace_id, file)) for file in files)


@dataclass(frozen=True, slots=True)
class Expired:
    """An upload that has expired, and when; an acknowledged one was left alone."""

    is_first: bool
    acked_at: datetime | None
    expired_at: datetime
    name: str
    size: int


async def expire(
    connection: Connection, workspace_id: WorkspaceId, file_id: FileId, *, now: datetime
) -> Expired | None:
    """
    Let an upload expire now, unless it was acknowledged; None if it does not exist.

    If it had expired before, that time stays.
    """
    row = await connection.fetchrow(queries.expire, workspace_id, file_id, now)
    return Expired(**row) if row else None


async def expire_waiting(
    connection: Connection, workspace_id: WorkspaceId, *, now: datetime, limit: int
) -> int:
    """Let a batch of a workspace's unacknowledged uploads expire now; returns how many."""
    return len(await connection.fetch(queries.expire_waiting, workspace_id, now, limit))


async def held_for(
    connection: Connection, workspace_id: WorkspaceId, *, now: datetime
) -> wire.HeldFiles:
    """The files that are kept for a workspace."""
    row = await connection.fetchrow(queries.held_for, workspace_id, now)
    return wire.HeldFiles(**dict(row or {}))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which uploads, of any workspace; None: all."""

    workspace_id: WorkspaceId | None = None
    file_id: FileId | None = None
    state: wire.UploadState | None = None


async def in_any_state(  # noqa: PLR0913 - each argument is one fact, named by its caller
    connection: Connection,
    wanted: Wanted,
    *,
    after: tuple[datetime, UUID] = BEGINNING,
    limit: int,
    ack_retention: timedelta,
    now: datetime,
) -> list[wire.UploadView]:
    """Uploads in any state, oldest first, as the operator sees them."""
    rows = await connection.fetch(
        queries.uploads_in_any_state,
        now,
        wanted.workspace_id,
        wanted.file_id,
        wanted.state,
        *after,
        limit,
        ack_retention,
    )
    return [wire.UploadView(**row) for row in rows]


async def partition_of(connection: Connection, upload: wire.UploadView) -> str | None:
    """The partition that has the bytes, if they exist."""
    return await connection.fetchval(
        queries.partition_of, upload.bucket, upload.workspace_id, upload.file_id
    )
