"""Indexes of the op log that are missing are built beside readers and writers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from oplog.captured import track
from waiting import until

from restante.database import locks, partitions
from restante.database.pool import Database
from restante.database.spans import Span
from restante.errors import BadRequest, DiskLow
from restante.oplog.indexing import catalogue, ensure, plan
from restante.oplog.indexing.plan import OPTIONAL, REQUIRED, Action, Step, Wanted
from restante.oplog.indexing.run import Report
from restante.oplog.tables import LOG_WIDTH, OPS

pytestmark = pytest.mark.anyio

PLENTY = 2**50
OLD = datetime(2020, 1, 1, tzinfo=UTC)


@dataclass
class Watched:
    """What a run tells."""

    steps: list[Step] = field(default_factory=list[Step])
    waited_for: list[str] = field(default_factory=list[str])
    outcomes: list[str] = field(default_factory=list[str])
    waiting: asyncio.Event = field(default_factory=asyncio.Event)

    def began(self, step: Step, number: int, count: int) -> None:
        self.steps.append(step)

    def progress(self, part: float) -> None:
        assert 0 <= part <= 1

    def waits(self, who: str) -> None:
        self.waited_for.append(who)
        self.waiting.set()

    def ended(self, outcome: str) -> None:
        self.outcomes.append(outcome)


@dataclass
class Log:
    """The log of one table, and the application's connection."""

    db: Database
    app: Any
    name: str
    partition: str  # the one that is written to

    async def ensure(
        self,
        *add: plan.Optional,
        logs: tuple[str, ...] | None = None,
        free: int | None = PLENTY,
        force: bool = False,
        stop: asyncio.Event | None = None,
        watcher: Watched | None = None,
    ) -> Report:
        return await ensure.ensure(
            self.db,
            Wanted(add, logs),
            free_bytes=lambda: free,
            force=force,
            stop=stop or asyncio.Event(),
            watcher=watcher or Watched(),
        )

    async def drop(self, logs: tuple[str, ...] | None = None) -> Report:
        stop, watcher = asyncio.Event(), Watched()
        return await ensure.drop(self.db, "arrival", logs, stop=stop, watcher=watcher)

    async def indexes(self, table: str) -> dict[str, bool]:
        """The definitions of a table's indexes that belong to its parent's, and whether valid."""
        rows = await self.app.fetch(
            "select substring(pg_get_indexdef(indexrelid) from 'USING (.*)'), indisvalid"
            "  from pg_index left join pg_inherits on inhrelid = indexrelid"
            " where indrelid = to_regclass($1) and (inhparent is not null or $1 = 'restante.ops')",
            f"restante.{table}",
        )
        return dict(map(tuple, rows))

    async def invalid(self) -> list[str]:
        """Every INVALID index that holds rows."""
        return [
            row[0]
            for row in await self.app.fetch(
                "select relname::text from pg_index join pg_class on oid = indexrelid"
                " where not indisvalid and relkind = 'i'"
            )
        ]

    async def lose(self, index: str = "ops_by_ulid") -> None:
        """Somebody drops an index of all logs."""
        await self.app.execute(f"drop index restante.{index}")

    async def write(self, key: str) -> None:
        await self.app.execute("insert into public.pages values ($1)", key)

    @asynccontextmanager
    async def old_transaction(self, other: Any) -> AsyncIterator[None]:
        """A build waits for it; nobody else does."""
        await other.execute("begin isolation level repeatable read")
        await other.execute("select count(*) from public.pages")
        try:
            yield
        finally:
            await other.execute("rollback")


@pytest.fixture
async def log(db: Database, connections: Any) -> Log:
    app = await connections()
    await app.execute("create table public.pages (id text primary key)")
    await track(db)
    name = await app.fetchval("select 'ops_' || id from op_tables")
    made = Log(db, app, name, "")
    await made.write("first")
    made.partition = await app.fetchval(f"select tableoid::regclass::text from {name}")
    return made


