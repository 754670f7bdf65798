"""The storage boundary: what was staged is handed over whole, acknowledged once, and swept."""

import asyncio
from array import array
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from factories import (
    HOUR,
    NOW,
    Counters,
    Parts,
    counters,
    make_parts,
    make_upload,
    make_workspace,
)
from waiting import until

from restante.database.pool import Database
from restante.delivery import store as uploads
from restante.delivery.blobs.postgres import WINDOW_CHUNKS
from restante.delivery.fetch import Delivery, NewFile
from restante.delivery.rules import CHUNK_BYTES, MIB, Quota, Swept, Upload
from restante.errors import UploadGone, UploadTooSlow, WorkspaceFull
from restante.ids import FileId, WorkspaceId, new_file_id

pytestmark = pytest.mark.anyio

WINDOW = WINDOW_CHUNKS * CHUNK_BYTES


@pytest.fixture
def db(db_with_partitions: Database) -> Database:
    return db_with_partitions


@pytest.fixture
async def workspace_id(db: Database) -> WorkspaceId:
    async with db.connection() as connection:
        return await make_workspace(connection)


@pytest.fixture
def parts(db: Database) -> Parts:
    return make_parts(db)


@pytest.fixture
def delivery(parts: Parts) -> Delivery:
    return parts.delivery


def pattern(size: int) -> bytes:
    """Bytes of which no two chunks are alike."""
    return array("I", range(size // 4 + 1)).tobytes()[:size]


def file_of(content: bytes, name: str = "letter.txt") -> NewFile:
    return NewFile(name, "text/plain", content)


async def collected(delivery: Delivery, upload: Upload) -> bytes:
    return b"".join([piece async for piece in delivery.read(upload, 0, upload.size - 1)])


async def execute(db: Database, statement: str, *values: object) -> str:
    async with db.connection() as connection:
        return await connection.execute(statement, *values)


async def counters_of(db: Database, workspace_id: WorkspaceId) -> Counters:
    async with db.connection() as connection:
        return await counters(connection, workspace_id)


# Staging


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, CHUNK_BYTES + 1, WINDOW, 2 * WINDOW + 1])
async def test_what_was_staged_comes_back(delivery: Delivery, workspace_id: WorkspaceId, size: int):
    content = pattern(size)
    file_id = await delivery.stage(workspace_id, file_of(content))

    upload = await delivery.get(workspace_id, file_id)

    assert upload.size == size
    assert await collected(delivery, upload) == content


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (0, 0),
        (CHUNK_BYTES - 1, CHUNK_BYTES),
        (CHUNK_BYTES, 2 * CHUNK_BYTES - 1),
        (10, WINDOW + 10),
        (WINDOW, 2 * WINDOW),
        (2 * WINDOW, 2 * WINDOW),
    ],
)
async def test_a_range_is_what_was_asked_for(
    delivery: Delivery, workspace_id: WorkspaceId, first: int, last: int
):
    content = pattern(2 * WINDOW + 1)
    upload = await delivery.get(workspace_id, await delivery.stage(workspace_id, file_of(content)))

    found = b"".join([piece async for piece in delivery.read(upload, first, last)])

    assert found == content[first : last + 1]


@pytest.mark.parametrize("size", [10, 3 * MIB])
async def test_a_batch_in_the_callers_transaction_is_committed_with_it(
    db: Database, parts: Parts, workspace_id: WorkspaceId, size: int
):
    """Whatever else the transaction wrote, and one wake-up after the commit."""
    await execute(db, "create table beside (id int)")
    files = [file_of(pattern(size)), file_of(b"x")]
    async with parts.wakeups.waiting(workspace_id) as waiter:
        async with parts.delivery.batch(workspace_id, files) as batch:
            async with db.transaction() as tx:
                ids = await batch.stage_in(tx)
                await tx.execute("insert into beside values (1)")
                seen_before = await counters_of(db, workspace_id)
            woken_inside = waiter.changed.is_set()
        woken_after = waiter.changed.is_set()

    assert seen_before.last_seq == 0
    assert (woken_inside, woken_after) == (False, True)
    assert await counters_of(db, workspace_id) == Counters(2, size + 1, 2)
    upload = await parts.delivery.get(workspace_id, ids[0])
    assert await collected(parts.delivery, upload) == pattern(size)


