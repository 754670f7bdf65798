"""Workspaces, files and what publishes them: valid unless a test says otherwise."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from waiting import until

from restante.database.listener import Listener
from restante.database.pool import Connection, Database
from restante.database.spans import floor
from restante.delivery import acknowledge, stage, store
from restante.delivery.blobs.postgres import PostgresBlobs
from restante.delivery.quotas import Reservation
from restante.delivery.receive import Receiver
from restante.delivery.rules import (
    Chunk,
    IncomingFile,
    Pace,
    Quota,
    ReceivePolicy,
    Usage,
    bucket_of,
)
from restante.delivery.store import Answer, Batch
from restante.delivery.subject import DueUploads
from restante.feed.rules import UNLIMITED, NewActivity, WriteLimits
from restante.feed.service import Feed
from restante.feed.store import Extent
from restante.feed.total import TotalLimit
from restante.feed.wakeups import Wakeups
from restante.ids import FileId, WorkspaceId
from restante.retention.disk import Disk
from restante.workspaces import store as workspaces
from restante.workspaces.rules import Details

# The partitions lie around the real time, because the ids of feed rows do.
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
NOW = datetime.now(UTC)
# Where the first of them begins: a row of a minute ago has one, also just after a full hour.
ROWS_FROM = floor(NOW - timedelta(minutes=5), HOUR)
ROOMY = Quota(max_bytes=10**9, max_files=10_000)


async def make_workspace(connection: Connection) -> WorkspaceId:
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
    id: FileId = field(default_factory=lambda: FileId(uuid4()))

    @property
    def file(self) -> IncomingFile:
        digest = hashlib.sha256(self.data).digest()
        return IncomingFile(self.name, self.name, "text/plain", self.id, len(self.data), digest)

    @property
    def chunk(self) -> Chunk:
        return Chunk(self.id, 0, self.data)


def make_batch(
    workspace_id: WorkspaceId, *contents: Content, now: datetime = NOW, **other: Any
) -> Batch:
    """What publishes these files, or one file."""
    given = contents or (Content(),)
    batch = Batch(
        workspace_id=workspace_id,
        bucket=bucket_of(NOW),
        created_at=now,
        expires_at=now + DAY,
        files=[content.file for content in given],
        chunks=[content.chunk for content in given],
        quota=ROOMY,
    )
    return replace(batch, **other)


async def make_upload(
    connection: Connection, workspace_id: WorkspaceId, content: Content | None = None, **other: Any
) -> FileId:
    """A published file."""
    content = content or Content()
    batch = make_batch(workspace_id, content, **other)
    assert await store.publish(connection, batch) is not None
    return content.id


def make_answer(key: str = "a key", **other: Any) -> Answer:
    """An answer to remember."""
    return replace(Answer(key, b"fingerprint", '{"files": []}', NOW + DAY), **other)


def make_reservation(workspace_id: WorkspaceId, size: int = 100, **other: Any) -> Reservation:
    """Room for one file."""
    room = Usage(size, 1)
    return replace(Reservation(uuid4(), workspace_id, room), **other)


def make_message(text: str = "hello") -> NewActivity:
    """A row that is no file."""
    return NewActivity("message/send", text, b"{}")


def rows_after(seq: int, *, limit: int = 500) -> Extent:
    """The extent of all rows after a seq."""
    return Extent(seq, 2**62, limit)


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
    """What one process delivers with."""

    db: Database
    blobs: PostgresBlobs
    receiver: Receiver
    wakeups: Wakeups

    async def stage(self, workspace_id: WorkspaceId, *contents: bytes) -> list[FileId]:
        """Stage files with these contents, now."""
        files = [stage.NewFile("a.bin", "text/plain", content) for content in contents]
        return await stage.stage_batch(self.receiver, workspace_id, files, now=datetime.now(UTC))

    async def reopen(self, workspace_id: WorkspaceId, file_id: FileId) -> None:
        """Reopen a file that was acknowledged in the last hour."""
        await acknowledge.reopen(
            self.receiver, workspace_id, file_id, ack_retention=HOUR, now=datetime.now(UTC)
        )


def make_parts(
    db: Database,
    *,
    quota: Quota = ROOMY,
    server: Quota = ROOMY,
    limits: WriteLimits = UNLIMITED,
    fresh_seconds: float | None = None,
    **policy: Any,
) -> Parts:
    """What a server delivers with; nobody hears its notifications."""
    chosen = ReceivePolicy(
        ttl=DAY,
        ttl_min=timedelta(seconds=1),
        ttl_max=7 * DAY,
        quota=quota,
        server_quota=server,
        server_max_stored_bytes=10**12,
        answers_kept=DAY,
        pace=Pace(grace_seconds=30, min_bytes_per_second=16_384),
    )
    wakeups, blobs = Wakeups(db, Listener("")), PostgresBlobs(db)
    receiver = Receiver(db, blobs, wakeups, replace(chosen, **policy), limits=limits, disk=Disk(db))
    if fresh_seconds is not None:  # how long the sums over the whole server are not read again
        receiver.server.usage_fresh_seconds = fresh_seconds
        receiver.server.sizes_fresh_seconds = fresh_seconds
    return Parts(db, blobs, receiver, wakeups)


def make_feed(
    db: Database,
    wakeups: Wakeups | None = None,
    *,
    limits: WriteLimits = UNLIMITED,
    disk: Disk | None = None,
    max_total_bytes: int = 2**60,
) -> Feed:
    """The feeds of a server without limits; nobody hears its notifications."""
    total_limit = TotalLimit(max_total_bytes)
    return Feed(db, wakeups or Wakeups(db, Listener("")), limits, disk or Disk(db), total_limit)


async def sweep_uploads(
    connection: Connection, *, now: datetime, ack_retention: timedelta = HOUR
) -> Counter[str]:
    """Delete every due upload, as a sweep does; how many, by outcome."""
    subject, swept = DueUploads(ack_retention=ack_retention), Counter[str]()
    while batch := +Counter(await subject.delete_due(connection, now=now)):
        swept += batch
    return swept


class HeldDatabase(Database):
    """Holds one caller between its statement and the release of its connection."""

    def __init__(self, db: Database) -> None:
        super().__init__(db._pool, acquire_timeout_seconds=5)
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.is_held = asyncio.Event()

    @asynccontextmanager
    async def connection(self, *, wait_seconds: float | None = None) -> AsyncIterator[Connection]:
        async with super().connection(wait_seconds=wait_seconds) as connection:
            yield connection
            if not self.is_held.is_set():
                self.is_held.set()
                await self.may_go_on.wait()