def actions(report: Report) -> set[str]:
    return {step.action for step in report.done}


async def test_the_required_indexes_are_those_of_the_schema(log: Log):
    """The command would otherwise not build a new one, or build one that is not needed any more."""
    tree = await catalogue.read(log.app)

    found = {index.name: index.definition for index in tree.indexes_of("ops")}

    assert found == REQUIRED


async def test_with_nothing_missing_nothing_is_done(log: Log):
    report = await log.ensure()

    assert (report.status, report.done, report.left) == ("complete", [], [])


async def test_a_dropped_index_is_built_everywhere_and_valid(log: Log):
    before = await log.indexes(log.partition)
    await log.lose()

    report = await log.ensure()

    assert report.status == "complete"
    assert await log.indexes(log.partition) == before
    assert await log.indexes(log.name) == await log.indexes("ops") == before
    assert all(before.values())
    assert (await log.ensure()).done == []


async def test_a_partition_that_lacks_an_index_of_its_parent_gets_it(log: Log):
    """The parent has it without its partitions: then nothing is declared, only built."""
    await log.lose()
    await log.app.execute("create index ops_by_ulid on only ops (ulid)")

    report = await log.ensure()

    assert (await log.indexes("ops"))["btree (ulid)"]
    assert {step.table for step in report.done if step.action is Action.DECLARE} == {log.name}


async def test_an_index_that_somebody_has_built_is_attached(log: Log):
    await log.lose()
    await log.app.execute(f"create index somebodys on {log.partition} (ulid)")

    report = await log.ensure()

    (step,) = [one for one in report.done if one.table == log.partition]
    assert (step.action, step.index) == (Action.ATTACH, "somebodys")
    assert (await log.indexes(log.partition))["btree (ulid)"]


async def test_an_index_of_the_operator_is_built_too(log: Log):
    await log.app.execute("create index ops_by_origin on only ops (origin) with (fillfactor = 80)")

    await log.ensure()

    built = await log.indexes(log.partition)
    assert built["btree (origin) WITH (fillfactor='80')"]


async def test_only_the_logs_that_are_named_are_looked_at(log: Log):
    await log.app.execute("create table public.files (id text primary key)")
    await track(log.db, "files")
    await log.lose()

    await log.ensure(logs=(log.name,))

    other = await log.app.fetchval("select 'ops_' || id from op_tables where name = 'files'")
    assert "btree (ulid)" in await log.indexes(log.partition)
    assert "btree (ulid)" not in await log.indexes(other)


async def leave_invalid(log: Log, other: Any, index: str = "leftover") -> None:
    """A build that was cut off."""
    async with log.old_transaction(other):
        await log.app.execute("set statement_timeout = '100ms'")
        with pytest.raises(Exception, match="canceling statement"):
            await log.app.execute(f"create index concurrently {index} on {log.partition} (ulid)")
        await log.app.execute("reset statement_timeout")


async def test_an_invalid_leftover_is_replaced(log: Log, connections: Any):
    await log.lose()
    await leave_invalid(log, await connections())
    assert await log.invalid() == ["leftover"]

    report = await log.ensure()

    assert await log.invalid() == []
    assert "replace" in actions(report)
    assert (await log.indexes("ops"))["btree (ulid)"]


async def test_an_invalid_index_that_is_attached_is_rebuilt(log: Log, connections: Any):
    """It cannot be dropped."""
    await log.lose()
    await log.app.execute("create index ops_by_ulid on only ops (ulid)")
    await log.app.execute(f"create index of_log on only {log.name} (ulid)")
    await log.app.execute("alter index ops_by_ulid attach partition of_log")
    await leave_invalid(log, await connections())
    await log.app.execute("alter index of_log attach partition leftover")

    report = await log.ensure()

    assert await log.invalid() == []
    assert "rebuild" in actions(report)


