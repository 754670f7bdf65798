"""
A pass over the log that ends in the middle: the next one finishes, and nothing is left over.

A lock of another session makes the pass wait in a step.  Then its session is terminated, as when
its process is killed, or it gives up and says who was in the way.
"""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from oplog.captured import log_of
from oplog.trimmed import (
    DAY,
    WEEK,
    age,
    count_ops,
    last_position,
    later_today,
    make_pages,
    make_wide,
    now,
    sweep_of,
    write,
)
from oplog.turns import Turns
from sweeps import (
    Stop,
    Tally,
    actions,
    end_who_waits_for,
    is_waited_for,
    locked,
    partition_names,
    state_of,
    stopped_pass,
    stops,
    utc_now,
)
from waiting import until

from restante.database.partitions import PartitionedTable
from restante.database.pool import Database
from restante.errors import DatabaseUnavailable
from restante.oplog import tables
from restante.oplog.peers import Reader
from restante.oplog.positions import START
from restante.oplog.serving import serve
from restante.oplog.serving.readers import OpenEnds
from restante.oplog.serving.serve import Ask, Page
from restante.oplog.tables import OPS
from restante.oplog.trimming import drops
from restante.oplog.trimming.limits import Limits

pytestmark = pytest.mark.anyio

Connect = Callable[[], Any]
DORMANT = Limits(dormant_after=timedelta(microseconds=1))


async def make_old(db: Database, connection: Any) -> tuple[int, str]:
    """A table with two ops that are due."""
    pages = await make_pages(db)
    await write(connection, 1, 2)
    old = await age(connection, pages, 20 * DAY)
    await count_ops(connection, old)
    return pages, old


async def read(db: Database) -> Page:
    """What a reader gets that has a cursor, and nothing else."""
    ask = Ask(position=str(START), is_ours=True)
    return await serve.read(db, Reader(None, False), ask, OpenEnds(), now=now())


def stops_of(parent: str, partition: str) -> dict[str, Stop]:
    """One for each step of the removal of a part of a log."""
    table = PartitionedTable(parent, OPS.bound_of, OPS.moment_of)
    marks = Stop("select from op_tables for update", "sealed")
    return {**stops(table, partition), "marks": marks}


@pytest.mark.parametrize(
    ("step", "named"),
    [
        ("seal", "as usual"),
        ("marks", "as usual"),
        ("detach", "as usual"),
        ("detach", "by an operator"),
        ("half detached", "by an operator"),
        ("drop", "as usual"),
    ],
)
async def test_a_removal_that_was_killed_is_finished(
    db: Database, connections: Connect, step: str, named: str
):
    connection = await connections()
    pages, old = await make_old(db, connection)
    last = await last_position(connection, pages)
    if named != "as usual":
        await connection.execute(f'alter table {old} rename to "Old ops"')
        old = '"Old ops"'
    stop = stops_of(f"ops_{pages}", old)[step]
    async with stopped_pass(stop, sweep_of(db), Tally(), connections, old) as (passing, holder):
        await end_who_waits_for(holder)
        with pytest.raises(DatabaseUnavailable):
            await passing

    page = await read(db)
    assert page.gap_tables or len(page.records) == 2
    report = await sweep_of(db).run(now=utc_now())

    assert report.postponed == []
    assert await log_of(connection) == []
    left = await connection.fetch(
        "select relname from pg_class where relname ~ '^(ops_|Old)' and relkind = 'r'"
        "   and (not relispartition or relname ~ 'Old')"
    )
    assert left == []
    table = await tables.find(connection, "pages")
    assert table is not None
    assert table.trimmed == last
    assert await dropped_ops(connection) == 2


async def dropped_ops(connection: Any) -> int:
    return await connection.fetchval("select dropped_ops from op_tables")


async def test_emptying_the_partition_in_use_is_tried_again(db: Database, connections: Connect):
    connection, holder = await connections(), await connections()
    await make_pages(db)
    await write(connection, 1, 2)
    used = await connection.fetchval("select tableoid::regclass::text from ops limit 1")
    sweep = sweep_of(db, DORMANT)
    async with locked(holder, used):
        passing = asyncio.create_task(sweep.run(now=later_today()))
        await until(lambda: is_waited_for(holder))
        await end_who_waits_for(holder)
        with pytest.raises(DatabaseUnavailable):
            await passing
    assert len((await read(db)).records) == 2

    await sweep.run(now=later_today())

    assert await log_of(connection) == []
    assert (await read(db)).gap_tables == ("pages",)


