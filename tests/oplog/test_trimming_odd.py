"""Clocks that jump, partitions that an operator has attached, and other things that seldom are."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from oplog.captured import log_of
from oplog.nodes import PEER
from oplog.trimmed import (
    DAY,
    WEEK,
    age,
    make_pages,
    make_reader,
    now,
    sweep_of,
    write,
)
from sweeps import make_subjects, state_of

from restante.database import partitions
from restante.database.pool import Database
from restante.oplog.positions import START
from restante.oplog.tables import OPS
from restante.oplog.tracking import capture, leftovers
from restante.oplog.trimming import picture
from restante.oplog.trimming.fates import fates
from restante.oplog.trimming.gate import Mark, Piece, TableLog
from restante.oplog.trimming.limits import Limits, Policy
from restante.retention import upkeep

pytestmark = pytest.mark.anyio

HOUR, YEAR = timedelta(hours=1), timedelta(days=365)
CAP = Limits(Policy(cap_age=10 * DAY))


@pytest.fixture
async def connection(connections: Callable[[], Any]) -> Any:
    return await connections()


# Clocks


async def notes(connection: Any, *moments: datetime) -> None:
    """A server notes these times."""
    for moment in moments:
        await picture.note_time(connection, now=moment)


async def steps(db: Database, limits: Limits, at: datetime) -> list[str]:
    plan = await sweep_of(db, limits).plan(now=at)
    return [step.partition for step in plan.steps if step.partition]


@pytest.mark.parametrize("limits", [WEEK, CAP, Limits(dormant_after=90 * DAY)])
async def test_nothing_ages_at_once_when_the_clock_jumps(
    db: Database, connection: Any, limits: Limits
):
    """Half an hour is enough to set it right; if nobody does, it is the time."""
    await make_pages(db)
    await write(connection, 1)
    present = now()
    future = present + YEAR
    await notes(connection, present - timedelta(minutes=1), present)

    assert await steps(db, limits, future) == []
    await notes(connection, future)
    assert await steps(db, limits, future + HOUR / 2) == []
    # It goes back to what it was, and on.
    await notes(connection, present + HOUR)
    assert await steps(db, limits, present + HOUR) == []

    await notes(connection, future, *(future + minutes * HOUR / 2 for minutes in range(1, 4)))
    assert await steps(db, limits, future + 3 * HOUR / 2) != []


async def test_a_peer_is_not_evicted_because_no_server_ran(db: Database, connection: Any):
    pages = await make_pages(db)
    await write(connection, 1)
    await age(connection, pages, 20 * DAY)
    peer = await make_reader(db, "")
    await connection.execute(
        "update op_peers set evict_after_days = 3, confirmed_at = $1", now() - 4 * DAY
    )
    await notes(connection, now() - 4 * DAY)

    assert await steps(db, WEEK, now()) == []
    await notes(connection, now())
    assert await steps(db, WEEK, now()) == []
    assert peer.host == PEER

    # An hour later it has not come.
    await notes(connection, now() + HOUR / 2, now() + HOUR)
    assert await steps(db, WEEK, now() + HOUR) != []


async def test_a_time_that_goes_on_ages_ops_as_before(db: Database, connection: Any):
    pages = await make_pages(db)
    await write(connection, 1)
    old = await age(connection, pages, 20 * DAY)
    await notes(
        connection, *(now() - minutes * timedelta(minutes=1) for minutes in range(50, 0, -1))
    )

    assert await steps(db, WEEK, now()) == [old]


# Partitions of an operator


async def test_a_partition_with_any_bounds_is_trimmed_or_left_but_breaks_nothing(
    db: Database, connection: Any
):
    """A big old log that was attached has the bounds that somebody wrote."""
    pages = await make_pages(db)
    log = f"ops_{pages}"
    await connection.execute(
        f"""create table "Old {{ops}}'" partition of {log} for values from (minvalue)"""
        " to ('2026-01-01')"
    )
    await connection.execute(
        f"create table later partition of {log} for values from ('2090-01-01') to ('infinity')"
    )
    await connection.execute(f"create table strays partition of {log} default")
    await write(connection, 1)
    await connection.execute(
        f"with moved as (delete from {log} returning *)"
        f" insert into {log} (table_id, arrived_at, era, xid, ulid, n, origin, action, approximate,"
        "   key_hash, old_hash, key, data)"
        " select table_id, '2025-06-01', era, xid, ulid, n, origin, action, approximate, key_hash,"
        "   old_hash, key, data from moved"
    )
    await write(connection, 2)

    report = await sweep_of(db).run(now=now())
    plan = await sweep_of(db).plan(now=now())
    assert report.postponed == report.done == []
    (held,) = [one for one in plan.held if one.partition == "Old {ops}'"]
    assert held.why.startswith("strays is a default partition")
    await connection.execute(f"alter table {log} detach partition strays")
    report = await sweep_of(db).run(now=now())
    await upkeep.create_partitions(db, make_subjects(), now=now() + 40 * DAY)

    assert report.postponed == []
    assert [one.key for one in await log_of(connection)] == [[2]]
    assert await connection.fetchval("select to_regclass('later') is not null")


async def test_a_part_that_was_left_over_goes_when_its_table_is_untracked(
    db: Database, connection: Any
):
    pages = await make_pages(db)
    await write(connection, 1)
    old = await age(connection, pages, 20 * DAY)
    await connection.execute(f"alter table ops_{pages} detach partition {old}")

    await capture.untrack(db, "pages")

    assert await state_of(connection, old) == "gone"
    await leftovers.drop(db)


async def test_a_table_that_is_missing_is_trimmed_as_well(db: Database, connection: Any):
    pages = await make_pages(db)
    await write(connection, 1)
    old = await age(connection, pages, 20 * DAY)
    await connection.execute("drop table public.pages")

    await sweep_of(db).run(now=now())

    assert await state_of(connection, old) == "gone"


# Peers


async def test_a_peer_that_may_see_a_table_later_keeps_its_ops_from_then_on(
    db: Database, connection: Any
):
    pages = await make_pages(db)
    await write(connection, 1)
    await age(connection, pages, 20 * DAY)
    await make_reader(db, "", tables=["others"])
    assert await steps(db, WEEK, now()) != []

    await connection.execute("update op_peers set tables = null")

    assert await steps(db, WEEK, now()) == []


@pytest.mark.parametrize(
    "host", ["http://[::1]:8080", "https://x.example/\u202e'; drop--", "http://" + 200 * "x"]
)
async def test_a_host_with_an_odd_name_is_named_in_one_line(
    db: Database, connection: Any, host: str
):
    pages = await make_pages(db)
    await write(connection, 1)
    await age(connection, pages, 20 * DAY)
    await connection.execute("insert into op_peers (host, added_at) values ($1, now())", host)

    (held,) = (await sweep_of(db).plan(now=now())).held

    assert held.why.isprintable()
    assert host[:12] in held.why


async def test_two_servers_with_different_settings_each_do_what_they_are_told(
    db: Database, connection: Any
):
    pages = await make_pages(db)
    await write(connection, 1)
    old = await age(connection, pages, 20 * DAY)
    month = Limits(Policy(retention=30 * DAY))

    await sweep_of(db, month).run(now=now())
    assert await state_of(connection, old) == "attached"
    await sweep_of(db, WEEK).run(now=now())
    assert await state_of(connection, old) == "gone"


# Many


def test_a_thousand_partitions_of_many_tables_are_decided_about_at_once():
    """By the bytes of all tables together the oldest go, until the rest fits."""
    mib = 1024 * 1024
    start = now() - 400 * DAY
    logs = [
        TableLog(f"t{table}", Policy(), [_piece(table, n, start + n * DAY) for n in range(50)])
        for table in range(20)
    ]
    marks = [Mark("http://a", str(_last(99)), str(_last(99)))]

    found = fates(logs, marks, Limits(Policy(cap_bytes=600 * mib)), now=now())

    assert len(found) == 400
    assert {int(name.split("_")[2]) for name in found} == set(range(20))


def _last(number: int) -> Any:
    era = round((now() - 500 * DAY).timestamp() * 1_000_000)
    return replace(START, era=era, xid=number)


def _piece(table: int, number: int, start: datetime) -> Piece:
    span = partitions.Span(start, start + DAY)
    state = partitions.PartitionState.ATTACHED
    name, parent = f"ops_{table}_{number}", f"ops_{table}"
    partition = partitions.Partition(OPS.name, name, state, span, parent, 1024 * 1024)
    return Piece(partition, _last(number), start, start)


async def test_hundreds_of_partitions_are_probed_without_as_many_locks(
    db: Database, connection: Any
):
    pages = await make_pages(db)
    await write(connection, 1)
    async with connection.transaction():
        for number in range(120):
            await partitions.create(
                connection,
                OPS,
                partitions.Span(
                    datetime.fromisoformat("2025-01-01T00:00+00:00") + number * HOUR,
                    datetime.fromisoformat("2025-01-01T00:00+00:00") + (number + 1) * HOUR,
                ),
                parent=f"ops_{pages}",
            )
    names = [one.name for one in await partitions.partitions_of(connection, [OPS])]

    ends = await picture.ends_of(connection, names)

    assert len(names) > 120
    assert [row["last_at"] is not None for row in ends.values()] == [True]
