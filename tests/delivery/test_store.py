"""Uploads on several connections: published whole, listed, fetched, and acknowledged once."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from factories import (
    DAY,
    HOUR,
    NOW,
    Content,
    Counters,
    counters,
    make_answer,
    make_batch,
    make_upload,
    make_workspace,
    until_blocked,
)

from restante.database.pool import Connection
from restante.delivery import store
from restante.delivery.rules import Chunk, Quota
from restante.delivery.store import Acknowledged, Batch
from restante.ids import FileId, WorkspaceId

pytestmark = pytest.mark.anyio

MOMENT = timedelta(microseconds=1)
TABLES = ("uploads", "chunks", "feed", "answers")
NOTHING = dict.fromkeys(TABLES, 0)


async def row_counts(connection: Any) -> dict[str, int]:
    return {name: await connection.fetchval(f"select count(*) from {name}") for name in TABLES}


# Publishing


async def test_a_batch_is_files_feed_rows_bytes_and_counters(
    connection: Connection, workspace_id: WorkspaceId
):
    first, second = Content(b"one", "a.txt"), Content(b"second", "b.txt")

    seq = await store.publish(connection, make_batch(workspace_id, first, second))

    assert seq == 2
    assert await counters(connection, workspace_id) == Counters(2, 9, 2)
    assert await row_counts(connection) == {"uploads": 2, "chunks": 2, "feed": 2, "answers": 0}
    found = await store.get(connection, workspace_id, first.id, now=NOW)
    assert found
    assert (found.name, found.size, found.sha256) == ("a.txt", 3, first.file.sha256)


def _with_file(batch: Batch, **wrong: Any) -> Batch:
    *others, last = batch.files
    return replace(batch, files=[*others, replace(last, **wrong)])


def _with_chunk(batch: Batch, seq: int, content: bytes) -> Batch:
    return replace(batch, chunks=[*batch.chunks, Chunk(FileId(uuid4()), seq, content)])


LAST_YEAR = NOW - 365 * DAY
BROKEN: dict[str, Callable[[Batch], Batch]] = {
    "name": lambda batch: _with_file(batch, name="not/a/name"),
    "dots": lambda batch: _with_file(batch, name=".."),
    "empty": lambda batch: _with_file(batch, size=0),
    "too_large": lambda batch: replace(
        _with_file(batch, size=64 * 1024**3 + 1), quota=Quota(2**40, 100)
    ),
    "digest": lambda batch: _with_file(batch, sha256=b"short"),
    "twice": lambda batch: _with_file(batch, file_id=batch.files[0].file_id),
    "chunk_empty": lambda batch: _with_chunk(batch, 0, b""),
    "chunk_too_large": lambda batch: _with_chunk(batch, 0, bytes(262_145)),
    "chunk_negative": lambda batch: _with_chunk(batch, -1, b"x"),
    "no_bucket": lambda batch: replace(batch, bucket=LAST_YEAR),
    "no_feed_partition": lambda batch: replace(batch, created_at=LAST_YEAR),
    "key": lambda batch: replace(batch, answer=make_answer("k" * 256)),
    "answer": lambda batch: replace(batch, answer=make_answer(json="no json")),
}


@pytest.mark.parametrize("broken", BROKEN)
async def test_a_batch_with_one_bad_part_stores_nothing(
    connection: Connection, workspace_id: WorkspaceId, broken: str
):
    """All or nothing: whichever table refuses, none keeps anything, and no seq is used up."""
    whole = make_batch(workspace_id, Content(), Content(), answer=make_answer())

    with pytest.raises(asyncpg.PostgresError):
        await store.publish(connection, BROKEN[broken](whole))

    assert await row_counts(connection) == NOTHING
    assert await counters(connection, workspace_id) == Counters()
    assert await store.publish(connection, whole) == 2


@pytest.mark.parametrize(
    ("quota", "fits"), [(Quota(20, 2), True), (Quota(19, 2), False), (Quota(20, 1), False)]
)
async def test_a_batch_without_room_stores_nothing(
    connection: Connection, workspace_id: WorkspaceId, quota: Quota, fits: bool
):
    files = [Content(bytes(10)), Content(bytes(10))]

    seq = await store.publish(connection, make_batch(workspace_id, *files, quota=quota))

    assert (seq is not None) == fits
    if not fits:
        assert await row_counts(connection) == NOTHING
        assert await counters(connection, workspace_id) == Counters()


async def test_room_is_checked_after_waiting_for_the_counters(
    connection: Connection, workspace_id: WorkspaceId, connections: Any
):
    """Of two requests that fit one at a time, the second sees what the first has taken."""
    second, watcher = await connections(), await connections()
    quota = Quota(15, 10)
    transaction = connection.transaction()
    await transaction.start()
    first = make_batch(workspace_id, Content(bytes(10)), quota=quota)
    await store.publish(connection, first)
    late = make_batch(workspace_id, Content(bytes(10)), quota=quota)
    publishing = asyncio.create_task(store.publish(second, late))
    await until_blocked(watcher, second)

    await transaction.commit()

    assert await publishing is None
    assert (await row_counts(watcher))["uploads"] == 1
    assert await counters(watcher, workspace_id) == Counters(1, 10, 1)


async def test_nothing_is_published_to_an_unknown_workspace(
    connection: Connection, workspace_id: WorkspaceId
):
    batch = make_batch(WorkspaceId(uuid4()))

    assert await store.publish(connection, batch) is None
    assert await row_counts(connection) == NOTHING


# Idempotency keys


async def test_a_used_key_stores_nothing_again(connection: Connection, workspace_id: WorkspaceId):
    await make_upload(connection, workspace_id, answer=make_answer(json='{"files": [1]}'))
    again = make_batch(workspace_id, answer=make_answer(json='{"files": [2]}'))

    assert await store.publish(connection, again) is None
    assert (await row_counts(connection))["uploads"] == 1
    remembered = await store.remembered(connection, workspace_id, "a key", now=NOW)
    assert remembered == (b"fingerprint", '{"files": [1]}')


async def test_a_key_belongs_to_one_workspace(connection: Connection, workspace_id: WorkspaceId):
    other = await make_workspace(connection)
    await make_upload(connection, workspace_id, answer=make_answer())

    assert await store.remembered(connection, other, "a key", now=NOW) is None
    assert await store.publish(connection, make_batch(other, answer=make_answer())) == 1


async def test_a_key_with_an_expired_answer_is_new_again(
    connection: Connection, workspace_id: WorkspaceId
):
    """Whether or not the sweep has deleted the answer."""
    await make_upload(connection, workspace_id, answer=make_answer(expires_at=NOW))
    later = make_answer(json='{"files": [2]}', expires_at=NOW + DAY)

    expired = await store.remembered(connection, workspace_id, "a key", now=NOW)
    seq = await store.publish(connection, make_batch(workspace_id, answer=later))

    assert (expired, seq) == (None, 2)
    remembered = await store.remembered(connection, workspace_id, "a key", now=NOW)
    assert remembered == (b"fingerprint", '{"files": [2]}')


async def test_a_key_is_not_remembered_for_files_without_room(
    connection: Connection, workspace_id: WorkspaceId
):
    batch = make_batch(workspace_id, Content(bytes(10)), quota=Quota(9, 1), answer=make_answer())

    assert await store.publish_with_key(connection, batch) is None
    assert await row_counts(connection) == NOTHING
    assert await store.publish_with_key(connection, replace(batch, quota=Quota(10, 1))) == 1


@pytest.mark.parametrize("first_commits", [True, False])
async def test_of_two_requests_with_one_key_one_is_stored(
    connection: Connection, workspace_id: WorkspaceId, connections: Any, first_commits: bool
):
    """The second waits until the first is committed or rolled back."""
    second, watcher = await connections(), await connections()
    transaction = connection.transaction()
    await transaction.start()
    await store.publish(connection, make_batch(workspace_id, answer=make_answer()))
    repeated = make_batch(workspace_id, answer=make_answer())
    publishing = asyncio.create_task(store.publish(second, repeated))
    await until_blocked(watcher, second)

    await (transaction.commit() if first_commits else transaction.rollback())

    assert await publishing == (None if first_commits else 1)
    assert await row_counts(watcher) == dict.fromkeys(TABLES, 1)
    assert await counters(watcher, workspace_id) == Counters(1, 10, 1)


# Finding


async def test_an_acknowledged_expired_or_foreign_upload_is_not_found(
    connection: Connection, workspace_id: WorkspaceId
):
    other = await make_workspace(connection)
    waiting, acked = [await make_upload(connection, workspace_id) for _ in range(2)]
    await store.acknowledge(connection, workspace_id, acked, now=NOW)

    async def is_found(file_id: FileId, now: datetime = NOW, workspace: Any = workspace_id) -> bool:
        return await store.get(connection, workspace, file_id, now=now) is not None

    assert await is_found(waiting)
    assert await is_found(waiting, NOW + DAY - MOMENT)
    assert not await is_found(waiting, NOW + DAY)
    assert not await is_found(acked)
    assert not await is_found(waiting, workspace=other)
    assert not await is_found(FileId(uuid4()))


async def test_unacknowledged_files_are_listed_oldest_first_page_by_page(
    connection: Connection, workspace_id: WorkspaceId
):
    """Files of the same time are in the order of their ids."""
    other = await make_workspace(connection)
    await make_upload(connection, other)
    ids = [
        await make_upload(connection, workspace_id, now=NOW + timedelta(seconds=number // 2))
        for number in range(6)
    ]
    await store.acknowledge(connection, workspace_id, ids[0], now=NOW)
    after, listed = store.BEGINNING, list[FileId]()

    while page := await store.unacked(connection, workspace_id, after=after, limit=2, now=NOW):
        listed += [FileId(upload.file_id) for upload in page]
        after = (page[-1].created_at, page[-1].file_id)

    assert listed == [ids[1], *sorted(ids[2:4]), *sorted(ids[4:6])]


# Fetching and acknowledging


async def fetched_at(connection: Any, file_id: FileId) -> datetime | None:
    return await connection.fetchval("select fetched_at from uploads where file_id = $1", file_id)


async def acked_at(connection: Any, file_id: FileId) -> datetime | None:
    return await connection.fetchval("select acked_at from uploads where file_id = $1", file_id)


async def test_a_fetch_is_recorded_only_while_the_upload_can_be_fetched(
    connection: Connection, workspace_id: WorkspaceId
):
    other = await make_workspace(connection)
    file_id = await make_upload(connection, workspace_id)

    await store.mark_fetched(connection, other, file_id, now=NOW)
    by_another = await fetched_at(connection, file_id)
    await store.mark_fetched(connection, workspace_id, file_id, now=NOW + HOUR)
    by_its_own = await fetched_at(connection, file_id)
    await store.mark_fetched(connection, workspace_id, file_id, now=NOW + DAY)
    when_expired = await fetched_at(connection, file_id)
    await store.acknowledge(connection, workspace_id, file_id, now=NOW)
    await store.mark_fetched(connection, workspace_id, file_id, now=NOW + 2 * HOUR)

    assert (by_another, by_its_own, when_expired) == (None, NOW + HOUR, NOW + HOUR)
    assert await fetched_at(connection, file_id) == NOW + HOUR


async def test_the_first_acknowledgement_stays_and_frees_room_once(
    connection: Connection, workspace_id: WorkspaceId
):
    content = Content(bytes(10), "a.txt")
    file_id = await make_upload(connection, workspace_id, content)
    await make_upload(connection, workspace_id, Content(bytes(7)))

    times = [NOW, NOW + HOUR, NOW + 2 * DAY]
    acked = [await store.acknowledge(connection, workspace_id, file_id, now=now) for now in times]

    first, again = (Acknowledged(is_first, False, "a.txt", 10) for is_first in (True, False))
    assert acked == [first, again, again]
    assert await acked_at(connection, file_id) == NOW
    assert await counters(connection, workspace_id) == Counters(2, 7, 1)


async def test_an_absent_foreign_or_expired_upload_cannot_be_acknowledged(
    connection: Connection, workspace_id: WorkspaceId
):
    other = await make_workspace(connection)
    file_id = await make_upload(connection, workspace_id)

    assert await store.acknowledge(connection, other, file_id, now=NOW) is None
    assert await store.acknowledge(connection, workspace_id, FileId(uuid4()), now=NOW) is None
    assert await store.acknowledge(connection, workspace_id, file_id, now=NOW + DAY) is None
    assert await acked_at(connection, file_id) is None
    assert await counters(connection, workspace_id) == Counters(1, 10, 1)


async def test_of_two_acknowledgements_at_once_the_first_counts(
    connection: Connection, workspace_id: WorkspaceId, connections: Any
):
    second, watcher = await connections(), await connections()
    file_id = await make_upload(connection, workspace_id)
    transaction = connection.transaction()
    await transaction.start()
    await store.acknowledge(connection, workspace_id, file_id, now=NOW)
    again = asyncio.create_task(store.acknowledge(second, workspace_id, file_id, now=NOW + HOUR))
    await until_blocked(watcher, second)

    await transaction.commit()

    acked = await again
    assert acked
    assert (acked.is_first, acked.is_gone) == (False, False)
    assert await acked_at(watcher, file_id) == NOW
    assert await counters(watcher, workspace_id) == Counters(1, 0, 0)


async def test_an_acknowledgement_that_waited_for_a_fetch_mark_counts(
    connection: Connection, workspace_id: WorkspaceId, connections: Any
):
    second, watcher = await connections(), await connections()
    file_id = await make_upload(connection, workspace_id)
    transaction = connection.transaction()
    await transaction.start()
    await store.mark_fetched(connection, workspace_id, file_id, now=NOW)
    acking = asyncio.create_task(store.acknowledge(second, workspace_id, file_id, now=NOW))
    await until_blocked(watcher, second)

    await transaction.commit()

    acked = await acking
    assert acked
    assert (acked.is_first, acked.is_gone) == (True, False)
    assert await acked_at(watcher, file_id) == NOW
    assert await counters(watcher, workspace_id) == Counters(1, 0, 0)


@pytest.mark.parametrize("is_committed", [True, False])
async def test_an_acknowledgement_waits_for_a_deletion_and_says_what_became_of_it(
    connection: Connection, workspace_id: WorkspaceId, connections: Any, is_committed: bool
):
    """One statement: its snapshot has the row, and its lock waits for the concurrent delete."""
    client, watcher = await connections(), await connections()
    content = Content(bytes(10), "a.txt")
    file_id = await make_upload(connection, workspace_id, content)
    deletion = connection.transaction()
    await deletion.start()
    await connection.execute("delete from uploads where file_id = $1", file_id)
    acking = asyncio.create_task(store.acknowledge(client, workspace_id, file_id, now=NOW))
    await until_blocked(watcher, client)

    await (deletion.commit() if is_committed else deletion.rollback())

    assert await acking == Acknowledged(not is_committed, is_committed, "a.txt", 10)
    # The statement that deletes frees the room itself; this one must not do it too.
    left = Counters(1, 10, 1) if is_committed else Counters(1, 0, 0)
    assert await counters(watcher, workspace_id) == left


async def test_the_table_has_a_ceiling_for_sizes_whatever_the_settings_say(
    connection: Connection, workspace_id: WorkspaceId
):
    await make_upload(connection, workspace_id)
    resize = "update uploads set size = $1"

    await connection.execute(resize, 2**36)
    for wrong in (0, 2**36 + 1):
        with pytest.raises(asyncpg.CheckViolationError, match="uploads_size_check"):
            await connection.execute(resize, wrong)
