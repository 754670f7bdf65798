"""A file is read whole or in part, also while its bytes are moved, and then acknowledged."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
import structlog
from callers import pattern
from factories import (
    DAY,
    HOUR,
    NOW,
    Content,
    Counters,
    Parts,
    counters,
    make_parts,
    make_upload,
    make_workspace,
    sweep_uploads,
)
from waiting import until

from restante.database.pool import Database
from restante.database.shares import caller
from restante.delivery import acknowledge, fetch, stage
from restante.delivery.blobs import WINDOW_CHUNKS, postgres
from restante.delivery.rules import CHUNK_BYTES, Upload
from restante.delivery.stage import NewFile
from restante.errors import TooManyAtOnce, UploadGone
from restante.ids import FileId, WorkspaceId

pytestmark = pytest.mark.anyio

WINDOW = WINDOW_CHUNKS * CHUNK_BYTES


async def make_file(parts: Parts, workspace_id: WorkspaceId, content: bytes) -> Upload:
    file = NewFile("letter.txt", "text/plain", content)
    file_id = await stage.stage(parts.receiver, workspace_id, file, now=NOW)
    return await fetch.get(parts.db, workspace_id, file_id, now=NOW)


async def read(parts: Parts, upload: Upload, first: int = 0, last: int | None = None) -> bytes:
    last = upload.size - 1 if last is None else last
    pieces = fetch.read(parts.db, parts.blobs, upload, first, last, now=NOW)
    return b"".join([piece async for piece in pieces])


# Reading


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
async def test_a_range_has_exactly_the_bytes_from_the_first_to_the_last(
    parts: Parts, workspace_id: WorkspaceId, first: int, last: int
):
    content = pattern(2 * WINDOW + 1)
    upload = await make_file(parts, workspace_id, content)

    assert await read(parts, upload, first, last) == content[first : last + 1]


@dataclass(frozen=True)
class Clients:
    """How many seconds a client may take to count as quick, and how much is read ahead for all."""

    quick_seconds: float
    max_ahead: int


@pytest.mark.parametrize(
    ("clients", "counts"),
    [
        pytest.param(Clients(math.inf, WINDOW_CHUNKS), [1, 2, 4, 3], id="quick"),
        pytest.param(Clients(0, WINDOW_CHUNKS), [1] * 10, id="slow"),
        pytest.param(Clients(math.inf, WINDOW_CHUNKS - 1), [1] * 10, id="too many"),
    ],
)
async def test_chunks_are_read_ahead_for_a_quick_client_only(
    parts: Parts,
    workspace_id: WorkspaceId,
    monkeypatch: pytest.MonkeyPatch,
    clients: Clients,
    counts: list[int],
):
    """What is read ahead waits in memory, and a client may stop reading for ever."""
    monkeypatch.setattr(postgres, "_QUICK_SECONDS", clients.quick_seconds)
    monkeypatch.setattr(postgres, "_MAX_AHEAD", clients.max_ahead)
    read_by_statement: list[int] = []
    blobs = parts.blobs
    one_statement = blobs._read

    async def noted(upload: Upload, seqs: range, wait_seconds: float | None) -> Sequence[bytes]:
        read_by_statement.append(len(seqs))
        return await one_statement(upload, seqs, wait_seconds)

    monkeypatch.setattr(blobs, "_read", noted)
    content = pattern(10 * CHUNK_BYTES)
    upload = await make_file(parts, workspace_id, content)

    assert await read(parts, upload) == content
    assert read_by_statement == counts
    assert not blobs._ahead


async def test_downloads_that_have_begun_wait_for_each_other_and_are_not_cut_off(
    dsn: str, parts: Parts, workspace_id: WorkspaceId
):
    """A new request is refused meanwhile."""
    content = pattern(3 * CHUNK_BYTES)
    upload = await make_file(parts, workspace_id, content)
    busy = await Database.open(
        dsn, pool_size=2, acquire_timeout_seconds=0.1, statement_timeout_seconds=20
    )
    with one_caller():
        downloads = [
            fetch.read(busy, make_parts(busy).blobs, upload, 0, upload.size - 1, now=NOW)
            for _ in range(40)
        ]
        firsts = [await anext(download) for download in downloads]
        async with busy.connection():  # the caller's whole share
            others = asyncio.gather(*(rest_of(download) for download in downloads))
            with pytest.raises(TooManyAtOnce):
                await fetch.get(busy, workspace_id, upload.file_id, now=NOW)
            await asyncio.sleep(0.3)  # what is tested is that time passes
        rests = await others
    await busy.close()

    assert all(first + rest == content for first, rest in zip(firsts, rests, strict=True))


@contextmanager
def one_caller() -> Iterator[None]:
    token = caller.set("a workspace")
    try:
        yield
    finally:
        caller.reset(token)


async def rest_of(download: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in download])


async def move(connection: Any, upload: Upload) -> None:
    """What the sweep does before it drops a bucket: the chunks move, the upload follows."""
    later = upload.bucket + HOUR
    async with connection.transaction():
        await connection.execute(
            "insert into chunks select $1, workspace_id, file_id, seq, bytes from chunks"
            " where bucket = $2",
            later,
            upload.bucket,
        )
        await connection.execute("delete from chunks where bucket = $1", upload.bucket)
        await connection.execute("update uploads set bucket = $1", later)


async def read_with(
    parts: Parts, upload: Upload, after_pieces: int, event: Any
) -> tuple[bytes, Exception | None]:
    """Read to the end; the event happens after so many pieces."""
    received, number = b"", 0
    try:
        async for piece in fetch.read(parts.db, parts.blobs, upload, 0, upload.size - 1, now=NOW):
            received, number = received + piece, number + 1
            if number == after_pieces:
                await event
    except UploadGone as error:
        return received, error
    return received, None


@pytest.mark.parametrize("after_pieces", [1, WINDOW_CHUNKS, WINDOW_CHUNKS + 1, 2 * WINDOW_CHUNKS])
async def test_a_reader_follows_bytes_that_are_moved(
    parts: Parts, connection: Any, workspace_id: WorkspaceId, after_pieces: int
):
    content = pattern(5 * WINDOW + 5)
    upload = await make_file(parts, workspace_id, content)

    received, error = await read_with(parts, upload, after_pieces, move(connection, upload))

    assert error is None
    assert received == content


async def test_a_reader_with_an_outdated_bucket_finds_the_bytes(
    parts: Parts, connection: Any, workspace_id: WorkspaceId
):
    """It looked the upload up before the move, and reads after it."""
    content = pattern(WINDOW)
    upload = await make_file(parts, workspace_id, content)

    await move(connection, upload)

    assert await read(parts, upload) == content


@pytest.mark.parametrize("after_pieces", [1, WINDOW_CHUNKS, WINDOW_CHUNKS + 1])
async def test_bytes_that_are_deleted_end_in_an_error_and_never_in_a_short_file(
    parts: Parts, connection: Any, workspace_id: WorkspaceId, after_pieces: int
):
    content = pattern(5 * WINDOW + 5)
    upload = await make_file(parts, workspace_id, content)

    deletion = connection.execute("delete from chunks")
    received, error = await read_with(parts, upload, after_pieces, deletion)

    assert isinstance(error, UploadGone)
    assert len(received) < len(content)
    assert content.startswith(received)


@pytest.mark.parametrize("missing", [0, 1, WINDOW_CHUNKS - 1, WINDOW_CHUNKS, 2 * WINDOW_CHUNKS])
async def test_bytes_after_a_missing_chunk_are_never_read_in_its_place(
    parts: Parts, connection: Any, workspace_id: WorkspaceId, missing: int
):
    content = pattern(2 * WINDOW + 5)
    upload = await make_file(parts, workspace_id, content)
    await connection.execute("delete from chunks where seq = $1", missing)

    received, error = await read_with(parts, upload, -1, None)

    assert isinstance(error, UploadGone)
    assert received == content[: missing * CHUNK_BYTES]


async def test_a_download_goes_on_after_its_file_was_acknowledged_and_moved(
    parts: Parts, connection: Any, workspace_id: WorkspaceId
):
    """As it would have if its bytes had stayed where they were."""
    content = pattern(5 * WINDOW)
    upload = await make_file(parts, workspace_id, content)

    async def acknowledge() -> None:
        await move(connection, upload)
        await connection.execute("update uploads set acked_at = $1", NOW)

    received, error = await read_with(parts, upload, 1, acknowledge())

    assert (received, error) == (content, None)


async def test_an_upload_that_expires_while_its_bytes_are_moved_is_gone(
    parts: Parts, connection: Any, workspace_id: WorkspaceId
):
    """When the bytes are not where they were, the upload is looked up again."""
    content = pattern(5 * WINDOW)
    upload = await make_file(parts, workspace_id, content)

    async def end() -> None:
        await move(connection, upload)
        await connection.execute("update uploads set expires_at = $1", NOW)

    received, error = await read_with(parts, upload, 1, end())

    assert isinstance(error, UploadGone)
    assert len(received) < len(content)
    assert content.startswith(received)


# Fetched and acknowledged


async def test_a_fetch_that_cannot_be_recorded_is_only_logged(
    parts: Parts, workspace_id: WorkspaceId
):
    """Best effort: the bytes have been sent."""
    upload = await make_file(parts, workspace_id, b"x")
    await fetch.mark_fetched(parts.db, upload, now=NOW)
    recorded = await fetch.get(parts.db, workspace_id, upload.file_id, now=NOW)
    await parts.db.close()

    with structlog.testing.capture_logs() as logged:
        await fetch.mark_fetched(parts.db, upload, now=NOW + HOUR)

    assert recorded.fetched_at == NOW
    assert [line["event"] for line in logged] == ["upload_fetched", "fetch_not_noted"]


async def test_an_acknowledged_file_is_gone_and_can_be_acknowledged_again(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    file_id = await make_upload(connection, workspace_id)

    assert await acknowledge.acknowledge(db, workspace_id, file_id, now=NOW)
    assert await acknowledge.acknowledge(db, workspace_id, file_id, now=NOW + HOUR)

    with pytest.raises(UploadGone):
        await fetch.get(db, workspace_id, file_id, now=NOW)
    with pytest.raises(UploadGone):
        await acknowledge.acknowledge(db, workspace_id, FileId(uuid4()), now=NOW)
    assert await counters(connection, workspace_id) == Counters(1, 0, 0)


async def test_only_the_first_acknowledgement_is_logged(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    file_id = await make_upload(connection, workspace_id, Content(name="a.txt"))

    with structlog.testing.capture_logs() as logged:
        for _ in range(2):
            await acknowledge.acknowledge(db, workspace_id, file_id, now=NOW)

    (line,) = logged
    assert (line["event"], line["file"]) == ("upload_acked", str(file_id))
    assert (line["name"], line["size"]) == ("a.txt", 10)


async def test_an_acknowledgement_that_waited_for_the_sweep_says_that_the_upload_is_gone(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """The statement has seen the row, because the sweep's deletion was not committed yet."""
    file_id = await make_upload(connection, workspace_id)
    sweep = connection.transaction()
    await sweep.start()
    await sweep_uploads(connection, now=NOW + 2 * DAY)
    acking = asyncio.create_task(acknowledge.acknowledge(db, workspace_id, file_id, now=NOW))
    await until_something_waits_for(connection)

    await sweep.commit()

    assert await acking is False
    with pytest.raises(UploadGone):
        await acknowledge.acknowledge(db, workspace_id, file_id, now=NOW)


async def until_something_waits_for(holder: Any) -> None:
    await until(
        lambda: holder.fetchval(
            "select exists (select from pg_stat_activity"
            " where pg_backend_pid() = any(pg_blocking_pids(pid)))"
        )
    )


# Listing


async def test_the_list_continues_after_a_file_that_was_acknowledged(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """A workspace reads its list page by page and acknowledges each page."""
    ids = [await make_upload(connection, workspace_id, now=NOW + n * HOUR) for n in range(5)]
    listed = list[FileId]()
    after: FileId | None = None

    while page := await fetch.unacked(db, workspace_id, after=after, limit=2, now=NOW):
        listed += [FileId(upload.file_id) for upload in page]
        after = listed[-1]
        for upload in page:
            await acknowledge.acknowledge(db, workspace_id, FileId(upload.file_id), now=NOW)

    assert listed == ids


async def test_a_list_does_not_continue_after_a_file_of_another_workspace(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    other = await make_workspace(connection)
    theirs = await make_upload(connection, other)

    with pytest.raises(UploadGone):
        await fetch.unacked(db, workspace_id, after=theirs, limit=2, now=NOW)
