"""The statements of the sweep on buckets: live files, arriving uploads, moving a file."""

from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from factories import DAY, HOUR, NOW, ROOMY, Content, make_reservation, make_upload, make_workspace
from sweeps import CHUNKS, PAST, make_old, make_partition

from restante.database import partitions
from restante.database.pool import Connection, Database
from restante.database.spans import Span
from restante.delivery import buckets, quotas
from restante.delivery.buckets import NO_FILES, LiveFiles
from restante.delivery.subject import DueUploads
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

MOMENT = timedelta(microseconds=1)
SPAN = Span(PAST, PAST + HOUR)


@pytest.fixture
async def connection(db: Database, connections: Any) -> Any:
    """With one bucket that has a past range."""
    connection = await connections()
    await make_partition(connection, CHUNKS)
    return connection


async def live_files(connection: Connection, *, limit: int = 100) -> LiveFiles:
    found = await buckets.live_in(connection, [SPAN], acked_before=NOW - HOUR, now=NOW, limit=limit)
    return found.get(1, NO_FILES)


async def test_live_files_are_those_that_are_not_due(
    connection: Connection, workspace_id: WorkspaceId
):
    """At both borders it agrees with what the sweep deletes."""
    times = {
        "unacknowledged": (None, NOW + DAY),
        "expiring now": (None, NOW),
        "expired": (None, NOW - MOMENT),
        "acknowledged": (NOW - HOUR, NOW + DAY),
        "acknowledged long ago": (NOW - HOUR - MOMENT, NOW + DAY),
        "acknowledged and expired": (NOW - MOMENT, NOW - DAY),
    }
    for number, (acked_at, expires_at) in enumerate(times.values()):
        content = Content(bytes(10**number))
        await make_upload(connection, workspace_id, content, bucket=PAST, expires_at=expires_at)
        await connection.execute(
            "update uploads set acked_at = $2 where file_id = $1", content.id, acked_at
        )
    subject = DueUploads(ack_retention=HOUR)

    found = await live_files(connection)
    due = await subject.count_due(connection, now=NOW)
    deleted = await subject.delete_due(connection, now=NOW)

    assert (found.files, found.bytes) == (4, 101_011)
    assert due == deleted == {"acked": 1, "expired": 1}
    assert await live_files(connection) == found


async def test_the_workspace_with_most_bytes_is_named(
    connection: Connection, workspace_id: WorkspaceId
):
    hoarder = await make_workspace(connection)
    await make_old(connection, workspace_id, 5, data=bytes(10))
    await make_old(connection, hoarder, 2, data=bytes(100), expires_at=NOW + HOUR)
    await connection.execute(
        "update uploads set created_at = $2 where workspace_id = $1", hoarder, NOW - DAY
    )

    found = await live_files(connection)

    assert found == LiveFiles(7, 250, hoarder, 200, NOW - DAY, NOW + HOUR)


async def test_live_files_are_counted_up_to_the_limit(
    connection: Connection, workspace_id: WorkspaceId
):
    await make_old(connection, workspace_id, 5, data=b"x")

    assert (await live_files(connection, limit=6)).files == 5
    assert (await live_files(connection, limit=5)).files == 5
    assert (await live_files(connection, limit=1)).files == 1


async def test_each_bucket_is_counted_by_itself(connection: Connection, workspace_id: WorkspaceId):
    """The start of the next bucket is not in this one."""
    for number in (1, 2):
        await make_partition(connection, CHUNKS, PAST + number * HOUR)
    last_second = PAST + HOUR - timedelta(seconds=1)
    await make_old(connection, workspace_id, 1, data=b"x", bucket=PAST + HOUR)
    await make_old(connection, workspace_id, 2, data=b"x", bucket=last_second)
    promise = make_reservation(workspace_id, bucket=PAST + 2 * HOUR)
    await quotas.reserve(connection, promise, ROOMY)
    spans = [Span(PAST + number * HOUR, PAST + (number + 1) * HOUR) for number in range(3)]

    live = await buckets.live_in(connection, spans, acked_before=NOW - HOUR, now=NOW, limit=10)
    arriving = await buckets.arriving_in(connection, spans)

    assert {number: found.files for number, found in live.items()} == {1: 2, 2: 1}
    assert arriving == {3: 1}


async def test_a_bucket_is_in_use_by_an_upload_or_by_any_reservation(
    connection: Connection, workspace_id: WorkspaceId
):
    """An upload with an expired reservation can be published until the reservation is deleted."""
    last_second = PAST + HOUR - timedelta(seconds=1)
    late = make_reservation(workspace_id, bucket=last_second, lasts=-HOUR)
    await quotas.reserve(connection, late, ROOMY)
    await quotas.reserve(connection, make_reservation(workspace_id, bucket=PAST + HOUR), ROOMY)

    reserved = await buckets.is_bucket_in_use(connection, SPAN)
    await quotas.release(connection, late.id)
    released = await buckets.is_bucket_in_use(connection, SPAN)
    await make_old(connection, workspace_id, expires_at=PAST)

    assert (reserved, released) == (True, False)
    assert await buckets.is_bucket_in_use(connection, SPAN)


async def test_a_file_is_moved_once(connection: Connection, workspace_id: WorkspaceId):
    (file_id,) = await make_old(connection, workspace_id, data=b"four")
    to = NOW.replace(microsecond=0)

    moved = [await buckets.move_file(connection, workspace_id, file_id, to=to) for _ in range(2)]

    assert moved == [4, None]
    assert await connection.fetchval("select bucket from uploads") == to
    assert await connection.fetchval("select bytes from chunks where bucket = $1", to) == b"four"


async def test_a_file_that_is_gone_is_not_moved(connection: Connection, workspace_id: WorkspaceId):
    (file_id,) = await make_old(connection, workspace_id)
    await connection.execute("delete from uploads")

    assert await buckets.move_file(connection, workspace_id, file_id, to=NOW) is None


async def test_a_file_that_another_session_has_locked_is_not_waited_for(
    connection: Connection, workspace_id: WorkspaceId, connections: Any
):
    holder = await connections()
    (file_id,) = await make_old(connection, workspace_id)
    async with holder.transaction():
        await holder.execute("select from uploads for update")

        moved = await buckets.move_file(connection, workspace_id, file_id, to=NOW)

    assert moved is None


async def test_nothing_is_stored_of_a_publication_into_a_sealed_bucket(
    connection: Connection, workspace_id: WorkspaceId
):
    """Neither row nor announcement."""
    await partitions.seal(connection, f"chunks_{PAST:%Y%m%d_%H%M%S}")

    with pytest.raises(asyncpg.CheckViolationError, match='"sealed"'):
        await make_old(connection, workspace_id)

    assert await connection.fetchval("select count(*) from uploads") == 0
    assert await connection.fetchval("select last_seq from feeds") == 0
