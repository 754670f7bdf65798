"""Workspaces, files and what publishes them: valid unless a test says otherwise."""

import hashlib
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from waiting import until

from restante.database.pool import Database, Listener, Tx
from restante.delivery import store as uploads
from restante.delivery.blobs.postgres import PostgresBlobs
from restante.delivery.capacity import Capacity
from restante.delivery.fetch import Delivery
from restante.delivery.quotas import Quota, Reservation
from restante.delivery.receive import Policy, Staging
from restante.delivery.rules import Chunk, NewUpload, bucket_of
from restante.delivery.store import Answer, Publication
from restante.feed.rules import NewActivity, announcement
from restante.feed.wakeups import Wakeups
from restante.ids import FileId, WorkspaceId, new_file_id
from restante.workspaces import store as workspaces
from restante.workspaces.rules import Details

# The leaves lie around the real time, because the ids of feed rows do.
NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
ROOMY = Quota(max_bytes=10**9, max_files=10_000)


async def make_workspace(connection: Tx) -> WorkspaceId:
    """A workspace that polls."""
    workspace_id = WorkspaceId(uuid4())
    details = Details("a workspace", "poll", None, "{}")
    token_hash = hashlib.sha256(workspace_id.bytes).digest()
    assert await workspaces.insert(connection, workspace_id, details, token_hash, "a secret")
    return workspace_id


@dataclass(frozen=True, slots=True)
class Content:
    """A file with its bytes, in one chunk."""

    data: bytes = b"some bytes"
    name: str = "letter.txt"
    id: FileId = field(default_factory=new_file_id)

    @property
    def upload(self) -> NewUpload:
        digest = hashlib.sha256(self.data).digest()
        return NewUpload(self.id, self.name, "text/plain", len(self.data), digest)

    @property
    def chunk(self) -> Chunk:
        return Chunk(self.id, 0, self.data)


def make_publication(
    workspace_id: WorkspaceId, *contents: Content, now: datetime = NOW, **other: Any
) -> Publication:
    """What publishes these files, or one file."""
    given = contents or (Content(),)
    files = [content.upload for content in given]
    publication = Publication(
        workspace_id=workspace_id,
        bucket=bucket_of(NOW),
        created_at=now,
        expires_at=now + DAY,
        files=files,
        announcements=[announcement(workspace_id, file) for file in files],
        last_chunks=[content.chunk for content in given],
        quota=ROOMY,
    )
    return replace(publication, **other)


async def make_upload(
    connection: Tx, workspace_id: WorkspaceId, content: Content | None = None, **other: Any
) -> FileId:
    """A published file."""
    content = content or Content()
    publication = make_publication(workspace_id, content, **other)
    assert await uploads.publish(connection, publication) is not None
    return content.id


def make_answer(key: str = "a key", **other: Any) -> Answer:
    """An answer to remember."""
    return replace(Answer(key, b"fingerprint", '{"files": []}', NOW + DAY), **other)


def make_reservation(workspace_id: WorkspaceId, size: int = 100, **other: Any) -> Reservation:
    """Room for one file."""
    return replace(Reservation(uuid4(), workspace_id, bucket_of(NOW), size, 1, NOW + HOUR), **other)


def make_message(text: str = "hello") -> NewActivity:
    """A row that is no file."""
    return NewActivity("message/send", text, b"{}")


@dataclass(frozen=True, slots=True)
class Counters:
    """What a workspace's feed has counted."""

    last_seq: int = 0
    waiting_bytes: int = 0
    waiting_files: int = 0
    reserved_bytes: int = 0
    reserved_files: int = 0


async def counters(connection: Any, workspace_id: UUID) -> Counters:
    row = await connection.fetchrow(
        "select last_seq, waiting_bytes, waiting_files, reserved_bytes, reserved_files"
        " from feeds where workspace_id = $1",
        workspace_id,
    )
    return Counters(*row)


async def until_blocked(watcher: Any, connection: Any) -> None:
    """Wait until a connection waits for a lock that another one holds."""
    pid = connection.get_server_pid()
    await until(
        lambda: watcher.fetchval("select cardinality(pg_blocking_pids($1)) > 0", pid), seconds=10
    )


@dataclass(frozen=True, slots=True)
class Parts:
    """The services of one process that deliver."""

    delivery: Delivery
    staging: Staging
    capacity: Capacity
    wakeups: Wakeups


def make_services(
    db: Database,
    *,
    quota: Quota = ROOMY,
    server: Quota = ROOMY,
    ack_retention: timedelta = HOUR,
    **policy: Any,
) -> Parts:
    """The services as a server has them; nobody hears its notices."""
    chosen = Policy(
        ttl=DAY,
        ttl_min=timedelta(seconds=1),
        ttl_max=7 * DAY,
        quota=quota,
        answers_kept=DAY,
        grace_seconds=30,
        min_bytes_per_second=16_384,
    )
    wakeups, blobs = Wakeups(db, Listener("")), PostgresBlobs(db)
    capacity = Capacity(db, server)
    staging = Staging(db, blobs, capacity, wakeups, replace(chosen, **policy))
    delivery = Delivery(db, blobs, staging, ack_retention=ack_retention)
    return Parts(delivery, staging, capacity, wakeups)
