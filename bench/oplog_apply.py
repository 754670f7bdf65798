"""Pulling a log and applying it on a second node, compared with COPY of the same rows."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import asyncpg

from bench.report import Figure, show
from bench.server import Running
from restante.database import migrate
from restante.database.pool import Database
from restante.database.rules import BOTH_PHASES
from restante.oplog import peers, tables
from restante.oplog.applying.apply import Source, apply_page
from restante.oplog.peers import Changes, Peer
from restante.oplog.pulling.following import Follower
from restante.oplog.pulling.state import Pace, State
from restante.oplog.remote import Ask, Remote
from restante.oplog.rules import Channel
from restante.oplog.snapshots.taking import Taker
from restante.oplog.tracking import capture
from restante.wire.oplog import Op

ROWS = 50_000
ROUNDS = 3
NAMES = [f"bench_apply_{number}" for number in range(ROUNDS)]
READER = "http://reader.bench"
SECOND = "restante_bench_second"

TABLE = """create table public.{} (
    id uuid primary key, title text, body text, amount numeric, n integer, at timestamptz)"""
FILL = """insert into public.{}
    select gen_random_uuid(), md5(n::text), repeat(md5(n::text), 10), n / 100.0, n, now()
      from generate_series(1, {}) as n"""


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The server, and a second node that is only a database and this process."""

    server: Database
    second: Database
    second_dsn: str
    peer: Peer  # the server, as the second node sees it


async def measure(server: Running) -> None:
    """Each round has a table of its own."""
    async with _nodes(server) as nodes, Remote.opened(own_host=READER, clock=_now) as remote:
        copied, pulled, applied = list[float](), list[float](), list[float]()
        for name in NAMES:
            await _track(nodes, name)
        for name in NAMES:
            pulled.append(ROWS / await _pull(nodes, remote, name))
            copied.append(ROWS / await _copy(nodes, name))
            applied.append(ROWS / await _apply(nodes, remote, name))
        show(Figure("Pull and apply", "rows/s", pulled, copied, "COPY", aim=0.3))
        show(Figure("Apply alone", "rows/s", applied, copied, "COPY", aim=0.3))


@asynccontextmanager
async def _nodes(server: Running) -> AsyncIterator[_Nodes]:
    admin = await asyncpg.connect(server.dsn)
    await admin.execute(f"drop database if exists {SECOND}")
    await admin.execute(f"create database {SECOND}")
    second_dsn = server.dsn.replace("/restante?", f"/{SECOND}?")
    await migrate.apply(second_dsn, migrate.shipped(), phases=BOTH_PHASES)
    first, second = await _open(server.dsn), await _open(second_dsn)
    try:
        url = f"http://127.0.0.1:{server.port}"
        async with first.connection() as connection:
            reader = await peers.add(connection, READER, Changes(renews_token=True), now=_now())
        async with second.connection() as connection:
            await tables.identify(connection, READER)
            added = await peers.add(connection, url, Changes(token=reader.token), now=_now())
        yield _Nodes(first, second, second_dsn, added.peer)
    finally:
        async with first.connection() as connection:
            await peers.remove(connection, READER)
        for name in NAMES:
            await capture.untrack(first, name)
            await admin.execute(f"drop table public.{name}")
        await second.close()
        await first.close()
        await admin.execute(f"drop database {SECOND}")
        await admin.close()


async def _open(dsn: str) -> Database:
    return await Database.open(
        dsn, pool_size=4, acquire_timeout_seconds=5, statement_timeout_seconds=60
    )


async def _track(nodes: _Nodes, name: str) -> None:
    for db in (nodes.server, nodes.second):
        async with db.connection() as connection:
            await connection.execute(TABLE.format(name))
        await capture.track(db, capture.Wanted(f"public.{name}"), host=None, now=_now())


async def _count(db: Database, name: str) -> int:
    async with db.connection() as connection:
        return await connection.fetchval(f"select count(*) from public.{name}")


async def _pull(nodes: _Nodes, remote: Remote, name: str) -> float:
    """From the first request to the last commit."""
    taker = Taker(nodes.second, remote, READER, _now)
    follower = Follower(nodes.second, remote, taker, Pace(wait_seconds=0), _now)
    state = State()
    await follower.advance(await _peer(nodes), state)  # at first the tables are joined
    async with nodes.server.connection() as connection:
        await connection.execute(FILL.format(name, ROWS))
    started = time.perf_counter()
    while await _count(nodes.second, name) < ROWS:
        await follower.advance(await _peer(nodes), state)
    return time.perf_counter() - started


async def _peer(nodes: _Nodes) -> Peer:
    async with nodes.second.connection() as connection:
        found = await peers.find(connection, nodes.peer.host)
    assert found is not None
    return found


async def _copy(nodes: _Nodes, name: str) -> float:
    """The same rows, read before and written by one COPY."""
    connection = await asyncpg.connect(nodes.second_dsn)
    try:
        rows = [tuple(row) for row in await connection.fetch(f"select * from public.{name}")]
        await connection.execute(TABLE.format("copied"))
        started = time.perf_counter()
        await connection.copy_records_to_table("copied", schema_name="public", records=rows)
        return time.perf_counter() - started
    finally:
        await connection.execute("drop table public.copied")
        await connection.close()


async def _apply(nodes: _Nodes, remote: Remote, name: str) -> float:
    """The same ops again, into an emptied table and log, without HTTP."""
    pages = await _pages(nodes, remote, name)
    async with nodes.second.transaction() as tx:
        table = await tables.find(tx, name)
        assert table is not None
        await tx.execute("select set_config('restante.applying', $1, true)", str(table.id))
        await tx.execute(f"delete from public.{name}")
        await tx.execute(f"truncate restante.{table.log}")
    async with nodes.second.connection() as connection:
        await connection.execute(f"vacuum full public.{name}")
    peer = await _peer(nodes)
    source = Source(peer, Channel.PULL, None)
    started = time.perf_counter()
    for ops in pages:
        await apply_page(
            nodes.second,
            ops,
            source,
            expected_cursor=peer.cursor,
            end_cursor=peer.cursor,
            now=_now(),
        )
    seconds = time.perf_counter() - started
    assert await _count(nodes.second, name) == ROWS
    return seconds


async def _pages(nodes: _Nodes, remote: Remote, name: str) -> list[list[Op]]:
    """Without positions, so that the cursor stays where it is."""
    pages, ask = list[list[Op]](), Ask()
    while True:
        page = await remote.page(nodes.peer, ask)
        ops = [op for op in page.ops if op.table == name]
        for op in ops:
            op.position = ""
        pages.append(ops)
        if not page.is_limited:
            return pages
        ask = Ask(position=page.next_position)
