"""Due uploads, reservations and answers are deleted: all of them, once, waiting for nobody."""

import asyncio
from collections import Counter
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from factories import (
    DAY,
    HOUR,
    NOW,
    Content,
    Counters,
    counters,
    make_answer,
    make_reservation,
    make_upload,
    make_workspace,
    until_blocked,
)

from restante.database.pool import Connection, Database
from restante.delivery import buckets, quotas, store
from restante.delivery.rules import Quota
from restante.delivery.store import Acknowledged
from restante.delivery.subject import DueUploads, ExpiredAnswers, ExpiredReservations
from restante.ids import FileId, WorkspaceId
from restante.retention.subjects import RowSubject, Subjects
from restante.retention.sweep import Sweep

pytestmark = pytest.mark.anyio

MOMENT = timedelta(microseconds=1)
NARROW = Quota(max_bytes=1000, max_files=5)


@pytest.fixture
async def sweeper(connections: Any) -> Any:
    """A connection on which waiting for a lock fails."""
    connection = await connections()
    await connection.execute("set lock_timeout = '100ms'")
    return connection


async def sweep(
    connection: Connection, now: datetime, *, retention: timedelta = HOUR, limit: int = 1000
) -> Counter[str]:
    """Delete one batch."""
    deleted = await buckets.delete_due(
        connection, acked_before=now - retention, expired_before=now, limit=limit
    )
    return +Counter(deleted)


async def make_acked(
    connection: Connection, workspace_id: WorkspaceId, at: datetime = NOW
) -> FileId:
    file_id = await make_upload(connection, workspace_id)
    assert await store.acknowledge(connection, workspace_id, file_id, now=at)
    return file_id


async def remaining(connection: Any) -> set[FileId]:
    return {row["file_id"] for row in await connection.fetch("select file_id from uploads")}


# When


async def test_acknowledged_uploads_are_due_after_their_retention_and_not_before(
    connection: Connection, workspace_id: WorkspaceId
):
    await make_acked(connection, workspace_id, NOW - MOMENT)
    on_the_boundary = await make_acked(connection, workspace_id, NOW)

    assert await sweep(connection, NOW + HOUR) == {"acked": 1}
    assert await remaining(connection) == {on_the_boundary}
    assert await sweep(connection, NOW + HOUR + MOMENT) == {"acked": 1}


async def test_unacknowledged_uploads_are_due_when_they_have_expired_and_not_before(
    connection: Connection, workspace_id: WorkspaceId
):
    await make_upload(connection, workspace_id, expires_at=NOW - MOMENT)
    on_the_boundary = await make_upload(connection, workspace_id, expires_at=NOW)

    assert await sweep(connection, NOW) == {"expired": 1}
    assert await remaining(connection) == {on_the_boundary}
    assert await sweep(connection, NOW + MOMENT) == {"expired": 1}


@pytest.mark.parametrize("retention", [timedelta(0), timedelta(days=-30)])
async def test_a_negative_retention_counts_as_none(
    connection: Connection, workspace_id: WorkspaceId, retention: timedelta
):
    """It must not make uploads due that are acknowledged right now, or in the future."""
    for at in (NOW - HOUR, NOW, NOW + HOUR):
        await make_acked(connection, workspace_id, at)
    subject = DueUploads(ack_retention=retention)

    assert await subject.count_due(connection, now=NOW) == {"acked": 1, "expired": 0}
    assert await subject.delete_due(connection, now=NOW) == {"acked": 1, "expired": 0}


async def test_what_is_counted_as_due_is_what_is_deleted(
    connection: Connection, workspace_id: WorkspaceId
):
    await make_acked(connection, workspace_id, NOW - DAY)
    await make_acked(connection, workspace_id)
    for expires_at in (NOW - DAY, NOW - HOUR, NOW + HOUR):
        await make_upload(connection, workspace_id, expires_at=expires_at)
    subject = DueUploads(ack_retention=HOUR)

    counted = await subject.count_due(connection, now=NOW)

    assert counted == {"acked": 1, "expired": 2}
    assert await subject.delete_due(connection, now=NOW) == counted


# How much


