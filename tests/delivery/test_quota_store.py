"""Room is promised, used, taken back and counted exactly, whoever does it at the same time."""

import asyncio
from datetime import timedelta
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
    make_batch,
    make_reservation,
    make_upload,
    make_workspace,
    until_blocked,
)

from restante.database.pool import Database, Tx
from restante.delivery import quota_store as quotas
from restante.delivery import store as uploads
from restante.delivery.rules import Quota, Usage
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

NARROW = Quota(max_bytes=1000, max_files=5)
MOMENT = timedelta(microseconds=1)


@pytest.fixture
async def connection(db_with_partitions: Database, connections: Any) -> Any:
    return await connections()


@pytest.fixture
async def workspace_id(connection: Tx) -> WorkspaceId:
    return await make_workspace(connection)


@pytest.mark.parametrize(
    ("size", "files", "fits"), [(1000, 1, True), (1001, 1, False), (1, 5, True), (1, 6, False)]
)
async def test_room_up_to_the_quota_and_not_beyond(
    connection: Tx, workspace_id: WorkspaceId, size: int, files: int, fits: bool
):
    wanted = make_reservation(workspace_id, size, files=files)

    assert await quotas.reserve(connection, wanted, NARROW) == fits

    expected = Counters(reserved_bytes=size, reserved_files=files) if fits else Counters()
    assert await counters(connection, workspace_id) == expected
    assert await connection.fetchval("select count(*) from reservations") == int(fits)


async def test_what_waits_and_what_is_promised_count_together(
    connection: Tx, workspace_id: WorkspaceId
):
    await make_upload(connection, workspace_id, Content(bytes(400)))
    assert await quotas.reserve(connection, make_reservation(workspace_id, 500), NARROW)

    assert not await quotas.reserve(connection, make_reservation(workspace_id, 101), NARROW)
    assert await quotas.reserve(connection, make_reservation(workspace_id, 100), NARROW)


async def test_publishing_turns_the_promise_into_what_waits(
    connection: Tx, workspace_id: WorkspaceId
):
    """The promise was for the declared length; what counts from now on are the files."""
    promise = make_reservation(workspace_id, 100)
    await quotas.reserve(connection, promise, NARROW)

    publication = make_batch(
        workspace_id, Content(bytes(30)), Content(bytes(40)), reservation=promise.id
    )
    await uploads.publish(connection, publication)
    after = await counters(connection, workspace_id)
    await quotas.release(connection, promise.id)

    assert after == Counters(last_seq=2, waiting_bytes=70, waiting_files=2)
    assert await counters(connection, workspace_id) == after
    assert await connection.fetchval("select count(*) from reservations") == 0


async def test_a_promise_makes_room_for_its_own_upload(connection: Tx, workspace_id: WorkspaceId):
    """Even when everything else is taken."""
    promise = make_reservation(workspace_id, 600)
    await quotas.reserve(connection, promise, NARROW)
    await quotas.reserve(connection, make_reservation(workspace_id, 400), NARROW)
    publication = make_batch(workspace_id, Content(bytes(600)), quota=NARROW)

    without = await uploads.publish(connection, publication)
    with_it = await uploads.publish(
        connection,
        make_batch(workspace_id, Content(bytes(600)), quota=NARROW, reservation=promise.id),
    )

    assert (without, with_it) == (None, 1)


async def test_a_refused_publication_keeps_its_promise(connection: Tx, workspace_id: WorkspaceId):
    """It is for the caller to release it; nothing is given back twice."""
    promise = make_reservation(workspace_id, 100)
    await quotas.reserve(connection, promise, NARROW)
    publication = make_batch(
        workspace_id, Content(bytes(1001)), quota=NARROW, reservation=promise.id
    )

    assert await uploads.publish(connection, publication) is None
    kept = await counters(connection, workspace_id)
    await quotas.release(connection, promise.id)
    await quotas.release(connection, promise.id)

    assert kept == Counters(reserved_bytes=100, reserved_files=1)
    assert await counters(connection, workspace_id) == Counters()


