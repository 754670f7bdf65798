"""Tracked tables without capture, and ops as peers send them; valid unless a test says so."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from msgspec import Raw

from restante.database.pool import Connection, Database
from restante.oplog import peers, tables, ulids
from restante.oplog.applying.apply import Source
from restante.oplog.peers import Peer
from restante.oplog.positions import Position
from restante.oplog.rules import Channel
from restante.oplog.tables import TrackedTable
from restante.wire.oplog import ActionName, Op

NOW = datetime.now(UTC)
OWN = "https://own.example"
PEER = "https://peer.example"
THIRD = "https://third.example"

ITEMS = "create table {} (id integer primary key, name text, price numeric)"


async def tracked(
    connection: Connection,
    name: str = "items",
    definition: str = ITEMS,
    *,
    key: Sequence[str] = ("id",),
) -> TrackedTable:
    """Create a table, and its part of the log, without triggers on it."""
    quoted = '"' + name.replace('"', '""') + '"'
    await connection.execute(definition.format(f"public.{quoted}"))
    return await logged(connection, name, key=key)


async def logged(
    connection: Connection, name: str, *, key: Sequence[str] = ("id",)
) -> TrackedTable:
    """Give a table of the schema public its part of the log."""
    async with connection.transaction():  # a server creates partitions for what it sees
        return await _logged(connection, name, key)


async def _logged(connection: Connection, name: str, key: Sequence[str]) -> TrackedTable:
    await tables.identify(connection, OWN)
    number = await connection.fetchval(
        """
        insert into restante.op_tables
               (name, schema_name, table_name, key_columns, state, changed_at)
        values ($1, 'public', $1, $2, 'tracked', now()) returning id
        """,
        name,
        list(key),
    )
    log = f"restante.ops_{number}"
    await connection.execute(
        f"create table {log} partition of restante.ops for values in ({number}) "
        "partition by range (arrived_at)"
    )
    await connection.execute(
        f"create table {log}_all partition of {log} for values from (minvalue) to (maxvalue)"
    )
    table = await tables.find(connection, name)
    assert table is not None
    return table


async def make_peer(db: Database, host: str = PEER, **given: Any) -> Peer:
    """A peer that is one of our own nodes."""
    async with db.connection() as connection:
        return (await peers.add(connection, host, peers.Changes(**given), now=NOW)).peer


def pull_from(peer: Peer, cursor: Position | None = None) -> Source:
    """A page that is pulled; the peer has read us up to its cursor."""
    return Source(peer, Channel.PULL, cursor)


def ulid_at(seconds: float, tail: int = 0) -> UUID:
    """A ULID of so many seconds after an hour ago."""
    moment = NOW - timedelta(hours=1) + timedelta(seconds=seconds)
    return UUID(int=ulids.lowest_at(moment).int + tail)


def op(
    action: ActionName,
    *records: dict[str, Any],
    at: float = 0,
    tail: int = 0,
    host: str = PEER,
    table: str = "items",
    **more: Any,
) -> Op:
    """An op that was made so many seconds after an hour ago, and arrives in that order."""
    ulid = ulid_at(at, tail)
    data = [Raw(json.dumps(record).encode()) for record in records]
    place = str(Position(1, max(int(at * 1000), 0), ulid, len(data)))
    given: dict[str, Any] = {"transient": False, "position": place} | more
    return Op(ulids.text_of(ulid), host, action, table, data, **given)


async def rows(connection: Connection, table: str = "items", by: str = "id") -> list[Any]:
    """Every record of a table, as a tuple."""
    quoted = '"' + table.replace('"', '""') + '"'
    return [
        tuple(row) for row in await connection.fetch(f"select * from public.{quoted} order by {by}")
    ]


async def write_locally(
    connection: Connection,
    table: TrackedTable,
    key: Any,
    data: dict[str, Any] | None,
    *,
    at: float,
) -> UUID:
    """What capture does for a record with one key column: change the row, and log it."""
    ulid = ulid_at(at, uuid4().int & 0xFFFF)
    column, relation = table.key_columns[0], table.relation
    await connection.execute(f'delete from {relation} where "{column}" = $1', key)
    if data is not None:
        await connection.execute(
            f"insert into {relation} select * from json_populate_record(null::{relation}, $1)",
            json.dumps(data),
        )
    own = await connection.fetchval("select host_id from restante.op_node")
    await connection.execute(
        """
        insert into restante.ops (table_id, arrived_at, era, xid, ulid, n, origin, action,
                                  key_hash, key, data)
        select $1, now(), restante.op_current_era(), pg_current_xact_id()::text::bigint,
               $2, 0, $3, $4::text::restante.op_action, hashtextextended(k.key, 0), k.key, $6
          from (select json_build_array($5::integer)::text as key) as k
        """,
        table.id,
        ulid,
        own,
        "d" if data is None else "u",
        key,
        json.dumps(data if data is not None else {column: key}),
    )
    return ulid
