"""Files in memory are staged: one, a batch, or a batch inside the caller's transaction."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from callers import pattern
from factories import NOW, Counters, Parts, counters, make_parts

from restante.database.pool import Database
from restante.delivery import fetch, stage
from restante.delivery.blobs import WINDOW_CHUNKS
from restante.delivery.rules import CHUNK_BYTES, MAX_FILE_BYTES, MIB, Quota
from restante.delivery.stage import NewFile, staging
from restante.errors import (
    BadRequest,
    FileTooLarge,
    RestanteError,
    UploadMalformed,
    WorkspaceFull,
    WorkspaceUnknown,
)
from restante.ids import FileId, WorkspaceId

pytestmark = pytest.mark.anyio

WINDOW = WINDOW_CHUNKS * CHUNK_BYTES


def file_of(content: bytes, name: str = "letter.txt") -> NewFile:
    return NewFile(name, "text/plain", content)


async def content_of(parts: Parts, workspace_id: WorkspaceId, file_id: FileId) -> bytes:
    upload = await fetch.get(parts.db, workspace_id, file_id, now=NOW)
    pieces = fetch.read(parts.db, parts.blobs, upload, 0, upload.size - 1, now=NOW)
    return b"".join([piece async for piece in pieces])


# One file, and a batch


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, CHUNK_BYTES + 1, WINDOW, 2 * WINDOW + 1])
async def test_a_staged_file_is_announced_and_fetched_as_it_was(
    parts: Parts, connection: Any, workspace_id: WorkspaceId, size: int
):
    content = pattern(size)

    file_id = await stage.stage(parts.receiver, workspace_id, file_of(content), now=NOW)

    assert await content_of(parts, workspace_id, file_id) == content
    assert await counters(connection, workspace_id) == Counters(1, size, 1)
    announced = await connection.fetchval("select request_body ->> 'file_id' from feed")
    assert announced == str(file_id)


async def test_a_staged_file_keeps_its_name_for_people(parts: Parts, workspace_id: WorkspaceId):
    file = file_of(b"x", "folder/Übersicht 2030.txt")

    file_id = await stage.stage(parts.receiver, workspace_id, file, now=NOW)

    upload = await fetch.get(parts.db, workspace_id, file_id, now=NOW)
    assert (upload.name, upload.display_name) == ("_bersicht_2030.txt", "Übersicht 2030.txt")


@pytest.mark.parametrize("size", [10, 2 * MIB])
async def test_a_batch_is_announced_in_its_order_and_committed_at_once(
    parts: Parts, connection: Any, workspace_id: WorkspaceId, size: int
):
    """Its feed rows are consecutive, and differ in time, so that a reader can page back."""
    contents = {"a.txt": b"first", "b.txt": pattern(size), "c.txt": b"third"}
    files = [file_of(content, name) for name, content in contents.items()]

    ids = await stage.stage_batch(parts.receiver, workspace_id, files, now=NOW)

    for file_id, content in zip(ids, contents.values(), strict=True):
        assert await content_of(parts, workspace_id, file_id) == content
    rows = await connection.fetch(
        "select seq, created_at, request_body ->> 'file_id' as file_id,"
        " request_body ->> 'name' as name from feed order by seq"
    )
    assert [tuple(row) for row in rows] == [
        (seq, NOW + timedelta(microseconds=seq - 1), str(file_id), name)
        for seq, (file_id, name) in enumerate(zip(ids, contents, strict=True), start=1)
    ]
    assert len({row["xmin"] for row in await connection.fetch("select xmin from uploads")}) == 1


@pytest.mark.parametrize(
    ("bad", "refusal"),
    [(b"", UploadMalformed), (bytes(MAX_FILE_BYTES + 1), FileTooLarge)],
    ids=["empty", "too large"],
)
@pytest.mark.parametrize("size", [10, 2 * MIB])
async def test_a_batch_with_a_bad_file_stages_none_of_them(
    *,
    parts: Parts,
    connection: Any,
    workspace_id: WorkspaceId,
    size: int,
    bad: bytes,
    refusal: type[RestanteError],
):
    files = [file_of(pattern(size)), file_of(bad), file_of(b"good")]

    with pytest.raises(refusal):
        await stage.stage_batch(parts.receiver, workspace_id, files, now=NOW)

    assert await counters(connection, workspace_id) == Counters()
    assert await connection.fetchval("select count(*) from uploads") == 0


async def test_a_batch_of_no_files_is_refused(parts: Parts, workspace_id: WorkspaceId):
    with pytest.raises(BadRequest, match="at least one file"):
        await stage.stage_batch(parts.receiver, workspace_id, [], now=NOW)


async def test_names_and_types_are_cleaned_as_those_of_an_upload(
    parts: Parts, workspace_id: WorkspaceId
):
    file = NewFile("../my report.txt", "text/html; charset=utf-8", b"x")

    file_id = await stage.stage(parts.receiver, workspace_id, file, now=NOW)

    upload = await fetch.get(parts.db, workspace_id, file_id, now=NOW)
    assert (upload.name, upload.mimetype) == ("my_report.txt", "text/html")


# Inside the caller's transaction


@pytest.mark.parametrize("size", [10, 3 * MIB])
async def test_a_batch_in_the_callers_transaction_is_committed_with_it(
    parts: Parts, connection: Any, workspace_id: WorkspaceId, size: int
):
    """Nothing is visible before the commit, and readers are woken once after it."""
    await connection.execute("create table beside (id int)")
    files = [file_of(pattern(size)), file_of(b"x")]
    async with parts.wakeups.waiting(workspace_id) as waiter:
        async with staging(parts.receiver, workspace_id, files, now=NOW) as incoming:
            async with parts.db.transaction() as tx:
                ids = await incoming.publish_in(tx, now=NOW)
                await tx.execute("insert into beside values (1)")
                seen_before = await counters(connection, workspace_id)
            is_woken_inside = waiter.changed.is_set()
        is_woken_after = waiter.changed.is_set()

    assert seen_before.last_seq == 0
    assert (is_woken_inside, is_woken_after) == (False, True)
    assert await counters(connection, workspace_id) == Counters(2, size + 1, 2)
    assert await content_of(parts, workspace_id, ids[0]) == pattern(size)


async def stage_with(
    parts: Parts,
    workspace_id: WorkspaceId,
    contents: Sequence[bytes],
    *,
    before: str = "select",
    after: str = "select",
) -> None:
    """Stage files in one transaction with other statements."""
    files = [file_of(content) for content in contents]
    async with (
        staging(parts.receiver, workspace_id, files, now=NOW) as incoming,
        parts.db.transaction() as tx,
    ):
        await tx.execute(before)
        await incoming.publish_in(tx, now=NOW)
        await tx.execute(after)


@pytest.mark.parametrize("size", [10, 3 * MIB])
async def test_a_batch_in_a_transaction_that_is_rolled_back_was_never_staged(
    parts: Parts, connection: Any, workspace_id: WorkspaceId, size: int
):
    """Nothing is stored, no reader is woken, and the room is free at once."""
    async with parts.wakeups.waiting(workspace_id) as waiter:
        with pytest.raises(asyncpg.DivisionByZeroError):
            await stage_with(parts, workspace_id, [pattern(size)], after="select 1 / 0")

        assert not waiter.changed.is_set()
    assert await counters(connection, workspace_id) == Counters()
    assert await fetch.unacked(parts.db, workspace_id, after=None, limit=10, now=NOW) == []


async def test_a_batch_that_is_not_published_releases_its_reservation(
    parts: Parts, connection: Any, workspace_id: WorkspaceId
):
    files = [file_of(pattern(3 * MIB))]
    async with parts.wakeups.waiting(workspace_id) as waiter:
        async with staging(parts.receiver, workspace_id, files, now=NOW):
            reserved = await counters(connection, workspace_id)

        assert not waiter.changed.is_set()
    assert reserved == Counters(reserved_bytes=3 * MIB, reserved_files=1)
    assert await counters(connection, workspace_id) == Counters()


@pytest.mark.parametrize("size", [10, 2 * MIB])
async def test_a_batch_without_room_rolls_the_callers_transaction_back(
    db: Database, connection: Any, workspace_id: WorkspaceId, size: int
):
    """The reservation is released after the rollback: the transaction has locked the counters."""
    await connection.execute("create table beside (id int)")
    parts = make_parts(db, quota=Quota(10 * MIB, 2))
    await parts.stage(workspace_id, b"x")

    with pytest.raises(WorkspaceFull):
        await stage_with(
            parts,
            workspace_id,
            [pattern(size), b"y"],
            before="insert into beside select 1 from (select from feeds for update) as locked",
        )

    assert await counters(connection, workspace_id) == Counters(1, 1, 1)
    assert await connection.fetchval("select count(*) from beside") == 0


async def test_files_of_a_committed_transaction_are_announced_although_the_block_fails_later(
    parts: Parts, workspace_id: WorkspaceId, connection: Any
):
    """What was committed is staged; its readers must not wait for the next event."""
    files = [NewFile("a.bin", "text/plain", b"x")]

    async with parts.wakeups.waiting(workspace_id) as waiter:
        with suppress(ZeroDivisionError):
            async with stage.staging(parts.receiver, workspace_id, files, now=NOW) as incoming:
                async with connection.transaction():
                    await incoming.publish_in(connection, now=NOW)
                raise ZeroDivisionError

        assert waiter.changed.is_set()


async def test_a_rollback_that_raises_nothing_leaves_nothing_staged_and_no_reservation(
    parts: Parts, workspace_id: WorkspaceId, connection: Any
):
    files = [NewFile("a.bin", "text/plain", bytes(3 * MIB))]

    async with parts.wakeups.waiting(workspace_id) as waiter:
        async with stage.staging(parts.receiver, workspace_id, files, now=NOW) as incoming:
            transaction = connection.transaction()
            await transaction.start()
            await incoming.publish_in(connection, now=NOW)
            await transaction.rollback()

        assert not waiter.changed.is_set()
    assert await connection.fetchval("select count(*) from reservations") == 0


@pytest.mark.parametrize("size", [10, 3 * MIB])
async def test_a_transaction_that_outlives_the_block_is_refused_at_once(
    parts: Parts, workspace_id: WorkspaceId, connection: Any, size: int
):
    """Nobody would know when to wake the readers, and the reservation belongs to it."""
    files = [NewFile("a.bin", "text/plain", bytes(size))]
    await connection.execute("set lock_timeout = '2s'")

    async def outlive() -> None:
        async with (
            connection.transaction(),
            stage.staging(parts.receiver, workspace_id, files, now=NOW) as incoming,
        ):
            await incoming.publish_in(connection, now=NOW)

    with pytest.raises(BadRequest, match="End the transaction"):
        await outlive()
    assert await connection.fetchval("select count(*) from uploads") == 0


async def test_files_are_published_once(parts: Parts, workspace_id: WorkspaceId):
    files = [NewFile("a.bin", "text/plain", b"x")]

    async with stage.staging(parts.receiver, workspace_id, files, now=NOW) as incoming:
        await incoming.publish(now=NOW)
        with pytest.raises(BadRequest, match="published before"):
            await incoming.publish(now=NOW)

    with pytest.raises(BadRequest, match="block has ended"):
        await incoming.publish(now=NOW)


@pytest.mark.parametrize("size", [10, 3 * MIB])
async def test_an_unknown_workspace_is_named_as_such(parts: Parts, size: int):
    file = NewFile("a.bin", "text/plain", bytes(size))

    with pytest.raises(WorkspaceUnknown):
        await stage.stage(parts.receiver, WorkspaceId(uuid4()), file, now=NOW)


async def test_temporary_tables_of_the_application_are_not_written_to(
    parts: Parts, workspace_id: WorkspaceId, connection: Any
):
    """Postgres searches them first unless told otherwise."""
    files = [NewFile("a.bin", "text/plain", b"x")]

    async with (
        stage.staging(parts.receiver, workspace_id, files, now=NOW) as incoming,
        connection.transaction(),
    ):
        await connection.execute("create temp table uploads (id int) on commit drop")
        await incoming.publish_in(connection, now=NOW)

    assert await connection.fetchval("select count(*) from restante.uploads") == 1
