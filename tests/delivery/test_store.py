"""Uploads on several connections: published whole, acknowledged once, swept exactly."""

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
    make_message,
    make_reservation,
    make_upload,
    make_workspace,
    until_blocked,
)

from restante.database import sql
from restante.database.pool import Database, Tx
from restante.delivery import quota_store as quotas
from restante.delivery import store as uploads
from restante.delivery.rules import Chunk, Quota, Swept
from restante.delivery.store import Publication
from restante.feed import store as feed
from restante.ids import FileId, WorkspaceId, new_file_id
from restante.workspaces import store as workspaces

pytestmark = pytest.mark.anyio

MOMENT = timedelta(microseconds=1)
TABLES = ("uploads", "chunks", "feed", "answers")


@pytest.fixture
async def connection(db_with_partitions: Database, connections: Any) -> Any:
    return await connections()


@pytest.fixture
async def workspace_id(connection: Tx) -> WorkspaceId:
    return await make_workspace(connection)


async def row_counts(connection: Any) -> dict[str, int]:
    return {name: await connection.fetchval(f"select count(*) from {name}") for name in TABLES}


NOTHING = dict.fromkeys(TABLES, 0)


# Publishing


async def test_a_publication_is_files_rows_bytes_and_counters(
    connection: Tx, workspace_id: WorkspaceId
):
    first, second = Content(b"one", "a.txt"), Content(b"second", "b.txt")

    seq = await uploads.publish(connection, make_batch(workspace_id, first, second))

    assert seq == 2
    assert await counters(connection, workspace_id) == Counters(2, 9, 2)
    assert await row_counts(connection) == {"uploads": 2, "chunks": 2, "feed": 2, "answers": 0}
    found = await uploads.get(connection, workspace_id, first.id, now=NOW)
    assert found
    assert (found.name, found.size, found.sha256) == ("a.txt", 3, first.upload.sha256)


def _with_file(publication: Publication, **wrong: Any) -> Publication:
    *others, last = publication.files
    return replace(publication, files=[*others, replace(last, **wrong)])


def _with_chunk(publication: Publication, chunk: Chunk) -> Publication:
    return replace(publication, last_chunks=[*publication.last_chunks, chunk])


BROKEN: dict[str, Callable[[Publication], Publication]] = {
    "name": lambda p: _with_file(p, name="not/a/name"),
    "dots": lambda p: _with_file(p, name=".."),
    "empty": lambda p: _with_file(p, size=0),
    "too_large": lambda p: _with_file(p, size=26_214_401),
    "digest": lambda p: _with_file(p, sha256=b"short"),
    "twice": lambda p: _with_file(p, file_id=p.files[0].file_id),
    "chunk_empty": lambda p: _with_chunk(p, Chunk(new_file_id(), 0, b"")),
    "chunk_too_large": lambda p: _with_chunk(p, Chunk(new_file_id(), 0, bytes(262_145))),
    "chunk_negative": lambda p: _with_chunk(p, Chunk(new_file_id(), -1, b"x")),
    "no_leaf": lambda p: replace(p, bucket=NOW - 365 * DAY),
    "row": lambda p: replace(
        p, announcements=[p.announcements[0], replace(make_message(), request_body=b"no json")]
    ),
    "key": lambda p: replace(p, answer=make_answer("k" * 256)),
    "answer": lambda p: replace(p, answer=make_answer(json="no json")),
}


@pytest.mark.parametrize("broken", BROKEN)
async def test_a_publication_with_one_bad_part_stores_nothing(
    connection: Tx, workspace_id: WorkspaceId, broken: str
):
    """All or nothing: whichever table refuses, none keeps anything, and the counter stands."""
    whole = make_batch(workspace_id, Content(), Content(), answer=make_answer())

    with pytest.raises(asyncpg.PostgresError):
        await uploads.publish(connection, BROKEN[broken](whole))

    assert await row_counts(connection) == NOTHING
    assert await counters(connection, workspace_id) == Counters()
    assert await uploads.publish(connection, whole) == 2