async def test_only_unacknowledged_uploads_free_room(
    connection: Connection, workspace_id: WorkspaceId
):
    """The room of an acknowledged one was freed by the acknowledgement."""
    other = await make_workspace(connection)
    await make_acked(connection, workspace_id, NOW - DAY)
    await make_upload(connection, workspace_id, Content(bytes(30)), expires_at=NOW - HOUR)
    await make_upload(connection, workspace_id, Content(bytes(4)))
    await make_upload(connection, other, Content(bytes(50)), expires_at=NOW - HOUR)
    await make_upload(connection, other, Content(bytes(60)), expires_at=NOW - DAY)

    swept = await sweep(connection, NOW)

    assert swept == {"acked": 1, "expired": 3}
    assert await counters(connection, workspace_id) == Counters(3, 4, 1)
    assert await counters(connection, other) == Counters(2, 0, 0)


async def test_a_batch_is_bounded_and_begins_with_the_oldest(
    connection: Connection, workspace_id: WorkspaceId
):
    ids = [
        await make_upload(connection, workspace_id, expires_at=NOW - number * HOUR)
        for number in range(1, 6)
    ]

    assert await sweep(connection, NOW, limit=2) == {"expired": 2}
    assert await remaining(connection) == set(ids[:3])
    assert await sweep(connection, NOW, limit=2) == {"expired": 2}
    assert await sweep(connection, NOW, limit=2) == {"expired": 1}
    assert await sweep(connection, NOW, limit=2) == {}


class InSmallBatches(DueUploads):
    """So that one pass needs several."""

    batch_size = 3


def small_sweep(db: Database) -> Sweep:
    subject = InSmallBatches(ack_retention=timedelta(minutes=30))
    return Sweep(db, Subjects(subject), budget_seconds=20)


async def test_a_pass_deletes_batches_until_nothing_is_due(
    db: Database, connection: Connection, workspace_id: WorkspaceId
):
    for _ in range(7):
        await make_upload(connection, workspace_id, expires_at=NOW - HOUR)
    for _ in range(4):
        await make_acked(connection, workspace_id, NOW - HOUR)
    await make_upload(connection, workspace_id)

    report = await small_sweep(db).run(now=NOW)

    assert report.deleted == {"acked": 4, "expired": 7}
    assert await counters(connection, workspace_id) == Counters(12, 10, 1)
    assert (await small_sweep(db).run(now=NOW)).deleted == {}


# At the same time as others


async def test_a_locked_row_does_not_delay_the_others(
    connection: Connection, workspace_id: WorkspaceId, sweeper: Connection
):
    locked = await make_upload(connection, workspace_id, expires_at=NOW - DAY)
    for _ in range(3):
        await make_upload(connection, workspace_id, expires_at=NOW - HOUR)
    await make_acked(connection, workspace_id, NOW - DAY)
    async with connection.transaction():
        await connection.execute("select from uploads where file_id = $1 for update", locked)

        swept = await sweep(sweeper, NOW)

    assert swept == {"acked": 1, "expired": 3}
    assert await remaining(connection) == {locked}
    assert await sweep(sweeper, NOW) == {"expired": 1}
    assert await counters(connection, workspace_id) == Counters(5, 0, 0)


async def test_a_second_sweeper_deletes_what_the_first_has_not_locked(
    connection: Connection, workspace_id: WorkspaceId, sweeper: Connection
):
    for _ in range(5):
        await make_acked(connection, workspace_id, NOW - DAY)
    async with connection.transaction():
        first = await sweep(connection, NOW, limit=3)
        second = await sweep(sweeper, NOW, limit=3)

    assert (first, second) == ({"acked": 3}, {"acked": 2})
    assert await remaining(connection) == set()


async def test_servers_that_sweep_at_once_count_everything_once(
    db: Database, connection: Connection, workspace_id: WorkspaceId
):
    """The last batches of two passes may skip each other's rows; the next pass deletes those."""
    ids = [workspace_id, *[await make_workspace(connection) for _ in range(4)]]
    for number in range(100):
        expires_at = NOW - timedelta(seconds=1 + number * 37 % 100)
        await make_upload(connection, ids[number % 5], expires_at=expires_at)
        await make_acked(connection, ids[number % 5], NOW - DAY)

    reports = await asyncio.gather(*(small_sweep(db).run(now=NOW) for _ in range(8)))
    reports.append(await small_sweep(db).run(now=NOW))

    swept = sum((Counter(report.deleted) for report in reports), Counter[str]())
    assert swept == {"acked": 100, "expired": 100}
    assert await remaining(connection) == set()
    for each in ids:
        assert await counters(connection, each) == Counters(40, 0, 0)


