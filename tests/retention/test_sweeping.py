"""
One pass of the sweep on real tables: what is due goes, the disk comes back, nothing live is lost.

The clock is moved by data.  Every race has its connections and its order; what interrupts a step is
a failure right after the step's effect, or the end of the session that was at it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import asyncpg
import pytest
import structlog
from factories import (
    DAY,
    HOUR,
    NOW,
    ROOMY,
    Content,
    Counters,
    counters,
    make_message,
    make_parts,
    make_reservation,
    make_upload,
    make_workspace,
)
from sweeps import (
    GIVES_UP_SECONDS,
    KIB,
    PAST,
    WRITER_STALL_SECONDS,
    Tally,
    expire,
    locked,
    make_old,
    make_old_feed,
    make_partition,
    make_sweep,
    partition_names,
    put_back_acks,
    state_of,
)
from waiting import until

from restante.database import locks
from restante.database import partitions as leaves
from restante.database.partitions import CHUNKS
from restante.database.pool import Database
from restante.delivery import quota_store as quotas
from restante.delivery import store as uploads
from restante.delivery.fetch import Delivery, NewFile
from restante.delivery.rules import CHUNK_BYTES, MIB, Swept, bucket_of
from restante.errors import CursorGone, DatabaseUnavailable, UploadGone, UploadTooSlow
from restante.feed import store as feed
from restante.feed.rules import EVERYTHING
from restante.feed.service import Feed, Query
from restante.ids import FileId, WorkspaceId
from restante.retention import store as retention
from restante.retention.rules import Kind
from restante.retention.sweep import Report, Sweeping

pytestmark = pytest.mark.anyio

BUCKET = f"chunks_{PAST:%Y%m%d_%H%M%S}"


@pytest.fixture
async def db(db_with_partitions: Database) -> Database:
    """One bucket whose time is over, and those around the clock."""
    async with db_with_partitions.connection() as connection:
        await make_partition(connection, CHUNKS)
    return db_with_partitions


@pytest.fixture
async def connection(db: Database, connections: Any) -> Any:
    return await connections()


@pytest.fixture
async def workspace_id(connection: Any) -> WorkspaceId:
    return await make_workspace(connection)


@pytest.fixture
def sweeping(db: Database) -> Sweeping:
    return make_sweep(db)


@pytest.fixture
def delivery(db: Database) -> Delivery:
    return make_parts(db).delivery


def kinds(report: Report) -> list[Kind]:
    return [step.kind for step in report.done]


def postponed(report: Report) -> dict[Kind, str]:
    return {step.kind: why for step, why in report.postponed}


async def content_of(delivery: Delivery, workspace_id: WorkspaceId, file_id: FileId) -> bytes:
    upload = await delivery.get(workspace_id, file_id)
    return b"".join([piece async for piece in delivery.read(upload, 0, upload.size - 1)])


async def size_of(connection: Any, leaf: str) -> int:
    return await connection.fetchval("select pg_total_relation_size($1::text::regclass)", leaf)


# What is counted and said


async def test_a_pass_counts_what_it_did_and_says_so_once(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId
):
    acked = (await make_old(connection, workspace_id, 2))[0]
    await uploads.acknowledge(connection, workspace_id, acked, now=datetime.now(UTC))
    await put_back_acks(connection)
    await expire(connection)
    size, tally = await size_of(connection, BUCKET), Tally()

    with structlog.testing.capture_logs() as logged:
        report = await sweeping.one_pass(tally)

    assert report.swept == Swept(acked=1, expired=1)
    assert tally == Tally(acked=1, expired=1, dropped=size)
    (line,) = logged
    assert (line["event"], line["acked"], line["expired"]) == ("swept", 1, 1)
    assert (line["bytes_back"], line["dropped"]) == (size, [BUCKET])
    assert line["postponed"] == []


async def test_a_pass_that_did_nothing_says_nothing(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId
):
    await make_upload(connection, workspace_id)
    await sweeping.one_pass(Tally())
    tally = Tally()

    with structlog.testing.capture_logs() as logged:
        for _ in range(3):
            await sweeping.one_pass(tally)

    assert (tally, logged) == (Tally(), [])


@pytest.mark.parametrize("retention_seconds", [0, -3600])
async def test_without_a_retention_the_acknowledged_go_at_once(
    db: Database, connection: Any, workspace_id: WorkspaceId, retention_seconds: int
):
    """A negative one counts as none; those that wait stay."""
    acked, waiting = await make_old(connection, workspace_id, 2)
    await uploads.acknowledge(connection, workspace_id, acked, now=datetime.now(UTC))
    sweeping = make_sweep(db, ack_retention=timedelta(seconds=retention_seconds))

    report = await sweeping.sweep()

    assert report.swept == Swept(acked=1)
    assert [row["file_id"] for row in await connection.fetch("select file_id from uploads")] == [
        waiting
    ]


async def test_within_its_retention_an_acknowledged_file_keeps_its_bytes(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId
):
    """It may be reopened."""
    (file_id,) = await make_old(connection, workspace_id)
    await uploads.acknowledge(connection, workspace_id, file_id, now=datetime.now(UTC))

    report = await sweeping.sweep()

    assert kinds(report) == []
    assert await state_of(connection, BUCKET) == "attached"


async def test_a_failed_pass_is_counted_and_the_next_one_does_the_work(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId
):
    await make_old(connection, workspace_id)
    await expire(connection)
    tally = Tally()
    await connection.execute("alter table uploads rename to elsewhere")
    with pytest.raises(asyncpg.UndefinedTableError):
        await sweeping.one_pass(tally)
    await connection.execute("alter table elsewhere rename to uploads")

    await sweeping.one_pass(tally)

    assert (tally.failed, tally.expired) == (1, 1)
    assert await state_of(connection, BUCKET) == "gone"


async def test_what_was_deleted_counts_even_if_the_pass_fails_after_that(
    sweeping: Sweeping,
    connection: Any,
    workspace_id: WorkspaceId,
    monkeypatch: pytest.MonkeyPatch,
):
    await make_old(connection, workspace_id, 3)
    await expire(connection)
    tally = Tally()

    with monkeypatch.context() as patched, structlog.testing.capture_logs() as logged:
        patched.setattr(retention, "seal", failing())
        with pytest.raises(Interrupted):
            await sweeping.one_pass(tally)

    assert tally == Tally(expired=3, failed=1)
    assert [(line["event"], line["expired"]) for line in logged] == [("swept", 3)]


async def test_a_pass_that_is_cut_counts_as_failed(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """The loop cuts a pass at its deadline; what it had deleted is counted all the same."""
    reader = await connections()
    await make_old(connection, workspace_id)
    await expire(connection)
    tally = Tally()

    async with locked(reader, BUCKET, "share update exclusive"):
        passing = asyncio.create_task(sweeping.one_pass(tally))
        await until(lambda: somebody_waits_for(reader))
        passing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await passing

    assert tally == Tally(expired=1, failed=1)
    assert kinds(await sweeping.sweep()) == [Kind.DROP_BUCKET]


async def somebody_waits_for(holder: Any) -> bool:
    return await holder.fetchval(
        "select exists (select from pg_stat_activity"
        " where pg_backend_pid() = any(pg_blocking_pids(pid)))"
    )


async def test_a_pass_whose_time_is_over_leaves_the_rest_for_the_next(
    db: Database, connection: Any, workspace_id: WorkspaceId, monkeypatch: pytest.MonkeyPatch
):
    """A backlog of millions must not run into the deadline, pass after pass."""
    monkeypatch.setattr(uploads, "SWEEP_BATCH", 2)
    await make_old(connection, workspace_id, 5)
    await expire(connection)
    tally = Tally()

    report = await make_sweep(db, budget_seconds=0).one_pass(tally)

    assert tally == Tally(expired=2, left=2)
    assert set(postponed(report)) == {Kind.DELETE_UPLOADS, Kind.DROP_BUCKET}
    assert "time" in postponed(report)[Kind.DELETE_UPLOADS]
    assert (await make_sweep(db).sweep()).swept == Swept(expired=3)


# Several at once, and clients in the way


async def test_two_sweepers_at_once_delete_and_drop_everything_once(
    db: Database, connection: Any, workspace_id: WorkspaceId, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(uploads, "SWEEP_BATCH", 3)
    attached = await partition_names(connection, CHUNKS) - {BUCKET}
    for hour in range(1, 4):
        await make_partition(connection, CHUNKS, PAST + hour * HOUR)
        await make_old(connection, workspace_id, 10, data=b"x", bucket=PAST + hour * HOUR)
    await expire(connection)
    tally = Tally()
    sweepers = [make_sweep(db) for _ in range(3)]

    await asyncio.gather(*(sweeper.one_pass(tally) for sweeper in sweepers))
    await asyncio.gather(*(sweeper.one_pass(tally) for sweeper in sweepers))

    assert (tally.expired, tally.failed) == (30, 0)
    assert await partition_names(connection, CHUNKS) == attached
    assert await counters(connection, workspace_id) == Counters(30, 0, 0)


async def test_what_another_server_has_done_since_the_look_is_not_done_again(
    db: Database, sweeping: Sweeping, connection: Any, monkeypatch: pytest.MonkeyPatch
):
    """It was faster between our look and our turn."""
    held_if_free, tally = locks.held_if_free, Tally()

    @asynccontextmanager
    async def after_another(*arguments: Any) -> AsyncIterator[bool]:
        monkeypatch.undo()
        await make_sweep(db).sweep()
        async with held_if_free(*arguments) as is_ours:
            yield is_ours

    monkeypatch.setattr(locks, "held_if_free", after_another)
    report = await sweeping.one_pass(tally)

    assert (report.done, report.postponed, tally.failed) == ([], [], 0)
    assert await state_of(connection, BUCKET) == "gone"


async def test_a_server_that_finds_another_at_the_leaves_deletes_its_share_of_the_rows(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    other = await connections()
    await make_old(connection, workspace_id, 2)
    await expire(connection)
    async with locks.held_if_free(other, "sweep"):
        meanwhile = await sweeping.sweep()

    afterwards = await sweeping.sweep()

    assert (kinds(meanwhile), meanwhile.swept) == ([Kind.DELETE_UPLOADS], Swept(expired=2))
    assert postponed(meanwhile) == {Kind.DROP_BUCKET: "another server is sweeping"}
    assert kinds(afterwards) == [Kind.DROP_BUCKET]


async def test_a_pass_that_only_finds_another_at_the_leaves_is_no_news(
    sweeping: Sweeping, connection: Any, connections: Any
):
    """Whoever asked for it is told; the log and the alerts are not: the work gets done."""
    other, tally = await connections(), Tally()
    async with locks.held_if_free(other, "sweep"):
        with structlog.testing.capture_logs() as logged:
            report = await sweeping.one_pass(tally)

    assert postponed(report) == {Kind.DROP_BUCKET: "another server is sweeping"}
    assert [line for line in logged if line["log_level"] != "debug"] == []
    assert tally == Tally()
    assert await state_of(connection, BUCKET) == "attached"


async def test_a_row_that_a_client_holds_keeps_its_bucket_and_nothing_else(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    client = await connections()
    held, _ = await make_old(connection, workspace_id, 2)
    await make_partition(connection, CHUNKS, PAST + HOUR)
    await make_old(connection, workspace_id, bucket=PAST + HOUR)
    await expire(connection)
    lock = client.transaction()
    await lock.start()
    await client.execute("select from uploads where file_id = $1 for update", held)

    async with asyncio.timeout(5):
        report = await sweeping.sweep()
    await lock.rollback()
    afterwards = await sweeping.sweep()

    assert report.swept == Swept(expired=2)
    assert [step.leaf.name for step in report.done if step.leaf] == [
        f"chunks_{PAST + HOUR:%Y%m%d_%H%M%S}"
    ]
    assert "still lives" in postponed(report)[Kind.DROP_BUCKET]
    assert (afterwards.swept, kinds(afterwards)[-1]) == (Swept(expired=1), Kind.DROP_BUCKET)
    assert await state_of(connection, BUCKET) == "gone"


# Buckets


async def test_a_bucket_goes_when_nothing_lives_in_it(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId
):
    """What a broken-off upload left in it goes along."""
    await make_old(connection, workspace_id, 3)
    await connection.execute("delete from uploads where ctid = (select max(ctid) from uploads)")
    await expire(connection)
    size = await size_of(connection, BUCKET)

    report = await sweeping.sweep()

    assert (report.bytes_back, await state_of(connection, BUCKET)) == (size, "gone")


async def test_a_bucket_that_lives_stays_and_is_named(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId
):
    other = await make_workspace(connection)
    await make_old(connection, workspace_id, 3)
    await make_old(connection, other, 1)

    report = await sweeping.sweep()
    (held,) = (await sweeping.plan()).held

    assert kinds(report) == []
    assert (held.leaf, held.bytes) == (BUCKET, await size_of(connection, BUCKET))
    assert held.why == "4 files live in it"
    assert held.by
    assert (held.by.workspace_id, held.by.files, held.by.bytes) == (workspace_id, 3, 192 * KIB)


async def test_one_offline_workspace_does_not_pin_an_hour_of_everybodys_files(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId, delivery: Delivery
):
    offline = await make_workspace(connection)
    content = bytes(range(256)) * 256
    (waiting,) = await make_old(connection, offline, data=content)
    busy = await make_old(connection, workspace_id, 9)
    for file_id in busy:
        await uploads.acknowledge(connection, workspace_id, file_id, now=datetime.now(UTC))
    await put_back_acks(connection)
    size = await size_of(connection, BUCKET)

    report = await sweeping.sweep()

    assert kinds(report) == [Kind.DELETE_UPLOADS, Kind.MOVE_FILES, Kind.DROP_BUCKET]
    assert report.bytes_back == size - len(content)
    assert await state_of(connection, BUCKET) == "gone"
    assert await content_of(delivery, offline, waiting) == content
    assert await counters(connection, offline) == Counters(1, len(content), 1)
    assert await connection.fetchval("select count(*) from chunks") == 1


async def size_of_all(connection: Any) -> int:
    return sum(
        [await size_of(connection, leaf) for leaf in await partition_names(connection, CHUNKS)]
    )


async def test_what_came_back_is_what_the_filesystem_sees(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId
):
    """What was written again to move files is taken off."""
    data = bytes(CHUNK_BYTES)
    await make_old(connection, workspace_id, 4, data=data)
    await make_old(connection, workspace_id, 20, data=data, expires_at=PAST)
    before, tally = await size_of_all(connection), Tally()

    report = await sweeping.one_pass(tally)

    came_back = before - await size_of_all(connection)
    assert report.bytes_back == pytest.approx(came_back, rel=0.02)
    assert (tally.moved, tally.dropped - tally.moved) == (4 * CHUNK_BYTES, report.bytes_back)


async def test_files_that_were_moved_out_of_what_has_to_stay_cost_space(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    await make_old(connection, workspace_id, data=bytes(1000))
    await make_old(connection, workspace_id, 9, expires_at=PAST)
    tally = Tally()
    async with locked(await connections(), BUCKET, "share update exclusive"):
        report = await sweeping.one_pass(tally)

    assert (report.bytes_back, tally.moved, tally.dropped) == (-1000, 1000, 0)
    assert Kind.DROP_BUCKET in postponed(report)


async def test_files_of_many_chunks_move_whole(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId, delivery: Delivery
):
    """One in the list, one acknowledged that can still be reopened."""
    contents = [bytes([n]) * (2 * CHUNK_BYTES + n) for n in range(3)]
    ids = [await delivery.stage(workspace_id, NewFile("a", "", each)) for each in contents]
    await connection.execute("update chunks set bucket = $1", PAST)
    await connection.execute("update uploads set bucket = $1", PAST)
    await uploads.acknowledge(connection, workspace_id, ids[2], now=datetime.now(UTC))
    await make_old(connection, workspace_id, 30, data=bytes(CHUNK_BYTES), expires_at=PAST)

    await sweeping.sweep()
    await delivery.reopen(workspace_id, ids[2])

    assert await state_of(connection, BUCKET) == "gone"
    for file_id, content in zip(ids, contents, strict=True):
        assert await content_of(delivery, workspace_id, file_id) == content


async def test_a_pass_without_news_asks_only_whether_anything_lives(
    sweeping: Sweeping,
    connection: Any,
    workspace_id: WorkspaceId,
    monkeypatch: pytest.MonkeyPatch,
):
    """Counting what lives in a day of buckets costs; it is done when a row is due, and not else."""
    with_contents, limits = retention.with_contents, list[int]()

    async def noted(*arguments: Any, limit: int, **named: Any) -> Any:
        limits.append(limit)
        return await with_contents(*arguments, limit=limit, **named)

    monkeypatch.setattr(retention, "with_contents", noted)
    files = await make_old(connection, workspace_id, 3)
    for _ in range(3):
        await sweeping.one_pass(Tally())
    await expire(connection, files[0])
    for _ in range(2):
        await sweeping.one_pass(Tally())

    first, *_ = limits
    assert first > 1000
    assert limits == [first, 1, 1, first, 1]


async def test_a_bucket_that_becomes_mostly_dead_before_its_time_is_over_is_not_forgotten(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId
):
    """Its rows went while it was in use, and none is due when its time is over."""
    await make_old(connection, workspace_id, 2)
    (live, *dead) = await make_old(connection, workspace_id, 10, bucket=bucket_of(NOW))
    await expire(connection, *dead)
    first, second = await sweeping.one_pass(Tally()), await sweeping.one_pass(Tally())
    leaf = await make_partition(connection, CHUNKS, PAST + HOUR)
    await connection.execute("update chunks set bucket = $1 where bucket > $1", PAST + HOUR)
    await connection.execute("update uploads set bucket = $1 where bucket > $1", PAST + HOUR)

    third = await sweeping.one_pass(Tally())

    assert (kinds(first), kinds(second)) == ([Kind.DELETE_UPLOADS], [])
    assert [(step.kind, step.leaf and step.leaf.name) for step in third.done] == [
        (Kind.MOVE_FILES, leaf),
        (Kind.DROP_BUCKET, leaf),
    ]
    assert await connection.fetchval(
        "select bucket > $2 from uploads where file_id = $1", live, PAST + DAY
    )


async def test_files_that_a_client_holds_are_moved_by_the_next_pass(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    client = await connections()
    held, *dead = await make_old(connection, workspace_id, 10)
    await expire(connection, *dead)
    lock = client.transaction()
    await lock.start()
    await client.execute("select from uploads where file_id = $1 for update", held)

    async with asyncio.timeout(5):
        report = await sweeping.sweep()
    await lock.rollback()
    afterwards = await sweeping.sweep()

    assert "clients hold" in postponed(report)[Kind.MOVE_FILES]
    assert "still lives" in postponed(report)[Kind.DROP_BUCKET]
    assert kinds(afterwards) == [Kind.MOVE_FILES, Kind.DROP_BUCKET]
    assert await state_of(connection, BUCKET) == "gone"


async def test_a_reader_of_a_file_that_moves_gets_all_of_it(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId, delivery: Delivery
):
    """The bucket is gone before the reader has half of the file."""
    content = bytes(range(256)) * 4 * KIB * 12
    file_id = await delivery.stage(workspace_id, NewFile("a", "", content))
    await connection.execute("update chunks set bucket = $1", PAST)
    await connection.execute("update uploads set bucket = $1", PAST)
    await connection.execute(
        "insert into chunks select bucket, $1, gen_random_uuid(), seq, bytes"
        " from chunks, generate_series(1, 4)",
        workspace_id,
    )
    upload = await delivery.get(workspace_id, file_id)
    read = b""

    async for piece in delivery.read(upload, 0, upload.size - 1):
        if not read:
            await sweeping.sweep()
            assert await state_of(connection, BUCKET) == "gone"
        read += piece

    assert read == content


# Uploads that are still arriving


async def test_a_bucket_with_an_arriving_upload_is_held_and_named(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId
):
    promise = make_reservation(workspace_id, bucket=PAST)
    await quotas.reserve(connection, promise, ROOMY)

    report = await sweeping.sweep()
    (held,) = (await sweeping.plan()).held
    await quotas.release(connection, promise.id)
    afterwards = await sweeping.sweep()

    assert kinds(report) == []
    assert (held.leaf, held.why) == (BUCKET, "1 uploads are still arriving in it")
    assert kinds(afterwards) == [Kind.DROP_BUCKET]


async def test_a_late_upload_holds_its_bucket_until_its_room_is_taken_back(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId
):
    """As long as the reservation is there the upload can be published, however late."""
    promise = make_reservation(workspace_id, bucket=PAST, expires_at=PAST)
    await quotas.reserve(connection, promise, ROOMY)
    before = await sweeping.sweep()

    await quotas.forget_expired(connection, now=datetime.now(UTC))

    assert (kinds(before), before.postponed) == ([], [])
    assert kinds(await sweeping.sweep()) == [Kind.DROP_BUCKET]


async def test_an_upload_whose_bucket_went_is_refused_and_not_half_stored(
    db: Database, sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId
):
    """Its bytes were written ahead, its room was taken back, and nothing kept the bucket."""
    staging = make_parts(db).staging
    async with staging.intake(workspace_id, 2 * MIB) as intake:
        await intake.begin_file("a.txt", "")
        await intake.write(bytes(2 * MIB))
        await intake._written()
        await connection.execute("update chunks set bucket = $1", PAST)
        await connection.execute("update reservations set bucket = $1, expires_at = $1", PAST)
        intake.bucket = PAST
        await quotas.forget_expired(connection, now=datetime.now(UTC))
        assert kinds(await sweeping.sweep()) == [Kind.DROP_BUCKET]
        await intake.end_file()

        with pytest.raises(UploadTooSlow):
            await staging.publish(intake)

    assert await connection.fetchval("select count(*) from uploads") == 0
    assert await counters(connection, workspace_id) == Counters()


async def test_bytes_cannot_come_into_a_bucket_that_was_sealed(
    connection: Any, workspace_id: WorkspaceId
):
    """Nothing is stored of what carries its bytes along: neither row nor announcement."""
    await retention.seal(connection, BUCKET)

    with pytest.raises(asyncpg.CheckViolationError):
        await make_old(connection, workspace_id)

    assert await counters(connection, workspace_id) == Counters()


async def test_a_seal_waits_for_bytes_that_are_being_written(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """An upload that was planned away by its bucket's emptiness commits before the last look."""
    writer = await connections()
    writing = writer.transaction()
    await writing.start()
    (file_id,) = await make_old(writer, workspace_id)
    passing = asyncio.create_task(sweeping.sweep())
    await until(lambda: somebody_waits_for(writer))

    await writing.commit()
    report = await passing

    assert "still lives" in postponed(report)[Kind.DROP_BUCKET]
    assert await connection.fetchval("select file_id from uploads") == file_id
    assert await state_of(connection, BUCKET) == "sealed"


