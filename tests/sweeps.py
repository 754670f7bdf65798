"""For tests of the sweep: the clock is moved by data, and what happens to leaves is looked at."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from factories import HOUR, Content, make_services, make_upload

from restante.database import partitions as leaves
from restante.database.partitions import CHUNKS, FEED, Table
from restante.database.pool import Database, Tx
from restante.database.spans import Span, floor
from restante.ids import FileId, WorkspaceId
from restante.retention.rules import Policy
from restante.retention.sweep import Sweeping

KIB = 1024

# The start of an hour that is over for good; whatever a test runs into, it stays over.
PAST = floor(datetime.now(UTC), HOUR) - timedelta(days=2)

# The contracts of a step that finds somebody in its way.
GIVES_UP_SECONDS = 1.5
WRITER_STALL_SECONDS = 0.25


async def make_leaf(
    connection: Tx, table: Table, start: datetime = PAST, width: timedelta = HOUR
) -> str:
    """A leaf for a stretch of time; its name."""
    async with connection.transaction():
        await leaves.create(connection, table, Span(start, start + width))
    return f"{table.name}_{start:%Y%m%d_%H%M%S}"


async def leaf_names(connection: Any, table: Table) -> set[str]:
    """The leaves of a table, and what is left over of them."""
    rows = await connection.fetch(
        "select relname from pg_class where relnamespace = 'restante'::regnamespace"
        " and relkind = 'r' and relname ~ ('^' || $1 || '_\\d')",
        table.name,
    )
    return {row["relname"] for row in rows}


async def state_of(connection: Any, leaf: str) -> str:
    """How far a leaf has come on its way out."""
    state = await connection.fetchval(
        "select case when inhdetachpending then 'detaching'"
        "            when exists (select from pg_trigger"
        "                          where tgrelid = class.oid and tgname = 'sealed'"
        "                            and inhparent is not null) then 'sealed'"
        "            when inhparent is null then 'detached' else 'attached' end"
        "  from pg_class class left join pg_inherits on inhrelid = class.oid"
        " where relnamespace = 'restante'::regnamespace and relname = $1",
        leaf,
    )
    return state or "gone"


async def make_old(
    connection: Tx,
    workspace_id: WorkspaceId,
    count: int = 1,
    *,
    data: bytes = bytes(64 * KIB),
    bucket: datetime = PAST,
    **other: Any,
) -> list[FileId]:
    """Files in a bucket whose time is over, waiting unless told otherwise."""
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


def make_sweeping(
    db: Database,
    *,
    ack_retention: timedelta = HOUR,
    budget_seconds: float = 20,
    **policy: Any,
) -> Sweeping:
    """A sweep as a server has it."""
    chosen = Policy(
        ack_retention=ack_retention,
        feed_retention=timedelta(days=30),
        settling=timedelta(seconds=5),
    )
    delivery = make_services(db, ack_retention=ack_retention).delivery
    return Sweeping(db, delivery, replace(chosen, **policy), budget_seconds=budget_seconds)


@dataclass(slots=True)
class Tally:
    """Hears how passes ended, and adds it up."""

    acked: int = 0
    expired: int = 0
    dropped: int = 0
    moved: int = 0
    left: int = 0
    failed: int = 0

    def swept(self, acked: int, expired: int) -> None:
        self.acked += acked
        self.expired += expired

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

    The leaves it was in are left empty, as if nothing had ever been in them; nothing may get into
    a leaf that something else leaves.
    """
    rows = await connection.fetch(
        "select distinct tableoid::regclass::text as leaf, bucket - $1::interval as bucket"
        "  from chunks",
        by,
    )
    for start in {floor(row["bucket"], HOUR) for row in rows}:
        if f"{CHUNKS.name}_{start:%Y%m%d_%H%M%S}" not in await leaf_names(connection, CHUNKS):
            await make_leaf(connection, CHUNKS, start)
    left = {row["leaf"] for row in rows}
    assert not left & {f"{CHUNKS.name}_{floor(row['bucket'], HOUR):%Y%m%d_%H%M%S}" for row in rows}
    async with connection.transaction():
        await connection.execute(
            "insert into chunks select bucket - $1::interval, workspace_id, file_id, seq, bytes"
            "  from chunks",
            by,
        )
        for leaf in left:
            await connection.execute(f"truncate {leaf}")
        await connection.execute(
            "update uploads set bucket = bucket - $1::interval,"
            " created_at = created_at - $1::interval, expires_at = expires_at - $1::interval,"
            " fetched_at = fetched_at - $1::interval, acked_at = acked_at - $1::interval",
            by,
        )


async def put_back_rows(connection: Any, workspace_id: UUID, by: timedelta, *, up_to: int) -> None:
    """Rows of a feed, up to a seq, become older; their leaves must be there."""
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
    """Put rows back by some days, into a leaf that is made for them; its name."""
    by = timedelta(days=days)
    start = floor(datetime.now(UTC) - by, timedelta(days=1)) - timedelta(days=1)
    name = await make_leaf(connection, FEED, start, timedelta(days=3))
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