async def test_a_locked_counter_postpones_its_workspace_and_nobody_else(
    connection: Connection, workspace_id: WorkspaceId, sweeper: Connection
):
    """The sweep does not wait, and what is published meanwhile is not lost from the counter."""
    other = await make_workspace(connection)
    await make_upload(connection, workspace_id, Content(bytes(30)), expires_at=NOW - HOUR)
    await make_upload(connection, other, expires_at=NOW - HOUR)
    transaction = connection.transaction()
    await transaction.start()
    await make_upload(connection, workspace_id, Content(bytes(5)))

    meanwhile = await sweep(sweeper, NOW)
    await transaction.commit()
    afterwards = await sweep(sweeper, NOW)

    assert (meanwhile, afterwards) == ({"expired": 1}, {"expired": 1})
    assert await counters(sweeper, workspace_id) == Counters(2, 5, 1)


async def test_an_acknowledgement_that_is_not_committed_yet_wins_over_the_sweep(
    connection: Connection, workspace_id: WorkspaceId, sweeper: Connection
):
    """It was made in time, although the upload has expired by the sweep's clock."""
    file_id = await make_upload(connection, workspace_id, expires_at=NOW + HOUR)
    transaction = connection.transaction()
    await transaction.start()
    await store.acknowledge(connection, workspace_id, file_id, now=NOW)

    meanwhile = await sweep(sweeper, NOW + 2 * HOUR, retention=DAY)
    await transaction.commit()
    afterwards = await sweep(sweeper, NOW + 2 * HOUR, retention=DAY)

    assert (meanwhile, afterwards) == ({}, {})
    assert await remaining(sweeper) == {file_id}
    assert await counters(sweeper, workspace_id) == Counters(1, 0, 0)


async def test_an_acknowledgement_during_the_sweep_finds_the_upload_gone(
    connection: Connection, workspace_id: WorkspaceId, connections: Any
):
    """This is the race that is answered with `raced`; the room is freed once."""
    client, watcher = await connections(), await connections()
    content = Content(name="a.txt")
    file_id = await make_upload(connection, workspace_id, content, expires_at=NOW + HOUR)
    transaction = connection.transaction()
    await transaction.start()
    assert await sweep(connection, NOW + 2 * HOUR) == {"expired": 1}
    acking = asyncio.create_task(store.acknowledge(client, workspace_id, file_id, now=NOW))
    await until_blocked(watcher, client)

    await transaction.commit()

    assert await acking == Acknowledged(is_first=False, is_gone=True, name="a.txt", size=10)
    assert await counters(watcher, workspace_id) == Counters(1, 0, 0)


# Reservations and answers


@pytest.mark.parametrize(
    ("subject", "table"),
    [(ExpiredReservations(), "reservations"), (ExpiredAnswers(), "answers")],
    ids=["reservations", "answers"],
)
async def test_reservations_and_answers_are_due_when_they_have_expired_and_not_before(
    connection: Any, workspace_id: WorkspaceId, subject: RowSubject, table: str
):
    for expires_at in (NOW - MOMENT, NOW, NOW + MOMENT):
        reservation = make_reservation(workspace_id, 100)
        await quotas.reserve(connection, reservation, NARROW)
        await connection.execute(
            "update reservations set expires_at = $2 where id = $1", reservation.id, expires_at
        )
        answer = make_answer(str(uuid4()), expires_at=expires_at)
        await make_upload(connection, workspace_id, answer=answer)

    counted = await subject.count_due(connection, now=NOW)

    assert counted == await subject.delete_due(connection, now=NOW) == {table: 1}
    assert await connection.fetchval(f"select min(expires_at) from {table}") == NOW
    reserved = (await counters(connection, workspace_id)).reserved_bytes
    assert reserved == (200 if table == "reservations" else 300)


async def test_reservations_that_several_servers_release_at_once_free_room_once(
    db: Database, connection: Connection, workspace_id: WorkspaceId
):
    for _ in range(5):
        await quotas.reserve(connection, make_reservation(workspace_id, 100), NARROW)
    await make_upload(connection, workspace_id)

    async def release() -> None:
        async with db.connection() as own:
            await ExpiredReservations().delete_due(own, now=NOW + DAY)

    await asyncio.gather(*(release() for _ in range(8)))

    left = await counters(connection, workspace_id)
    assert (left.reserved_bytes, left.reserved_files, left.waiting_files) == (0, 0, 1)
