"""Pages of the op log: their latency in a long log against a short one, and waking a long poll."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import asyncpg

from bench import http
from bench.report import Bound, show
from bench.server import Running
from restante.database import migrate
from restante.database.pool import Database
from restante.database.rules import BOTH_PHASES
from restante.oplog import peers, positions
from restante.oplog.peers import Changes
from restante.oplog.positions import Position
from restante.oplog.serving import log, serve
from restante.oplog.serving.encoding import PageEncoder
from restante.oplog.serving.readers import OpenEnds
from restante.oplog.serving.serve import Ask
from restante.wire import oplog as wire

SHORT, LONG = 100_000, 3_000_000
TABLES, PARTITIONS = 10, 10  # of each table
RECORDS_PER_OP = 5
PAGE_OPS = 200
ROUNDS = 60
WAKES = 200

_READER = peers.Reader(None, is_authenticated=False)


async def measure(server: Running) -> None:
    """Both logs have as many partitions; pages are read alternately, from their middle."""
    async with _logged(server, SHORT) as short, _logged(server, LONG) as long:
        for name, kind in (("A page", _page), ("An empty page", _empty_page)):
            times: dict[int, list[float]] = {SHORT: [], LONG: []}
            for _ in range(ROUNDS):
                for rows, db in ((SHORT, short), (LONG, long)):
                    times[rows].append(await kind(db, rows))
            middle = {rows: statistics.median(found) for rows, found in times.items()}
            detail = (
                f"{middle[LONG]:.1f} ms of {LONG:,} records, {middle[SHORT]:.1f} ms of {SHORT:,}, "
                f"{TABLES * PARTITIONS} partitions each"
            )
            ratio = middle[LONG] / middle[SHORT]
            show(Bound(f"{name} of a long log, against a short one", "x", ratio, 1.5, detail))
    await _measure_wakes(server)


async def _page(db: Database, rows: int) -> float:
    """Read, put together and encode a page of many ops, in milliseconds."""
    middle = await _position(db, rows // RECORDS_PER_OP // 2)
    started = time.monotonic()
    ask = Ask(position=str(middle), is_ours=True, limits=log.Limits(ops=PAGE_OPS))
    page = await serve.read(db, _READER, ask, OpenEnds(), now=datetime.now(UTC))
    encoder = PageEncoder(page.tables, is_ours=True)
    encoder.add(page.records)
    async for records in serve.rest(db, page):
        encoder.add(records)
    encoder.end()
    assert encoder.ops == PAGE_OPS
    return (time.monotonic() - started) * 1000


async def _empty_page(db: Database, rows: int) -> float:
    end = await _position(db, rows // RECORDS_PER_OP - 1)
    started = time.monotonic()
    ask = Ask(position=str(end), is_ours=True)
    page = await serve.read(db, _READER, ask, OpenEnds(), now=datetime.now(UTC))
    assert page.last is None
    return (time.monotonic() - started) * 1000


async def _position(db: Database, xid: int) -> Position:
    async with db.connection() as connection:
        row = await connection.fetchrow(
            "select era, xid, ulid, n from ops where xid = $1 order by n desc limit 1", xid
        )
    assert row is not None
    return Position(row["era"], row["xid"], row["ulid"], row["n"])


@asynccontextmanager
async def _logged(server: Running, rows: int) -> AsyncIterator[Database]:
    """A database of its own, with a log of so many records."""
    name = f"restante_bench_log_{rows}"
    admin = await asyncpg.connect(server.dsn)
    await admin.execute(f"drop database if exists {name}")
    await admin.execute(f"create database {name}")
    dsn = server.dsn.replace("/restante?", f"/{name}?")
    await migrate.apply(dsn, migrate.shipped(), phases=BOTH_PHASES)
    await _fill(dsn, rows)
    db = await Database.open(
        dsn, pool_size=2, acquire_timeout_seconds=10, statement_timeout_seconds=60
    )
    try:
        yield db
    finally:
        await db.close()
        await admin.execute(f"drop database {name} with (force)")
        await admin.close()


async def _fill(dsn: str, rows: int) -> None:
    connection = await asyncpg.connect(dsn, server_settings={"search_path": "restante"})
    await connection.execute("set synchronous_commit = off")
    await connection.execute("insert into op_hosts (host) values ('http://a.bench')")
    for table in range(1, TABLES + 1):
        await connection.execute(
            "insert into op_tables (name, schema_name, table_name, key_columns, state, changed_at)"
            " values ($1, 'public', $1, '{id}', 'tracked', now())",
            f"t{table}",
        )
        await connection.execute(
            f"create table ops_{table} partition of ops for values in ({table})"
            " partition by range (arrived_at)"
        )
        for day in range(1, PARTITIONS + 1):
            await connection.execute(
                f"create table ops_{table}_{day} partition of ops_{table}"
                f" for values from ('2026-01-{day:02} 00:00:00+00')"
                f" to ('2026-01-{day + 1:02} 00:00:00+00')"
            )
    for day in range(1, PARTITIONS + 1):
        await connection.execute(
            """
            insert into ops (table_id, arrived_at, era, xid, ulid, n, origin, action, key_hash, key,
                             data)
            select op % $3::int + 1, at, 1, op,
                   op_ulid((extract(epoch from at) * 1000)::bigint << 15,
                           lpad(to_hex(op), 16, '0')), number % $4::int, 1, 'u',
                   hashtextextended(number::text, 0), '[' || number || ']',
                   json_build_object('id', number, 'text', repeat(md5(number::text), 8))
              from generate_series($1::bigint * ($2::int - 1), $1::bigint * $2::int - 1) as number,
                   lateral (select number / $4::int as op) as of,
                   lateral (select '2026-01-01 00:00:00+00'::timestamptz
                                   + ($2::int - 1) * interval '1 day'
                                   + (op % ($1::bigint / $4::int)) * interval '23 hours'
                                     / ($1::bigint / $4::int)) as t (at)
            """,
            rows // PARTITIONS,
            day,
            TABLES,
            RECORDS_PER_OP,
        )
    await connection.execute("analyze ops")
    await connection.close()


async def _measure_wakes(server: Running) -> None:
    """From the commit of one change to the first byte of the answer to a waiting peer."""
    connection = await asyncpg.connect(server.dsn, server_settings={"search_path": "restante"})
    added = await peers.add(
        connection,
        "http://waiting.bench",
        Changes(renews_token=True, tables=["bench_wakes"]),
        now=datetime.now(UTC),
    )
    number = await connection.fetchval(
        "insert into op_tables (name, schema_name, table_name, key_columns, state, changed_at)"
        " values ('bench_wakes', 'public', 'bench_wakes', '{id}', 'tracked', now()) returning id"
    )
    await connection.execute(
        f"create table ops_{number} partition of ops for values in ({number})"
        " partition by range (arrived_at)"
    )
    await connection.execute(
        f"create table ops_{number}_all partition of ops_{number}"
        " for values from ('2020-01-01 00:00:00+00') to ('2100-01-01 00:00:00+00')"
    )
    await connection.execute(
        "insert into op_hosts (host) values ('http://a.bench') on conflict do nothing"
    )
    reader = await http.Connection.open(server.port)
    latencies = [await _wake(reader, added.token or "", connection, number) for _ in range(WAKES)]
    reader.close()
    await connection.execute("delete from op_tables where id = $1", number)
    await connection.execute(f"drop table ops_{number}")
    await connection.execute("delete from op_peers where host = 'http://waiting.bench'")
    await connection.close()
    p50, p99 = statistics.median(latencies), statistics.quantiles(latencies, n=100)[98]
    detail = f"p50 {p50:.1f} ms, from the commit to the answer's first byte, {WAKES} wakes"
    show(Bound("Wake-up of a waiting peer, p99", "ms", p99, 100, detail))


async def _wake(
    reader: http.Connection,
    token: str,
    connection: "asyncpg.Connection[asyncpg.Record]",
    table: int,
) -> float:
    head = await connection.fetchrow(
        "select era, xid, ulid, n from ops order by era desc, xid desc, ulid desc, n desc limit 1"
    )
    at = positions.START if head is None else Position(*head.values())
    path = f"/internal/crud/sweep?wait=30&position={at}"
    request = http.request("GET", path, token)
    end = request.index(b"\r\n\r\n")
    reader.writer.write(request[:end] + f"\r\n{wire.OPLOG_VERSION}: 1".encode() + request[end:])
    await reader.writer.drain()
    await asyncio.sleep(0.05)  # it waits by then
    await connection.execute(
        """
        insert into ops (table_id, arrived_at, era, xid, ulid, n, origin, action, key_hash, key,
                         data)
        select $1, now(), op_current_era(), pg_current_xact_id()::text::bigint,
               op_ulid(op_tick(1), '0123456789abcdef'), 0,
               (select id from op_hosts where host = 'http://a.bench'), 'u', 1, '[1]', '{"id":1}'
        """,
        table,
    )
    committed_at = time.monotonic()
    status, length = await reader.head()
    latency = (time.monotonic() - committed_at) * 1000
    assert status == 200
    await reader.skip(length)
    return latency