@asynccontextmanager
async def building(log: Log, builder: Any, other: Any) -> AsyncIterator[None]:
    """Somebody builds an index, and waits for a writer of that partition."""
    async with other.transaction():
        await other.execute(f"lock table {log.partition} in row exclusive mode")
        pid = await builder.fetchval("select pg_backend_pid()")
        work = asyncio.ensure_future(
            builder.execute(f"create index concurrently theirs on {log.partition} (ulid)")
        )
        await until(lambda: is_waiting(log.app, pid))
        yield
    await work


async def is_waiting(app: Any, pid: int) -> bool:
    return await app.fetchval("select cardinality(pg_blocking_pids($1)) > 0", pid)


async def test_an_index_that_somebody_builds_is_left_alone(log: Log, connections: Any):
    builder, other = await connections(), await connections()
    await log.lose()

    async with building(log, builder, other):
        during = await log.ensure()
        unfinished = await log.invalid()
    after = await log.ensure()

    pid = builder.get_server_pid()
    (left,) = [one for one in during.left if one.table == log.partition]
    assert during.status == "incomplete"
    assert (left.index, left.why) == (
        "theirs",
        f"process {pid} is building an index of {log.partition}",
    )
    assert unfinished == ["theirs"]
    assert after.status == "complete"
    assert "attach" in actions(after)


async def test_a_second_run_is_refused_while_one_is_active(log: Log, connections: Any):
    await log.lose()
    other = await connections()

    async with locks.held_if_free(other, ensure.LOCK):
        report = await log.ensure()

    assert (report.status, report.done) == ("busy", [])
    assert f"process {other.get_server_pid()}" in report.notes[0]
    assert (await log.ensure()).status == "complete"


async def test_too_little_disk_is_refused_with_the_numbers(log: Log):
    await log.lose()
    expected = await ensure.outlook(log.db, Wanted(), free_bytes=lambda: PLENTY)
    free = expected.needed_bytes - 1

    with pytest.raises(DiskLow) as refusal:
        await log.ensure(free=free)

    assert expected.estimated_bytes > 0
    assert expected.needed_bytes >= 1.2 * expected.estimated_bytes
    assert "KiB must be free for that" in str(refusal.value)
    assert await log.indexes("ops") == {
        "btree (era, xid, ulid, n)": True,
        "btree (key_hash, ulid)": True,
    }
    assert (await log.ensure(free=free, force=True)).status == "complete"


async def test_an_unknown_disk_needs_force(log: Log):
    await log.lose()

    with pytest.raises(DiskLow, match=r"cannot be seen from here.*--force"):
        await log.ensure(free=None)
    assert (await log.ensure(free=None, force=True)).status == "complete"


async def test_a_disk_that_fills_meanwhile_ends_the_builds(log: Log):
    """Others write too."""
    await log.lose()
    expected = await ensure.outlook(log.db, Wanted(), free_bytes=lambda: PLENTY)
    free = iter([expected.needed_bytes])

    report = await ensure.ensure(
        log.db,
        Wanted(),
        free_bytes=lambda: next(free, 0),
        force=False,
        stop=asyncio.Event(),
        watcher=Watched(),
    )

    assert report.status == "incomplete"
    assert {left.why.split(",")[0] for left in report.left} == {"0 B are free by now"}
    assert await log.invalid() == []


async def stopped_in_the_middle(log: Log, other: Any) -> tuple[Report, Watched]:
    stop, watcher = asyncio.Event(), Watched()
    async with log.old_transaction(other):
        run = asyncio.ensure_future(log.ensure(stop=stop, watcher=watcher))
        await watcher.waiting.wait()
        stop.set()
        return await run, watcher


async def test_a_stop_in_the_middle_leaves_nothing_invalid(log: Log, connections: Any):
    other = await connections()
    await log.lose()

    report, watcher = await stopped_in_the_middle(log, other)

    assert report.status == "interrupted"
    assert report.left == []
    assert await log.invalid() == []
    assert f"process {other.get_server_pid()}" in watcher.waited_for[0]
    assert (await log.ensure()).status == "complete"


