"""The log is emptied after a comparison: who is asked, what stays, and what a crash leaves."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import soak
from oplog.captured import log_of
from oplog.meshes import converge, join, mesh
from oplog.nodes import THIRD, make_peer
from oplog.resets import FILL, clock, everything, pair, plan_of, planned, planned_with, reset
from oplog.trimmed import DAY, age, last_position, make_pages, make_reader, write
from sweeps import attached_to, detach_half_way, state_of

from restante.database.pool import Database
from restante.errors import DatabaseUnavailable
from restante.oplog import positions
from restante.oplog.peers import Reader
from restante.oplog.positions import Position
from restante.oplog.remote import Remote
from restante.oplog.resetting import act
from restante.oplog.resetting.act import Reset
from restante.oplog.serving import serve
from restante.oplog.serving.readers import OpenEnds
from restante.oplog.serving.serve import Ask
from restante.oplog.tables import OPS
from restante.oplog.trimming import drops
from restante.wire.oplog_digests import KeyDifference

pytestmark = pytest.mark.anyio

UNSEEN = "select set_config('restante.applying', id::text, false) from op_tables"


@pytest.fixture
async def connection(connections: Callable[[], Any]) -> Any:
    return await connections()


@pytest.mark.soak
@soak.only_long
async def test_the_log_goes_and_all_nodes_stay_in_step(cluster: str, tmp_path: Path):
    """All are written to all the time: nothing is lost, and nobody has to take a snapshot."""
    async with mesh(cluster, tmp_path, 3) as (a, b, c):
        await join(a, b, c)
        await a.sql.execute(FILL)
        await converge(a, b, c)
        has_plan = asyncio.Event()
        writing = [asyncio.create_task(keep_writing(node, has_plan)) for node in (a, b, c)]

        async with Remote.opened(own_host=a.url, clock=clock) as remote:
            plan = await planned_with(a.db, remote, b.url, wait_seconds=25)
        assert plan.refusals == [], plan
        has_plan.set()
        report = await reset(a.db, plan)
        for task in writing:
            task.cancel()
        await asyncio.wait(writing)
        rows = await converge(a, b, c)

        assert report.left == []
        assert report.bytes > 0
        assert report.filesystem_bytes is not None
        assert len(rows) > 50
        trimmed = await a.sql.fetchval("select trimmed from restante.op_tables")
        assert "" < trimmed <= plan.up_to
        for node in (b, c):
            assert await node.sql.fetchval("select count(*) from restante.op_snapshots") == 0
            assert (await node.peer(a))["gaps"] == 0
        assert (await a.peer(c))["evictions"] == 0


async def keep_writing(node: Any, has_plan: asyncio.Event) -> None:
    """A record that all change all the time cannot be compared: it comes after the plan."""
    for number in count():
        key = f"{node.port}-{number}"
        await node.sql.execute("insert into notes values ($1, 'new', 0)", key)
        await node.sql.execute("delete from notes where id = $1", f"{node.port}-{number - 30}")
        if has_plan.is_set():
            await node.sql.execute("update notes set body = $1 where id = '7'", key)
        await asyncio.sleep(0.01)


async def test_a_plan_names_what_would_go_and_writes_nothing(cluster: str):
    async with pair(cluster) as (a, b):
        before = await everything(a.sql)

        plan = await planned(a, b)

        assert plan.refusals == []
        (table,) = plan.tables
        assert table.is_reset
        assert table.partitions == 1
        assert plan.bytes > 0
        assert await everything(a.sql) == before


async def test_unequal_nodes_change_nothing_and_the_keys_are_named(cluster: str):
    async with pair(cluster) as (a, b):
        await a.sql.execute(UNSEEN)
        await a.sql.execute("delete from notes where id = '7'")
        before = await everything(a.sql)

        plan = await planned(a, b)

        assert plan.refusals == [f"notes is not equal to that of {b.url}."]
        assert plan.verified.tables[0].keys == [KeyDifference('["7"]', "missing_here")]
        assert await everything(a.sql) == before


async def test_a_table_with_other_columns_there_stays(cluster: str):
    async with pair(cluster) as (a, b):
        await b.sql.execute("alter table notes add added text")

        plan = await planned(a, b)

        assert plan.refusals == [f"notes has other columns on {b.url}."]


BEHIND = {"nothing": "", "garbage": "18423042", "the start": str(positions.START)}


@pytest.mark.parametrize("passed", BEHIND.values(), ids=BEHIND)
async def test_a_peer_that_needs_ops_is_named_and_evicted_only_if_that_is_accepted(
    cluster: str, passed: str
):
    async with pair(cluster) as (a, b):
        await make_reader(a.db, passed, THIRD)
        await a.sql.execute("update op_peers set confirmed_at = null, confirmed = ''")

        refused = await planned(a, b)
        accepted = await planned(a, b, evicts=True)
        report = await reset(a.db, accepted)

        assert len(refused.refusals) == 1
        assert refused.refusals[0].startswith(f"{THIRD} still needs 50 ops.")
        (loss,) = refused.peers
        assert (loss.host, loss.ops, loss.tables) == (THIRD, 50, ["notes"])
        assert loss.since is not None
        assert accepted.refusals == []
        assert report.evicted == [THIRD]
        row = await a.peer(THIRD)
        assert row["evicted_at"] is not None
        assert row["evictions"] == 1


async def test_a_peer_that_has_read_everything_needs_nothing(cluster: str):
    async with pair(cluster) as (a, b):
        up_to = (await planned(a, b)).up_to
        await make_reader(a.db, up_to, THIRD)

        plan = await planned(a, b)

        assert (plan.refusals, plan.peers) == ([], [])


async def test_a_peer_that_has_just_taken_a_snapshot_is_waited_for_while_it_reads(cluster: str):
    """It may not be evicted, but in a moment it has read everything."""
    async with pair(cluster) as (a, b):
        up_to = (await planned(a, b)).up_to
        await make_reader(a.db, "", THIRD)
        await a.sql.execute("update op_peers set spared_until = now() + interval '1 hour'")
        waits = asyncio.Event()

        async def read() -> None:
            await waits.wait()
            await a.sql.execute("update op_peers set passed = $2 where host = $1", THIRD, up_to)

        def wait(_why: str) -> None:
            waits.set()

        reading = asyncio.create_task(read())
        plan = await planned(a, b, on_wait=wait, wait_seconds=10.0)
        reading.cancel()

        assert (plan.refusals, plan.peers) == ([], [])


OBSTACLES = [
    ("update op_tables set state = 'paused'", "notes is paused here."),
    (
        """
        insert into op_snapshots (peer_id, table_id, phase, is_for_gap, started_at, progressed_at)
        select op_peers.id, op_tables.id, 'records', true, now(), now()
          from op_peers, op_tables where host <> 'https://third.example'
        """,
        "A snapshot of notes is being taken from ",
    ),
    (
        """
        insert into op_pins select op_peers.id, op_tables.id, '', now() + interval '1 hour'
          from op_peers, op_tables where host = 'https://third.example'
        """,
        f"{THIRD} is taking a snapshot of notes from this node.",
    ),
    (
        """
        update op_peers set passed = '', spared_until = now() + interval '1 hour'
         where host = 'https://third.example'
        """,
        f"{THIRD} has just taken a snapshot, and needs 50 ops since then.",
    ),
    (
        """
        insert into op_parked (peer_id, table_name, ulid, origin, action, data, data_hash, reason,
                               sentence, parked_at, tried_at)
        values (1, 'notes', gen_random_uuid(), 'https://third.example', 'u', '{}', 1, 'unique',
                'x', now(), now())
        """,
        "1 parked ops of notes could not be applied here",
    ),
]


async def test_what_forbids_a_reset_is_named_and_eviction_does_not_help(cluster: str):
    async with pair(cluster) as (a, b):
        await make_reader(a.db, (await planned(a, b)).up_to, THIRD)
        before = await everything(a.sql)
        for statement, sentence in OBSTACLES:
            await a.sql.execute(statement)

            plan = await planned(a, b, evicts=True, wait_seconds=0)

            assert any(one.startswith(sentence) for one in plan.refusals), (sentence, plan.refusals)
            await put_back(a.sql, before)


async def put_back(connection: Any, before: dict[str, Any]) -> None:
    """What the obstacles have changed, as it was."""
    for name in ("op_snapshots", "op_pins", "op_parked"):
        await connection.execute(f"delete from restante.{name}")
    await connection.execute("update restante.op_tables set state = 'tracked'")
    for row in before["op_peers"]:
        await connection.execute(
            "update restante.op_peers set passed = $2, spared_until = null where id = $1",
            row["id"],
            row["passed"],
        )


async def test_ops_that_come_after_the_plan_stay(db: Database, connection: Any):
    pages = await make_pages(db)
    await write(connection, 1)
    old = await age(connection, pages, 20 * DAY)
    await write(connection, 2)
    limit = await last_position(connection, pages)
    await write(connection, 3, 4)
    late = await log_of(connection)

    report = await reset(db, plan_of(limit))

    assert report.left == []
    assert await state_of(connection, old) == "gone"
    assert await log_of(connection) == late[-2:]
    assert await page_after(db, positions.START) == ([3, 4], True)
    assert await page_after(db, limit) == ([3, 4], False)
    assert await connection.fetchval("select trimmed from op_tables") == str(limit)


async def page_after(db: Database, position: Position) -> tuple[list[int], bool]:
    """The keys that a reader gets after a position, and whether it is told of a gap."""
    reader, ask = Reader(None, is_authenticated=False), Ask(position=str(position), is_ours=True)
    page = await serve.read(db, reader, ask, OpenEnds(), now=clock())
    keys = [json.loads(one.data)["id"] for one in page.records if one.data]
    return keys, bool(page.gap_tables)


async def test_who_needs_ops_only_since_the_plan_was_made_stops_the_reset(
    db: Database, connection: Any
):
    pages = await make_pages(db)
    await write(connection, 1)
    await make_peer(db, THIRD)

    report = await reset(db, plan_of(await last_position(connection, pages)))

    assert len(report.left) == 1
    assert report.left[0].endswith(f"{THIRD} still needs ops of it.")
    assert len(await log_of(connection)) == 1
    assert await connection.fetchval("select evicted_at from op_peers") is None


async def test_a_writer_in_the_way_is_left_and_the_next_run_finishes(
    db: Database, connections: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
):
    """A transaction that has written to the log stays open for longer than anybody waits."""
    connection, writer = await connections(), await connections()
    pages = await make_pages(db)
    await write(connection, 1)
    limit = await last_position(connection, pages)
    monkeypatch.setattr(act, "_TRIES", 1)
    monkeypatch.setattr(act, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(drops, "_TRIES", 0)

    async with writer.transaction():
        await write(writer, 2)
        stopped = await reset(db, plan_of(limit))
        kept = await log_of(connection)
    finished = await reset(db, plan_of(limit))

    assert len(stopped.left) == 1
    assert [one.key for one in kept] == [[1]]
    assert finished.left == []
    assert [one.key for one in await log_of(connection)] == [[2]]


async def test_a_partition_that_is_half_detached_is_finished_first(
    db: Database, connections: Callable[[], Any]
):
    connection = await connections()
    pages = await make_pages(db)
    await write(connection, 1)
    old = await age(connection, pages, 20 * DAY)
    await write(connection, 2)
    limit = await last_position(connection, pages)
    await detach_half_way(connections, attached_to(f"ops_{pages}", old, OPS))

    report = await reset(db, plan_of(limit))

    assert report.left == []
    assert await state_of(connection, old) == "gone"
    assert await log_of(connection) == []


CHANGING = {"alter", "create", "drop", "insert", "truncate", "update"}


class Killed(Exception):
    """The process ends here."""


class Killing:
    """A database whose session is lost before one of its statements."""

    def __init__(self, db: Database, number: int) -> None:
        self._db = db
        self._left = number
        self.is_over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Any]:
        async with self._db.session() as connection:
            yield _Counting(connection, self)

    def count(self) -> bool:
        self._left -= 1
        self.is_over |= self._left < 0
        return self.is_over


class _Counting:
    def __init__(self, connection: Any, owner: Killing) -> None:
        self._connection = connection
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def execute(self, statement: str, *values: Any) -> Any:
        if _verb(statement) in CHANGING and self._owner.count():
            if not self._connection.is_closed():
                self._connection.terminate()
            raise Killed
        return await self._connection.execute(statement, *values)


def _verb(statement: str) -> str:
    """Its first word after the comments."""
    return re.sub(r"--.*\n", "", statement).split(maxsplit=1)[0]


@pytest.mark.parametrize("late", [[], [3]], ids=["emptied", "cut"])
async def test_a_reset_that_is_killed_before_any_change_is_finished_by_the_next(
    db: Database, connection: Any, late: list[int]
):
    """And at each of these moments a reader gets a whole page, or is told of the gap."""
    pages = await make_pages(db)
    for number in count():
        await begin_anew(connection)
        await write(connection, 1)
        await age(connection, pages, 20 * DAY)
        await write(connection, 2)
        limit = await last_position(connection, pages)
        await write(connection, *late)
        killing: Any = Killing(db, number)

        with suppress(Killed, DatabaseUnavailable):  # which follows from it
            await Reset(killing, plan_of(limit), clock).run()
        keys, has_gap = await page_after(db, positions.START)
        report = await reset(db, plan_of(limit))

        assert has_gap or keys == [1, 2, *late]
        assert report.left == []
        assert [one.key for one in await log_of(connection)] == [[key] for key in late]
        assert await connection.fetchval("select trimmed from op_tables") == str(limit)
        assert await leftovers(connection, pages) == 0
        if not killing.is_over:
            assert number >= 6
            return


async def begin_anew(connection: Any) -> None:
    """An empty log from which nothing was ever dropped."""
    await connection.execute("delete from restante.ops")
    await connection.execute(
        "update restante.op_tables set trimmed = '', floor_origin = '',"
        " floor = '00000000-0000-0000-0000-000000000000'"
    )


async def leftovers(connection: Any, pages: int) -> int:
    """Tables that are no partition any more."""
    return await connection.fetchval(
        "select count(*) from pg_class where relnamespace = 'restante'::regnamespace"
        " and relname like $1 and relkind = 'r' and not relispartition",
        f"ops\\_{pages}\\_%",
    )


async def test_a_reference_that_has_not_read_us_is_waited_for_and_then_named(cluster: str):
    async with pair(cluster) as (a, b):
        await b.sql.execute("update restante.op_peers set cursor = ''")

        plan = await planned(a, b, wait_seconds=0)

        assert plan.up_to == ""
        assert len(plan.refusals) == 1
        assert plan.refusals[0].startswith(f"{b.url} has not read the log of this node")


async def test_a_node_that_has_not_read_the_reference_is_refused(cluster: str):
    """Its records are equal, but it has no versions of them to pass on."""
    async with pair(cluster) as (a, b):
        await a.sql.execute("update restante.op_peers set cursor = 'garbage'")

        plan = await planned(a, b, wait_seconds=0)

        assert len(plan.refusals) == 1
        assert plan.refusals[0].startswith(f"This node has not read the log of {b.url}")
