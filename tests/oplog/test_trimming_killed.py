"""
`restante sweep` is killed with -9 in each step of the removal of ops; the next pass finishes.

A lock of another session makes the process wait in the step.  Then it is killed, as by the kernel
when memory runs out, and its session ends when Postgres notices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import soak
from oplog.captured import log_of
from oplog.killed import STOP_KEY, command, kill, make_stop_in_copies
from oplog.test_trimming_interrupted import make_old, read, stops_of
from oplog.trimmed import (
    DAY,
    WEEK,
    age,
    count_ops,
    make_pages,
    make_wide,
    merge_past,
    now,
    sweep_of,
    write,
)
from sweeps import (
    Stop,
    in_the_way,
    make_subjects,
    partition_names,
    state_of,
    until_stopped,
)

from restante.database.pool import Database
from restante.oplog import status
from restante.oplog.tables import OPS
from restante.oplog.trimming import plan
from restante.oplog.trimming.limits import Limits
from restante.retention import upkeep
from restante.wire import RetentionPlan

pytestmark = pytest.mark.anyio

Connect = Callable[[], Any]
# The indexes of a partition that was emptied, and must stay.
EMPTY_BYTES = 4 * 8192
only_in_soak = (pytest.mark.soak, soak.only_long)


@dataclass(frozen=True, slots=True)
class Scene:
    """A log of which something is due, and the partition that it is in."""

    log: str
    partition: str
    keeps: int  # so many ops stay


async def due_whole(db: Database, connection: Any) -> Scene:
    pages, old = await make_old(db, connection)
    return Scene(f"ops_{pages}", old, keeps=0)


async def due_in_use(db: Database, connection: Any) -> Scene:
    """All that is in the partition in use, but it must stay for what is written next."""
    pages = await make_pages(db)
    await write(connection, 1, 2)
    await age(connection, pages, 20 * DAY)
    used = await merge_past(connection, pages, days_ahead=2)
    return Scene(f"ops_{pages}", used, keeps=0)


async def due_in_part(db: Database, connection: Any) -> Scene:
    pages, wide = await make_wide(db, connection)
    await make_stop_in_copies(connection, f"ops_{pages}")
    # The last transaction before the cut stays too.
    return Scene(f"ops_{pages}", wide, keeps=102)


def stops_in(scene: Scene) -> dict[str, Stop]:
    """The steps of all three kinds of removal, in their order."""
    return {
        **stops_of(scene.log, scene.partition),
        "empty": Stop(f"lock table {scene.partition} in access share mode", "attached"),
        "copy": Stop(f"select pg_advisory_xact_lock({STOP_KEY})", "sealed"),
        "swap": Stop(f"lock table only {scene.log} in access share mode", "sealed"),
        "marks of a swap": Stop("select from op_tables for update", "sealed"),
    }


STEPS = [
    pytest.param(due_whole, "seal", marks=only_in_soak),
    pytest.param(due_whole, "marks", marks=only_in_soak),
    pytest.param(due_whole, "detach", marks=only_in_soak),
    pytest.param(due_whole, "half detached"),
    pytest.param(due_whole, "drop", marks=only_in_soak),
    pytest.param(due_in_use, "empty", marks=only_in_soak),
    pytest.param(due_in_part, "copy", marks=only_in_soak),
    pytest.param(due_in_part, "swap", marks=only_in_soak),
    pytest.param(due_in_part, "marks of a swap"),
]


@pytest.mark.parametrize(("make", "step"), STEPS)
async def test_a_sweep_that_is_killed_in_any_step_is_finished_by_the_next(
    db: Database, dsn: str, connections: Connect, make: Any, step: str
):
    connection = await connections()
    scene = await make(db, connection)
    await count_ops(connection, scene.partition)
    logged, names = await log_of(connection), await partition_names(connection, OPS)
    bytes_before = await bytes_of(connection, scene.log)
    planned = await sweep_of(db).plan(now=now())

    await kill_in(stops_in(scene)[step], scene, dsn, connections)
    page, between = await read(db), await sweep_of(db).plan(now=now())
    report = await sweep_of(db).run(now=now())

    whole = [one.ulid for one in logged][: len(page.records)]
    assert page.gap_tables == ("pages",) or [one.position.ulid for one in page.records] == whole
    assert page.gap_tables or page.records
    assert steps_on(between, scene)
    # A copy is committed before it is filled: a crash of Postgres forgets only what was not.
    has_copy = "drop a leftover" in {one.action for one in between.steps}
    assert has_copy == (step in {"drop", "copy", "swap", "marks of a swap"})
    assert report.postponed == []
    assert await log_of(connection) == logged[len(logged) - scene.keeps :]
    assert (await read(db)).gap_tables == ("pages",)
    goes = {scene.partition} if make is due_whole else set[str]()
    assert await partition_names(connection, OPS) == names - goes
    freed = bytes_before - await bytes_of(connection, scene.log)
    assert freed >= planned.bytes_to_come_back - EMPTY_BYTES
    assert freed > 0
    await assert_all_is_told(db, connection, scene, steps_on(planned, scene)[0].rows)


async def kill_in(stop: Stop, scene: Scene, dsn: str, connections: Connect) -> None:
    """Writers go on as soon as Postgres notices, although the lock is still held."""
    writer = await connections()
    await writer.execute("set lock_timeout = 500")
    holder = await in_the_way(stop, connections)
    async with command(dsn, "sweep", "--ops-retention-days", "7") as process:
        holder = await until_stopped(stop, holder, connections, scene.partition)
        found = await state_of(writer, scene.partition)
        await kill(process, holder)
        await writer.execute("begin; insert into public.pages values (-1); rollback")
    await holder.execute("rollback")
    assert found == stop.state


def steps_on(found: RetentionPlan, scene: Scene) -> list[Any]:
    return [one for one in found.steps if (one.partition or "").startswith(scene.log)]


async def bytes_of(connection: Any, log: str) -> int:
    """Of all that has to do with a log, left over or not."""
    return await connection.fetchval(
        "select sum(pg_total_relation_size(oid))::bigint from pg_class"
        " where relnamespace = 'restante'::regnamespace and relkind = 'r'"
        "   and starts_with(relname, $1 || '_')",
        log,
    )


async def assert_all_is_told(db: Database, connection: Any, scene: Scene, dropped: int) -> None:
    """Status and plan say what there is, and what is gone is counted once."""
    async with db.connection() as looking:
        planned = await plan.look(looking, Limits(), now=now())
    (table,) = (await status.look(db, now=now())).tables
    attached = await connection.fetchval(
        "select count(*) from pg_inherits where inhparent = $1::text::regclass", scene.log
    )
    assert planned.tables[0].removals == []
    assert table.partitions == attached
    assert table.dropped_ops == planned.tables[0].dropped_ops == dropped > 0


@pytest.mark.soak
@soak.only_long
async def test_a_server_that_is_killed_while_it_creates_partitions_leaves_none_behind(
    db: Database, dsn: str, connections: Connect, tmp_path: Path
):
    """And they are created by the next one."""
    connection, pages = await connections(), await make_pages(db)
    names = await partition_names(connection, OPS)
    await connection.execute(f"drop table {max(names)}")
    stop = Stop(f"lock table only ops_{pages} in share update exclusive mode", "")
    holder = await in_the_way(stop, connections)
    words = ("serve", "--port", "0", "--data-dir", str(tmp_path), "--ops-retention-days", "7")
    async with command(dsn, *words) as process:
        await until_stopped(stop, holder, connections, "")
        await kill(process, holder)
    await holder.execute("rollback")

    left = await partition_names(connection, OPS)
    await upkeep.create_partitions(db, make_subjects(log_limits=WEEK), now=now())

    assert left == names - {max(names)}
    assert await partition_names(connection, OPS) == names
