"""
Trimming the op log: dropping its partitions compared with DELETE in batches, under captured writes.

Both ways remove the same ops and keep the recent ones.  The DELETE has a log without partitions, as
programs have it that delete; the sweep has one partition a day.
"""

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg

from bench.report import Bound, Figure, show
from bench.server import Running
from restante.database import migrate, partitions
from restante.database.pool import Database
from restante.database.rules import BOTH_PHASES
from restante.database.spans import Span, floor
from restante.oplog import tables
from restante.oplog.tables import OPS
from restante.oplog.tracking import capture
from restante.oplog.tracking.capture import Wanted
from restante.oplog.trimming import picture, plan
from restante.oplog.trimming.limits import Limits, Policy
from restante.oplog.trimming.log_subject import OpLog
from restante.retention.subjects import Subjects
from restante.retention.sweep import Sweep

# `BENCH_TRIMMED_OPS` makes a quick run with fewer.
DUE_OPS = int(os.environ.get("BENCH_TRIMMED_OPS") or 3_000_000)
RECENT_OPS = DUE_OPS // 20
SHORT_OPS = DUE_OPS // 30
DAYS = 10
BATCH = 10_000
IDLE_SECONDS = 5.0
CLIENTS = 2
ROUNDS = 8
ROUND_SECONDS = 5.0
PROBES = 50
MIB = 1024 * 1024
_PROBE = "The probe for what is due and dormant"
_PLAN = "The plan for the log"
DAY = timedelta(days=1)
LIMITS = Limits(Policy(retention=30 * DAY), dormant_after=90 * DAY)

_COLUMNS = "table_id, arrived_at, era, xid, ulid, n, origin, action, key_hash, old_hash, key, data"
# As the triggers write them: of single-row updates, with records of about 350 bytes.
_OPS = """
select $1::int, at, (extract(epoch from at) * 1000000)::bigint, number,
       op_ulid((extract(epoch from at) * 1000)::bigint << 15, lpad(to_hex(number), 16, '0')), 1, 1,
       'u'::op_action, hashtextextended(number::text, 0), number, '["' || md5(number::text) || '"]',
       json_build_object('id', md5(number::text), 'number', number,
                         'body', repeat(md5((number * 7)::text), 8), 'at', at)
  from generate_series(1, $3::bigint) as number,
       lateral (select $2::timestamptz + (number - 1) * interval '23 hours' / $3) as moment (at)
"""


@dataclass(slots=True)
class Cost:
    """What one way to remove the ops costs."""

    seconds: float = 0.0
    wal_bytes: float = 0.0  # what the clients write included
    wal_of_clients: float = 0.0  # about
    due_bytes: int = 0
    freed_bytes: int = 0
    idle: list[float] = field(default_factory=list[float])  # latencies of the writers, in ms
    during: list[float] = field(default_factory=list[float])

    def line(self, name: str) -> str:
        return (
            f"    {name}: {self.seconds:.2f} s, {self.wal_bytes / MIB:.1f} MiB of WAL, "
            f"{self.freed_bytes / MIB:.0f} of {self.due_bytes / MIB:.0f} MiB back at once; "
            f"writers {_spread(self.idle)} before, {_spread(self.during)} during"
        )


async def measure(server: Running) -> None:
    """One log after the other, each in a database of its own."""
    async with _node(server, "delete") as node:
        await node.fill_flat()
        deleted = await node.cost(node.delete)
    async with _node(server, "probe") as node:
        await node.fill_days(SHORT_OPS)
        short = await node.probe_milliseconds()
    async with _node(server, "drop") as node:
        await node.fill_days(DUE_OPS)
        long = await node.probe_milliseconds()
        dropped = await node.cost(node.sweep)
        idle = await node.idle_pass_milliseconds()
        await _throughput(node)
    _show(deleted, dropped)
    _show_probes(short, long, idle)


def _show(deleted: Cost, dropped: Cost) -> None:
    print(f"Removing {DUE_OPS:,} ops of {DUE_OPS + RECENT_OPS:,}")
    print(dropped.line("partitions dropped"))
    print(deleted.line(f"DELETE in batches of {BATCH:,}, and VACUUM"))
    time_share = 100 * dropped.seconds / deleted.seconds
    show(Bound("Time of dropping, relative to DELETE and VACUUM", "%", time_share, 5))
    # To its disadvantage: the clients' share counts as that of dropping.
    wal_share = 100 * dropped.wal_bytes / (deleted.wal_bytes - deleted.wal_of_clients)
    detail = "the clients' WAL is included in that of dropping, and left out of the other"
    show(Bound("WAL of dropping, relative to DELETE and VACUUM", "%", wal_share, 1, detail))
    kept = 100 - 100 * dropped.freed_bytes / dropped.due_bytes
    of_delete = 100 * deleted.freed_bytes / deleted.due_bytes
    detail = f"DELETE and VACUUM gave back {of_delete:.0f} % of what the due ops took"
    show(Bound("Bytes not back at once after dropping", "%", kept, 5, detail))
    times = _p99(dropped.during) / _p99(dropped.idle)
    detail = f"beside DELETE and VACUUM: {_p99(deleted.during) / _p99(deleted.idle):.1f} x"
    show(Bound("Writers' p99 beside dropping, relative to idle", "x", times, 2, detail))