async def test_a_promise_that_expires_while_it_is_published_is_not_given_back_twice(
    connection: Tx, workspace_id: WorkspaceId, connections: Any
):
    publisher, watcher = await connections(), await connections()
    promise = make_reservation(workspace_id, 100)
    await quotas.reserve(connection, promise, NARROW)
    await quotas.reserve(connection, make_reservation(workspace_id, 200), NARROW)
    publication = make_batch(workspace_id, Content(bytes(50)), quota=NARROW, reservation=promise.id)
    releasing = connection.transaction()
    await releasing.start()
    await quotas.release(connection, promise.id)
    publishing = asyncio.create_task(uploads.publish(publisher, publication))
    await until_blocked(watcher, publisher)

    await releasing.commit()

    assert await publishing is None
    assert await counters(connection, workspace_id) == Counters(0, 0, 0, 200, 1)


async def test_a_promise_that_is_published_while_it_expires_is_not_given_back_twice(
    connection: Tx, workspace_id: WorkspaceId, connections: Any
):
    publisher, watcher = await connections(), await connections()
    promise = make_reservation(workspace_id, 100)
    await quotas.reserve(connection, promise, NARROW)
    await quotas.reserve(connection, make_reservation(workspace_id, 200), NARROW)
    publishing = publisher.transaction()
    await publishing.start()
    publication = make_batch(workspace_id, Content(bytes(50)), reservation=promise.id)
    await uploads.publish(publisher, publication)
    releasing = asyncio.create_task(quotas.release(connection, promise.id))
    await until_blocked(watcher, connection)

    await publishing.commit()
    await releasing

    assert await counters(connection, workspace_id) == Counters(1, 50, 1, 200, 1)


async def test_many_at_once_get_no_more_than_there_is(
    db_with_partitions: Database, workspace_id: WorkspaceId
):
    async def reserve() -> bool:
        async with db_with_partitions.connection() as connection:
            wanted = make_reservation(workspace_id, 250)
            return await quotas.reserve(connection, wanted, NARROW)

    reserved = await asyncio.gather(*(reserve() for _ in range(20)))

    async with db_with_partitions.connection() as connection:
        assert sum(reserved) == 4
        assert (await counters(connection, workspace_id)).reserved_bytes == 1000


async def test_only_what_is_past_its_time_is_forgotten(connection: Tx, workspace_id: WorkspaceId):
    for expires_at in (NOW - MOMENT, NOW, NOW + MOMENT):
        await quotas.reserve(
            connection, make_reservation(workspace_id, 100, expires_at=expires_at), NARROW
        )
        answer = make_answer(str(uuid4()), expires_at=expires_at)
        await make_upload(connection, workspace_id, answer=answer)

    forgotten = await quotas.forget_expired(connection, now=NOW)

    assert forgotten == 2
    assert (await counters(connection, workspace_id)).reserved_bytes == 200
    assert await connection.fetchval("select min(expires_at) from answers") == NOW
    assert await connection.fetchval("select min(expires_at) from reservations") == NOW


async def test_two_who_clean_up_at_once_give_room_back_once(
    db_with_partitions: Database, connection: Tx, workspace_id: WorkspaceId
):
    for _ in range(5):
        await quotas.reserve(connection, make_reservation(workspace_id, 100), NARROW)
    await make_upload(connection, workspace_id)

    async def clean_up() -> None:
        async with db_with_partitions.connection() as own:
            await quotas.forget_expired(own, now=NOW + DAY)

    await asyncio.gather(*(clean_up() for _ in range(8)))

    left = await counters(connection, workspace_id)
    assert (left.reserved_bytes, left.reserved_files, left.waiting_files) == (0, 0, 1)


async def test_usage_of_one_and_of_all(connection: Tx, workspace_id: WorkspaceId):
    other = await make_workspace(connection)
    await make_upload(connection, workspace_id, Content(bytes(10)))
    await make_upload(connection, other, Content(bytes(20)), expires_at=NOW + HOUR)
    await quotas.reserve(connection, make_reservation(other, 300), NARROW)

    assert await quotas.usage_of(connection, workspace_id) == Usage(10, 1)
    assert await quotas.usage_of(connection, other) == Usage(20, 1, 300, 1)
    assert await quotas.usage_of(connection, WorkspaceId(uuid4())) == Usage(0, 0)
    assert await quotas.usage_of_server(connection) == Usage(30, 2, 300, 1)
    assert await quotas.workspace_frees_at(connection, workspace_id) == NOW + DAY
    assert await quotas.server_frees_at(connection) == NOW + HOUR
    assert await quotas.workspace_frees_at(connection, WorkspaceId(uuid4())) is None


async def test_usage_of_an_empty_server(connection: Tx):
    assert await quotas.usage_of_server(connection) == Usage(0, 0)
    assert await quotas.server_frees_at(connection) is None