@pytest.mark.parametrize(
    ("quota", "fits"),
    [
        (Quota(20, 2), True),
        (Quota(19, 2), False),
        (Quota(20, 1), False),
    ],
)
async def test_a_publication_without_room_stores_nothing(
    connection: Tx, workspace_id: WorkspaceId, quota: Quota, fits: bool
):
    files = [Content(bytes(10)), Content(bytes(10))]

    seq = await uploads.publish(connection, make_batch(workspace_id, *files, quota=quota))

    assert (seq is not None) == fits
    if not fits:
        assert await row_counts(connection) == NOTHING
        assert await counters(connection, workspace_id) == Counters()


async def test_room_is_looked_for_after_the_wait(
    connection: Tx, workspace_id: WorkspaceId, connections: Any
):
    """The last room goes to one of two: the other sees what the first has taken."""
    second, watcher = await connections(), await connections()
    quota = Quota(15, 10)
    transaction = connection.transaction()
    await transaction.start()
    first = make_batch(workspace_id, Content(bytes(10)), quota=quota)
    await uploads.publish(connection, first)
    late = make_batch(workspace_id, Content(bytes(10)), quota=quota)
    publishing = asyncio.create_task(uploads.publish(second, late))
    await until_blocked(watcher, second)

    await transaction.commit()

    assert await publishing is None
    assert (await row_counts(watcher))["uploads"] == 1
    assert await counters(watcher, workspace_id) == Counters(1, 10, 1)


async def test_an_unknown_workspace_gets_nothing(connection: Tx):
    publication = make_batch(WorkspaceId(uuid4()))

    assert await uploads.publish(connection, publication) is None
    assert await row_counts(connection) == NOTHING


# Keys


async def test_a_key_that_was_used_stores_nothing_again(connection: Tx, workspace_id: WorkspaceId):
    await make_upload(connection, workspace_id, answer=make_answer(json='{"files": [1]}'))
    again = make_batch(workspace_id, answer=make_answer(json='{"files": [2]}'))

    assert await uploads.publish(connection, again) is None
    assert (await row_counts(connection))["uploads"] == 1
    remembered = await uploads.remembered(connection, workspace_id, "a key", now=NOW)
    assert remembered == (b"fingerprint", '{"files": [1]}')


async def test_a_key_belongs_to_one_workspace(connection: Tx, workspace_id: WorkspaceId):
    other = await make_workspace(connection)
    await make_upload(connection, workspace_id, answer=make_answer())

    assert await uploads.remembered(connection, other, "a key", now=NOW) is None
    assert await uploads.publish(connection, make_batch(other, answer=make_answer())) == 1


async def test_a_key_whose_answer_has_expired_is_new_again(
    connection: Tx, workspace_id: WorkspaceId
):
    """Whether or not somebody has cleaned up since."""
    await make_upload(connection, workspace_id, answer=make_answer(expires_at=NOW))
    later = make_answer(json='{"files": [2]}', expires_at=NOW + DAY)

    forgotten = await uploads.remembered(connection, workspace_id, "a key", now=NOW)
    seq = await uploads.publish(connection, make_batch(workspace_id, answer=later))

    assert (forgotten, seq) == (None, 2)
    remembered = await uploads.remembered(connection, workspace_id, "a key", now=NOW)
    assert remembered == (b"fingerprint", '{"files": [2]}')


@pytest.mark.parametrize("first_commits", [True, False])
async def test_of_two_requests_with_one_key_one_is_stored(
    connection: Tx, workspace_id: WorkspaceId, connections: Any, first_commits: bool
):
    """The second waits to see what becomes of the first."""
    second, watcher = await connections(), await connections()
    transaction = connection.transaction()
    await transaction.start()
    await uploads.publish(connection, make_batch(workspace_id, answer=make_answer()))
    repeated = make_batch(workspace_id, answer=make_answer())
    publishing = asyncio.create_task(uploads.publish(second, repeated))
    await until_blocked(watcher, second)

    await (transaction.commit() if first_commits else transaction.rollback())

    assert await publishing == (None if first_commits else 1)
    assert await row_counts(watcher) == dict.fromkeys(TABLES, 1)
    assert await counters(watcher, workspace_id) == Counters(1, 10, 1)


# Finding