def _show_probes(short: dict[str, float], long: dict[str, float], idle: float) -> None:
    of_ops = f"of {DUE_OPS:,} ops in {DAYS + 1} partitions"
    for name, aim in ((_PROBE, 5), (_PLAN, 100)):
        detail = f"{of_ops}; {short[name]:.1f} ms of {SHORT_OPS:,}"
        show(Bound(f"{name}, median", "ms", long[name], aim, detail))
    show(Bound("A sweep of the log with nothing due, median", "ms", idle, 100))


async def _throughput(node: "_Node") -> None:
    """Captured writes while a sweep drops ops every second, and without."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for number in range(ROUNDS):
        for has_retention in (True, False) if number % 2 else (False, True):
            await node.fill_days(SHORT_OPS, with_recent=False)
            sweeping = asyncio.create_task(node.keep_sweeping()) if has_retention else None
            async with node.writing() as writes:
                await asyncio.sleep(ROUND_SECONDS)
                rates[has_retention].append(len(writes) / ROUND_SECONDS)
            if sweeping:
                sweeping.cancel()
                await asyncio.wait([sweeping])
            await node.sweep()
    show(
        Figure(
            f"Captured commits with retention running, {CLIENTS} clients",
            "commits/s",
            rates[True],
            rates[False],
            "without",
            0.95,
        )
    )


@asynccontextmanager
async def _node(server: Running, name: str) -> AsyncIterator["_Node"]:
    """A database of its own with a tracked table, on which clients write."""
    database = f"restante_bench_{name}"
    admin = await asyncpg.connect(server.dsn)
    await admin.execute(f"drop database if exists {database} with (force)")
    await admin.execute(f"create database {database}")
    dsn = server.dsn.replace("/restante?", f"/{database}?")
    await migrate.apply(dsn, migrate.shipped(), phases=BOTH_PHASES)
    db = await Database.open(
        dsn, pool_size=4, acquire_timeout_seconds=10, statement_timeout_seconds=600
    )
    node = _Node(dsn, db)
    try:
        await node.begin()
        yield node
    finally:
        await node.end()
        await db.close()
        await admin.execute(f"drop database {database} with (force)")
        await admin.execute("checkpoint")
        await admin.close()


@dataclass(frozen=True, slots=True)
class _Write:
    """One commit of a client."""

    started: float
    ended: float

    @property
    def milliseconds(self) -> float:
        return (self.ended - self.started) * 1000


class _Node:
    """A tracked table with old ops."""

    def __init__(self, dsn: str, db: Database) -> None:
        self._dsn = dsn
        self._db = db
        self._sweep = Sweep(db, Subjects(OpLog(LIMITS)), budget_seconds=600)
        self._clients: list[asyncpg.Connection[Any]] = []

    async def begin(self) -> None:
        connect = asyncpg.connect
        self._admin = await connect(self._dsn, server_settings={"search_path": "restante"})
        self._data = Path(await self._admin.fetchval("show data_directory")) / "base"
        await self._admin.execute(
            "create table public.pages (id text primary key, number integer, body text)"
        )
        await self._admin.execute(
            "insert into public.pages select n, n, repeat(md5(n::text), 8)"
            " from generate_series(1, 1000) as n"
        )
        async with self._db.connection() as connection:
            await tables.identify(connection, "http://a.bench")
        started = await capture.track(
            self._db, Wanted("public.pages"), host="http://a.bench", now=datetime.now(UTC)
        )
        self._table_id = started.table.id
        self._clients = [await connect(self._dsn) for _ in range(CLIENTS)]

    async def end(self) -> None:
        for one in (*self._clients, self._admin):
            await one.close()

    async def fill_days(self, ops: int, *, with_recent: bool = True) -> None:
        """Old ops in one partition a day, and recent ones in that of today."""
        first = floor(datetime.now(UTC), DAY) - (40 + DAYS) * DAY
        for number in range(DAYS):
            start = first + number * DAY
            async with self._db.transaction() as tx:
                span = Span(start, start + DAY)
                await partitions.create(tx, OPS, span, parent=f"ops_{self._table_id}")
            await self._insert("ops", start, ops // DAYS)
        if with_recent:
            await self._insert("ops", datetime.now(UTC) - timedelta(hours=23), RECENT_OPS)
        await self._admin.execute("vacuum analyze ops")

    async def fill_flat(self) -> None:
        """The same ops in one table with the same indexes."""
        await self._admin.execute("create table flat (like ops including all)")
        first = floor(datetime.now(UTC), DAY) - (40 + DAYS) * DAY
        for number in range(DAYS):
            await self._insert("flat", first + number * DAY, DUE_OPS // DAYS)
        self._due_before = first + DAYS * DAY
        await self._insert("flat", datetime.now(UTC) - timedelta(hours=23), RECENT_OPS)
        await self._admin.execute("vacuum analyze flat")

    async def _insert(self, table: str, start: datetime, ops: int) -> None:
        statement = f"insert into {table} ({_COLUMNS}) {_OPS}"
        await self._admin.execute(statement, self._table_id, start, ops)

    async def cost(self, act: Callable[[], Awaitable[None]]) -> Cost:
        """Remove the ops while clients write."""
        found = Cost(due_bytes=await self._due_bytes())
        await self._admin.execute("checkpoint")
        before = _size(self._data)
        async with self.writing() as writes:
            began, wal = time.monotonic(), await self._wal()
            await asyncio.sleep(IDLE_SECONDS)
            started, wal_before = time.monotonic(), await self._wal()
            await act()
            ended, wal_after = time.monotonic(), await self._wal()
        found.freed_bytes = before - _size(self._data)
        found.seconds = ended - started
        idle = [one for one in writes if began <= one.started and one.ended <= started]
        during = [one for one in writes if one.ended > started and one.started < ended]
        found.wal_bytes = wal_after - wal_before
        found.wal_of_clients = (wal_before - wal) / max(len(idle), 1) * len(during)
        found.idle = [one.milliseconds for one in idle]
        found.during = [one.milliseconds for one in during]
        return found

    async def _due_bytes(self) -> int:
        """What the ops that are due take on disk, their share of the indexes included."""
        flat = await self._admin.fetchval("select to_regclass('flat') is not null")
        if flat:
            size = await self._admin.fetchval("select pg_total_relation_size('flat')")
            return size * DUE_OPS // (DUE_OPS + RECENT_OPS)
        async with self._db.connection() as connection:
            found = await plan.look(connection, LIMITS, now=datetime.now(UTC))
        return found.bytes_to_come_back

    async def _wal(self) -> int:
        query = "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')"
        return int(await self._admin.fetchval(query))

    async def delete(self) -> None:
        """As programs do it that have no partitions."""
        statement = (
            "with due as (select ctid from flat where arrived_at < $1"
            "              order by era, xid, ulid, n limit $2)"
            " delete from flat using due where flat.ctid = due.ctid"
        )
        while await self._admin.execute(statement, self._due_before, BATCH) != "DELETE 0":
            pass
        await self._admin.execute("vacuum flat")

    async def sweep(self) -> None:
        """One sweep, as a server makes it."""
        report = await self._sweep.run(now=datetime.now(UTC))
        assert not report.postponed, report.postponed

    async def keep_sweeping(self) -> None:
        """Far more often than a server does."""
        while True:
            await self.sweep()
            await asyncio.sleep(1)

    async def probe_milliseconds(self) -> dict[str, float]:
        """Look at what is due and dormant."""
        times: dict[str, list[float]] = {_PROBE: [], _PLAN: []}
        async with self._db.connection() as connection:
            for _ in range(PROBES):
                found = await partitions.partitions_of(connection, [OPS])
                measured = await partitions.with_sizes(connection, found)
                now = datetime.now(UTC)
                started = time.perf_counter()
                await picture.look(connection, measured, LIMITS, now=now)
                times[_PROBE].append((time.perf_counter() - started) * 1000)
                started = time.perf_counter()
                await plan.look(connection, LIMITS, now=now)
                times[_PLAN].append((time.perf_counter() - started) * 1000)
        return {name: statistics.median(some) for name, some in times.items()}

    async def idle_pass_milliseconds(self) -> float:
        """A pass of the loop when nothing is due."""
        times: list[float] = []
        for _ in range(PROBES):
            started = time.perf_counter()
            await self.sweep()
            times.append((time.perf_counter() - started) * 1000)
        return statistics.median(times)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[list[_Write]]:
        """Every client updates one record after the other, each in a transaction of its own."""
        writes: list[_Write] = []
        ended = asyncio.Event()

        async def write(number: int) -> None:
            client, key = self._clients[number], number
            while not ended.is_set():
                key = (key + CLIENTS) % 1000
                started = time.monotonic()
                await client.execute(
                    "update public.pages set number = number + 1 where id = $1", str(key + 1)
                )
                writes.append(_Write(started, time.monotonic()))

        tasks = [asyncio.create_task(write(number)) for number in range(CLIENTS)]
        try:
            yield writes
        finally:
            ended.set()
            await asyncio.gather(*tasks)


def _size(directory: Path) -> int:
    """Disk usage of the tables, as the filesystem has it."""
    sizes = 0
    for path in directory.rglob("*"):
        try:
            sizes += path.stat().st_blocks * 512
        except FileNotFoundError:  # Postgres has just removed it
            continue
    return sizes


def _spread(latencies: list[float]) -> str:
    return f"p50 {statistics.median(latencies):.1f}, p99 {_p99(latencies):.1f} ms"


def _p99(latencies: list[float]) -> float:
    return statistics.quantiles(latencies, n=100, method="inclusive")[98]
