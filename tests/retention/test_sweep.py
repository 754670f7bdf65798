"""One pass of the sweep: what it counts, what it logs, when it fails, and the plan it follows."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import asyncpg
import pytest
import structlog
from factories import HOUR, make_upload
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
    make_old_feed,
    make_partition,
    make_sweep,
    put_back_acks,
    reasons,
    size_of,
    state_of,
    utc_now,
)
from waiting import until

from restante.database import partitions
from restante.database.partitions import Partition
from restante.database.pool import Connection, Database
from restante.delivery import store as uploads
from restante.delivery.subject import (
    DROP_BUCKET,
    MOVE_FILES,
    BucketContents,
    Buckets,
    DueUploads,
)
from restante.errors import DatabaseReadOnly
from restante.feed import store as feed
from restante.feed.rules import NewActivity
from restante.feed.subject import TRIM
from restante.ids import WorkspaceId
from restante.retention.rules import DROP_DETACHED, FINISH_DETACH
from restante.retention.subjects import RowSubject, Subjects
from restante.retention.sweep import Sweep

pytestmark = pytest.mark.anyio

BUCKET = f"chunks_{PAST:%Y%m%d_%H%M%S}"
DELETE = DueUploads.action


@pytest.fixture
async def db(db: Database) -> Database:
    """One bucket with a past range, and one for the current time."""
    async with db.connection() as connection:
        await make_partition(connection, CHUNKS)
    return db


@pytest.fixture
def sweep(db: Database) -> Sweep:
    return make_sweep(db)


class UploadsInPairs(DueUploads):
    """Deletes two uploads in each batch."""

    batch_size = 2


# Counted and logged ------------------------------------------------------------------------------


async def test_a_pass_counts_what_it_did_and_logs_it_once(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    acked = (await make_old(connection, workspace_id, 2))[0]
    await uploads.acknowledge(connection, workspace_id, acked, now=utc_now())
    await put_back_acks(connection)
    await expire(connection)
    size, tally = await size_of(connection, BUCKET), Tally()

    with structlog.testing.capture_logs() as logged:
        report = await sweep.run_observed(tally, now=utc_now())

    assert (report.acked, report.expired, report.bytes_back) == (1, 1, size)
    assert tally == Tally(rows=Counter(acked=1, expired=1), dropped=size)
    (line,) = logged
    assert (line["event"], line["acked"], line["expired"]) == ("swept", 1, 1)
    assert (line["bytes_back"], line["steps"]) == (size, [f"{DROP_BUCKET} {BUCKET}"])
    assert line["postponed"] == []


async def test_a_pass_that_did_nothing_logs_nothing(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    await make_upload(connection, workspace_id)
    await sweep.run_observed(Tally(), now=utc_now())
    tally = Tally()

    with structlog.testing.capture_logs() as logged:
        for _ in range(3):
            await sweep.run_observed(tally, now=utc_now())

    assert (tally, logged) == (Tally(), [])


async def test_a_failed_pass_is_counted_and_the_next_one_does_the_work(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    await make_old(connection, workspace_id)
    await expire(connection)
    tally = Tally()
    await connection.execute("alter table uploads rename to elsewhere")
    with pytest.raises(asyncpg.UndefinedTableError):
        await sweep.run_observed(tally, now=utc_now())
    await connection.execute("alter table elsewhere rename to uploads")

    await sweep.run_observed(tally, now=utc_now())

    assert (tally.failed, tally.rows) == (1, Counter(expired=1))
    assert await state_of(connection, BUCKET) == "gone"


async def test_rows_deleted_before_a_failure_are_counted_and_logged(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    """The seal fails, because its function is missing."""
    await make_old(connection, workspace_id, 3)
    await expire(connection)
    await connection.execute("alter function refuse_rows() rename to elsewhere")
    tally = Tally()

    with (
        structlog.testing.capture_logs() as logged,
        pytest.raises(asyncpg.UndefinedFunctionError),
    ):
        await sweep.run_observed(tally, now=utc_now())

    assert tally == Tally(rows=Counter(expired=3), failed=1)
    assert [(line["event"], line["expired"]) for line in logged] == [("swept", 3)]


async def test_a_cancelled_pass_counts_as_failed(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """The loop cancels a pass at its deadline; the rows that it had deleted are counted."""
    holder = await connections()
    await make_old(connection, workspace_id)
    await expire(connection)
    tally = Tally()

    async with locked(holder, BUCKET, "share update exclusive"):
        passing = asyncio.create_task(sweep.run_observed(tally, now=utc_now()))
        await until(lambda: is_waited_for(holder))
        passing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await passing

    assert tally == Tally(rows=Counter(expired=1), failed=1)
    assert actions(await sweep.run(now=utc_now())) == [DROP_BUCKET]


async def test_a_pass_out_of_time_leaves_the_rest_for_the_next(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """A backlog of millions must not reach the deadline, pass after pass."""
    subjects = Subjects(UploadsInPairs(ack_retention=HOUR), Buckets(width=HOUR, ack_retention=HOUR))
    await make_old(connection, workspace_id, 5)
    await expire(connection)
    tally = Tally()

    report = await Sweep(db, subjects, budget_seconds=0).run_observed(tally, now=utc_now())

    assert tally == Tally(rows=Counter(expired=2), left=2)
    assert set(reasons(report)) == {DELETE, DROP_BUCKET}
    assert all("time" in reason for reason in reasons(report).values())
    assert (await make_sweep(db).run(now=utc_now())).expired == 3


async def test_each_step_is_reported_as_it_ends(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """The command line shows the progress from this."""
    await make_old(connection, workspace_id)
    await expire(connection)
    seen: list[tuple[str, str]] = []

    async with locked(await connections(), BUCKET):
        await sweep.run(
            now=utc_now(), on_step=lambda step, outcome: seen.append((step.action, outcome))
        )

    first, second = seen
    assert first == (DELETE, "done")
    assert second[0] == DROP_BUCKET
    assert "holds a lock" in second[1]


async def test_a_connection_goes_back_to_the_pool_without_lock_and_lock_timeout(
    db: Database, connection: Any, connections: Any
):
    """The next statement on it waits for locks as long as any other."""
    async with locked(await connections(), BUCKET):
        await make_sweep(db).run(now=utc_now())

    async with db.connection() as one, db.connection() as other:
        for each in (one, other):
            assert await each.fetchval("show lock_timeout") == "0"
    held = await connection.fetchval(
        "select count(*) from pg_locks join pg_database on pg_database.oid = pg_locks.database"
        " where locktype = 'advisory' and datname = current_database()"
    )
    assert held == 0


# Retention ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("retention_seconds", [0, -3600])
async def test_without_a_retention_acknowledged_files_are_deleted_at_once(
    db: Database, connection: Any, workspace_id: WorkspaceId, retention_seconds: int
):
    """A negative one counts as none; unacknowledged files stay."""
    acked, waiting = await make_old(connection, workspace_id, 2)
    await uploads.acknowledge(connection, workspace_id, acked, now=utc_now())
    sweep = make_sweep(db, ack_retention=timedelta(seconds=retention_seconds))

    report = await sweep.run(now=utc_now())

    assert (report.acked, report.expired) == (1, 0)
    left = await connection.fetch("select file_id from uploads")
    assert [row["file_id"] for row in left] == [waiting]


async def test_an_acknowledged_file_keeps_its_bytes_during_its_retention(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    """It may be reopened."""
    (file_id,) = await make_old(connection, workspace_id)
    await uploads.acknowledge(connection, workspace_id, file_id, now=utc_now())

    report = await sweep.run(now=utc_now())

    assert actions(report) == []
    assert await state_of(connection, BUCKET) == "attached"


# The plan and the pass ---------------------------------------------------------------------------


async def test_a_pass_carries_out_the_steps_that_a_dry_run_shows(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """Every kind of step, in order: rows, leftovers, buckets that go and stay, the feed."""
    starts = [PAST + hour * HOUR for hour in range(1, 6)]
    moved, held, detaching, detached, empty = [
        await make_partition(connection, CHUNKS, start) for start in starts
    ]
    for _ in range(3):
        await feed.append(connection, workspace_id, NewActivity("m", "", b"{}"), now=utc_now())
    old_feed = await make_old_feed(connection, workspace_id, up_to=2)
    await make_old(connection, workspace_id, bucket=PAST)
    await expire(connection)
    await make_old(connection, workspace_id, 1, bucket=starts[0])
    await make_old(connection, workspace_id, 9, bucket=starts[0], expires_at=PAST)
    await make_old(connection, workspace_id, 2, bucket=starts[1])
    await partitions.detach(connection, attached_to("chunks", detached, CHUNKS))
    await detach_half_way(connections, attached_to("chunks", detaching, CHUNKS))

    plan = await sweep.plan(now=utc_now())
    report = await sweep.run(now=utc_now())

    assert [(step.action, step.partition) for step in plan.steps] == [
        (DELETE, None),
        (FINISH_DETACH, detaching),
        (DROP_DETACHED, detached),
        (DROP_BUCKET, BUCKET),
        (MOVE_FILES, moved),
        (DROP_BUCKET, moved),
        (DROP_BUCKET, empty),
        (TRIM, old_feed),
    ]
    assert [one.partition for one in plan.held] == [held]
    assert report.done == plan.steps
    assert report.postponed == []
    assert report.bytes_back == plan.bytes_to_come_back


class WritingLook(RowSubject):
    """Writes while it looks."""

    name = "writing"
    tables = ("space_samples",)
    action = "write"
    outcomes = ("written",)

    async def count_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        await connection.execute("insert into space_samples values ($1, 1)", now)
        return {}

    async def delete_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        return {}


async def test_a_dry_run_refuses_a_subject_that_writes(db: Database):
    sweep = Sweep(db, Subjects(WritingLook()), budget_seconds=20)

    with pytest.raises(DatabaseReadOnly):
        await sweep.plan(now=utc_now())


class WatchedBuckets(Buckets):
    """Records how it is asked to look, and in what transaction."""

    def __init__(self) -> None:
        super().__init__(width=HOUR, ack_retention=HOUR)
        self.closely: list[bool] = []
        self.transactions: list[tuple[str, object]] = []

    async def contents(
        self, connection: Connection, past: Sequence[Partition], *, now: datetime, closely: bool
    ) -> Mapping[str, BucketContents]:
        found = await super().contents(connection, past, now=now, closely=closely)
        row = await connection.fetchrow(
            "select current_setting('transaction_read_only'), pg_current_xact_id_if_assigned()"
        )
        assert row
        self.transactions.append(tuple(row))
        self.closely.append(closely)
        return found


async def test_a_dry_run_is_one_read_only_transaction_without_an_id(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """Postgres assigns an id with the first write; the look at the buckets comes last."""
    await make_old(connection, workspace_id, 2)
    await expire(connection)
    watched = WatchedBuckets()
    subjects = Subjects(DueUploads(ack_retention=HOUR), watched)

    plan = await Sweep(db, subjects, budget_seconds=20).plan(now=utc_now())

    assert [step.action for step in plan.steps] == [DELETE, DROP_BUCKET]
    assert watched.transactions == [("on", None)]


async def test_an_idle_pass_does_not_look_closely(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """Counting the live files of a day of buckets is expensive; it is done when a row is due."""
    watched = WatchedBuckets()
    subjects = Subjects(DueUploads(ack_retention=HOUR), watched)
    sweep = Sweep(db, subjects, budget_seconds=20)
    files = await make_old(connection, workspace_id, 3)

    for _ in range(3):
        await sweep.run_observed(Tally(), now=utc_now())
    await expire(connection, files[0])
    for _ in range(2):
        await sweep.run_observed(Tally(), now=utc_now())

    assert watched.closely == [True, False, False, True, False]
