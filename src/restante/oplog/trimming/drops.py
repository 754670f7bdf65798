"""
Drops ops: a whole partition, all that is in the partition in use, or the older part of one.

The marks that tell readers of a gap are raised before anything goes, or in the same transaction.
Each step can be interrupted.  A partition whose removal has begun is finished by the next pass, and
a copy that was not used is dropped by it.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

import msgspec
import structlog

from restante.database import partitions, sql
from restante.database.partitions import Partition
from restante.database.pool import Connection, Row, Tx, transaction, translated
from restante.errors import TableBusy
from restante.oplog.positions import Position
from restante.oplog.serving import log as serving
from restante.oplog.trimming.fates import Cause, Fate
from restante.oplog.trimming.picture import Log
from restante.retention.subjects import Work
from restante.wire.oplog_status import Eviction

log = structlog.get_logger()

queries = sql.load("restante.oplog.trimming", "drops")

# Whoever waits for a lock on a log that is in use holds up its writers.
_LOCK_TIMEOUT = "150ms"
_TRIES = 8
_PAUSE_SECONDS = 0.2

# For names that look like a partition's, but never are: no hour has this number.
_NOT_A_START = "%Y%m%d_99%M%S"


@dataclass(frozen=True, slots=True)
class Drop:
    """What goes, and why."""

    log: Log
    partition: Partition
    fate: Fate
    rows: int  # about
    bytes: int
    now: datetime

    @property
    def lost_bytes(self) -> int:
        """Without what is written anew."""
        return self.bytes - self.fate.kept_bytes


async def whole(drop: Drop, last: Position | None, work: Work) -> None:
    """Drop a partition that takes no more ops."""
    if last is not None:
        await _remove_older_parked(work.connection, drop, last)
    async with transaction(work.connection) as tx:
        if last is not None:
            await _note(tx, drop, last)
        partition = await _regularly_named(tx, drop)
    await work.detach_and_drop(partition)


async def _regularly_named(tx: Tx, drop: Drop) -> Partition:
    """The partition under a name by which the next pass finds it, if this one ends too early."""
    partition, parent = drop.partition, drop.log.parent
    if partitions.is_regular(partition.name, parent):
        return partition
    name = f"{parent}_{drop.now:{_NOT_A_START}}"
    await tx.execute(f"alter table {_name(drop)} rename to {sql.quoted(name)}")
    return replace(partition, name=name)


async def contents(drop: Drop, last: Position, work: Work) -> str | None:
    """Drop all that is in the partition in use, unless an op has arrived since; returns why not."""
    await _remove_older_parked(work.connection, drop, last)

    async def attempt() -> str | None:
        async with transaction(work.connection) as tx:
            await tx.execute(queries.set_lock_timeout, _LOCK_TIMEOUT)
            await tx.execute(f"lock table {_name(drop)} in access exclusive mode")
            if await _last_before(tx, drop.partition, _END) != last:
                return "an op has arrived meanwhile"
            await _note(tx, drop, last)
            await tx.execute(f"truncate {_name(drop)}")
        return None

    if reason := await _often(attempt):
        return reason
    work.freed(drop.bytes)
    return None


_END = Position(2**63 - 1, 0, UUID(int=0), 0)


async def older_part(drop: Drop, *, most: Position | None, work: Work) -> str | None:
    """
    Drop what arrived before a moment, and write the rest anew; returns why not.

    The rest is copied while the partition is in use.  The copy then takes its place, with what was
    committed meanwhile.  `most` is the last position that may go.
    """
    assert drop.fate.until is not None  # noqa: S101 - only such a fate comes here
    connection = work.connection
    trimmed = await connection.fetchval(queries.trimmed, drop.log.table_id)
    below = await serving.horizon(connection)
    found = serving.Log(connection, [], below)
    first = await found.first_arrival(drop.fate.until)
    bound = first or Position(below.era, below.xid, UUID(int=0), 0)
    last = await _last_before(connection, drop.partition, bound)
    if last is not None and most is not None and most < last:
        last = await _last_before(connection, drop.partition, replace(most, n=most.n + 1))
    if last is None:
        return "nothing of it may go yet"
    await _remove_older_parked(connection, drop, last)
    copy = f"{drop.log.parent}_{drop.now:{_NOT_A_START}}"
    await _create_copy(connection, drop, copy)

    async def attempt() -> str | None:
        async with transaction(connection) as tx:
            await tx.execute(queries.set_lock_timeout, _LOCK_TIMEOUT)
            await tx.execute(f"lock table {sql.quoted(drop.log.parent)} in access exclusive mode")
            if await tx.fetchval(queries.trimmed, drop.log.table_id) != trimmed:
                return "somebody else has dropped ops of the table meanwhile"
            statement = _of(queries.copy_rest, drop.partition, copy)
            await tx.execute(statement, *_values(last), below.era, below.xid)
            await _note(tx, drop, last)
            await _replace(tx, drop, copy)
        return None

    reason: str | None = "it was not used"
    try:
        await _fill(connection, drop.partition, copy, (*_values(last), below.era, below.xid))
        reason = await _often(attempt)
    finally:
        if reason and not connection.is_closed():
            await connection.execute(f"drop table if exists {sql.quoted(copy)}")
    if reason:
        return reason
    sizes = await partitions.sizes(connection, [drop.partition.name])
    work.freed(drop.bytes)
    work.moved(sizes[drop.partition.name] or 0)
    return None


async def _create_copy(connection: Connection, drop: Drop, copy: str) -> None:
    """
    A table for the rest; its constraint spares a scan when it takes its place.

    It is committed before anything is in it.  A crash of Postgres leaves the files of a table that
    was not, and nobody would find them.
    """
    span = drop.partition.span
    assert span is not None  # noqa: S101 - it is attached
    async with transaction(connection) as tx:
        await tx.execute(
            f"create table {sql.quoted(copy)} (like {sql.quoted(drop.log.parent)} including all)"
        )
        await tx.execute(
            f"alter table {sql.quoted(copy)} add constraint bounds check ("
            f"table_id = {drop.log.table_id:d} and arrived_at >= '{span.start.isoformat()}' "
            f"and arrived_at < '{span.end.isoformat()}')"
        )


async def _fill(
    connection: Connection, partition: Partition, copy: str, bounds: Sequence[object]
) -> None:
    """Copy what stays and is committed, however long that takes."""
    async with transaction(connection) as tx:
        await tx.execute(queries.no_statement_timeout)
        await tx.execute(_of(queries.copy_after, partition, copy), *bounds)


async def _replace(tx: Tx, drop: Drop, copy: str) -> None:
    """Put the copy in the place of a partition, which is dropped."""
    parent, name = sql.quoted(drop.log.parent), _name(drop)
    bounds = await tx.fetchval(queries.bounds, drop.partition.name)
    await tx.execute(f"alter table {parent} detach partition {name}")
    await tx.execute(f"drop table {name}")
    await tx.execute(f"alter table {sql.quoted(copy)} rename to {name}")
    await tx.execute(f"alter table {parent} attach partition {name} {bounds}")
    await tx.execute(f"alter table {name} drop constraint bounds")


async def _often(attempt: Callable[[], Awaitable[str | None]]) -> str | None:
    """Try often and never for long, so that no writer waits long behind us; raises TableBusy."""
    for _ in range(_TRIES):
        with suppress(TableBusy), translated():
            return await attempt()
        await asyncio.sleep(_PAUSE_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
    with translated():
        return await attempt()


async def _remove_older_parked(connection: Connection, drop: Drop, last: Position) -> None:
    """
    Forget parked ops that are older than what goes; they could not be judged by it any more.

    Before anything is locked, because many may be parked.  An op never waits if a newer one of its
    record is in the log already.
    """
    statement = _of(queries.remove_older_parked, drop.partition)
    await connection.execute(statement, drop.log.decided.name, *_values(last))


async def _note(tx: Tx, drop: Drop, last: Position) -> None:
    """Raise the marks of the table, and note who is evicted by that."""
    row = await tx.fetchrow(_of(queries.newest_until, drop.partition), *_values(last))
    assert row is not None  # noqa: S101 - the last op is there
    await tx.execute(
        queries.raise_marks,
        drop.log.table_id,
        row["ulid"],
        row["host"] or "",
        str(last),
        drop.rows,
        drop.lost_bytes,
        drop.now,
        drop.fate.cause is Cause.DORMANT,
    )
    if drop.fate.evicts:
        await _evict(tx, drop, last)


async def _evict(tx: Tx, drop: Drop, last: Position) -> None:
    hosts = list(drop.fate.evicts)
    await tx.execute(queries.begin_snapshots_again, drop.log.table_id, hosts)
    lost = Eviction(
        table=drop.log.decided.name,
        cause=drop.fate.cause or "",
        ops=drop.rows,
        bytes=drop.lost_bytes,
    )
    details = msgspec.json.encode(lost).decode()
    for row in await tx.fetch(queries.evict, hosts, drop.now, str(last), details):
        log.warning("peer_evicted", peer=row["host"], **msgspec.structs.asdict(lost))


async def _last_before(
    connection: Connection, partition: Partition, position: Position
) -> Position | None:
    row = await connection.fetchrow(_of(queries.last_before, partition), *_values(position))
    return None if row is None else _position(row)


def _position(row: Row) -> Position:
    return Position(row["era"], row["xid"], row["ulid"], row["n"])


def _values(position: Position) -> Sequence[object]:
    return position.era, position.xid, position.ulid, position.n


def _name(drop: Drop) -> str:
    return sql.quoted(drop.partition.name)


def _of(statement: str, partition: Partition, copy: str = "") -> str:
    return statement.format(partition=sql.quoted(partition.name), copy=sql.quoted(copy))