async def stage_with(
    db: Database,
    delivery: Delivery,
    workspace_id: WorkspaceId,
    contents: Sequence[bytes],
    *,
    before: str = "select",
    after: str = "select",
) -> None:
    """Stage files in one transaction with something else."""
    files = [file_of(content) for content in contents]
    async with (
        asyncio.timeout(10),
        delivery.batch(workspace_id, files) as batch,
        db.transaction() as tx,
    ):
        await tx.execute(before)
        await batch.stage_in(tx)
        await tx.execute(after)


@pytest.mark.parametrize("size", [10, 3 * MIB])
async def test_a_batch_whose_transaction_is_rolled_back_was_never_there(
    db: Database, parts: Parts, workspace_id: WorkspaceId, size: int
):
    """Nothing is stored, nobody is woken, and the room is free at once."""
    async with parts.wakeups.waiting(workspace_id) as waiter:
        with pytest.raises(asyncpg.DivisionByZeroError):
            await stage_with(
                db, parts.delivery, workspace_id, [pattern(size)], after="select 1 / 0"
            )

        assert not waiter.changed.is_set()
    assert await counters_of(db, workspace_id) == Counters()
    assert await parts.delivery.waiting(workspace_id, after=None, limit=10) == []


async def test_a_batch_that_is_not_staged_gives_its_room_back(
    db: Database, parts: Parts, workspace_id: WorkspaceId
):
    async with (
        parts.wakeups.waiting(workspace_id) as waiter,
        parts.delivery.batch(workspace_id, [file_of(pattern(3 * MIB))]),
    ):
        pass

    assert not waiter.changed.is_set()
    assert await counters_of(db, workspace_id) == Counters()


@pytest.mark.parametrize("size", [10, 2 * MIB])
async def test_a_batch_without_room_takes_the_transaction_along(
    db: Database, workspace_id: WorkspaceId, size: int
):
    """The refusal comes at once, though the transaction holds what giving room back waits for."""
    await execute(db, "create table beside (id int)")
    delivery = make_parts(db, quota=Quota(10 * MIB, 2)).delivery
    await delivery.stage(workspace_id, file_of(b"x"))

    with pytest.raises(WorkspaceFull):
        await stage_with(
            db,
            delivery,
            workspace_id,
            [pattern(size), b"y"],
            before="insert into beside select 1 from (select from feeds for update) as locked",
        )

    assert await counters_of(db, workspace_id) == Counters(1, 1, 1)
    assert await execute(db, "delete from beside") == "DELETE 0"


# Reading what moves or goes


async def move(db: Database, upload: Upload) -> None:
    """What a sweep does that gives a bucket back: the live chunks move, the upload follows."""
    later = upload.bucket + HOUR
    async with db.transaction() as tx:
        await tx.execute(
            "insert into chunks select $1, workspace_id, file_id, seq, bytes from chunks"
            " where bucket = $2",
            later,
            upload.bucket,
        )
        await tx.execute("delete from chunks where bucket = $1", upload.bucket)
        await tx.execute("update uploads set bucket = $1", later)


async def read_with(
    delivery: Delivery, upload: Upload, after_pieces: int, happening: Any
) -> tuple[bytes, Exception | None]:
    """Read to the end, and let something happen on the way."""
    read, number = b"", 0
    try:
        async for piece in delivery.read(upload, 0, upload.size - 1):
            read, number = read + piece, number + 1
            if number == after_pieces:
                await happening
    except UploadGone as error:
        return read, error
    return read, None


@pytest.mark.parametrize("after_pieces", [1, WINDOW_CHUNKS, WINDOW_CHUNKS + 1, 2 * WINDOW_CHUNKS])
async def test_a_reader_follows_bytes_that_move(
    db: Database, delivery: Delivery, workspace_id: WorkspaceId, after_pieces: int
):
    content = pattern(5 * WINDOW + 5)
    upload = await delivery.get(workspace_id, await delivery.stage(workspace_id, file_of(content)))

    read, error = await read_with(delivery, upload, after_pieces, move(db, upload))

    assert error is None
    assert read == content


