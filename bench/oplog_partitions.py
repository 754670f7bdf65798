"""A log of 1,000 partitions against one of 10, with as many ops in each partition."""

import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg

from bench.report import Bound, show
from bench.server import Running
from restante.database import migrate, partitions
from restante.database.pool import Database
from restante.database.rules import BOTH_PHASES
from restante.database.spans import Span, floor
from restante.oplog import peers, status, tables
from restante.oplog.positions import Position
from restante.oplog.serving import log, serve
from restante.oplog.serving.readers import OpenEnds
from restante.oplog.serving.serve import Ask
from restante.oplog.tables import OPS
from restante.oplog.tracking import capture
from restante.oplog.tracking.capture import Wanted
from restante.oplog.trimming import picture, plan
from restante.oplog.trimming.limits import Limits, Policy
from restante.oplog.trimming.log_subject import OpLog
from restante.retention.subjects import Subjects
from restante.retention.sweep import Sweep

FEW, MANY = 10, 1000
OPS_PER_PARTITION = 20
ROUNDS = 30
DAY = timedelta(days=1)
LIMITS = Limits(Policy(retention=4000 * DAY), dormant_after=90 * DAY)
_READER = peers.Reader(None, is_authenticated=False)

_OPS = """
insert into ops (table_id, arrived_at, era, xid, ulid, n, origin, action, key_hash, old_hash, key,
                 data)
select $1::int, at, (extract(epoch from $2::timestamptz) * 1000000)::bigint, number,
       op_ulid((extract(epoch from at) * 1000)::bigint << 15, lpad(to_hex(number), 16, '0')), 0, 1,
       'u', hashtextextended(number::text, 0), number, '["' || number || '"]', '{"id": "x"}'
  from generate_series(1, $3::bigint) as number,
       lateral (select $2::timestamptz + number * interval '1 minute') as moment (at)
"""


async def measure(server: Running) -> None:
    """The two take turns, so that whatever else the machine does meets both."""
    async with _node(server, FEW) as few, _node(server, MANY) as many:
        for name, kind, aim in KINDS:
            times: dict[int, list[float]] = {FEW: [], MANY: []}
            for _ in range(ROUNDS):
                for node in (few, many):
                    started = time.perf_counter()
                    found = await kind(node)
                    spent = (time.perf_counter() - started) * 1000
                    times[node.partitions].append(spent if found is None else found)
            middle = {count: statistics.median(some) for count, some in times.items()}
            detail = f"{middle[MANY]:.2f} ms of {MANY:,}, {middle[FEW]:.2f} ms of {FEW}"
            ratio = middle[MANY] / middle[FEW]
            show(Bound(f"{name}, {MANY:,} partitions against {FEW}", "x", ratio, aim, detail))


@dataclass(frozen=True, slots=True)
class _Node:
    """A tracked table whose log has so many partitions."""

    partitions: int
    db: Database
    client: Any
    end: Position

    async def captured_insert(self) -> None:
        await self.client.execute("insert into public.pages (text) values ('x')")

    async def planned_insert(self) -> float:
        return await self._planning(
            "insert into restante.ops select * from restante.ops where false"
        )

    async def planned_page(self) -> float:
        """By the planner's own count; a server plans it once for each connection."""
        async with self.db.connection() as connection:
            found = await log.logged_tables(connection)
            read = log.Log(connection, found, log.Horizon(2**62, 0))
            statement = read._visible(log.queries.window)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
            values = "(0, 0, '00000000-0000-0000-0000-000000000000', 0)"
            statement = statement.replace("($1, $2, $3, $4)", values)
            statement = statement.replace("($5, $6)", "(9000000000000000000, 0)")
            statement = statement.replace("$7", "100").replace("$8", "100000")
            return await self._planning(statement)

    async def _planning(self, statement: str) -> float:
        rows = await self.client.fetch(f"explain (summary) {statement}")
        line = next(row[0] for row in rows if row[0].startswith("Planning Time"))
        return float(line.split()[2])

    async def empty_page(self) -> None:
        ask = Ask(position=str(self.end), is_ours=True)
        await serve.read(self.db, _READER, ask, OpenEnds(), now=datetime.now(UTC))

    async def probe(self) -> float:
        async with self.db.connection() as connection:
            found = await partitions.partitions_of(connection, [OPS])
            measured = await partitions.with_sizes(connection, found)
            started = time.perf_counter()
            await picture.look(connection, measured, LIMITS, now=datetime.now(UTC))
            return (time.perf_counter() - started) * 1000

    async def plan(self) -> None:
        async with self.db.connection() as connection:
            await plan.look(connection, LIMITS, now=datetime.now(UTC))

    async def idle_pass(self) -> None:
        report = await Sweep(self.db, Subjects(OpLog(LIMITS)), budget_seconds=60).run(
            now=datetime.now(UTC)
        )
        assert not report.done, report

    async def status(self) -> None:
        await status.look(self.db, now=datetime.now(UTC))


KINDS: list[tuple[str, Callable[[_Node], Awaitable[float | None]], float]] = [
    ("A captured insert", _Node.captured_insert, 1.5),
    ("Planning an insert into the log", _Node.planned_insert, 1.5),
    ("Planning a page of the log", _Node.planned_page, 1.5),
    ("An empty page of the log", _Node.empty_page, 1.5),
    ("The probe for what is due and dormant", _Node.probe, 100),
    ("The plan for the log", _Node.plan, 100),
    ("A sweep of the log with nothing due", _Node.idle_pass, 100),
    ("The status", _Node.status, 100),
]


@asynccontextmanager
async def _node(server: Running, count: int) -> AsyncIterator[_Node]:
    name = f"restante_bench_partitions_{count}"
    admin = await asyncpg.connect(server.dsn)
    await admin.execute(f"drop database if exists {name} with (force)")
    await admin.execute(f"create database {name}")
    dsn = server.dsn.replace("/restante?", f"/{name}?")
    await migrate.apply(dsn, migrate.shipped(), phases=BOTH_PHASES)
    db = await Database.open(
        dsn, pool_size=2, acquire_timeout_seconds=10, statement_timeout_seconds=600
    )
    client = await asyncpg.connect(dsn, server_settings={"search_path": "restante"})
    try:
        yield _Node(count, db, client, await _fill(db, client, count))
    finally:
        await client.close()
        await db.close()
        await admin.execute(f"drop database {name} with (force)")
        await admin.close()


async def _fill(db: Database, client: Any, count: int) -> Position:
    """One partition a day, up to some weeks ago; returns the last position."""
    await client.execute(
        "create table public.pages (id uuid primary key default gen_random_uuid(), text text)"
    )
    async with db.connection() as connection:
        await tables.identify(connection, "http://a.bench")
    started = await capture.track(
        db, Wanted("public.pages"), host="http://a.bench", now=datetime.now(UTC)
    )
    first = floor(datetime.now(UTC), DAY) - (count + 60) * DAY
    for number in range(count):
        span = Span(first + number * DAY, first + (number + 1) * DAY)
        async with db.transaction() as tx:
            await partitions.create(tx, OPS, span, parent=started.table.log)
        await client.execute(_OPS, started.table.id, span.start, OPS_PER_PARTITION)
    await client.execute("vacuum analyze ops")
    row = await client.fetchrow(
        "select era, xid, ulid, n from ops order by era desc, xid desc, ulid desc, n desc limit 1"
    )
    return Position(*row)
