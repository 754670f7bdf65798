"""A tracked table whose ops are days old, peers that have read some of them, and a sweep."""

from datetime import UTC, datetime, timedelta
from typing import Any, cast

from oplog.captured import OWN, track
from oplog.nodes import PEER, make_peer
from sweeps import make_sweep

from restante.database import partitions
from restante.database.pool import Connection, Database, Tx
from restante.database.spans import Span, floor
from restante.oplog import tables
from restante.oplog.peers import Peer
from restante.oplog.positions import Position
from restante.oplog.tables import OPS
from restante.oplog.trimming import picture
from restante.oplog.trimming.limits import Limits, Policy
from restante.retention.sweep import Sweep

DAY = timedelta(days=1)
WEEK = Limits(Policy(retention=7 * DAY))


async def make_pages(db: Database, **wanted: Any) -> int:
    """A table whose changes are captured, with a partition for each day; its number."""
    async with db.connection() as connection:
        await tables.identify(connection, OWN)
        await picture.save_limits(connection, WEEK)
        await connection.execute("create table public.pages (id integer primary key, text text)")
    return (await track(db, **wanted)).table.id


async def write(connection: Connection, *ids: int, text: str = "x") -> None:
    """Insert these records, or change them."""
    await connection.execute(
        "insert into public.pages select id, $2 from unnest($1::int[]) as id"
        " on conflict (id) do update set text = excluded.text",
        list(ids),
        text,
    )


async def age(connection: Connection, table_id: int, by: timedelta) -> str:
    """
    The ops of the last hour arrived so much earlier, in an era of their own.

    Returns the partition that they are in now.
    """
    start = floor(datetime.now(UTC) - by, DAY)
    name = f"ops_{table_id}_{start:%Y%m%d_%H%M%S}"
    async with connection.transaction():
        if not await connection.fetchval("select to_regclass('restante.' || $1) is not null", name):
            span = Span(start, start + DAY)
            await partitions.create(cast("Tx", connection), OPS, span, parent=f"ops_{table_id}")
        await connection.execute(
            "with moved as (delete from restante.ops where table_id = $1"
            "  and arrived_at > now() - interval '1 hour' returning *)"
            " insert into restante.ops (table_id, arrived_at, era, xid, ulid, n, origin, action,"
            "   approximate, key_hash, old_hash, key, data)"
            " select table_id, $2, era - $3, xid, ulid, n, origin, action, approximate, key_hash,"
            "        old_hash, key, data from moved",
            table_id,
            start + DAY / 2,
            by // timedelta(microseconds=1),
        )
    return name


async def merge_past(connection: Connection, table_id: int, *, days_ahead: int = 0) -> str:
    """One wide partition instead of those of past days, as if nobody had limited the log then."""
    log, end = f"ops_{table_id}", floor(datetime.now(UTC), DAY) + days_ahead * DAY
    async with connection.transaction():
        await connection.execute(
            f"create temp table past on commit drop as"
            f" select * from restante.{log} where arrived_at < $1",
            end,
        )
        for one in await partitions.partitions_of(connection, [OPS]):
            if one.parent == log and one.span and one.span.end <= end:
                await connection.execute(f"drop table restante.{one.name}")
        await connection.execute(
            f"create table restante.{log}_wide partition of restante.{log}"
            f" for values from ('{end - 60 * DAY}') to ('{end}')"
        )
        await connection.execute(f"insert into restante.{log} select * from past")
    return f"{log}_wide"


async def count_ops(connection: Connection, table: str) -> None:
    """Let Postgres know how many ops there are: what a session has written it reports later."""
    await connection.execute("select pg_stat_force_next_flush()")
    await connection.execute(f"analyze {table}")


async def last_position(connection: Connection, table_id: int) -> Position:
    row = await connection.fetchrow(
        "select era, xid, ulid, n from restante.ops where table_id = $1"
        " order by era desc, xid desc, ulid desc, n desc limit 1",
        table_id,
    )
    assert row is not None
    return Position(*row)


async def make_reader(db: Database, passed: str, host: str = PEER, **given: Any) -> Peer:
    """A peer that has read our log up to a position, and whose log we have read."""
    peer = await make_peer(db, host, **given)
    async with db.connection() as connection:
        await connection.execute(
            "update restante.op_peers set passed = $2, confirmed = $2, confirmed_at = now()"
            " where id = $1",
            peer.id,
            passed,
        )
    return peer


def sweep_of(db: Database, limits: Limits = WEEK) -> Sweep:
    return make_sweep(db, log_limits=limits)


async def make_wide(db: Database, connection: Connection) -> tuple[int, str]:
    """A table with one wide partition, most of which is due; its number, and the partition."""
    pages = await make_pages(db)
    for first in range(0, 2000, 100):
        await write(connection, *range(first, first + 100), text="x" * 1000)
    await age(connection, pages, 50 * DAY)
    await write(connection, 1, 2)
    await age(connection, pages, 3 * DAY)
    return pages, await merge_past(connection, pages)


def later_today() -> datetime:
    """A moment at which the partition of this moment is still in use."""
    return min(now() + timedelta(minutes=1), floor(now(), DAY) + DAY - timedelta(microseconds=1))


def now() -> datetime:
    return datetime.now(UTC)
