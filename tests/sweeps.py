"""For tests of the sweep: data is made older, and the state of partitions is looked at."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID

import asyncpg
import pytest
from factories import HOUR, Content, Parts, make_upload, until_blocked
from waiting import until

from restante.database import partitions
from restante.database.partitions import Partition, PartitionedTable, PartitionState
from restante.database.pool import Connection, Database, Tx
from restante.database.spans import Span, floor
from restante.delivery import fetch
from restante.delivery.subject import (
    CHUNKS,
    Buckets,
    DueUploads,
    ExpiredAnswers,
    ExpiredReservations,
)
from restante.feed.subject import FEED, CrowdedFeeds, FeedPartitions, MessageIds
from restante.feed.total import TotalLimit
from restante.ids import FileId, WorkspaceId
from restante.oplog.subject import EndedSnapshots, OldConflicts, ParkedOps, UnsettledDeletes
from restante.oplog.trimming.limits import Limits
from restante.oplog.trimming.log_subject import OpLog
from restante.retention.space import SpaceSamples
from restante.retention.subjects import Subjects
from restante.retention.sweep import Sweep
from restante.wire import SweepReport
from restante.workspaces.subject import RemovedWorkspaces

__all__ = ["CHUNKS", "FEED"]

KIB = 1024

# The start of an hour that is over for good; whatever a test runs into, it stays over.
PAST = floor(datetime.now(UTC), HOUR) - timedelta(days=2)


async def make_partition(
    connection: Connection,
    table: PartitionedTable,
    start: datetime = PAST,
    width: timedelta = HOUR,
) -> str:
    """A partition for a stretch of time; its name."""
    async with connection.transaction():
        return await partitions.create(cast("Tx", connection), table, Span(start, start + width))


async def partition_names(connection: Any, table: PartitionedTable) -> set[str]:
    """The partitions of a table, and what is left over of them."""
    rows = await connection.fetch(
        "select relname from pg_class where relnamespace = 'restante'::regnamespace"
        " and relkind = 'r' and relname ~ ('^' || $1 || '_\\d')",
        table.name,
    )
    return {row["relname"] for row in rows}


async def state_of(connection: Any, partition: str) -> str:
    """How far the removal of a partition has come."""
    state = await connection.fetchval(
        "select case when inhdetachpending then 'detaching'"
        "            when exists (select from pg_trigger"
        "                          where tgrelid = class.oid and tgname = 'sealed'"
        "                            and inhparent is not null) then 'sealed'"
        "            when inhparent is null then 'detached' else 'attached' end"
        "  from pg_class class left join pg_inherits on inhrelid = class.oid"
        " where relnamespace = 'restante'::regnamespace and relname = $1",
        partition,
    )
    return state or "gone"


async def make_old(
    connection: Connection,
    workspace_id: WorkspaceId,
    count: int = 1,
    *,
    data: bytes = bytes(64 * KIB),
    bucket: datetime = PAST,
    **other: Any,
) -> list[FileId]:
    """Files in a bucket whose time is over, unacknowledged unless told otherwise."""
    return [
        await make_upload(connection, workspace_id, Content(data), bucket=bucket, **other)
        for _ in range(count)
    ]


async def expire(connection: Any, *file_ids: FileId) -> None:
    """Nobody fetched these in time; without ids, all of them."""
    await connection.execute(
        "update uploads set expires_at = now() - interval '1 minute'"
        " where cardinality($1::uuid[]) = 0 or file_id = any($1)",
        list(file_ids),
    )


async def put_back_acks(connection: Any, by: timedelta = timedelta(days=1)) -> None:
    """What was acknowledged was acknowledged so much earlier."""
    await connection.execute("update uploads set acked_at = acked_at - $1::interval", by)


def make_subjects(
    *,
    ack_retention: timedelta = HOUR,
    feed_retention: timedelta = timedelta(days=30),
    feed_limit: TotalLimit | None = None,
    log_limits: Limits | None = None,
) -> Subjects:
    """Everything that is kept bounded, as a server has it."""
    limit = feed_limit or TotalLimit()
    return Subjects(
        DueUploads(ack_retention=ack_retention),
        ExpiredReservations(),
        ExpiredAnswers(),
        RemovedWorkspaces(retention=feed_retention),
        SpaceSamples(),
        ParkedOps(),
        OldConflicts(),
        EndedSnapshots(),
        UnsettledDeletes(),
        CrowdedFeeds(limit),
        OpLog(log_limits or Limits()),
        Buckets(width=HOUR, ack_retention=ack_retention),
        FeedPartitions(retention=feed_retention, limit=limit),
        MessageIds(),
    )


def make_sweep(db: Database, *, budget_seconds: float = 20, **chosen: Any) -> Sweep:
    """A sweep as a server has it."""
    return Sweep(db, make_subjects(**chosen), budget_seconds=budget_seconds)


@dataclass(slots=True)
class Tally:
    """Is told how passes ended, and adds it up."""

    rows: Counter[str] = field(default_factory=Counter[str])
    dropped: int = 0
    moved: int = 0
    left: int = 0
    failed: int = 0

    def deleted(self, rows: Counter[str]) -> None:
        self.rows += rows

    def gave_back(self, dropped: int, moved: int) -> None:
        self.dropped += dropped
        self.moved += moved

    def postponed(self, steps: int) -> None:
        self.left += steps

    def sweep_failed(self) -> None:
        self.failed += 1


async def grow_older(connection: Any, by: timedelta = timedelta(days=2)) -> None:
    """
    Every file, with its bytes and all its times, becomes older.

    The partitions it was in are left empty, as if nothing had ever been in them; nothing may get
    into a partition that something else leaves.
    """
    rows = await connection.fetch(
        "select distinct tableoid::regclass::text as partition, bucket - $1::interval as bucket"
        "  from chunks",
        by,
    )
    for start in {floor(row["bucket"], HOUR) for row in rows}:
        if f"{CHUNKS.name}_{start:%Y%m%d_%H%M%S}" not in await partition_names(connection, CHUNKS):
            await make_partition(connection, CHUNKS, start)
    left = {row["partition"] for row in rows}
    assert not left & {f"{CHUNKS.name}_{floor(row['bucket'], HOUR):%Y%m%d_%H%M%S}" for row in rows}
    async with connection.transaction():
        await connection.execute(
            "insert into chunks select bucket - $1::interval, workspace_id, file_id, seq, bytes"
            "  from chunks",
            by,
        )
        for partition in left:
            await connection.execute(f"truncate {partition}")
        await connection.execute(
            "update uploads set bucket = bucket - $1::interval,"
            " created_at = created_at - $1::interval, expires_at = expires_at - $1::interval,"
            " fetched_at = fetched_at - $1::interval, acked_at = acked_at - $1::interval",
            by,
        )


async def put_back_rows(connection: Any, workspace_id: UUID, by: timedelta, *, up_to: int) -> None:
    """Rows of a feed, up to a seq, become older; their partitions must exist."""
    rows = await connection.fetch(
        "select id from feed where workspace_id = $1 and seq <= $2", workspace_id, up_to
    )
    milliseconds = int(by.total_seconds() * 1000)
    for row in rows:
        older = UUID(int=row["id"].int - (milliseconds << 80))
        await connection.execute(
            "update feed set id = $2, created_at = created_at - $3::interval"
            " where workspace_id = $4 and id = $1",
            row["id"],
            older,
            by,
            workspace_id,
        )


async def make_old_feed(connection: Any, workspace_id: UUID, *, days: int = 60, up_to: int) -> str:
    """Put rows back by some days, into a partition that is made for them; its name."""
    by = timedelta(days=days)
    start = floor(datetime.now(UTC) - by, timedelta(days=1)) - timedelta(days=1)
    name = await make_partition(connection, FEED, start, timedelta(days=3))
    await put_back_rows(connection, workspace_id, by, up_to=up_to)
    return name


@asynccontextmanager
async def locked(connection: Any, table: str, mode: str = "access share") -> AsyncIterator[None]:
    """Hold a lock and a snapshot in an open transaction while inside."""
    transaction = connection.transaction(isolation="repeatable_read")
    await transaction.start()
    await connection.execute(f"lock table {table} in {mode} mode")
    await connection.execute("select from feeds")
    yield
    await transaction.rollback()


def utc_now() -> datetime:
    return datetime.now(UTC)


# What a pass did ---------------------------------------------------------------------------------


def actions(report: SweepReport) -> list[str]:
    """What was done, in order."""
    return [step.action for step in report.done]


def reasons(report: SweepReport) -> dict[str, str]:
    """What was postponed, and why."""
    return {one.step.action: one.reason for one in report.postponed}


async def size_of(connection: Any, table: str) -> int:
    """The bytes of one table or partition on disk, with indexes and TOAST."""
    return await connection.fetchval("select pg_total_relation_size($1::text::regclass)", table)


async def content_of(parts: Parts, workspace_id: WorkspaceId, file_id: FileId) -> bytes:
    """The bytes of a file, as its workspace fetches them."""
    now = utc_now()
    upload = await fetch.get(parts.db, workspace_id, file_id, now=now)
    pieces = fetch.read(parts.db, parts.blobs, upload, 0, upload.size - 1, now=now)
    return b"".join([piece async for piece in pieces])


# A pass that is stopped by a lock ----------------------------------------------------------------

Connect = Callable[[], Awaitable[Any]]


async def is_waited_for(holder: Any) -> bool:
    """Whether another session waits for a lock that this one holds."""
    # In a transaction pg_stat_activity shows only the sessions that there were at the first look.
    return await holder.fetchval(
        "select exists (select from pg_locks"
        " where not granted and pg_backend_pid() = any(pg_blocking_pids(pid)))"
    )


async def end_who_waits_for(holder: Any) -> None:
    """Terminate the sessions that wait for a lock of this one, as if their process was killed."""
    await holder.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where pg_backend_pid() = any(pg_blocking_pids(pid))"
    )


@dataclass(frozen=True, slots=True)
class Stop:
    """A lock that makes a pass wait in one step, and the state of the partition meanwhile."""

    lock: str
    state: str


def stops(table: PartitionedTable, partition: str) -> dict[str, Stop]:
    """One stop for each step of the removal of a partition."""
    return {
        "seal": Stop(f"lock table {partition} in share update exclusive mode", "attached"),
        "detach": Stop(f"lock table only {table.name} in share update exclusive mode", "sealed"),
        "half detached": Stop(f"lock table only {table.name} in access share mode", "detaching"),
        "drop": Stop(f"lock table {partition} in access share mode", "detached"),
    }


@asynccontextmanager
async def stopped_pass(
    stop: Stop, sweep: Sweep, observer: "Tally", connect: Connect, partition: str
) -> AsyncIterator[tuple["asyncio.Task[SweepReport]", Any]]:
    """A pass that waits for the lock while inside; yields its task and the lock's holder."""
    holder = await in_the_way(stop, connect)
    passing = asyncio.create_task(sweep.run_observed(observer, now=utc_now()))
    try:
        holder = await until_stopped(stop, holder, connect, partition)
        yield passing, holder
    except BaseException:
        passing.cancel()
        raise
    await holder.execute("rollback")


