"""
`restante oplog reset --yes` is killed with -9 in each of its steps, or interrupted by a signal.

The same command goes on, and the peer, which had read everything, misses nothing.
"""

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import soak
from oplog.killed import STOP_KEY, command, ended, interrupt, kill, make_stop_in_copies
from oplog.meshes import Member, converge, join, mesh
from oplog.resets import FILL, clock, planned_with, reset
from oplog.test_trimming_interrupted import stops_of
from oplog.trimmed import DAY, age, count_ops
from sweeps import Stop, in_the_way, state_of, until_stopped

from restante.oplog.remote import Remote

pytestmark = pytest.mark.anyio

only_in_soak = (pytest.mark.soak, soak.only_long)
LOG = "ops_1"
ALL = 50


@pytest.fixture
async def nodes(cluster: str, tmp_path: Path) -> AsyncIterator[tuple[Member, Member, str]]:
    """Two nodes with the same records, and the older of the first one's two partitions."""
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await join(a, b)
        await a.sql.execute("set search_path to restante, public")
        await a.sql.execute(FILL)
        await converge(a, b)
        old = await age(a.sql, 1, 20 * DAY)
        await a.sql.execute("update notes set body = 'new' where size < 10")
        await converge(a, b)
        await count_ops(a.sql, LOG)
        yield a, b, old


@pytest.fixture
async def connect(
    nodes: tuple[Member, Member, str],
) -> AsyncIterator[Callable[[], Any]]:
    """Opens further connections to the database of the first node."""
    opened = list[Any]()

    async def one() -> Any:
        opened.append(
            await asyncpg.connect(nodes[0].dsn, server_settings={"search_path": "restante"})
        )
        return opened[-1]

    yield one
    for connection in opened:
        await connection.close()


def words(b: Member) -> tuple[str, ...]:
    return "oplog", "reset", "--from", b.url, "--yes"


STEPS = [
    pytest.param("seal", marks=only_in_soak),
    pytest.param("marks", marks=only_in_soak),
    pytest.param("detach", marks=only_in_soak),
    pytest.param("half detached"),
    pytest.param("drop", marks=only_in_soak),
]


@pytest.mark.parametrize("step", STEPS)
async def test_a_reset_that_is_killed_in_any_step_is_finished_by_the_next(
    nodes: tuple[Member, Member, str], connect: Any, step: str
):
    a, b, old = nodes
    stop = stops_of(LOG, old)[step]
    holder = await in_the_way(stop, connect)
    async with command(a.dsn, *words(b)) as process:
        holder = await until_stopped(stop, holder, connect, old)
        found = await state_of(a.sql, old)
        await kill(process, holder)
    await holder.execute("rollback")
    await a.sql.execute("insert into notes values ('after the kill')")

    assert found == stop.state
    await assert_the_next_finishes(a, b)


@pytest.mark.soak
@soak.only_long
@pytest.mark.parametrize("step", ["empty", "copy", "swap"])
async def test_a_reset_that_is_killed_at_the_partition_in_use_is_finished_by_the_next(
    nodes: tuple[Member, Member, str], connect: Any, step: str
):
    """It is emptied, or cut if something was written after the comparison."""
    a, b, old = nodes
    used = await a.sql.fetchval(
        "select tableoid::regclass::text from ops order by xid desc limit 1"
    )
    await make_stop_in_copies(a.sql, LOG)
    async with command(a.dsn, *words(b)) as process:
        async with at_the_first_step(old, connect):
            if step != "empty":
                await a.sql.execute("insert into notes values ('after the comparison')")
            holder = await in_the_way(_empty(used) if step == "empty" else COPY, connect)
        await until_stopped(COPY, holder, connect, used)
        if step == "swap":
            copying, holder = holder, await in_the_way(SWAP, connect)
            await copying.execute("rollback")
            await until_stopped(SWAP, holder, connect, used)
        await kill(process, holder)
    await holder.execute("rollback")

    assert await state_of(a.sql, old) == "gone"
    await assert_the_next_finishes(a, b)


COPY = Stop(f"select pg_advisory_xact_lock({STOP_KEY})", "attached")
SWAP = Stop(f"lock table only {LOG} in access share mode", "attached")


def _empty(used: str) -> Stop:
    return Stop(f"lock table {used} in access share mode", "attached")


@asynccontextmanager
async def at_the_first_step(old: str, connect: Any) -> AsyncIterator[None]:
    """A reset has made its plan, and waits while inside; the removal of the older one goes on."""
    stop = stops_of(LOG, old)["seal"]
    holder = await in_the_way(stop, connect)
    await until_stopped(stop, holder, connect, old)
    yield
    await holder.execute("rollback")


async def assert_the_next_finishes(a: Member, b: Member) -> None:
    """Nothing is left over, and the peer reads on as if nothing had happened."""
    await converge(a, b)
    async with Remote.opened(own_host=a.url, clock=clock) as remote:
        report = await reset(a.db, await planned_with(a.db, remote, b.url, wait_seconds=25))

    assert report.left == []
    assert await a.sql.fetchval("select count(*) from ops") == 0
    assert await leftovers(a.sql) == []
    assert 0 < await a.sql.fetchval("select dropped_ops from op_tables") <= ALL + 20
    await a.sql.execute("update notes set body = 'afterwards' where id = '7'")
    await converge(a, b)
    assert (await b.peer(a))["gaps"] == 0
    assert await b.sql.fetchval("select count(*) from restante.op_snapshots") == 0


async def leftovers(connection: Any) -> list[str]:
    rows = await connection.fetch(
        "select relname from pg_class where relnamespace = 'restante'::regnamespace"
        " and starts_with(relname, $1 || '_') and relkind = 'r' and not relispartition",
        LOG,
    )
    return [row["relname"] for row in rows]


async def test_a_reset_that_is_interrupted_says_that_the_same_command_goes_on(
    nodes: tuple[Member, Member, str], connect: Any
):
    """By Ctrl-C, by SIGTERM, and then it does."""
    a, b, old = nodes
    stop, outcomes = stops_of(LOG, old)["detach"], list[Any]()
    for number in (signal.SIGINT, signal.SIGTERM):
        holder = await in_the_way(stop, connect)
        async with command(a.dsn, *words(b)) as process:
            await until_stopped(stop, holder, connect, old)
            outcomes.append(await interrupt(process, number))
        await holder.execute("rollback")
    async with command(a.dsn, *words(b)) as process:
        last = await ended(process)

    for one in outcomes:
        assert one.code == 130
        assert one.stderr.endswith("Stopped; the same command goes on from here.\n")
        assert "Traceback" not in one.stderr
    assert last.code == 0, last
    assert last.stdout.startswith("Dropped about ")
    assert await a.sql.fetchval("select count(*) from ops") == 0