async def test_a_cancelled_run_leaves_nothing_invalid(log: Log, connections: Any):
    watcher = Watched()
    await log.lose()

    async with log.old_transaction(await connections()):
        run = asyncio.ensure_future(log.ensure(watcher=watcher))
        await watcher.waiting.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    assert await log.invalid() == []


async def test_writers_go_on_during_a_build(log: Log, connections: Any):
    watcher = Watched()
    await log.lose()
    await log.app.execute("set statement_timeout = '5s'")

    async with log.old_transaction(await connections()):
        run = asyncio.ensure_future(log.ensure(watcher=watcher))
        await watcher.waiting.wait()
        await log.write("during")
    report = await run

    assert report.status == "complete"
    ulid = await log.app.fetchval(f"select ulid from {log.name} where key like '%during%'")
    await log.app.execute("set enable_seqscan = off")
    assert (
        await log.app.fetchval(f"select count(*) from {log.partition} where ulid = $1", ulid) == 1
    )


async def test_a_busy_partition_is_attached_by_a_later_try(log: Log, connections: Any):
    """A writer's transaction holds its locks on the indexes until it ends."""
    writer, watcher = await connections(), Watched()
    await log.lose()
    await log.app.execute(f"create index built on {log.partition} (ulid)")
    await log.app.execute("create index ops_by_ulid on only ops (ulid)")
    await log.app.execute(f"create index of_log on only {log.name} (ulid)")
    await log.app.execute("alter index ops_by_ulid attach partition of_log")

    async with writer.transaction():
        await writer.execute("insert into public.pages values ('open')")
        run = asyncio.ensure_future(log.ensure(watcher=watcher, logs=(log.name,)))
        await watcher.waiting.wait()
        await log.write("meanwhile")  # nobody queues behind us for long
    report = await run

    assert "attach" in actions(report)
    assert f"process {writer.get_server_pid()}" in " ".join(watcher.waited_for)


async def test_the_optional_index_is_on_all_partitions_and_on_new_ones(log: Log):
    await log.ensure("arrival")
    async with log.db.transaction() as tx:
        span = Span(OLD, OLD + LOG_WIDTH)
        new = await partitions.create(tx, OPS, span, parent=log.name)
    await log.app.execute("create table public.files (id text primary key)")
    await track(log.db, "files")

    other = await log.app.fetchval("select 'ops_' || id from op_tables where name = 'files'")
    for table in ("ops", log.name, log.partition, new, other):
        assert (await log.indexes(table))[OPTIONAL["arrival"]], table
    assert (await log.ensure("arrival")).done == []


async def test_the_optional_index_finds_ops_by_their_arrival(log: Log):
    await log.ensure("arrival")
    await log.app.execute("set enable_seqscan = off; set enable_indexscan = off")

    rows = await log.app.fetch(
        f"explain select * from {log.partition} where arrived_at > now() - interval '1 hour'"
    )

    assert any("Bitmap Index Scan" in row[0] and "by_arrival" in row[0] for row in rows)


async def test_the_optional_index_is_dropped_again(log: Log):
    before = await log.indexes(log.partition)
    await log.ensure("arrival")

    dropped = await log.drop()

    assert [step.index for step in dropped.done] == ["ops_by_arrival"]
    assert await log.indexes(log.partition) == before
    assert (await log.drop()).done == []


async def test_the_optional_index_of_one_log_becomes_part_of_all(log: Log):
    await log.app.execute("create table public.files (id text primary key)")
    await track(log.db, "files")
    await log.ensure("arrival", logs=(log.name,))
    of_one = await log.indexes(log.partition)
    of_all = await log.indexes("ops")

    await log.ensure("arrival")

    assert of_one[OPTIONAL["arrival"]]
    assert OPTIONAL["arrival"] not in of_all
    assert (await log.indexes("ops"))[OPTIONAL["arrival"]]
    with pytest.raises(BadRequest, match="belongs to all logs"):
        await log.drop((log.name,))