async def in_the_way(stop: Stop, connect: Connect) -> Any:
    """A session that holds the lock."""
    holder = await connect()
    await holder.execute(f"begin; {stop.lock}")
    return holder


async def until_stopped(stop: Stop, holder: Any, connect: Connect, partition: str) -> Any:
    """Wait until a pass waits in the step; returns the session that it waits for."""
    await until(lambda: is_waited_for(holder))
    if stop.state == "detached":
        return await _waiting_before_drop(holder, connect, partition)
    return holder


async def _waiting_before_drop(holder: Any, connect: Connect, partition: str) -> Any:
    """Queue behind the detach and before the drop; returns the session that the drop waits for."""
    watcher, second = await connect(), await connect()
    lock = f"begin; lock table {partition} in access share mode"
    locking = asyncio.create_task(second.execute(lock))
    await until_blocked(watcher, second)
    await holder.execute("rollback")
    await locking
    await until(lambda: is_waited_for(second))
    return second


def attached_to(parent: str, name: str, table: PartitionedTable) -> Partition:
    """A partition, as the catalogue describes it before its removal."""
    return Partition(table.name, name, PartitionState.ATTACHED, None, parent)


async def detach_half_way(connect: Connect, partition: Partition) -> None:
    """Interrupt a DETACH CONCURRENTLY after its first half."""
    holder, detaching = await connect(), await connect()
    await detaching.execute("set lock_timeout = 50")
    async with locked(holder, f"only {partition.parent}"):
        with pytest.raises(asyncpg.LockNotAvailableError):
            await partitions.detach(detaching, partition)
