"""The log on a disk that is almost full, or full: what is freed, in which order, and what waits."""

from collections.abc import Callable
from typing import Any

import pytest
from oplog.captured import log_of, track
from oplog.trimmed import DAY, WEEK, age, make_wide, now, sweep_of
from sweeps import make_subjects, partition_names

from restante.database.pool import Database
from restante.oplog.tables import OPS
from restante.retention.disk import Disk
from restante.retention.sweep import DISK_FULL, Sweep

pytestmark = pytest.mark.anyio


async def make_notes(db: Database, connection: Any) -> tuple[str, str]:
    """A log with an older part, and a newer one that is much larger."""
    await connection.execute("create table public.notes (id integer primary key, text text)")
    notes, names = (await track(db, "notes")).table.id, list[str]()
    for days, count in ((21, 10), (20, 500)):
        await connection.execute(
            "insert into public.notes select n, repeat('x', 500) from generate_series(1, $1) as n"
            " on conflict (id) do update set text = excluded.text || 'x'",
            count,
        )
        names.append(await age(connection, notes, days * DAY))
    return names[0], names[1]


async def test_on_a_low_disk_no_log_is_written_anew_and_the_oldest_part_goes_first(
    db: Database, connections: Callable[[], Any]
):
    """However large the newer one is: an old op must not outlive a newer one of its record."""
    connection = await connections()
    _, wide = await make_wide(db, connection)
    small, large = await make_notes(db, connection)
    db.disk_full_at = float("inf")
    sweep = Sweep(db, make_subjects(log_limits=WEEK), budget_seconds=20, disk=Disk(db))

    plan = await sweep.plan(now=now())

    assert [step.partition for step in plan.steps] == [small, large]
    (held,) = [one for one in plan.held if one.partition == wide]
    assert held.why.startswith("what stays of it cannot be written anew")


async def test_a_cut_that_finds_no_space_leaves_the_log_as_it_was(
    db: Database, connections: Callable[[], Any]
):
    connection = await connections()
    pages, wide = await make_wide(db, connection)
    names, logged = await partition_names(connection, OPS), await log_of(connection)
    # The copy has the constraints of the log, and this one fails as a full disk does.
    await connection.execute(
        "create function no_space() returns boolean language plpgsql as"
        " $$ begin raise sqlstate '53100'; end $$"
    )
    await connection.execute(
        f"alter table ops_{pages} add constraint space check (no_space()) not valid"
    )

    report = await sweep_of(db).run(now=now())

    assert [(one.step.partition, one.reason) for one in report.postponed] == [(wide, DISK_FULL)]
    assert await partition_names(connection, OPS) == names
    assert await log_of(connection) == logged

    await connection.execute(f"alter table ops_{pages} drop constraint space")
    await sweep_of(db).run(now=now())
    assert len(await log_of(connection)) < len(logged)
    assert await partition_names(connection, OPS) == names
