"""Capture of the op log: writes to a tracked table compared with the same writes to another one."""

import asyncio
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import asyncpg

from bench.report import Figure, show
from bench.server import Running
from restante.database.pool import Database
from restante.oplog.tracking import capture
from restante.oplog.tracking.capture import Wanted

ROWS = 100_000  # of about 450 bytes
ROUNDS = 5
CLIENTS = 4
SECONDS = 3.0

_TABLE = (
    "(id text primary key, number integer, body text, at timestamptz not null default now(),"
    " about jsonb)"
)
_FILL = (
    "insert into {} select gen_random_uuid()::text, n, repeat(md5(n::text), 10), now(),"
    " jsonb_build_object('digest', md5(n::text)) from generate_series(1, $1) as n"
)


async def measure(server: Running) -> None:
    """One statement on all rows, and single-row commits of several clients."""
    connection = await asyncpg.connect(server.dsn, server_settings={"search_path": "public"})
    db = await Database.open(
        server.dsn, pool_size=2, acquire_timeout_seconds=5, statement_timeout_seconds=120
    )
    try:
        for name in ("bench_plain", "bench_tracked"):
            await connection.execute(f"create table {name} {_TABLE}")
        await capture.track(db, Wanted("bench_tracked"), host=None, now=datetime.now(UTC))
        await _statements(connection, db)
        await _commits(server, connection, db)
        await capture.untrack(db, "bench_tracked")
    finally:
        await connection.execute("drop table if exists bench_plain, bench_tracked")
        await connection.close()
        await db.close()


async def _refilled(connection: asyncpg.Connection, db: Database, rows: int) -> None:
    """Both tables with the same number of rows, and an empty log."""
    now = datetime.now(UTC)
    await capture.pause(db, "bench_tracked", now=now)
    for name in ("bench_plain", "bench_tracked"):
        await connection.execute(f"truncate {name}")
        await connection.execute(_FILL.format(name), rows)
    await capture.resume(db, "bench_tracked", host=None, now=now)
    for name in ("bench_plain", "bench_tracked"):
        await connection.execute(f"vacuum analyze {name}")
    await connection.execute("checkpoint")


async def _statements(connection: asyncpg.Connection, db: Database) -> None:
    kinds = {
        "update": "update {0} set number = number + 1",
        "insert": "insert into {0} select id || 'x', number, body, at, about from {0}",
    }
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for kind, statement in kinds.items():
            await _refilled(connection, db, ROWS)
            for name in ("bench_plain", "bench_tracked"):
                started = time.perf_counter()
                await connection.execute(statement.format(name))
                rate = ROWS / (time.perf_counter() - started)
                rates.setdefault((kind, name), []).append(rate)
    for kind in kinds:
        show(
            Figure(
                f"Capture of one {kind} of {ROWS:,} rows",
                "rows/s",
                rates[kind, "bench_tracked"],
                rates[kind, "bench_plain"],
                "without capture",
                0.4,
            )
        )


async def _commits(server: Running, connection: asyncpg.Connection, db: Database) -> None:
    await _refilled(connection, db, 1000)
    ids = [row["id"] for row in await connection.fetch("select id from bench_plain")]
    await connection.execute("delete from bench_tracked")
    await connection.execute("insert into bench_tracked select * from bench_plain")
    clients = [await asyncpg.connect(server.dsn) for _ in range(CLIENTS)]
    rates: dict[str, list[float]] = {"bench_plain": [], "bench_tracked": []}
    busy: dict[str, list[float]] = {"bench_plain": [], "bench_tracked": []}
    for _ in range(ROUNDS):
        for name, found in rates.items():
            before = _processor_seconds(clients)
            found.append(await _commit_rate(clients, name, ids))
            spent = _processor_seconds(clients) - before
            busy[name].append(spent / (found[-1] * SECONDS) * 1_000_000)
    for client in clients:
        await client.close()
    show(
        Figure(
            f"Capture of single-row commits, {CLIENTS} clients",
            "commits/s",
            rates["bench_tracked"],
            rates["bench_plain"],
            "without capture",
            0.7,
        )
    )
    ours, floor = (statistics.median(busy[name]) for name in ("bench_tracked", "bench_plain"))
    waited = CLIENTS / statistics.median(rates["bench_plain"]) * 1_000_000
    print(
        f"    processor time of the backends per commit: ours {ours:.0f} µs, without capture "
        f"{floor:.0f} µs; a commit without capture takes {waited:,.0f} µs in all",
        flush=True,
    )


def _processor_seconds(clients: list[asyncpg.Connection]) -> float:
    """What the backends have used so far, by Linux's count in nanoseconds."""
    paths = (Path(f"/proc/{client.get_server_pid()}/schedstat") for client in clients)
    return sum(int(path.read_text().split()[0]) for path in paths) / 1e9


async def _commit_rate(clients: list[asyncpg.Connection], table: str, ids: list[str]) -> float:
    """Commits per second of all clients; each has rows of its own."""
    end = time.perf_counter() + SECONDS

    async def write(number: int) -> int:
        mine, done = ids[number::CLIENTS], 0
        statement = f"update public.{table} set number = number + 1 where id = $1"
        while time.perf_counter() < end:
            await clients[number].execute(statement, mine[done % len(mine)])
            done += 1
        return done

    return sum(await asyncio.gather(*map(write, range(CLIENTS)))) / SECONDS
