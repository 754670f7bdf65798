"""`oplog verify` of two equal tables, compared with one scan that hashes each of them."""

import asyncio
import time
from typing import Any

import asyncpg

from bench.report import Figure, show
from bench.server import Running
from restante.database.pool import Database
from restante.oplog.verifying.comparison import Here, Limits, Progress
from restante.oplog.verifying.verify import verify

ROWS = 200_000
ROUNDS = 5
SCAN = (
    "select bit_xor(hashint8extended(hashtextextended(t.body, 1) # hashtextextended(t.id::text, 2),"
    " 0)) from bench_{0} as t"
)


async def measure(server: Running) -> None:
    """Both sides are read at the same time, each by its own connection."""
    connection = await asyncpg.connect(server.dsn, server_settings={"search_path": "public"})
    db = await Database.open(
        server.dsn, pool_size=4, acquire_timeout_seconds=5, statement_timeout_seconds=60
    )
    try:
        for name in ("here", "there"):
            await _fill(connection, name)
        ours, scans = list[float](), list[float]()
        for _ in range(ROUNDS):
            ours.append(ROWS / await _verify(db))
            scans.append(ROWS / await _scan(server))
        show(Figure("Verify, records of each node", "rows/s", ours, scans, "one scan", aim=0.3))
    finally:
        for name in ("here", "there"):
            await connection.execute(f"drop table if exists bench_{name}")
        await connection.execute("delete from restante.op_tables where name like 'bench_%'")
        await db.close()
        await connection.close()


async def _fill(connection: "asyncpg.Connection[Any]", name: str) -> None:
    await connection.execute(f"create table bench_{name} (id bigint primary key, body text)")
    await connection.execute(
        f"insert into bench_{name} select n, repeat(md5(n::text), 15) "
        f"from generate_series(1, {ROWS}) as n"
    )
    await connection.execute(f"vacuum analyze bench_{name}")
    await connection.execute(
        "insert into restante.op_tables (name, schema_name, table_name, key_columns, state,"
        " changed_at) values ($1, 'public', $1, '{id}', 'tracked', now())",
        f"bench_{name}",
    )


class _Renamed(Here):
    """The second table, under the name of the first: as if it were on another node."""

    async def table(self, name: str) -> Any:
        return await super().table(name.replace("here", "there"))


async def _verify(db: Database) -> float:
    started = time.perf_counter()
    report = await verify(
        Here(db, 0, frozenset({"bench_here"})),
        _Renamed(db, 0, frozenset({"bench_here", "bench_there"})),
        "",
        only=["bench_here"],
        limits=Limits(),
        progress=Progress(),
    )
    assert report.is_equal, report
    assert report.tables[0].rows_there == ROWS
    return time.perf_counter() - started


async def _scan(server: Running) -> float:
    connections = [
        await asyncpg.connect(server.dsn, server_settings={"search_path": "public"})
        for _ in range(2)
    ]
    started = time.perf_counter()
    await asyncio.gather(
        *(
            connection.fetchval(SCAN.format(name))
            for connection, name in zip(connections, ("here", "there"), strict=True)
        )
    )
    seconds = time.perf_counter() - started
    for connection in connections:
        await connection.close()
    return seconds