async def test_a_cut_that_was_killed_is_finished_and_its_copy_is_dropped(
    db: Database, connections: Connect
):
    connection, holder = await connections(), await connections()
    pages, _ = await make_wide(db, connection)
    logged, names = await log_of(connection), await partition_names(connection, OPS)
    async with locked(holder, f"only ops_{pages}"):
        passing = asyncio.create_task(sweep_of(db).run(now=now()))
        await until(lambda: is_waited_for(holder))
        await end_who_waits_for(holder)
        with pytest.raises(DatabaseUnavailable):
            await passing
    assert await log_of(connection) == logged
    assert len(await partition_names(connection, OPS)) == len(names) + 1

    report = await sweep_of(db).run(now=now())

    assert "drop a leftover" in actions(report)
    assert await partition_names(connection, OPS) == names
    assert await log_of(connection) == logged[-len(await log_of(connection)) :] != logged


class Failure(Exception):
    """Something that nobody expects."""


@pytest.mark.parametrize("kind", ["whole", "contents", "older_part"])
async def test_a_step_may_fail_at_any_statement(
    db: Database, connections: Connect, monkeypatch: pytest.MonkeyPatch, kind: str
):
    """What was logged is there or in the marks, and the next pass finishes."""
    connection = await connections()
    if kind == "older_part":
        await make_wide(db, connection)
    elif kind == "whole":
        await make_old(db, connection)
    else:
        await make_pages(db)
        await write(connection, 1, 2)
    names, logged = await partition_names(connection, OPS), await log_of(connection)
    sweep = sweep_of(db, DORMANT if kind == "contents" else WEEK)
    original = getattr(drops, kind)
    fail_at, statements = 0, 0

    async def fail() -> None:
        raise Failure

    async def failing(drop: Any, *values: Any, work: Any = None, **given: Any) -> Any:
        nonlocal statements
        work = work or values[-1]
        values = values[:-1] if given == {} else values
        inner, turns = work.connection, Turns(db)
        turns.before(fail_at, fail)
        work.connection = turns.wrapped(inner)
        try:
            if given:
                return await original(drop, *values, work=work, **given)
            return await original(drop, *values, work)
        finally:
            statements = turns.statements
            work.connection = inner

    monkeypatch.setattr(drops, kind, failing)
    moment = later_today() if kind == "contents" else now()
    while True:
        try:
            await sweep.run(now=moment)
        except Failure:
            page = await read(db)
            assert page.gap_tables or await log_of(connection) == logged
            fail_at += 3 if kind == "older_part" else 1
            continue
        break

    assert fail_at > 3
    assert fail_at >= statements
    left = await partition_names(connection, OPS)
    assert left == names if kind != "whole" else left < names
    assert len(await log_of(connection)) < len(logged)


# Who is in the way


@pytest.mark.parametrize("who", ["a reader", "a prepared transaction", "a held snapshot"])
async def test_a_pass_says_who_is_in_the_way_and_the_next_one_finishes(
    db: Database, connections: Connect, who: str
):
    connection, holder = await connections(), await connections()
    pages, old = await make_old(db, connection)
    await holder.execute("set application_name = 'a long report'")
    if who == "a reader":
        await holder.execute(f"begin isolation level repeatable read; select from ops_{pages}")
        named = "a long report"
    elif who == "a prepared transaction":
        await holder.execute(
            f"begin; lock table {old} in row exclusive mode; prepare transaction 'order 66'"
        )
        named = "order 66"
    else:
        # It has read nothing of the log, but an interrupted detach waits for it.
        await holder.execute("begin isolation level repeatable read; select from op_peers")
        blocker = await connections()
        async with locked(blocker, f"only ops_{pages}"):
            await sweep_of(db).run(now=now())
        assert await state_of(connection, old) == "detaching"
        named = "a long report"

    report = await sweep_of(db).run(now=now())

    (postponed,) = report.postponed
    assert "In the way: " in postponed.reason
    assert named in postponed.reason
    await holder.execute(
        "rollback prepared 'order 66'" if who == "a prepared transaction" else "rollback"
    )
    await sweep_of(db).run(now=now())
    assert await state_of(connection, old) == "gone"
    assert await dropped_ops(connection) == 2
