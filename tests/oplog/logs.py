"""A log that tests write by SQL, in transactions of their own, and readers of it over HTTP."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sites import Site
from waiting import until

from restante.database.pool import Connection, Database
from restante.oplog import peers, ulids
from restante.oplog.peers import Changes
from restante.oplog.positions import Position
from restante.wire import oplog as wire

PEER = "http://reader.example"
ORIGIN = "http://origin.example"
SWEEP = "/internal/crud/sweep"


async def add_table(
    connection: Connection, name: str, *, key_map: Mapping[str, str] | None = None
) -> int:
    """A table with a log, which has one partition; ops of ORIGIN can be logged."""
    async with connection.transaction():  # the server creates partitions for what it sees
        return await _add_table(connection, name, json.dumps(key_map or {}))


async def _add_table(connection: Connection, name: str, key_map: str) -> int:
    await connection.execute(
        "insert into restante.op_hosts (host) values ($1) on conflict do nothing", ORIGIN
    )
    number = await connection.fetchval(
        """
        insert into restante.op_tables
               (name, schema_name, table_name, key_columns, key_map, state, changed_at)
        values ($1, 'public', $1, '{id}', $2, 'tracked', now()) returning id
        """,
        name,
        key_map,
    )
    log = f"restante.ops_{number}"
    await connection.execute(
        f"create table {log} partition of restante.ops for values in ({number}) "
        "partition by range (arrived_at)"
    )
    await connection.execute(
        f"create table {log}_all partition of {log} "
        "for values from ('2020-01-01 00:00:00+00') to ('2100-01-01 00:00:00+00')"
    )
    return number


async def append(
    connection: Connection,
    table: int,
    *records: Any,
    ulid: UUID | None = None,
    first: int = 0,
    action: str = "u",
    approximate: bool = False,
    is_held_up: bool = False,
) -> str:
    """
    Log one op in the transaction of the connection, or in one of its own; returns its ULID.

    In one of its own it is served when this returns, unless an open transaction holds it up.
    """
    fresh: UUID = await connection.fetchval(
        "select restante.op_ulid(restante.op_tick(1), substr(md5(random()::text), 1, 16))"
    )
    ulid = ulid or fresh
    await connection.execute(
        """
        insert into restante.ops (table_id, arrived_at, era, xid, ulid, n, origin, action,
                                  approximate, key_hash, key, data)
        select $1, clock_timestamp(), restante.op_current_era(),
               pg_current_xact_id()::text::bigint, $2, $3 + number - 1,
               (select id from restante.op_hosts where host = $8), $4::text::restante.op_action, $5,
               hashtextextended(key, 0), key, data::json
          from unnest($6::text[], $7::text[]) with ordinality as record (key, data, number)
        """,
        table,
        ulid,
        first,
        action,
        approximate,
        [json.dumps([one["id"]]) for one in records or ({"id": 1},)],
        [json.dumps(one) for one in records or ({"id": 1},)],
        ORIGIN,
    )
    if not is_held_up and not connection.is_in_transaction():
        await until(lambda: is_served(connection))
    return ulids.text_of(ulid)


async def is_served(connection: Connection) -> bool:
    """Whether all committed ops are below the horizon: any transaction of the server moves it."""
    return await connection.fetchval(
        "select not exists (select from restante.ops where era = restante.op_current_era()"
        " and xid >= restante.op_horizon())"
    )


async def trim(connection: Connection, table: int, *, up_to: str) -> None:
    """Drop the ops of a table up to and including the op with a ULID, as retention does."""
    ulid = ulids.parsed(up_to)
    last = await connection.fetchrow(
        """
        select era, xid, ulid, n from restante.ops where ulid = $1 and table_id = $2
         order by era desc, xid desc, n desc limit 1
        """,
        ulid,
        table,
    )
    assert last is not None
    await drop_up_to(connection, table, last)


async def drop_up_to(connection: Connection, table: int, last: Any) -> None:
    at = Position(last["era"], last["xid"], last["ulid"], last["n"])
    floor = await connection.fetchval(
        """
        select ulid from restante.ops
         where table_id = $1 and (era, xid, ulid, n) <= ($2, $3, $4, $5)
         order by ulid desc limit 1
        """,
        table,
        at.era,
        at.xid,
        at.ulid,
        at.n,
    )
    await connection.execute(
        "delete from restante.ops where table_id = $1 and (era, xid, ulid, n) <= ($2, $3, $4, $5)",
        table,
        at.era,
        at.xid,
        at.ulid,
        at.n,
    )
    await connection.execute(
        """
        update restante.op_tables
           set trimmed = greatest(trimmed, $2), floor = greatest(floor::text, $3::uuid::text)::uuid
         where id = $1
        """,
        table,
        str(at),
        floor,
    )


@dataclass
class Page:
    """An answer with a page."""

    status: int
    headers: Mapping[str, str]
    ops: list[Any]

    @property
    def ulids(self) -> list[str]:
        return [op["ulid"] for op in self.ops]

    @property
    def records(self) -> list[Any]:
        return [record for op in self.ops for record in op["data"]]

    @property
    def has_gap(self) -> bool:
        return self.headers.get(wire.RETENTION_GAP) == "true"

    @property
    def is_limited(self) -> bool:
        return self.headers.get(wire.LIMITED) == "true"


@dataclass
class Reader:
    """A node that reads a site's log."""

    site: Site
    token: str | None
    headers: dict[str, str] = field(default_factory=dict[str, str])

    async def read(self, **query: Any) -> Page:
        headers = dict(self.headers)
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        async with self.site.http.get(SWEEP, params=query, headers=headers) as answer:
            ops = await answer.json()
            return Page(answer.status, answer.headers, ops)


async def add_peer(db: Database, url: str = PEER, **changes: Any) -> str:
    """Add a peer; returns the token that it shows."""
    async with db.connection() as connection:
        added = await peers.add(connection, url, Changes(**changes), now=datetime.now(UTC))
    assert added.token
    return added.token


async def old_reader(site: Site, url: str = PEER, **changes: Any) -> Reader:
    """A peer of the older protocol."""
    token = await add_peer(site.state.db, url, **changes)
    return Reader(site, token, {"User-Agent": f"mediorum {url}"})


async def own_reader(site: Site, url: str = PEER, **changes: Any) -> Reader:
    """A peer that is a node of ours."""
    token = await add_peer(site.state.db, url, **changes)
    return Reader(site, token, {wire.OPLOG_VERSION: "1"})


async def peer_row(db: Database, url: str = PEER) -> Any:
    async with db.connection() as connection:
        return await connection.fetchrow("select * from op_peers where host = $1", url)


def positions_of(page: Page) -> Sequence[str]:
    return [op["position"] for op in page.ops]
