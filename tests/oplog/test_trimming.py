"""Ops go by partitions: who is told before, what stays, and what the disk gets back."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from oplog.captured import log_of
from oplog.nodes import PEER, THIRD
from oplog.trimmed import (
    DAY,
    age,
    last_position,
    make_pages,
    make_reader,
    merge_past,
    now,
    sweep_of,
    write,
)
from sweeps import partition_names, state_of

from restante.database.pool import Database
from restante.database.spans import floor
from restante.oplog import tables
from restante.oplog.tables import OPS
from restante.oplog.trimming.limits import Limits, Policy

pytestmark = pytest.mark.anyio


@pytest.fixture
async def connection(connections: Callable[[], Any]) -> Any:
    return await connections()


DORMANT = Limits(dormant_after=timedelta(microseconds=1))


def later_today() -> datetime:
    """A moment at which the partition of this moment is still in use."""
    return min(now() + timedelta(minutes=1), floor(now(), DAY) + DAY - timedelta(microseconds=1))


async def marks_of(connection: Any) -> tuple[Any, str]:
    table = await tables.find(connection, "pages")
    assert table is not None
    return table.floor, str(table.trimmed or "")


async def test_old_ops_go_and_the_marks_say_so(db: Database, connection: Any):
    pages = await make_pages(db)
    await write(connection, 1, 2)
    old = await age(connection, pages, 20 * DAY)
    last, newest = await last_position(connection, pages), (await log_of(connection))[-1].ulid
    await write(connection, 3)
    await make_reader(db, str(last))

    report = await sweep_of(db).run(now=now())

    assert [step.partition for step in report.done if step.partition] == [old]
    assert report.bytes_back > 0
    assert await state_of(connection, old) == "gone"
    assert [one.key for one in await log_of(connection)] == [[3]]
    assert await marks_of(connection) == (newest, str(last))


async def test_a_plan_says_the_same_and_writes_nothing(db: Database, connection: Any):
    pages = await make_pages(db)
    await write(connection, 1, 2)
    old = await age(connection, pages, 20 * DAY)
    before = await connection.fetch("select * from op_tables")

    plan = await sweep_of(db).plan(now=now())

    assert [(step.action, step.partition) for step in plan.steps] == [("trim the op log", old)]
    assert await connection.fetch("select * from op_tables") == before
    assert await state_of(connection, old) == "attached"


async def test_a_peer_that_is_behind_keeps_them_and_is_named_with_the_bytes(
    db: Database, connection: Any
):
    pages = await make_pages(db)
    await write(connection, 1)
    await age(connection, pages, 21 * DAY)
    first = await last_position(connection, pages)
    await write(connection, 2)
    old = await age(connection, pages, 20 * DAY)
    await make_reader(db, str(first))
    await make_reader(db, str(await last_position(connection, pages)), THIRD)

    plan = await sweep_of(db).plan(now=now())
    report = await sweep_of(db).run(now=now())

    (held,) = [one for one in plan.held if one.partition == old]
    assert held.why.startswith(f"{PEER} has not read it since ")
    assert "peers remove" in held.why
    assert "--evict-after-days" in held.why
    assert held.bytes > 0
    assert held.since is not None
    assert old not in [step.partition for step in report.done]
    assert len(await log_of(connection)) == 1


@pytest.mark.parametrize(
    "spelling", ["https://own.example", "HTTPS://Own.Example/", "http://own.example"]
)
async def test_our_own_address_among_the_peers_keeps_nothing(
    db: Database, connection: Any, spelling: str
):
    pages = await make_pages(db)
    await write(connection, 1)
    old = await age(connection, pages, 20 * DAY)
    await connection.execute("insert into op_peers (host, added_at) values ($1, now())", spelling)

    await sweep_of(db).run(now=now())

    assert await state_of(connection, old) == "gone"


async def test_rows_of_removed_peers_keep_nothing(db: Database, connection: Any):
    pages = await make_pages(db)
    await write(connection, 1)
    old = await age(connection, pages, 20 * DAY)
    peer = await make_reader(db, "18423042")
    await connection.execute("delete from op_peers where id = $1", peer.id)

    await sweep_of(db).run(now=now())

    assert await state_of(connection, old) == "gone"


async def test_a_cap_evicts_whoever_is_behind_once(db: Database, connection: Any):
    pages = await make_pages(db)
    await write(connection, 1)
    first = await age(connection, pages, 20 * DAY)
    await write(connection, 2)
    second = await age(connection, pages, 18 * DAY)
    await make_reader(db, "")
    sweep = sweep_of(db, Limits(Policy(cap_age=10 * DAY)))

    await sweep.run(now=now())

    assert await state_of(connection, first) == await state_of(connection, second) == "gone"
    row = await connection.fetchrow("select evicted_at, evictions from op_peers")
    assert row["evicted_at"] is not None
    assert row["evictions"] == 1


async def test_a_table_has_its_own_limits_and_they_can_be_changed(db: Database, connection: Any):
    pages = await make_pages(db)
    await write(connection, 1)
    old = await age(connection, pages, 20 * DAY)
    await connection.execute("update op_tables set retention_days = 0")
    await sweep_of(db).run(now=now())
    assert await state_of(connection, old) == "attached"

    await connection.execute("update op_tables set retention_days = 19")
    await sweep_of(db, Limits()).run(now=now())
    assert await state_of(connection, old) == "gone"


async def test_a_dormant_table_loses_even_what_is_in_the_partition_in_use(
    db: Database, connection: Any
):
    pages = await make_pages(db)
    await write(connection, 1, 2)
    last = await last_position(connection, pages)
    await connection.execute("analyze ops")

    await sweep_of(db, DORMANT).run(now=later_today())

    assert await log_of(connection) == []
    assert (await marks_of(connection))[1] == str(last)
    assert await connection.fetchval("select dormant_ops from op_tables") == 2
    await write(connection, 3)
    assert [one.key for one in await log_of(connection)] == [[3]]


async def test_a_wide_partition_is_cut_and_keeps_what_is_not_due(db: Database, connection: Any):
    pages = await make_pages(db)
    for first in range(0, 2000, 100):
        await write(connection, *range(first, first + 100), text="x" * 1000)
    await age(connection, pages, 50 * DAY)
    await write(connection, 1, 2)
    await age(connection, pages, 3 * DAY)
    await merge_past(connection, pages)
    logged, names = await log_of(connection), await partition_names(connection, OPS)

    plan = await sweep_of(db).plan(now=now())
    report = await sweep_of(db).run(now=now())

    wide = f"ops_{pages}_wide"
    assert [(step.action, step.partition) for step in plan.steps] == [("cut the op log", wide)]
    assert report.postponed == []
    assert report.bytes_back > 1_000_000
    # The last transaction that began before may have ended later.
    assert await log_of(connection) == logged[-102:]
    assert (await marks_of(connection))[0] == logged[-103].ulid
    assert await partition_names(connection, OPS) == names


async def test_an_op_that_arrives_meanwhile_survives(db: Database, connections: Callable[[], Any]):
    """A plan is made, an op is written to the dormant table, and then the plan is carried out."""
    connection = await connections()
    await make_pages(db)
    await write(connection, 1)
    sweep, later = sweep_of(db, DORMANT), later_today()
    plan = await sweep.plan(now=later)
    assert [step.action for step in plan.steps] == ["drop dormant ops"]
    writer = await connections()

    async with writer.transaction():
        await write(writer, 2)
        report = await sweep.run(now=later)

    assert "drop dormant ops" not in [step.action for step in report.done]
    assert [one.key for one in await log_of(connection)] == [[1], [2]]
