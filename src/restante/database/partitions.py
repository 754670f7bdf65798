"""
Partitions of time-ranged tables: list them, create them ahead, and remove them.

A new partition is created as a table and then attached, which takes no lock that a writer notices.
An old one is sealed (no more rows), detached concurrently, and dropped.  Each step can be
interrupted; the catalogue shows where it stopped, and the next pass finishes it.  A partitioned
table may itself be a partition: only the lowest level holds rows, and only that is listed.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum

import asyncpg

from restante.database import spans, sql
from restante.database.pool import Connection, Database, Row, Tx
from restante.database.spans import Span

queries = sql.load("restante.database")

# Above Postgres's deadlock_timeout, so that an autovacuum that holds the lock is cancelled.
LOCK_TIMEOUT_MILLISECONDS = 1500
_SIZE_LOCK_TIMEOUT = "50ms"
_MAX_NAME = 63
_BOUNDS = re.compile(r"FROM \((?P<start>[^)]+)\) TO \((?P<end>[^)]+)\)")
_REGULAR = re.compile(r"_\d{8}_\d{6}")
# What an operator has attached may begin or end with no time at all, or with one that is none here.
_FIRST, _LAST = datetime(1000, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class PartitionedTable:
    """A table that is partitioned by time, and how a time is written as a partition bound."""

    name: str
    bound_of: Callable[[datetime], str]
    moment_of: Callable[[str], datetime]
    options: str = ""


class PartitionState(StrEnum):
    """How far the removal of a partition has come."""

    ATTACHED = "attached"
    SEALED = "sealed"  # refuses new rows
    DETACHING = "detaching"  # a DETACH CONCURRENTLY was interrupted
    DETACHED = "detached"  # a plain table that nothing reads


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition as the catalogue has it."""

    table: str  # the partitioned table that rows are inserted into
    name: str
    state: PartitionState
    span: Span | None  # None once detaching has begun, or if it has no range
    parent: str | None = None  # what it is attached to; None once it is detached
    bytes: int = 0
    is_locked: bool = False  # another session holds ACCESS EXCLUSIVE; `bytes` is unknown

    @property
    def is_attached(self) -> bool:
        return self.state in {PartitionState.ATTACHED, PartitionState.SEALED}


async def partitions_of(
    connection: Connection, tables: Iterable[PartitionedTable]
) -> list[Partition]:
    """Every partition of these tables and every leftover, without sizes.  Waits for no lock."""
    by_name = {table.name: table for table in tables}
    rows = await connection.fetch(queries.partitions, list(by_name))
    return [_partition(row, by_name[row["table_name"]]) for row in rows]


def _partition(row: Row, table: PartitionedTable) -> Partition:
    span = _span_of(table, row["bounds"]) if row["bounds"] else None
    return Partition(table.name, row["name"], PartitionState(row["state"]), span, row["parent"])


def _span_of(table: PartitionedTable, bounds: str) -> Span | None:
    """The time range in a partition's bounds as Postgres prints them; None: it has none."""
    found = _BOUNDS.search(bounds)
    if found is None:
        return None
    start, end = (_moment_of(table, found[name]) for name in ("start", "end"))
    return Span(start or _FIRST, end or _LAST)


def _moment_of(table: PartitionedTable, bound: str) -> datetime | None:
    """The time of a bound; None for MINVALUE, infinity, and times that no datetime has."""
    try:
        return table.moment_of(bound.strip("'"))
    except (ValueError, OverflowError):
        return None


def is_regular(name: str, parent: str) -> bool:
    """Whether a partition has such a name that it is found when it is left over."""
    return _REGULAR.fullmatch(name.removeprefix(parent)) is not None


async def with_sizes(connection: Connection, found: Sequence[Partition]) -> list[Partition]:
    """The same partitions with their bytes on disk; locked ones are marked."""
    measured = await sizes(connection, [partition.name for partition in found])
    return [
        replace(one, bytes=measured[one.name] or 0, is_locked=measured[one.name] is None)
        for one in found
    ]


