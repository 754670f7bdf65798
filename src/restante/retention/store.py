"""
A picture of the tables for the planner, and the way of a leaf out of the database.

A leaf is sealed (its last row is final), detached without a lock that readers or writers would
feel, and dropped.  Each step can be interrupted, found in the catalogue again, and finished.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from uuid import UUID

import asyncpg

from restante.database import sql
from restante.database.pool import Row, Tx
from restante.database.spans import Span
from restante.ids import FileId, WorkspaceId
from restante.retention import space_store as space
from restante.retention.rules import Holder, Leaf, Live

queries = sql.load("restante.retention")

# Above Postgres's deadlock_timeout, so that an autovacuum in the way is told to yield.
LEAF_LOCK_MILLISECONDS = 1500
_WORKSPACES_PER_TRIM = 500
_DUE_COUNTED = 100_000


@dataclass(frozen=True, slots=True)
class Choice:
    """How long the servers of this database keep acknowledged files and feed rows."""

    ack: timedelta
    feed: timedelta


async def due_uploads(
    connection: Tx, *, acked_before: datetime, expired_before: datetime
) -> tuple[int, int]:
    """How many uploads a sweep would delete, acknowledged and expired; no more are counted."""
    row = await connection.fetchrow(queries.due_uploads, acked_before, expired_before, _DUE_COUNTED)
    assert row is not None  # noqa: S101 - it has no FROM
    return row["acked"], row["expired"]


async def keep_choice(connection: Tx, choice: Choice) -> None:
    """Record how long the servers keep things."""
    await connection.execute(
        queries.keep_choice, choice.ack.total_seconds(), choice.feed.total_seconds()
    )


async def choice(connection: Tx) -> Choice | None:
    """How long the servers keep things; None if none has started yet."""
    row = await connection.fetchrow(queries.choice)
    if row is None:
        return None
    return Choice(timedelta(seconds=row["ack_seconds"]), timedelta(seconds=row["feed_seconds"]))


async def with_sizes(connection: Tx, found: Sequence[Leaf]) -> list[Leaf]:
    """The same leaves with their bytes on disk; those that somebody has locked are marked."""
    sizes = await space.sizes(connection, [leaf.name for leaf in found])
    return [
        replace(leaf, bytes=sizes[leaf.name] or 0, is_locked=sizes[leaf.name] is None)
        for leaf in found
    ]


async def with_contents(
    connection: Tx, found: Sequence[Leaf], *, acked_before: datetime, now: datetime, limit: int
) -> list[Leaf]:
    """The same buckets with what lives in them, counted up to the limit, and what is arriving."""
    begins = [leaf.span.start for leaf in found if leaf.span]
    ends = [leaf.span.end for leaf in found if leaf.span]
    live = {
        row["number"]: _live(row, limit)
        for row in await connection.fetch(queries.live_in, begins, ends, acked_before, now, limit)
    }
    arriving = {
        row["number"]: row["uploads"]
        for row in await connection.fetch(queries.arriving_in, begins, ends)
    }
    return [
        replace(leaf, live=live.get(number, Live(0, 0)), arriving=arriving.get(number, 0))
        for number, leaf in enumerate(found, start=1)
    ]


def _live(row: Row, limit: int) -> Live:
    holder = Holder(
        WorkspaceId(row["workspace_id"]),
        row["held_bytes"],
        row["held_files"],
        row["since"],
        row["until"],
    )
    return Live(int(row["files"]), row["bytes"], counted=row["files"] < limit, holder=holder)


@asynccontextmanager
async def patient(connection: Tx, milliseconds: int) -> AsyncIterator[None]:
    """Give up waiting for a lock after so long, while inside."""
    await connection.execute(f"set lock_timeout = {milliseconds:d}")
    try:
        yield
    finally:
        if not connection.is_closed():
            await connection.execute("reset lock_timeout")


async def seal(connection: Tx, leaf: str) -> None:
    """
    Let no more rows in; waits for those that are being written.  A second time is no mistake.

    Readers go on meanwhile, and whoever reads for long does not hold it up.
    """
    await connection.execute(
        f"create or replace trigger sealed before insert on {sql.quoted(leaf)} "
        f"for each row execute function refuse_rows()"
    )


async def is_in_use(connection: Tx, span: Span) -> bool:
    """Whether any upload has, or is getting, its bytes in this bucket."""
    return bool(await connection.fetchval(queries.is_in_use, span.start, span.end))


async def detach(connection: Tx, table: str, leaf: str) -> None:
    """Take the leaf out of its table; may be interrupted half-way."""
    await connection.execute(
        f"alter table {sql.quoted(table)} detach partition {sql.quoted(leaf)} concurrently"
    )


async def finish_detaching(connection: Tx, table: str, leaf: str) -> None:
    """
    Finish what an interrupted detach began.

    It takes the leaf and then waits for every statement that began before.  One of somebody else's
    that asks for the leaf now waits for us in turn, until Postgres ends one of us; so a second try.
    """
    statement = f"alter table {sql.quoted(table)} detach partition {sql.quoted(leaf)} finalize"
    try:
        await connection.execute(statement)
    except asyncpg.DeadlockDetectedError:
        await connection.execute(statement)


async def drop(connection: Tx, leaf: str) -> int:
    """Drop a detached leaf; returns the bytes that the filesystem gets back."""
    sizes = await space.sizes(connection, [leaf])
    await connection.execute(f"drop table {sql.quoted(leaf)}")
    return sizes[leaf] or 0


async def files_in(connection: Tx, span: Span, limit: int) -> list[tuple[WorkspaceId, FileId]]:
    """Uploads whose bytes are in this bucket."""
    rows = await connection.fetch(queries.files_in, span.start, span.end, limit)
    return [(WorkspaceId(row["workspace_id"]), FileId(row["file_id"])) for row in rows]


async def move_file(
    connection: Tx, workspace_id: WorkspaceId, file_id: FileId, *, to: datetime
) -> int | None:
    """Move one file's bytes to another bucket; None if somebody holds it or it is gone."""
    return await connection.fetchval(queries.move_file, workspace_id, file_id, to)


async def trim_feeds(connection: Tx, leaf: str) -> None:
    """Record, for every workspace, that the rows of this leaf are no longer kept."""
    statement = queries.trim_feeds % sql.quoted(leaf)
    last: UUID | None = UUID(int=0)
    while last is not None:
        last = await connection.fetchval(statement, last, _WORKSPACES_PER_TRIM)