async def test_the_optional_index_of_one_log_is_dropped_alone(log: Log):
    await log.ensure("arrival", logs=(log.name,))

    dropped = await log.drop((log.name,))

    assert [step.table for step in dropped.done] == [log.name]
    assert OPTIONAL["arrival"] not in await log.indexes(log.partition)


async def test_a_partition_that_is_about_to_be_dropped_gets_no_index(log: Log):
    await log.lose()
    await partitions.seal(log.app, log.partition)

    report = await log.ensure()

    assert [left.why for left in report.left] == [f"{log.partition} is about to be dropped"]
    assert "btree (ulid)" not in await log.indexes(log.partition)


async def test_a_parent_is_valid_again_when_the_partition_without_the_index_is_gone(log: Log):
    await log.lose()
    await partitions.seal(log.app, log.partition)
    await log.ensure()
    await log.app.execute(f"drop table {log.partition}")

    report = await log.ensure()

    is_valid = (await log.indexes("ops"))["btree (ulid)"]
    assert is_valid or "still marked INVALID" in report.notes[0]
    assert report.status == "complete"


async def test_the_estimate_is_near_the_truth(log: Log):
    """Above it, and by less than the half."""
    await log.app.execute(
        "insert into public.pages select md5(n::text) from generate_series(1, 20000) as n"
    )
    await log.app.execute(f"analyze {log.partition}")
    table = (await catalogue.read(log.app)).tables[log.partition]
    widths = (await catalogue.read(log.app)).widths
    await log.app.execute("reindex table " + log.partition)

    for index in (await catalogue.read(log.app)).indexes_of(log.partition):
        size = await log.app.fetchval("select pg_relation_size($1::text::regclass)", index.name)
        guess = plan.estimate(index.definition, table, widths).index_bytes
        if index.definition != REQUIRED["ops_by_ulid"]:  # its duplicates are stored once
            assert size <= guess <= 1.5 * size, index.definition


def test_more_rows_are_assumed_where_nobody_has_counted():
    counted = catalogue.Table(
        "p", "ops_1", is_partitioned=False, bytes=10**9, rows=10**6, pages=10**5
    )
    unknown = catalogue.Table("p", "ops_1", is_partitioned=False, bytes=10**9)

    assert plan.rows_of(counted) == pytest.approx(10**6 * 10**9 / 8192 / 10**5)
    assert plan.rows_of(unknown) == 10**7


def test_names_fit_and_are_not_taken():
    table = catalogue.Table("ops_1_20200101_000000", "ops_1", is_partitioned=False)
    tables = [
        catalogue.Table("ops", None, is_partitioned=True),
        catalogue.Table("ops_1", "ops", is_partitioned=True),
        table,
    ]
    long = "x" * 60
    indexes = [
        catalogue.Index(f"ops_{long}"[:63], "ops", None, False, False, "btree (origin)"),
        catalogue.Index(
            "ops_1_20200101_000000_by_ulid", table.name, None, True, False, "btree (n)"
        ),
    ]

    steps = plan.planned(catalogue.Tree({one.name: one for one in tables}, indexes), Wanted())

    names = [step.index for step in steps]
    assert len(names) == len(set(names))
    assert "ops_1_20200101_000000_by_ulid_2" in names
    assert max(map(len, names)) == 63


def test_the_smallest_partition_is_first():
    sizes = {"ops_1_b": 10, "ops_1_a": 3000, "ops_1_c": 200}
    tables = [
        catalogue.Table("ops", None, is_partitioned=True),
        catalogue.Table("ops_1", "ops", is_partitioned=True),
        *(
            catalogue.Table(name, "ops_1", is_partitioned=False, bytes=size)
            for name, size in sizes.items()
        ),
    ]

    steps = plan.planned(catalogue.Tree({one.name: one for one in tables}, []), Wanted())

    built = [step.table for step in steps if step.action is Action.BUILD]
    assert list(dict.fromkeys(built)) == ["ops_1_b", "ops_1_c", "ops_1_a"]