async def test_a_publication_that_is_committing_keeps_its_bucket(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """It carries no bytes itself: those were written ahead, so the seal does not wait for it."""
    publisher, content = await connections(), Content(bytes(100))
    promise = make_reservation(workspace_id, bucket=PAST, expires_at=PAST)
    await quotas.reserve(connection, promise, ROOMY)
    put = (PAST, workspace_id, [content.id], [0], [content.data])
    await connection.execute(uploads.queries.put_chunks, *put)
    committing = publisher.transaction()
    await committing.start()
    await make_upload(
        publisher, workspace_id, content, bucket=PAST, last_chunks=[], reservation=promise.id
    )

    report = await sweeping.sweep()
    await committing.commit()
    delivery = make_parts(sweeping._db).delivery

    assert Kind.DROP_BUCKET not in kinds(report)
    assert await content_of(delivery, workspace_id, content.id) == content.data


async def test_the_bucket_of_a_slow_upload_is_chosen_when_its_first_bytes_are_stored(
    db: Database, workspace_id: WorkspaceId, connection: Any
):
    """Until then nothing keeps the bucket of the moment when the request came."""
    staging = make_parts(db).staging
    async with staging.intake(workspace_id, 2 * MIB) as intake:
        await intake.begin_file("a.txt", "")
        intake.bucket = PAST
        await intake.write(bytes(2 * MIB))
        await intake.end_file()
        await staging.publish(intake)

    assert await connection.fetchval("select bucket > $1 from uploads", PAST)
    assert await connection.fetchval(
        "select count(*) from chunks join uploads using (bucket, workspace_id, file_id)"
    ) == (2 * MIB // CHUNK_BYTES)


# The feed


@pytest.fixture
async def old_feed(connection: Any, workspace_id: WorkspaceId) -> str:
    """Five rows, of which the first three are older than the retention; their leaf."""
    for number in range(1, 6):
        row = make_message(str(number))
        await feed.append(connection, workspace_id, row, now=datetime.now(UTC))
    return await make_old_feed(connection, workspace_id, up_to=3)


@pytest.fixture
async def ids(old_feed: str, connection: Any, workspace_id: WorkspaceId) -> list[Any]:
    """The ids of the rows, as a reader has them for cursors; seq 1 comes first."""
    rows = await feed.rows_after(connection, workspace_id, 0, EVERYTHING, 10)
    return [row.id for row in rows]


@pytest.fixture
def reader(db: Database) -> Feed:
    return Feed(db, make_parts(db).wakeups)


async def test_a_trim_raises_the_mark_and_takes_the_rows(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId, old_feed: str
):
    size = await size_of(connection, old_feed)

    report = await sweeping.sweep()

    assert kinds(report) == [Kind.TRIM_FEED, Kind.DROP_BUCKET]
    assert report.bytes_back >= size
    assert await state_of(connection, old_feed) == "gone"
    marks = await feed.marks(connection, workspace_id)
    assert marks
    assert (marks.last_seq, marks.trimmed_seq) == (5, 3)
    rows = await feed.rows_after(connection, workspace_id, 0, EVERYTHING, 10)
    assert [row.seq for row in rows] == [4, 5]


async def test_a_cursor_below_the_trim_is_gone_and_one_above_goes_on(
    sweeping: Sweeping, reader: Feed, workspace_id: WorkspaceId, ids: list[Any]
):
    await sweeping.sweep()

    for gone in ids[:3]:
        with pytest.raises(CursorGone):
            await reader.read(workspace_id, Query(since_id=gone))
    page = await reader.read(workspace_id, Query(since_id=ids[3]))
    assert [row.seq for row in page.rows] == [5]


async def test_a_follower_by_seq_at_the_mark_goes_on_and_below_it_is_told(
    sweeping: Sweeping, reader: Feed, workspace_id: WorkspaceId, old_feed: str
):
    await sweeping.sweep()

    with pytest.raises(CursorGone):
        await reader.rows_after(workspace_id, 2, 10)
    at_the_mark = await reader.rows_after(workspace_id, 3, 10)
    assert [row.seq for row in at_the_mark.rows] == [4, 5]


async def test_marks_are_raised_for_everybody_in_the_leaf_and_nobody_else(
    sweeping: Sweeping,
    connection: Any,
    workspace_id: WorkspaceId,
    old_feed: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(retention, "_WORKSPACES_PER_TRIM", 2)
    others = [await make_workspace(connection) for _ in range(5)]
    for other in others:
        await connection.execute(
            "insert into feed (id, workspace_id, seq, activity_type, status, created_at)"
            " select id, $1, seq, activity_type, status, created_at from feed"
            " where workspace_id = $2 and seq <= 2",
            other,
            workspace_id,
        )
        await connection.execute("update feeds set last_seq = 9 where workspace_id = $1", other)
    silent = await make_workspace(connection)

    await sweeping.sweep()

    trimmed = {
        row["workspace_id"]: row["trimmed_seq"]
        for row in await connection.fetch("select workspace_id, trimmed_seq from feeds")
    }
    assert trimmed == dict.fromkeys(others, 2) | {workspace_id: 3, silent: 0}


@pytest.mark.parametrize("step", ["seal", "trim_feeds", "detach"])
async def test_a_reader_that_meets_a_trim_gets_rows_or_is_told(
    *,
    sweeping: Sweeping,
    reader: Feed,
    connection: Any,
    workspace_id: WorkspaceId,
    ids: list[Any],
    step: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """Promise 3, after each step of a trim: rows are there without a hole, or 410."""
    patch_after(monkeypatch, step, raises=Interrupted)
    with pytest.raises(Interrupted):
        await sweeping.sweep()

    for seq, row_id in enumerate(ids, start=1):
        try:
            page = await reader.read(workspace_id, Query(since_id=row_id))
        except CursorGone:
            assert seq < 3 or step == "detach"
        else:
            assert [row.seq for row in page.rows] == list(range(seq + 1, 6))


async def test_a_page_that_was_read_while_its_beginning_went_is_not_given(
    sweeping: Sweeping,
    reader: Feed,
    workspace_id: WorkspaceId,
    ids: list[Any],
    monkeypatch: pytest.MonkeyPatch,
):
    """The cursor is found, then the leaf is trimmed and dropped, then the page is read."""
    rows_after = feed.rows_after

    async def trimmed_before(*arguments: Any) -> Any:
        await sweeping.sweep()
        return await rows_after(*arguments)

    monkeypatch.setattr(feed, "rows_after", trimmed_before)

    with pytest.raises(CursorGone):
        await reader.read(workspace_id, Query(since_id=ids[0]))


async def test_a_page_that_was_read_before_the_trim_ends_is_whole_or_refused(
    sweeping: Sweeping,
    reader: Feed,
    workspace_id: WorkspaceId,
    ids: list[Any],
    monkeypatch: pytest.MonkeyPatch,
):
    """The page is read, then the marks rise: told once too often, but never a hole."""
    rows_after = feed.rows_after

    async def trimmed_after(*arguments: Any) -> Any:
        page = await rows_after(*arguments)
        await sweeping.sweep()
        return page

    monkeypatch.setattr(feed, "rows_after", trimmed_after)

    with pytest.raises(CursorGone):
        await reader.read(workspace_id, Query(since_id=ids[1]))
    page = await reader.read(workspace_id, Query(since_id=ids[3]))
    assert [row.seq for row in page.rows] == [5]


# A leaf's life, interrupted


class Interrupted(Exception):
    """The process ends here."""


def failing() -> Any:
    async def fail(*_: Any) -> None:
        raise Interrupted

    return fail


def patch_after(monkeypatch: pytest.MonkeyPatch, step: str, *, raises: Callable[[], Exception]):
    """Let a step have its effect, and fail then."""
    original = getattr(retention, step)

    async def run(*arguments: Any, **named: Any) -> None:
        await original(*arguments, **named)
        raise raises()

    monkeypatch.setattr(retention, step, run)


@pytest.mark.parametrize(
    ("step", "state"),
    [("move_file", "attached"), ("seal", "sealed"), ("detach", "detached"), ("drop", "gone")],
)
async def test_a_bucket_whose_sweep_was_interrupted_is_finished_by_the_next(
    *,
    db: Database,
    connection: Any,
    workspace_id: WorkspaceId,
    delivery: Delivery,
    step: str,
    state: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """Two files live in it and are fetched after each step; nothing of the bucket is left over."""
    *live, _ = files = await make_old(connection, workspace_id, 3, data=bytes(range(256)) * 64)
    await make_old(connection, workspace_id, 20, expires_at=PAST)
    await expire(connection, files[2])
    tally = Tally()
    with monkeypatch.context() as patched:
        patch_after(patched, step, raises=Interrupted)
        with pytest.raises(Interrupted):
            await make_sweep(db).one_pass(tally)
    found = await state_of(connection, BUCKET)
    between = [await content_of(delivery, workspace_id, file_id) for file_id in live]

    await make_sweep(db).one_pass(tally)

    assert (found, tally.failed) == (state, 1)
    assert await state_of(connection, BUCKET) == "gone"
    assert between == [bytes(range(256)) * 64] * 2
    assert [await content_of(delivery, workspace_id, file_id) for file_id in live] == between
    assert await connection.fetchval("select count(*) from chunks") == 2


@pytest.mark.parametrize(
    ("step", "state"),
    [("seal", "sealed"), ("trim_feeds", "sealed"), ("detach", "detached"), ("drop", "gone")],
)
async def test_a_trim_that_was_interrupted_is_finished_by_the_next(
    *,
    db: Database,
    connection: Any,
    workspace_id: WorkspaceId,
    old_feed: str,
    step: str,
    state: str,
    monkeypatch: pytest.MonkeyPatch,
):
    await make_sweep(db, feed_retention=timedelta(days=999)).sweep()
    with monkeypatch.context() as patched:
        patch_after(patched, step, raises=Interrupted)
        with pytest.raises(Interrupted):
            await make_sweep(db).sweep()
    found = await state_of(connection, old_feed)

    await make_sweep(db).sweep()

    assert (found, await state_of(connection, old_feed)) == (state, "gone")
    marks = await feed.marks(connection, workspace_id)
    assert marks
    assert marks.trimmed_seq == 3


async def terminate_who_waits_for(holder: Any) -> None:
    await holder.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where pg_backend_pid() = any(pg_blocking_pids(pid))"
    )


@pytest.mark.parametrize(
    ("table", "mode", "state"),
    [
        (BUCKET, "share update exclusive", "attached"),
        ("only chunks", "share update exclusive", "sealed"),
        ("only chunks", "access share", "detaching"),
    ],
)
async def test_a_session_that_is_ended_in_a_step_leaves_what_the_next_pass_finishes(
    *,
    db: Database,
    sweeping: Sweeping,
    connection: Any,
    workspace_id: WorkspaceId,
    delivery: Delivery,
    connections: Any,
    table: str,
    mode: str,
    state: str,
):
    """The lock says in which step the pass is when its backend is terminated."""
    holder = await connections()
    (live,) = await make_old(connection, workspace_id, data=b"live", bucket=PAST)
    await connection.execute("update chunks set bucket = $1", bucket_of(datetime.now(UTC)))
    await connection.execute("update uploads set bucket = (select bucket from chunks)")
    tally = Tally()
    async with locked(holder, table, mode):
        passing = asyncio.create_task(sweeping.one_pass(tally))
        await until(lambda: somebody_waits_for(holder))
        await terminate_who_waits_for(holder)
        with pytest.raises(DatabaseUnavailable):
            await passing
        found = await state_of(connection, BUCKET)

    report = await sweeping.sweep()

    assert (found, tally.failed) == (state, 1)
    assert not report.postponed
    assert await state_of(connection, BUCKET) == "gone"
    assert await content_of(delivery, workspace_id, live) == b"live"


# Somebody in the way


IN_THE_WAY = [
    pytest.param(BUCKET, "access share", "detaching", id="a long reader of the bucket"),
    pytest.param(BUCKET, "share update exclusive", "attached", id="a vacuum of the bucket"),
    pytest.param("only chunks", "access share", "detaching", id="a long reader of the table"),
    pytest.param("only chunks", "share update exclusive", "sealed", id="an analyze of the table"),
]


@pytest.mark.parametrize(("table", "mode", "state"), IN_THE_WAY)
async def test_a_pass_gives_up_in_time_and_says_so_while_writers_hardly_notice(
    *,
    sweeping: Sweeping,
    connection: Any,
    workspace_id: WorkspaceId,
    connections: Any,
    table: str,
    mode: str,
    state: str,
):
    holder, writer = await connections(), await connections()
    tally, ended = Tally(), asyncio.Event()
    async with locked(holder, table, mode):
        writing = asyncio.create_task(statement_times(writer, workspace_id, ended))
        began = time.monotonic()
        report = await sweeping.one_pass(tally)
        took = time.monotonic() - began
        ended.set()
        slowest = max(await writing)
        found = await state_of(connection, BUCKET)

    afterwards = await sweeping.sweep()

    (why,) = [why for step, why in report.postponed if step.kind is Kind.DROP_BUCKET]
    assert "in the way" in why
    assert (tally.left, tally.failed, found) == (1, 0, state)
    assert GIVES_UP_SECONDS <= took < 4 * GIVES_UP_SECONDS
    assert slowest < WRITER_STALL_SECONDS * 2
    assert not afterwards.postponed
    assert await state_of(connection, BUCKET) == "gone"


async def statement_times(
    writer: Any, workspace_id: WorkspaceId, ended: asyncio.Event
) -> list[float]:
    """Publish one file after the other; how long each statement took."""
    times: list[float] = []
    while not ended.is_set():
        now = datetime.now(UTC)
        began = time.monotonic()
        await make_upload(writer, workspace_id, bucket=bucket_of(now), now=now)
        times.append(time.monotonic() - began)
        await asyncio.sleep(0)
    return times


async def test_readers_of_the_feed_do_not_wait_behind_a_seal(
    *,
    db: Database,
    sweeping: Sweeping,
    reader: Feed,
    connection: Any,
    workspace_id: WorkspaceId,
    ids: list[Any],
    old_feed: str,
    connections: Any,
):
    """A vacuum of the leaf holds the seal up; whoever reads the same leaf meanwhile does not."""
    holder = await connections()
    async with locked(holder, old_feed, "share update exclusive"):
        passing = asyncio.create_task(sweeping.sweep())
        await until(lambda: somebody_waits_for(holder))
        began = time.monotonic()
        page = await reader.read(workspace_id, Query(since_id=ids[0]))
        took = time.monotonic() - began
        is_waiting = await somebody_waits_for(holder)
        report = await passing

    assert [row.seq for row in page.rows] == [2, 3, 4, 5]
    assert is_waiting
    assert took < WRITER_STALL_SECONDS
    assert "in the way" in postponed(report)[Kind.TRIM_FEED]
    assert await state_of(connection, old_feed) == "attached"


async def test_a_long_reader_of_a_leaf_holds_up_neither_its_seal_nor_other_readers(
    *,
    sweeping: Sweeping,
    reader: Feed,
    connection: Any,
    workspace_id: WorkspaceId,
    ids: list[Any],
    old_feed: str,
    connections: Any,
):
    """The detach waits for it; by then nobody who comes needs the leaf."""
    holder, others = await connections(), list[float]()
    async with locked(holder, old_feed):
        passing = asyncio.create_task(sweeping.sweep())
        while not passing.done():
            began = time.monotonic()
            await reader.read(workspace_id, Query(since_id=ids[3]))
            others.append(time.monotonic() - began)
        report = await passing
        found = await state_of(connection, old_feed)

    afterwards = await sweeping.sweep()

    assert (found, max(others) < WRITER_STALL_SECONDS) == ("detaching", True)
    assert "in the way" in postponed(report)[Kind.TRIM_FEED]
    assert Kind.FINISH_DETACH in kinds(afterwards)
    assert await state_of(connection, old_feed) == "gone"


async def test_a_leaf_that_somebody_has_locked_keeps_no_plan_and_no_pass_waiting(
    sweeping: Sweeping, connection: Any, connections: Any, workspace_id: WorkspaceId
):
    """Its size is not to be had; everything else is planned and done, and it goes next time."""
    free = await make_partition(connection, CHUNKS, PAST + HOUR)
    async with locked(await connections(), BUCKET, "access exclusive"):
        began = time.monotonic()
        plan = await sweeping.plan()
        report = await sweeping.one_pass(Tally())
        took = time.monotonic() - began

    afterwards = await sweeping.one_pass(Tally())

    assert [step.leaf.name for step in plan.steps if step.leaf] == [free]
    assert [(held.leaf, held.why) for held in plan.held] == [
        (BUCKET, "somebody has it locked just now")
    ]
    assert report.done == plan.steps
    assert took < GIVES_UP_SECONDS
    assert [step.leaf.name for step in afterwards.done if step.leaf] == [BUCKET]


async def test_a_detach_that_is_stuck_does_not_fail_the_other_buckets(
    sweeping: Sweeping, connection: Any, connections: Any
):
    """Postgres detaches one leaf of a table at a time; the others wait for the next pass."""
    holder = await connections()
    for hour in range(1, 4):
        await make_partition(connection, CHUNKS, PAST + hour * HOUR)
    tally = Tally()
    async with locked(holder, "only chunks"):
        began = time.monotonic()
        await sweeping.one_pass(tally)
        await sweeping.one_pass(tally)
        took = time.monotonic() - began

    report = await sweeping.sweep()

    assert (tally.failed, tally.left) == (0, 8)
    assert took < 4 * GIVES_UP_SECONDS
    assert kinds(report) == [Kind.FINISH_DETACH, *[Kind.DROP_BUCKET] * 3]
    assert len(await partition_names(connection, CHUNKS)) == len(
        await connection.fetch("select from pg_inherits where inhparent = 'chunks'::regclass")
    )


async def test_a_detach_is_finished_although_somebody_asks_for_the_leafs_size(
    sweeping: Sweeping, connection: Any, connections: Any
):
    """Both wait for each other until Postgres ends one of them; the leaf goes all the same."""
    curious = await connections()
    await connection.execute("set lock_timeout = 50")
    await detach_half_way(connection, BUCKET, make_holder=sweeping._db)
    looking = curious.transaction(isolation="repeatable_read")
    await looking.start()
    await curious.execute("select from workspaces")
    passing = asyncio.create_task(sweeping.sweep())
    await until(lambda: somebody_waits_for(curious))

    with suppress(asyncpg.DeadlockDetectedError):
        await size_of(curious, BUCKET)
    await looking.rollback()
    report = await passing

    assert (kinds(report), report.postponed) == ([Kind.FINISH_DETACH], [])
    assert await state_of(connection, BUCKET) == "gone"


async def test_a_snapshot_that_is_held_open_elsewhere_does_not_hold_the_sweep_up(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """A backup of other tables runs for an hour; buckets go all the same."""
    other = await connections()
    await make_old(connection, workspace_id)
    await expire(connection)
    async with other.transaction(isolation="repeatable_read", readonly=True):
        await other.fetch("select * from workspaces")

        report = await sweeping.sweep()

    assert kinds(report) == [Kind.DELETE_UPLOADS, Kind.DROP_BUCKET]


async def test_a_connection_goes_back_as_it_came(db: Database, connection: Any, connections: Any):
    """It waits for locks as long as any other; nobody after the sweep gives up early."""
    holder = await connections()
    async with locked(holder, BUCKET):
        await make_sweep(db).sweep()

    async with db.connection() as one, db.connection() as other:
        for each in (one, other):
            assert await each.fetchval("show lock_timeout") == "0"
    held = await connection.fetchval(
        "select count(*) from pg_locks join pg_database on pg_database.oid = pg_locks.database"
        " where locktype = 'advisory' and datname = current_database()"
    )
    assert held == 0


# The plan and the pass


async def test_a_dry_run_shows_the_steps_that_the_next_pass_carries_out(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId, old_feed: str
):
    """Every kind of step, in one order: rows, leftovers, the feed, buckets that go and stay."""
    starts = [PAST + hour * HOUR for hour in range(1, 6)]
    moved, held, detaching, detached, empty = [
        await make_partition(connection, CHUNKS, start) for start in starts
    ]
    await make_old(connection, workspace_id, bucket=PAST)
    await expire(connection)
    await make_old(connection, workspace_id, 1, bucket=starts[0])
    await make_old(connection, workspace_id, 9, bucket=starts[0], expires_at=PAST)
    await make_old(connection, workspace_id, 2, bucket=starts[1])
    await retention.detach(connection, "chunks", detached)
    await connection.execute("set lock_timeout = 50")
    await detach_half_way(connection, detaching, make_holder=sweeping._db)

    plan = await sweeping.plan()
    report = await sweeping.sweep()

    assert [(step.kind, step.leaf.name if step.leaf else None) for step in plan.steps] == [
        (Kind.DELETE_UPLOADS, None),
        (Kind.FINISH_DETACH, detaching),
        (Kind.DROP_DETACHED, detached),
        (Kind.TRIM_FEED, old_feed),
        (Kind.DROP_BUCKET, BUCKET),
        (Kind.MOVE_FILES, moved),
        (Kind.DROP_BUCKET, moved),
        (Kind.DROP_BUCKET, empty),
    ]
    assert [one.leaf for one in plan.held] == [held]
    assert report.done == plan.steps
    assert report.postponed == []
    assert report.bytes_back == plan.bytes_to_come_back


async def detach_half_way(connection: Any, leaf: str, *, make_holder: Database) -> None:
    async with make_holder.connection() as holder, locked(holder, "only chunks"):
        with pytest.raises(asyncpg.LockNotAvailableError):
            await retention.detach(connection, "chunks", leaf)


async def test_a_dry_run_is_a_read_only_transaction_that_writes_nothing(
    sweeping: Sweeping,
    connection: Any,
    workspace_id: WorkspaceId,
    monkeypatch: pytest.MonkeyPatch,
):
    await make_old(connection, workspace_id, 2)
    await expire(connection)
    seen: list[tuple[str, Any]] = []
    spy_on(monkeypatch, leaves, "all_leaves", seen)
    for name in ("due_uploads", "with_sizes", "with_contents"):
        spy_on(monkeypatch, retention, name, seen)

    await sweeping.plan()

    assert seen == [("on", None)] * 4
    assert await connection.fetchval("select count(*) from uploads") == 2
    assert await state_of(connection, BUCKET) == "attached"


def spy_on(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, seen: list[tuple[str, Any]]
) -> None:
    """Note what the transaction is like once the look is done."""
    original = getattr(module, name)

    async def run(connection: Any, *arguments: Any, **named: Any) -> Any:
        result = await original(connection, *arguments, **named)
        row = await connection.fetchrow(
            "select current_setting('transaction_read_only'), pg_current_xact_id_if_assigned()"
        )
        seen.append(tuple(row))
        return result

    monkeypatch.setattr(module, name, run)


async def test_each_step_is_told_as_it_ends(
    sweeping: Sweeping, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """What the progress display shows."""
    holder = await connections()
    await make_old(connection, workspace_id)
    await expire(connection)
    told: list[tuple[Kind, str]] = []
    async with locked(holder, BUCKET):
        await sweeping.sweep(lambda step, outcome: told.append((step.kind, outcome)))

    (first, second) = told
    assert first == (Kind.DELETE_UPLOADS, "done")
    assert second[0] == Kind.DROP_BUCKET
    assert "in the way" in second[1]


# Undo, against the sweep


async def test_a_reopening_that_is_committing_wins_over_the_sweep(
    db: Database, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """Its retention ends while it is reopened; the file stays and waits again."""
    client, content = await connections(), Content(b"kept")
    file_id = await make_upload(connection, workspace_id, content)
    now = datetime.now(UTC)
    await uploads.acknowledge(connection, workspace_id, file_id, now=now)
    acked = await uploads.get_acked(connection, workspace_id, file_id)
    assert acked
    reopening = client.transaction()
    await reopening.start()
    times = uploads.Reopening(now, now - HOUR, now + HOUR)
    assert await uploads.reopen(client, acked, make_message(), times)

    sweep = partial(uploads.sweep, acked_before=now + 2 * HOUR, expired_before=now)
    async with asyncio.timeout(5):
        meanwhile = await sweep(connection)
    await reopening.commit()

    assert (meanwhile, await sweep(connection)) == (Swept(), Swept())
    assert await counters(connection, workspace_id) == Counters(2, 4, 1)


async def test_a_reopening_that_finds_the_sweep_at_work_finds_nothing(
    delivery: Delivery, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    sweeper = await connections()
    file_id = await make_upload(connection, workspace_id)
    await delivery.acknowledge(workspace_id, file_id)
    sweep = sweeper.transaction()
    await sweep.start()
    later = datetime.now(UTC) + HOUR
    swept = await uploads.sweep(sweeper, acked_before=later, expired_before=later)
    reopening = asyncio.create_task(delivery.reopen(workspace_id, file_id))
    await until(lambda: somebody_waits_for(sweeper))

    await sweep.commit()

    assert swept == Swept(acked=1)
    with pytest.raises(UploadGone):
        await reopening
    assert await counters(connection, workspace_id) == Counters(1, 0, 0)


async def test_two_reopenings_at_once_take_room_and_announce_once(
    delivery: Delivery, connection: Any, workspace_id: WorkspaceId
):
    file_id = await make_upload(connection, workspace_id, Content(b"four"))
    await delivery.acknowledge(workspace_id, file_id)

    ended = await asyncio.gather(
        *(delivery.reopen(workspace_id, file_id) for _ in range(5)), return_exceptions=True
    )

    assert sum(not isinstance(one, Exception) for one in ended) == 1
    assert sum(isinstance(one, UploadGone) for one in ended) == 4
    assert await counters(connection, workspace_id) == Counters(2, 4, 1)
