"""A pass that meets locks, and several passes at once: nothing waits for long, nothing is lost."""

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Any

import asyncpg
import pytest
import structlog
from factories import HOUR, Counters, counters, make_answer, make_upload
from sweeps import (
    CHUNKS,
    PAST,
    Tally,
    actions,
    attached_to,
    detach_half_way,
    expire,
    is_waited_for,
    locked,
    make_old,
    make_partition,
    make_sweep,
    partition_names,
    reasons,
    size_of,
    state_of,
    utc_now,
)
from waiting import until

from restante.database import locks
from restante.database.pool import Database
from restante.delivery.rules import bucket_of
from restante.delivery.subject import DROP_BUCKET, Buckets, DueUploads, ExpiredAnswers
from restante.ids import WorkspaceId
from restante.retention.rules import FINISH_DETACH
from restante.retention.subjects import Subjects
from restante.retention.sweep import SWEPT_ELSEWHERE, Sweep

pytestmark = pytest.mark.anyio

BUCKET = f"chunks_{PAST:%Y%m%d_%H%M%S}"
DELETE = DueUploads.action
# Shorter than the lock timeout of a step: a writer that queues behind a step fails with this.
WRITER_LOCK_TIMEOUT_MILLISECONDS = 1000


@pytest.fixture
async def db(db: Database) -> Database:
    """One bucket with a past range, and one for the current time."""
    async with db.connection() as connection:
        await make_partition(connection, CHUNKS)
    return db


@pytest.fixture
def sweep(db: Database) -> Sweep:
    return make_sweep(db)


def buckets_only(db: Database) -> Sweep:
    return Sweep(db, Subjects(Buckets(width=HOUR, ack_retention=HOUR)), budget_seconds=20)


# Several servers ---------------------------------------------------------------------------------


class UploadsInThrees(DueUploads):
    """Deletes three uploads in each batch."""

    batch_size = 3


