"""
The sweep on buckets: dead bytes are freed, and no live or arriving byte is lost.

Ages are set in the data; the clock is the real one.
"""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from factories import (
    DAY,
    HOUR,
    NOW,
    ROOMY,
    Content,
    Counters,
    Parts,
    counters,
    make_reservation,
    make_upload,
    make_workspace,
)
from sweeps import (
    CHUNKS,
    KIB,
    PAST,
    Tally,
    actions,
    content_of,
    expire,
    is_waited_for,
    locked,
    make_old,
    make_partition,
    make_sweep,
    partition_names,
    put_back_acks,
    reasons,
    size_of,
    state_of,
    utc_now,
)
from waiting import until

from restante.database.pool import Database
from restante.delivery import fetch, quotas, store
from restante.delivery.rules import CHUNK_BYTES, MIB, bucket_of
from restante.delivery.subject import DROP_BUCKET, MOVE_FILES, Buckets, DueUploads
from restante.errors import UploadTooSlow
from restante.ids import WorkspaceId
from restante.retention.subjects import Subjects
from restante.retention.sweep import Sweep

pytestmark = pytest.mark.anyio

MOMENT = timedelta(microseconds=1)
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


async def put_in_past_bucket(connection: Any) -> None:
    """Everything that is stored so far is in the bucket with the past range."""
    await connection.execute("update chunks set bucket = $1", PAST)
    await connection.execute("update uploads set bucket = $1", PAST)


# Dropped or held ---------------------------------------------------------------------------------