async def sizes(connection: Connection, names: Sequence[str]) -> dict[str, int | None]:
    """
    The bytes of each table on disk, with indexes and TOAST; 0 if the table is gone.

    None for a table under an ACCESS EXCLUSIVE lock.  The lock timeout is short, because the lock
    holder may be waiting for us.
    """
    try:
        return await _measured(connection, names)
    except asyncpg.LockNotAvailableError:
        return {name: await _size_unless_locked(connection, name) for name in names}


async def _size_unless_locked(connection: Connection, name: str) -> int | None:
    try:
        return (await _measured(connection, [name]))[name]
    except asyncpg.LockNotAvailableError:
        return None


async def _measured(connection: Connection, names: Sequence[str]) -> dict[str, int | None]:
    """Runs in a transaction or savepoint of its own, which a lock timeout aborts."""
    async with connection.transaction():
        await connection.execute(queries.set_lock_timeout, _SIZE_LOCK_TIMEOUT)
        rows = await connection.fetch(queries.sizes, names)
    return {row["name"]: row["bytes"] for row in rows}


async def create_ahead(  # noqa: PLR0913 - each argument is one fact, named by its caller
    db: Database,
    table: PartitionedTable,
    *,
    parent: str,
    now: datetime,
    width: timedelta,
    lead: timedelta,
) -> list[Span]:
    """Create the partitions of a parent that the lead asks for; concurrent servers take turns."""
    async with db.transaction() as tx:
        await tx.execute(queries.lock_partition_creation, parent)
        # A session that waits for a lock on the parent blocks every writer behind it.
        await tx.execute(queries.set_lock_timeout, "2s")
        found = await partitions_of(tx, [table])
        existing = [one.span for one in found if one.span and one.parent == parent]
        wanted = spans.missing(existing, now=now, width=width, lead=lead)
        for span in wanted:
            await create(tx, table, span, parent=parent)
    return wanted


async def create(tx: Tx, table: PartitionedTable, span: Span, *, parent: str | None = None) -> str:
    """Create a partition and attach it to the table or to one of its partitions; its name."""
    parent = parent or table.name
    name = f"{parent}_{span.start:%Y%m%d_%H%M%S}"
    if len(name) > _MAX_NAME:
        raise ValueError(f"{name} is longer than a name in Postgres can be")
    await tx.execute(
        f"create table {sql.quoted(name)} (like {sql.quoted(parent)} including all) {table.options}"
    )
    await tx.execute(
        f"alter table {sql.quoted(parent)} attach partition {sql.quoted(name)} "
        f"for values from ('{table.bound_of(span.start)}') to ('{table.bound_of(span.end)}')"
    )
    return name


async def seal(connection: Connection, partition: str) -> None:
    """
    Refuse new rows; waits for inserts in progress.  Idempotent.

    Readers are not blocked, and long reads do not block it.
    """
    await connection.execute(
        f"create or replace trigger sealed before insert on {sql.quoted(partition)} "
        f"for each row execute function refuse_rows()"
    )


async def detach(connection: Connection, partition: Partition) -> None:
    """Detach concurrently; can be interrupted half-way."""
    await connection.execute(f"{_detach_statement(partition)} concurrently")


async def finish_detaching(connection: Connection, partition: Partition) -> None:
    """
    Complete an interrupted detach.

    FINALIZE locks the partition and then waits for every older statement.  If one of those now
    asks for the partition, Postgres ends one of the two as a deadlock; so it is tried twice.
    """
    statement = f"{_detach_statement(partition)} finalize"
    try:
        await connection.execute(statement)
    except asyncpg.DeadlockDetectedError:
        await connection.execute(statement)


def _detach_statement(partition: Partition) -> str:
    parent = sql.quoted(partition.parent or partition.table)
    return f"alter table {parent} detach partition {sql.quoted(partition.name)}"


async def drop(connection: Connection, partition: str) -> int:
    """Drop a detached partition; returns the bytes that go back to the filesystem."""
    measured = await sizes(connection, [partition])
    await connection.execute(f"drop table {sql.quoted(partition)}")
    return measured[partition] or 0