async def test_passes_at_once_delete_every_row_and_drop_every_bucket_once(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    attached = await partition_names(connection, CHUNKS) - {BUCKET}
    for hour in range(1, 4):
        await make_partition(connection, CHUNKS, PAST + hour * HOUR)
        await make_old(connection, workspace_id, 10, data=b"x", bucket=PAST + hour * HOUR)
    await expire(connection)
    subjects = Subjects(
        UploadsInThrees(ack_retention=HOUR), Buckets(width=HOUR, ack_retention=HOUR)
    )
    sweeps, tally = [Sweep(db, subjects, budget_seconds=20) for _ in range(3)], Tally()

    for _ in range(2):
        await asyncio.gather(*(sweep.run_observed(tally, now=utc_now()) for sweep in sweeps))

    assert (tally.rows, tally.failed) == (Counter(expired=30), 0)
    assert await partition_names(connection, CHUNKS) == attached
    assert await counters(connection, workspace_id) == Counters(30, 0, 0)


async def test_a_partition_that_another_server_dropped_since_the_look_is_not_dropped_again(
    db: Database, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """Our pass has looked, and waits in its first step while the other server drops the bucket."""
    holder, tally = await connections(), Tally()
    await make_upload(connection, workspace_id, answer=make_answer(expires_at=PAST))
    async with locked(holder, "answers", "exclusive"):
        passing = asyncio.create_task(make_sweep(db).run_observed(tally, now=utc_now()))
        await until(lambda: is_waited_for(holder))
        other = await buckets_only(db).run(now=utc_now())
    report = await passing

    assert actions(other) == [DROP_BUCKET]
    assert (actions(report), report.postponed) == ([ExpiredAnswers.action], [])
    assert (tally.failed, tally.dropped) == (0, 0)


async def test_a_server_that_finds_another_at_the_partitions_deletes_rows(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    await make_old(connection, workspace_id, 2)
    await expire(connection)
    async with locks.held_if_free(await connections(), "sweep"):
        meanwhile = await sweep.run(now=utc_now())

    afterwards = await sweep.run(now=utc_now())

    assert (actions(meanwhile), meanwhile.expired) == ([DELETE], 2)
    assert reasons(meanwhile) == {DROP_BUCKET: SWEPT_ELSEWHERE}
    assert actions(afterwards) == [DROP_BUCKET]


async def test_a_pass_that_only_finds_another_server_is_neither_logged_nor_an_obstacle(
    sweep: Sweep, connection: Any, connections: Any
):
    """The caller sees it in the report; alerts do not fire, because the work gets done."""
    tally = Tally()
    async with locks.held_if_free(await connections(), "sweep"):
        with structlog.testing.capture_logs() as logged:
            report = await sweep.run_observed(tally, now=utc_now())

    assert reasons(report) == {DROP_BUCKET: SWEPT_ELSEWHERE}
    assert [line for line in logged if line["log_level"] != "debug"] == []
    assert tally == Tally()
    assert await state_of(connection, BUCKET) == "attached"


# Locks of other sessions -------------------------------------------------------------------------


LOCKS = [
    pytest.param(BUCKET, "access share", "detaching", id="a long read of the bucket"),
    pytest.param(BUCKET, "share update exclusive", "attached", id="a vacuum of the bucket"),
    pytest.param("only chunks", "access share", "detaching", id="a long read of the table"),
    pytest.param("only chunks", "share update exclusive", "sealed", id="an analyze of the table"),
]


@pytest.mark.parametrize(("table", "mode", "state"), LOCKS)
async def test_a_step_that_meets_a_lock_is_postponed_and_writers_do_not_wait(
    *,
    sweep: Sweep,
    connection: Any,
    workspace_id: WorkspaceId,
    connections: Any,
    table: str,
    mode: str,
    state: str,
):
    """The pass ends while the lock is still held; the next one finishes."""
    writer, tally, ended = await connections(), Tally(), asyncio.Event()
    await writer.execute(f"set lock_timeout = {WRITER_LOCK_TIMEOUT_MILLISECONDS}")
    async with locked(await connections(), table, mode):
        writing = asyncio.create_task(keep_publishing(writer, workspace_id, ended))
        report = await sweep.run_observed(tally, now=utc_now())
        ended.set()
        written = await writing
        found = await state_of(connection, BUCKET)

    afterwards = await sweep.run(now=utc_now())

    assert "holds a lock" in reasons(report)[DROP_BUCKET]
    assert (tally.left, tally.failed, found) == (1, 0, state)
    assert written > 0
    assert not afterwards.postponed
    assert await state_of(connection, BUCKET) == "gone"


async def keep_publishing(writer: Any, workspace_id: WorkspaceId, ended: asyncio.Event) -> int:
    """Publish one file after the other; how many.  A wait for a lock raises."""
    written = 0
    while not ended.is_set():
        now = utc_now()
        await make_upload(writer, workspace_id, bucket=bucket_of(now), now=now)
        written += 1
    return written


async def test_a_locked_partition_is_named_by_the_dry_run_and_by_the_report(
    sweep: Sweep, connection: Any, connections: Any
):
    """Its size cannot be read.  The step is not tried: that would wait for the lock timeout."""
    free = await make_partition(connection, CHUNKS, PAST + HOUR)
    tally = Tally()
    async with locked(await connections(), BUCKET, "access exclusive"):
        plan = await sweep.plan(now=utc_now())
        report = await sweep.run_observed(tally, now=utc_now())

    afterwards = await sweep.run_observed(Tally(), now=utc_now())

    (held,) = plan.held
    assert (held.partition, held.subject, held.action) == (BUCKET, "buckets", DROP_BUCKET)
    assert held.why == "another session holds a lock on it"
    assert [step.partition for step in plan.steps] == [free]
    assert report.done == plan.steps
    (postponed,) = report.postponed
    assert (postponed.step.partition, postponed.step.action) == (BUCKET, DROP_BUCKET)
    assert postponed.reason == held.why
    assert tally.left == 1
    assert [step.partition for step in afterwards.done] == [BUCKET]


async def test_a_locked_leftover_is_named_by_the_dry_run_and_by_the_report(
    sweep: Sweep, connection: Any, connections: Any
):
    """A removal that was interrupted before, on a table that another session has locked now."""
    await detach_half_way(connections, attached_to("chunks", BUCKET, CHUNKS))
    tally = Tally()
    async with locked(await connections(), BUCKET, "access exclusive"):
        plan = await sweep.plan(now=utc_now())
        report = await sweep.run_observed(tally, now=utc_now())

    assert [(held.partition, held.action) for held in plan.held] == [(BUCKET, FINISH_DETACH)]
    assert [one.step.partition for one in report.postponed] == [BUCKET]
    assert tally.left == 1
    assert actions(await sweep.run(now=utc_now())) == [FINISH_DETACH]


async def test_a_detach_that_cannot_end_postpones_the_other_partitions_of_its_table(
    sweep: Sweep, connection: Any, connections: Any
):
    """Postgres detaches one partition of a table at a time.  Only the first waits for the lock."""
    for hour in range(1, 4):
        await make_partition(connection, CHUNKS, PAST + hour * HOUR)
    tally = Tally()
    async with locked(await connections(), "only chunks"):
        blocked = [await sweep.run_observed(tally, now=utc_now()) for _ in range(2)]

    report = await sweep.run(now=utc_now())

    for one in blocked:
        first, *others = [postponed.reason for postponed in one.postponed]
        assert "holds a lock" in first
        assert set(others) == {"another partition of its table is being detached"}
    assert (tally.failed, tally.left) == (0, 8)
    assert actions(report) == [FINISH_DETACH, *[DROP_BUCKET] * 3]
    assert len(await partition_names(connection, CHUNKS)) == len(
        await connection.fetch("select from pg_inherits where inhparent = 'chunks'::regclass")
    )


async def test_a_detach_is_finished_although_another_session_asks_for_the_size(
    sweep: Sweep, connection: Any, connections: Any
):
    """Each waits for the other until Postgres ends one as a deadlock; the partition goes anyway."""
    curious = await connections()
    await detach_half_way(connections, attached_to("chunks", BUCKET, CHUNKS))
    looking = curious.transaction(isolation="repeatable_read")
    await looking.start()
    await curious.execute("select from workspaces")
    passing = asyncio.create_task(sweep.run(now=utc_now()))
    await until(lambda: is_waited_for(curious))

    with suppress(asyncpg.DeadlockDetectedError):
        await size_of(curious, BUCKET)
    await looking.rollback()
    report = await passing

    assert (actions(report), report.postponed) == ([FINISH_DETACH], [])
    assert await state_of(connection, BUCKET) == "gone"


async def test_a_snapshot_that_is_held_elsewhere_does_not_block_the_sweep(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """A backup of other tables runs for an hour; buckets are dropped meanwhile."""
    other = await connections()
    await make_old(connection, workspace_id)
    await expire(connection)
    async with other.transaction(isolation="repeatable_read", readonly=True):
        await other.fetch("select * from workspaces")

        report = await sweep.run(now=utc_now())

    assert actions(report) == [DELETE, DROP_BUCKET]


async def test_a_locked_row_keeps_its_bucket_and_nothing_else(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """A client holds the row; the pass does not wait for it."""
    client = await connections()
    held, _ = await make_old(connection, workspace_id, 2)
    free = await make_partition(connection, CHUNKS, PAST + HOUR)
    await make_old(connection, workspace_id, bucket=PAST + HOUR)
    await expire(connection)
    lock = client.transaction()
    await lock.start()
    await client.execute("select from uploads where file_id = $1 for update", held)

    report = await sweep.run(now=utc_now())
    await lock.rollback()
    afterwards = await sweep.run(now=utc_now())

    assert report.expired == 2
    assert [step.partition for step in report.done if step.partition] == [free]
    assert "live files are still in it" in reasons(report)[DROP_BUCKET]
    assert (afterwards.expired, actions(afterwards)[-1]) == (1, DROP_BUCKET)
    assert await state_of(connection, BUCKET) == "gone"