async def test_a_bucket_without_live_files_is_dropped(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    """The bytes of an aborted upload are dropped with it."""
    await make_old(connection, workspace_id, 3)
    await connection.execute("delete from uploads where ctid = (select max(ctid) from uploads)")
    await expire(connection)
    size = await size_of(connection, BUCKET)

    report = await sweep.run(now=utc_now())

    assert (report.bytes_back, await state_of(connection, BUCKET)) == (size, "gone")


async def test_a_bucket_with_live_files_stays_and_their_workspace_is_named(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    await make_old(connection, workspace_id, 3)
    await make_old(connection, await make_workspace(connection), 1)

    report = await sweep.run(now=utc_now())
    (held,) = (await sweep.plan(now=utc_now())).held

    assert actions(report) == []
    assert (held.partition, held.bytes) == (BUCKET, await size_of(connection, BUCKET))
    assert held.why == "4 live files are in it"
    assert (held.workspace_id, held.workspace_bytes) == (workspace_id, 192 * KIB)


async def test_a_bucket_is_looked_at_again_when_its_range_has_ended(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    """Its rows were deleted while it was in use, and no row is due when its range ends."""
    await make_old(connection, workspace_id, 2)
    live, *dead = await make_old(connection, workspace_id, 10, bucket=bucket_of(NOW))
    await expire(connection, *dead)
    first = await sweep.run_observed(Tally(), now=utc_now())
    second = await sweep.run_observed(Tally(), now=utc_now())
    ended = await make_partition(connection, CHUNKS, PAST + HOUR)
    await connection.execute("update chunks set bucket = $1 where bucket > $1", PAST + HOUR)
    await connection.execute("update uploads set bucket = $1 where bucket > $1", PAST + HOUR)

    third = await sweep.run_observed(Tally(), now=utc_now())

    assert (actions(first), actions(second)) == ([DELETE], [])
    assert [(step.action, step.partition) for step in third.done] == [
        (MOVE_FILES, ended),
        (DROP_BUCKET, ended),
    ]
    assert await connection.fetchval(
        "select bucket > $2 from uploads where file_id = $1", live, PAST + DAY
    )


# Moved -------------------------------------------------------------------------------------------


async def test_one_offline_workspace_does_not_keep_an_hour_of_all_files(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, parts: Parts
):
    offline = await make_workspace(connection)
    content = bytes(range(256)) * 256
    (waiting,) = await make_old(connection, offline, data=content)
    for file_id in await make_old(connection, workspace_id, 9):
        await store.acknowledge(connection, workspace_id, file_id, now=utc_now())
    await put_back_acks(connection)
    size = await size_of(connection, BUCKET)

    report = await sweep.run(now=utc_now())

    assert actions(report) == [DELETE, MOVE_FILES, DROP_BUCKET]
    assert report.bytes_back == size - len(content)
    assert await state_of(connection, BUCKET) == "gone"
    assert await content_of(parts, offline, waiting) == content
    assert await counters(connection, offline) == Counters(1, len(content), 1)
    assert await connection.fetchval("select count(*) from chunks") == 1


async def size_of_all(connection: Any) -> int:
    names = await partition_names(connection, CHUNKS)
    return sum([await size_of(connection, name) for name in names])


async def test_the_reported_bytes_are_those_that_the_filesystem_gets_back(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    """The bytes that were written again to move files are subtracted."""
    data = bytes(CHUNK_BYTES)
    await make_old(connection, workspace_id, 4, data=data)
    await make_old(connection, workspace_id, 20, data=data, expires_at=PAST)
    before, tally = await size_of_all(connection), Tally()

    report = await sweep.run_observed(tally, now=utc_now())

    freed = before - await size_of_all(connection)
    assert report.bytes_back == pytest.approx(freed, rel=0.02)
    assert (tally.moved, tally.dropped - tally.moved) == (4 * CHUNK_BYTES, report.bytes_back)


async def test_files_moved_out_of_a_bucket_that_must_stay_cost_space(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    await make_old(connection, workspace_id, data=bytes(1000))
    await make_old(connection, workspace_id, 9, expires_at=PAST)
    tally = Tally()

    async with locked(await connections(), BUCKET, "share update exclusive"):
        report = await sweep.run_observed(tally, now=utc_now())

    assert (report.bytes_back, tally.moved, tally.dropped) == (-1000, 1000, 0)
    assert DROP_BUCKET in reasons(report)


async def test_files_of_many_chunks_are_moved_whole(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, parts: Parts
):
    """Unacknowledged ones, and an acknowledged one that can still be reopened."""
    contents = [bytes([n]) * (2 * CHUNK_BYTES + n) for n in range(3)]
    ids = await parts.stage(workspace_id, *contents)
    await put_in_past_bucket(connection)
    await store.acknowledge(connection, workspace_id, ids[2], now=utc_now())
    await make_old(connection, workspace_id, 30, data=bytes(CHUNK_BYTES), expires_at=PAST)

    await sweep.run(now=utc_now())
    await parts.reopen(workspace_id, ids[2])

    assert await state_of(connection, BUCKET) == "gone"
    for file_id, content in zip(ids, contents, strict=True):
        assert await content_of(parts, workspace_id, file_id) == content


async def test_a_locked_file_is_moved_by_the_next_pass(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """A client holds its row; the pass does not wait for it."""
    client = await connections()
    held, *dead = await make_old(connection, workspace_id, 10)
    await expire(connection, *dead)
    lock = client.transaction()
    await lock.start()
    await client.execute("select from uploads where file_id = $1 for update", held)

    report = await sweep.run(now=utc_now())
    await lock.rollback()
    afterwards = await sweep.run(now=utc_now())

    assert "locked" in reasons(report)[MOVE_FILES]
    assert "live files are still in it" in reasons(report)[DROP_BUCKET]
    assert actions(afterwards) == [MOVE_FILES, DROP_BUCKET]
    assert await state_of(connection, BUCKET) == "gone"


async def test_a_reader_of_a_file_that_is_moved_gets_all_of_it(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, parts: Parts
):
    """The bucket is dropped before the reader has half of the file."""
    content = bytes(range(256)) * 4 * KIB * 12
    (file_id,) = await parts.stage(workspace_id, content)
    await put_in_past_bucket(connection)
    await connection.execute(
        "insert into chunks select bucket, $1, gen_random_uuid(), seq, bytes"
        " from chunks, generate_series(1, 4)",
        workspace_id,
    )
    upload = await fetch.get(parts.db, workspace_id, file_id, now=utc_now())
    pieces = fetch.read(parts.db, parts.blobs, upload, 0, upload.size - 1, now=utc_now())

    read = await anext(pieces)
    await sweep.run(now=utc_now())
    dropped = await state_of(connection, BUCKET)
    async for piece in pieces:
        read += piece

    assert dropped == "gone"
    assert read == content


# Arriving uploads --------------------------------------------------------------------------------


async def test_a_bucket_with_an_arriving_upload_is_held_and_named(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    promise = make_reservation(workspace_id, bucket=PAST)
    await quotas.reserve(connection, promise, ROOMY)

    report = await sweep.run(now=utc_now())
    (held,) = (await sweep.plan(now=utc_now())).held
    await quotas.release(connection, promise.id)
    afterwards = await sweep.run(now=utc_now())

    assert actions(report) == []
    assert (held.partition, held.why) == (BUCKET, "1 uploads are still arriving in it")
    assert actions(afterwards) == [DROP_BUCKET]


async def test_a_late_upload_keeps_its_bucket_until_its_reservation_is_deleted(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    """As long as the reservation exists the upload can be published, however late."""
    promise = make_reservation(workspace_id, bucket=PAST, lasts=-MOMENT)
    await quotas.reserve(connection, promise, ROOMY)

    first, second = [await sweep.run(now=utc_now()) for _ in range(2)]

    assert (actions(first), first.postponed) == (["release reservations"], [])
    assert actions(second) == [DROP_BUCKET]


@pytest.mark.parametrize("is_noticed", [False, True])
async def test_an_upload_is_refused_and_not_half_stored_if_its_bucket_is_gone(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, parts: Parts, is_noticed: bool
):
    """
    Its first bytes were stored two days ago; its reservation has expired and was released.

    If its server has noticed, it reserves room again, and finds that the bytes are gone.
    """
    async with parts.receiver.receive(workspace_id, 2 * MIB) as incoming:
        await incoming.begin_file("a.txt", "", now=PAST)
        await incoming.write(bytes(2 * MIB), now=PAST)
        chunks = 2 * MIB // CHUNK_BYTES
        await until(lambda: connection.fetchval("select count(*) = $1 from chunks", chunks))
        await connection.execute("update chunks set bucket = $1", PAST)
        await connection.execute("update reservations set bucket = $1, expires_at = $1", PAST)
        incoming.room.bucket = PAST
        if is_noticed:
            incoming.room.renewed_at -= HOUR.total_seconds()
        await sweep.run_prompt(Tally(), now=utc_now())
        report = await sweep.run(now=utc_now())
        await incoming.end_file(now=utc_now())

        with pytest.raises(UploadTooSlow):
            await incoming.publish(now=utc_now())

    assert actions(report) == [DROP_BUCKET]
    assert await connection.fetchval("select count(*) from uploads") == 0
    assert await counters(connection, workspace_id) == Counters()


async def test_the_last_look_at_a_bucket_waits_for_bytes_that_are_being_written(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """The plan found the bucket empty; the seal waits until the upload has committed."""
    writer = await connections()
    writing = writer.transaction()
    await writing.start()
    (file_id,) = await make_old(writer, workspace_id)
    passing = asyncio.create_task(sweep.run(now=utc_now()))
    await until(lambda: is_waited_for(writer))

    await writing.commit()
    report = await passing

    assert "live files are still in it" in reasons(report)[DROP_BUCKET]
    assert await connection.fetchval("select file_id from uploads") == file_id
    assert await state_of(connection, BUCKET) == "sealed"


async def test_an_upload_that_is_being_published_keeps_its_bucket(
    connection: Any, workspace_id: WorkspaceId, connections: Any, parts: Parts
):
    """Its bytes were written ahead, so the seal does not wait for the commit that publishes it."""
    publisher, content = await connections(), Content(bytes(100))
    promise = make_reservation(workspace_id, bucket=PAST, lasts=-MOMENT)
    await quotas.reserve(connection, promise, ROOMY)
    await parts.blobs.put(workspace_id, PAST, [content.chunk])
    publishing = publisher.transaction()
    await publishing.start()
    await make_upload(
        publisher, workspace_id, content, bucket=PAST, chunks=[], reservation=promise.id
    )

    subjects = Subjects(Buckets(width=HOUR, ack_retention=HOUR))
    report = await Sweep(parts.db, subjects, budget_seconds=20).run(now=utc_now())
    await publishing.commit()

    assert actions(report) == []
    assert await content_of(parts, workspace_id, content.id) == content.data


async def test_the_bucket_of_a_slow_upload_is_that_of_its_first_stored_bytes(
    connection: Any, workspace_id: WorkspaceId, parts: Parts
):
    """Until then nothing protects the bucket of the time when the request began."""
    async with parts.receiver.receive(workspace_id, 2 * MIB) as incoming:
        await incoming.begin_file("a.txt", "", now=PAST)
        await incoming.write(bytes(2 * MIB), now=utc_now())
        await incoming.end_file(now=utc_now())
        await incoming.publish(now=utc_now())

    assert await connection.fetchval("select bucket > $1 from uploads", PAST + DAY)
    stored = await connection.fetchval(
        "select count(*) from chunks join uploads using (bucket, workspace_id, file_id)"
    )
    assert stored == 2 * MIB // CHUNK_BYTES


async def test_a_bucket_that_was_open_at_the_last_pass_is_looked_at_closely_when_it_is_over(
    sweep: Sweep, connection: Any
):
    """
    An idle pass does not look closely at what stays, and an open bucket always stays.

    The second pass finds the next bucket open, and this one within the seconds that it may still be
    written to.
    """
    workspace_id = await make_workspace(connection)
    await make_partition(connection, CHUNKS, PAST + HOUR)
    kept, *_ = await make_old(connection, workspace_id, 4)
    await connection.execute("delete from uploads where file_id <> $1", kept)  # as if aborted

    reports = [
        await sweep.run_observed(Tally(), now=now)
        for now in (PAST + HOUR / 2, PAST + HOUR + timedelta(seconds=1), PAST + 1.5 * HOUR)
    ]

    assert [actions(report) for report in reports] == [[], [], [MOVE_FILES, DROP_BUCKET]]