async def test_a_reader_that_comes_after_the_move_follows_too(
    db: Database, delivery: Delivery, workspace_id: WorkspaceId
):
    """It had looked the upload up before."""
    content = pattern(WINDOW)
    upload = await delivery.get(workspace_id, await delivery.stage(workspace_id, file_of(content)))

    await move(db, upload)

    assert await collected(delivery, upload) == content


@pytest.mark.parametrize("after_pieces", [1, WINDOW_CHUNKS, WINDOW_CHUNKS + 1])
async def test_bytes_that_go_end_in_an_error_and_never_in_a_short_file(
    db: Database, delivery: Delivery, workspace_id: WorkspaceId, after_pieces: int
):
    content = pattern(5 * WINDOW + 5)
    upload = await delivery.get(workspace_id, await delivery.stage(workspace_id, file_of(content)))

    read, error = await read_with(delivery, upload, after_pieces, execute(db, "delete from chunks"))

    assert isinstance(error, UploadGone)
    assert len(read) < len(content)
    assert content.startswith(read)


@pytest.mark.parametrize("missing", [0, 1, WINDOW_CHUNKS - 1, WINDOW_CHUNKS, 2 * WINDOW_CHUNKS])
async def test_bytes_after_a_hole_are_never_given_for_those_in_it(
    db: Database, delivery: Delivery, workspace_id: WorkspaceId, missing: int
):
    content = pattern(2 * WINDOW + 5)
    upload = await delivery.get(workspace_id, await delivery.stage(workspace_id, file_of(content)))
    await execute(db, "delete from chunks where seq = $1", missing)

    read, error = await read_with(delivery, upload, -1, None)

    assert isinstance(error, UploadGone)
    assert read == content[: missing * CHUNK_BYTES]


@pytest.mark.parametrize("gone", ["acked_at = now()", "expires_at = now()"])
async def test_an_upload_that_is_over_while_its_bytes_move_is_gone(
    db: Database, delivery: Delivery, workspace_id: WorkspaceId, gone: str
):
    content = pattern(5 * WINDOW)
    upload = await delivery.get(workspace_id, await delivery.stage(workspace_id, file_of(content)))

    async def end() -> None:
        await move(db, upload)
        await execute(db, f"update uploads set {gone}")

    read, error = await read_with(delivery, upload, 1, end())

    assert isinstance(error, UploadGone)
    assert content.startswith(read)


# Fetched and acknowledged


async def test_a_fetch_stands_even_if_it_cannot_be_noted(
    db: Database, delivery: Delivery, workspace_id: WorkspaceId
):
    """Best effort: the bytes have been sent."""
    upload = await delivery.get(workspace_id, await delivery.stage(workspace_id, file_of(b"x")))
    await delivery.mark_fetched(upload)
    noted = (await delivery.get(workspace_id, upload.file_id)).fetched_at
    await db.close()

    await delivery.mark_fetched(upload)

    assert noted


async def test_acknowledged_is_not_there_any_more_and_can_be_acknowledged_again(
    db: Database, delivery: Delivery, workspace_id: WorkspaceId
):
    file_id = await delivery.stage(workspace_id, file_of(b"x"))

    assert await delivery.acknowledge(workspace_id, file_id)
    assert await delivery.acknowledge(workspace_id, file_id)

    with pytest.raises(UploadGone):
        await delivery.get(workspace_id, file_id)
    with pytest.raises(UploadGone):
        await delivery.acknowledge(workspace_id, new_file_id())
    assert await counters_of(db, workspace_id) == Counters(1, 0, 0)


async def test_an_acknowledgement_that_the_sweep_was_faster_than_says_so(
    db: Database, delivery: Delivery, workspace_id: WorkspaceId, connections: Any
):
    """The look finds the upload, since the sweep's deletion is not committed yet."""
    sweeper = await connections()
    file_id = await delivery.stage(workspace_id, file_of(b"x"))
    sweep = sweeper.transaction()
    await sweep.start()
    later = datetime.now(UTC) + timedelta(days=2)
    await uploads.sweep(sweeper, acked_before=later, expired_before=later)
    acking = asyncio.create_task(delivery.acknowledge(workspace_id, file_id))
    await until_somebody_waits_for(sweeper)

    await sweep.commit()

    assert await acking is False


async def until_somebody_waits_for(holder: Any) -> None:
    await until(
        lambda: holder.fetchval(
            "select exists (select from pg_stat_activity"
            " where pg_backend_pid() = any(pg_blocking_pids(pid)))"
        )
    )