async def test_what_is_acknowledged_expired_or_somebody_elses_is_not_there(
    connection: Tx, workspace_id: WorkspaceId
):
    other = await make_workspace(connection)
    waiting, acked = [await make_upload(connection, workspace_id) for _ in range(2)]
    await uploads.acknowledge(connection, workspace_id, acked, now=NOW)

    async def is_found(file_id: FileId, now: datetime = NOW, workspace: Any = workspace_id) -> bool:
        return await uploads.get(connection, workspace, file_id, now=now) is not None

    assert await is_found(waiting)
    assert await is_found(waiting, NOW + DAY - MOMENT)
    assert not await is_found(waiting, NOW + DAY)
    assert not await is_found(acked)
    assert not await is_found(waiting, workspace=other)
    assert not await is_found(new_file_id())


async def test_what_waits_is_listed_oldest_first_page_by_page(
    connection: Tx, workspace_id: WorkspaceId
):
    other = await make_workspace(connection)
    await make_upload(connection, other)
    ids = [
        await make_upload(connection, workspace_id, now=NOW + timedelta(seconds=number // 2))
        for number in range(6)
    ]
    await uploads.acknowledge(connection, workspace_id, ids[0], now=NOW)
    after, listed = (NOW - DAY, FileId(uuid4())), list[FileId]()

    while page := await uploads.waiting(connection, workspace_id, after=after, limit=2, now=NOW):
        listed += [upload.file_id for upload in page]
        after = (page[-1].created_at, page[-1].file_id)

    # Those of one moment come in the order of their ids.
    assert listed == [ids[1], *sorted(ids[2:4]), *sorted(ids[4:6])]


# Fetching and acknowledging


async def fetched_at(connection: Any, file_id: FileId) -> datetime | None:
    return await connection.fetchval("select fetched_at from uploads where file_id = $1", file_id)


async def test_a_fetch_is_noted_while_the_upload_waits(connection: Tx, workspace_id: WorkspaceId):
    other = await make_workspace(connection)
    file_id = await make_upload(connection, workspace_id)

    await uploads.mark_fetched(connection, other, file_id, now=NOW)
    by_another = await fetched_at(connection, file_id)
    await uploads.mark_fetched(connection, workspace_id, file_id, now=NOW + HOUR)
    by_its_own = await fetched_at(connection, file_id)
    await uploads.mark_fetched(connection, workspace_id, file_id, now=NOW + DAY)
    when_expired = await fetched_at(connection, file_id)
    await uploads.acknowledge(connection, workspace_id, file_id, now=NOW)
    await uploads.mark_fetched(connection, workspace_id, file_id, now=NOW + 2 * HOUR)

    assert (by_another, by_its_own, when_expired) == (None, NOW + HOUR, NOW + HOUR)
    assert await fetched_at(connection, file_id) == NOW + HOUR


async def test_the_first_acknowledgement_stays_and_gives_room_back_once(
    connection: Tx, workspace_id: WorkspaceId
):
    file_id = await make_upload(connection, workspace_id, Content(bytes(10)))
    await make_upload(connection, workspace_id, Content(bytes(7)))

    times = [NOW, NOW + HOUR, NOW + 2 * DAY]
    acked = [await uploads.acknowledge(connection, workspace_id, file_id, now=now) for now in times]

    assert [each and each.first_time for each in acked] == [True, False, False]
    assert await acked_at(connection, file_id) == NOW
    assert await counters(connection, workspace_id) == Counters(2, 7, 1)


async def acked_at(connection: Any, file_id: FileId) -> datetime | None:
    return await connection.fetchval("select acked_at from uploads where file_id = $1", file_id)


async def test_what_is_not_there_cannot_be_acknowledged(connection: Tx, workspace_id: WorkspaceId):
    other = await make_workspace(connection)
    file_id = await make_upload(connection, workspace_id)

    assert await uploads.acknowledge(connection, other, file_id, now=NOW) is None
    assert await uploads.acknowledge(connection, workspace_id, new_file_id(), now=NOW) is None
    assert await uploads.acknowledge(connection, workspace_id, file_id, now=NOW + DAY) is None
    assert not await uploads.exists(connection, workspace_id, file_id, now=NOW + DAY)
    assert await uploads.exists(connection, workspace_id, file_id, now=NOW)
    assert await counters(connection, workspace_id) == Counters(1, 10, 1)


async def test_of_two_acknowledgements_at_once_the_first_counts(
    connection: Tx, workspace_id: WorkspaceId, connections: Any
):
    second, watcher = await connections(), await connections()
    file_id = await make_upload(connection, workspace_id)
    transaction = connection.transaction()
    await transaction.start()
    await uploads.acknowledge(connection, workspace_id, file_id, now=NOW)
    again = asyncio.create_task(uploads.acknowledge(second, workspace_id, file_id, now=NOW + HOUR))
    await until_blocked(watcher, second)

    await transaction.commit()

    acked = await again
    assert acked
    assert not acked.first_time
    assert await acked_at(watcher, file_id) == NOW
    assert await counters(watcher, workspace_id) == Counters(1, 0, 0)


async def test_an_acknowledgement_that_waited_for_a_fetch_mark_counts(
    connection: Tx, workspace_id: WorkspaceId, connections: Any
):
    second, watcher = await connections(), await connections()
    file_id = await make_upload(connection, workspace_id)
    transaction = connection.transaction()
    await transaction.start()
    await uploads.mark_fetched(connection, workspace_id, file_id, now=NOW)
    acking = asyncio.create_task(uploads.acknowledge(second, workspace_id, file_id, now=NOW))
    await until_blocked(watcher, second)

    await transaction.commit()

    acked = await acking
    assert acked
    assert acked.first_time
    assert await acked_at(watcher, file_id) == NOW
    assert await counters(watcher, workspace_id) == Counters(1, 0, 0)


# Sweeping


async def sweep(connection: Tx, now: datetime, retention: timedelta = HOUR) -> Swept:
    return await uploads.sweep(connection, acked_before=now - retention, expired_before=now)


async def make_acked(connection: Tx, workspace_id: WorkspaceId, at: datetime = NOW) -> FileId:
    file_id = await make_upload(connection, workspace_id)
    assert await uploads.acknowledge(connection, workspace_id, file_id, now=at)
    return file_id


async def remaining(connection: Any) -> set[FileId]:
    return {row["file_id"] for row in await connection.fetch("select file_id from uploads")}


async def test_the_acknowledged_go_after_their_retention_and_not_before(
    connection: Tx, workspace_id: WorkspaceId
):
    await make_acked(connection, workspace_id, NOW - MOMENT)
    at_the_border = await make_acked(connection, workspace_id, NOW)

    assert await sweep(connection, NOW + HOUR) == Swept(acked=1)
    assert await remaining(connection) == {at_the_border}
    assert await sweep(connection, NOW + HOUR + MOMENT) == Swept(acked=1)


async def test_the_unclaimed_go_when_they_expire_and_not_before(
    connection: Tx, workspace_id: WorkspaceId
):
    await make_upload(connection, workspace_id, expires_at=NOW - MOMENT)
    at_the_border = await make_upload(connection, workspace_id, expires_at=NOW)

    assert await sweep(connection, NOW) == Swept(expired=1)
    assert await remaining(connection) == {at_the_border}
    assert await sweep(connection, NOW + MOMENT) == Swept(expired=1)


async def test_only_the_unclaimed_give_room_back(connection: Tx, workspace_id: WorkspaceId):
    """The room of an acknowledged one was given back with the acknowledgement."""
    other = await make_workspace(connection)
    await make_acked(connection, workspace_id, NOW - DAY)
    await make_upload(connection, workspace_id, Content(bytes(30)), expires_at=NOW - HOUR)
    await make_upload(connection, workspace_id, Content(bytes(4)))
    await make_upload(connection, other, Content(bytes(50)), expires_at=NOW - HOUR)
    await make_upload(connection, other, Content(bytes(60)), expires_at=NOW - DAY)

    swept = await sweep(connection, NOW)

    assert swept == Swept(acked=1, expired=3)
    assert await counters(connection, workspace_id) == Counters(3, 4, 1)
    assert await counters(connection, other) == Counters(2, 0, 0)


async def test_a_batch_is_bounded_and_takes_the_oldest_first(
    connection: Tx, workspace_id: WorkspaceId, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(uploads, "SWEEP_BATCH", 2)
    ids = [
        await make_upload(connection, workspace_id, expires_at=NOW - number * HOUR)
        for number in range(1, 6)
    ]

    assert await sweep(connection, NOW) == Swept(expired=2)
    assert await remaining(connection) == set(ids[:3])
    assert await sweep(connection, NOW) == Swept(expired=2)
    assert await sweep(connection, NOW) == Swept(expired=1)
    assert await sweep(connection, NOW) == Swept()


async def test_a_row_that_a_client_holds_does_not_hold_up_the_rest(
    connection: Tx, workspace_id: WorkspaceId, connections: Any
):
    client = await connections()
    held = await make_upload(connection, workspace_id, expires_at=NOW - DAY)
    for _ in range(3):
        await make_upload(connection, workspace_id, expires_at=NOW - HOUR)
    await make_acked(connection, workspace_id, NOW - DAY)
    async with client.transaction():
        await client.execute("select from uploads where file_id = $1 for update", held)

        async with asyncio.timeout(5):
            swept = await sweep(connection, NOW)

    assert swept == Swept(acked=1, expired=3)
    assert await remaining(connection) == {held}
    assert await sweep(connection, NOW) == Swept(expired=1)
    assert await counters(connection, workspace_id) == Counters(5, 0, 0)


async def test_two_sweepers_share_the_work(
    connection: Tx,
    workspace_id: WorkspaceId,
    connections: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    """The second takes what the first has not, without waiting for it."""
    monkeypatch.setattr(uploads, "SWEEP_BATCH", 3)
    second = await connections()
    for _ in range(5):
        await make_acked(connection, workspace_id, NOW - DAY)
    async with connection.transaction():
        first_swept = await sweep(connection, NOW)
        async with asyncio.timeout(5):
            second_swept = await sweep(second, NOW)

    assert (first_swept, second_swept) == (Swept(acked=3), Swept(acked=2))
    assert await remaining(connection) == set()


async def test_many_sweepers_count_everything_once(
    db_with_partitions: Database, connection: Tx, monkeypatch: pytest.MonkeyPatch
):
    """Workspaces and rows are mixed, so that sweepers meet at the same counters."""
    monkeypatch.setattr(uploads, "SWEEP_BATCH", 7)
    ids = [await make_workspace(connection) for _ in range(5)]
    for number in range(100):
        await make_upload(
            connection, ids[number % 5], expires_at=NOW - timedelta(seconds=1 + number * 37 % 100)
        )
        await make_acked(connection, ids[number % 5], NOW - DAY)

    async def sweep_all() -> Swept:
        swept = Swept()
        while True:
            async with db_with_partitions.connection() as own:
                batch = await sweep(own, NOW)
            swept += batch
            if not batch.total:
                return swept

    swept = await asyncio.gather(*(sweep_all() for _ in range(8)))

    assert sum(swept, Swept()) == Swept(acked=100, expired=100)
    assert await remaining(connection) == set()
    for workspace_id in ids:
        assert await counters(connection, workspace_id) == Counters(40, 0, 0)


async def test_a_held_counter_keeps_its_workspace_for_the_next_pass_and_nobody_else(
    connection: Tx, workspace_id: WorkspaceId, connections: Any
):
    """The sweep waits for nothing, and what comes in meanwhile is not lost from the counter."""
    sweeper, other = await connections(), await make_workspace(connection)
    await make_upload(connection, workspace_id, Content(bytes(30)), expires_at=NOW - HOUR)
    await make_upload(connection, other, expires_at=NOW - HOUR)
    transaction = connection.transaction()
    await transaction.start()
    await make_upload(connection, workspace_id, Content(bytes(5)))

    async with asyncio.timeout(5):
        meanwhile = await sweep(sweeper, NOW)
    await transaction.commit()
    afterwards = await sweep(sweeper, NOW)

    assert (meanwhile, afterwards) == (Swept(expired=1), Swept(expired=1))
    assert await counters(sweeper, workspace_id) == Counters(2, 5, 1)


async def test_an_acknowledgement_that_is_committing_wins_over_the_sweep(
    connection: Tx, workspace_id: WorkspaceId, connections: Any
):
    """It came in time, though the sweep's clock says that the upload has expired since."""
    sweeper = await connections()
    file_id = await make_upload(connection, workspace_id, expires_at=NOW + HOUR)
    transaction = connection.transaction()
    await transaction.start()
    await uploads.acknowledge(connection, workspace_id, file_id, now=NOW)

    async with asyncio.timeout(5):
        meanwhile = await sweep(sweeper, NOW + 2 * HOUR, retention=DAY)
    await transaction.commit()
    afterwards = await sweep(sweeper, NOW + 2 * HOUR, retention=DAY)

    assert (meanwhile, afterwards) == (Swept(), Swept())
    assert await acked_at(sweeper, file_id) == NOW
    assert await counters(sweeper, workspace_id) == Counters(1, 0, 0)


async def test_an_acknowledgement_that_finds_the_sweep_at_work_finds_nothing(
    connection: Tx, workspace_id: WorkspaceId, connections: Any
):
    """The caller had seen the upload a moment before: this is the race that is answered `raced`."""
    client, watcher = await connections(), await connections()
    file_id = await make_upload(connection, workspace_id, expires_at=NOW + HOUR)
    transaction = connection.transaction()
    await transaction.start()
    assert await sweep(connection, NOW + 2 * HOUR) == Swept(expired=1)
    assert await uploads.exists(client, workspace_id, file_id, now=NOW)
    acking = asyncio.create_task(uploads.acknowledge(client, workspace_id, file_id, now=NOW))
    await until_blocked(watcher, client)

    await transaction.commit()

    assert await acking is None
    assert await counters(watcher, workspace_id) == Counters(1, 0, 0)


# What is waited for


async def test_what_becomes_visible_is_synced_and_the_rest_is_not_waited_for(
    db_with_partitions: Database,
):
    """The setting as it stands when the statement's transaction is about to commit."""
    db = db_with_partitions
    async with db.connection() as connection:
        workspace_id = await make_workspace(connection)
        promise = make_reservation(workspace_id)
        file_id = await make_upload(connection, workspace_id)
        chunk_queries, feed_queries = sql.load("restante.delivery"), sql.load("restante.feed")
        put = (make_batch(workspace_id).bucket, workspace_id, [new_file_id()], [0], [b"x"])
        statements = {
            "publish": lambda: uploads.publish(connection, make_batch(workspace_id)),
            "append": lambda: feed.append(connection, workspace_id, make_message(), now=NOW),
            "mark": lambda: feed.acknowledge(connection, workspace_id, 1),
            "put": lambda: connection.execute(chunk_queries.put_chunks, *put),
            "reserve": lambda: quotas.reserve(connection, promise, Quota(10**6, 100)),
            "release": lambda: quotas.release(connection, promise.id),
            "fetched": lambda: uploads.mark_fetched(connection, workspace_id, file_id, now=NOW),
            "heartbeat": lambda: workspaces.heartbeat(connection, workspace_id, 1, ""),
            "notify": lambda: connection.execute(feed_queries.notify, workspace_id.hex),
            "acknowledge": lambda: uploads.acknowledge(connection, workspace_id, file_id, now=NOW),
        }
        found = {
            name: [await setting_after(connection, run), await setting(connection)]
            for name, run in statements.items()
        }

    synced = {"publish", "append", "mark", "acknowledge"}
    assert {name for name, (inside, _) in found.items() if inside == "on"} == synced
    assert {after for _, after in found.values()} == {"on"}


async def setting(connection: Any) -> str:
    return await connection.fetchval("show synchronous_commit")


async def setting_after(connection: Any, run: Any) -> str:
    async with connection.transaction():
        await run()
        return await setting(connection)


async def test_a_publication_flushes_the_chunks_that_were_written_ahead_of_it(
    db_with_partitions: Database, workspace_id: WorkspaceId
):
    """One flush of the log covers what was written ahead of it, so it is flushed up to its end."""
    content, chunks = Content(bytes(100)), sql.load("restante.delivery").put_chunks
    publication = make_batch(workspace_id, content)
    async with db_with_partitions.connection() as connection:
        await connection.execute(
            chunks, publication.bucket, workspace_id, [content.id], [7], [bytes(1000)]
        )
        ahead = await connection.fetchval("select pg_current_wal_insert_lsn()")

        await uploads.publish(connection, publication)

        assert await connection.fetchval("select pg_current_wal_flush_lsn() >= $1::pg_lsn", ahead)