async def test_the_list_goes_on_after_a_file_that_was_acknowledged(
    delivery: Delivery, workspace_id: WorkspaceId
):
    """A workspace reads its list page by page and acknowledges as it goes."""
    ids = [await delivery.stage(workspace_id, file_of(b"x")) for _ in range(5)]
    listed: list[FileId] = []
    after: FileId | None = None

    while page := await delivery.waiting(workspace_id, after=after, limit=2):
        listed += [upload.file_id for upload in page]
        after = listed[-1]
        for upload in page:
            await delivery.acknowledge(workspace_id, upload.file_id)

    assert listed == ids


async def test_a_list_does_not_go_on_after_somebody_elses_file(
    db: Database, delivery: Delivery, workspace_id: WorkspaceId
):
    async with db.connection() as connection:
        other = await make_workspace(connection)
    theirs = await delivery.stage(other, file_of(b"x"))

    with pytest.raises(UploadGone):
        await delivery.waiting(workspace_id, after=theirs, limit=2)


# Sweeping


async def test_a_sweep_goes_on_until_nothing_is_due(
    db: Database, workspace_id: WorkspaceId, monkeypatch: pytest.MonkeyPatch
):
    delivery = make_parts(db, ack_retention=timedelta(minutes=30)).delivery
    monkeypatch.setattr(uploads, "SWEEP_BATCH", 3)
    async with db.connection() as connection:
        for _ in range(7):
            await make_upload(connection, workspace_id, expires_at=NOW - HOUR)
        for _ in range(4):
            file_id = await make_upload(connection, workspace_id)
            await uploads.acknowledge(connection, workspace_id, file_id, now=NOW - HOUR)
        await make_upload(connection, workspace_id)

    swept = await delivery.sweep(now=NOW)

    assert swept == Swept(acked=4, expired=7)
    assert await counters_of(db, workspace_id) == Counters(12, 10, 1)
    assert await delivery.sweep(now=NOW) == Swept()


@pytest.mark.parametrize("retention", [timedelta(0), timedelta(days=-30)])
async def test_a_negative_retention_is_none(
    db: Database, workspace_id: WorkspaceId, retention: timedelta
):
    """It must not reach into the future, nor forget those that are acknowledged right now."""
    async with db.connection() as connection:
        for at in (NOW - HOUR, NOW, NOW + HOUR):
            file_id = await make_upload(connection, workspace_id)
            await uploads.acknowledge(connection, workspace_id, file_id, now=at)

    delivery = make_parts(db, ack_retention=retention).delivery
    assert await delivery.sweep(now=NOW) == Swept(acked=1)


async def test_servers_that_sweep_at_once_share_the_work(
    db: Database, workspace_id: WorkspaceId, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(uploads, "SWEEP_BATCH", 5)
    async with db.connection() as connection:
        for _ in range(60):
            await make_upload(connection, workspace_id, expires_at=NOW - HOUR)

    swept = await asyncio.gather(*(make_parts(db).delivery.sweep(now=NOW) for _ in range(5)))

    assert sum(swept, Swept()) == Swept(expired=60)
    assert await counters_of(db, workspace_id) == Counters(60, 0, 0)


# Room of uploads that never ended


async def test_room_is_given_back_when_an_upload_never_ends(
    db: Database, parts: Parts, workspace_id: WorkspaceId
):
    """What a killed server leaves: a reservation, and nobody who would release it."""
    intake = parts.staging.intake(workspace_id, 3 * MIB)
    arriving = await intake.__aenter__()
    await arriving.begin_file("a.txt", "")
    await arriving.write(bytes(2 * MIB))
    now = datetime.now(UTC)

    too_early = await parts.delivery.forget_expired(now=now)
    kept = await counters_of(db, workspace_id)
    in_time = await parts.delivery.forget_expired(now=now + timedelta(days=1))

    assert (too_early, kept.reserved_bytes, in_time) == (0, 3 * MIB, 1)
    assert await counters_of(db, workspace_id) == Counters()
    await arriving.end_file()
    with pytest.raises(UploadTooSlow, match="send it again"):
        await parts.staging.publish(arriving)
    await intake.__aexit__(None, None, None)
    assert await counters_of(db, workspace_id) == Counters()
