"""Room is reserved, used, released and counted exactly, also by several connections at once."""

import asyncio
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
    make_batch,
    make_reservation,
    make_upload,
    make_workspace,
    until_blocked,
)

from restante.database.pool import Connection, Database
from restante.delivery import quotas, store
from restante.delivery.quotas import ServerUsage
from restante.delivery.rules import Quota, Usage
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

NARROW = Quota(max_bytes=1000, max_files=5)


@pytest.mark.parametrize(
    ("size", "files", "fits"), [(1000, 1, True), (1001, 1, False), (1, 5, True), (1, 6, False)]
)
async def test_room_is_reserved_up_to_the_quota_and_not_beyond(
    connection: Connection, workspace_id: WorkspaceId, size: int, files: int, fits: bool
):
    wanted = make_reservation(workspace_id, room=Usage(size, files))

    reserved = await quotas.reserve(connection, wanted, NARROW)

    assert (reserved is not None) == fits

    expected = Counters(reserved_bytes=size, reserved_files=files) if fits else Counters()
    assert await counters(connection, workspace_id) == expected
    assert await connection.fetchval("select count(*) from reservations") == int(fits)


async def test_unacknowledged_and_reserved_bytes_count_together(
    connection: Connection, workspace_id: WorkspaceId
):
    await make_upload(connection, workspace_id, Content(bytes(400)))
    assert await quotas.reserve(connection, make_reservation(workspace_id, 500), NARROW)

    assert not await quotas.reserve(connection, make_reservation(workspace_id, 101), NARROW)
    assert await quotas.reserve(connection, make_reservation(workspace_id, 100), NARROW)


async def test_publishing_replaces_the_reservation_with_the_files(
    connection: Connection, workspace_id: WorkspaceId
):
    """The reservation was for the declared length; from then on the files themselves count."""
    reservation = make_reservation(workspace_id, 100)
    await quotas.reserve(connection, reservation, NARROW)

    batch = make_batch(
        workspace_id, Content(bytes(30)), Content(bytes(40)), reservation=reservation.id
    )
    await store.publish(connection, batch)
    after = await counters(connection, workspace_id)
    await quotas.release(connection, reservation.id)

    assert after == Counters(last_seq=2, waiting_bytes=70, waiting_files=2)
    assert await counters(connection, workspace_id) == after
    assert await connection.fetchval("select count(*) from reservations") == 0


async def test_a_reservation_is_room_for_its_own_upload(
    connection: Connection, workspace_id: WorkspaceId
):
    """Even when everything else is taken."""
    reservation = make_reservation(workspace_id, 600)
    await quotas.reserve(connection, reservation, NARROW)
    await quotas.reserve(connection, make_reservation(workspace_id, 400), NARROW)
    batch = make_batch(workspace_id, Content(bytes(600)), quota=NARROW)

    without = await store.publish(connection, batch)
    with_it = await store.publish(
        connection,
        make_batch(workspace_id, Content(bytes(600)), quota=NARROW, reservation=reservation.id),
    )

    assert (without, with_it) == (None, 1)


async def test_a_refused_batch_leaves_its_reservation(
    connection: Connection, workspace_id: WorkspaceId
):
    """The caller releases it; a second release frees nothing."""
    reservation = make_reservation(workspace_id, 100)
    await quotas.reserve(connection, reservation, NARROW)
    batch = make_batch(workspace_id, Content(bytes(1001)), quota=NARROW, reservation=reservation.id)

    assert await store.publish(connection, batch) is None
    kept = await counters(connection, workspace_id)
    await quotas.release(connection, reservation.id)
    await quotas.release(connection, reservation.id)

    assert kept == Counters(reserved_bytes=100, reserved_files=1)
    assert await counters(connection, workspace_id) == Counters()


async def test_a_reservation_that_is_released_while_it_is_published_is_freed_once(
    connection: Connection, workspace_id: WorkspaceId, connections: Any
):
    publisher, watcher = await connections(), await connections()
    reservation = make_reservation(workspace_id, 100)
    await quotas.reserve(connection, reservation, NARROW)
    await quotas.reserve(connection, make_reservation(workspace_id, 200), NARROW)
    batch = make_batch(workspace_id, Content(bytes(50)), quota=NARROW, reservation=reservation.id)
    releasing = connection.transaction()
    await releasing.start()
    await quotas.release(connection, reservation.id)
    publishing = asyncio.create_task(store.publish(publisher, batch))
    await until_blocked(watcher, publisher)

    await releasing.commit()

    assert await publishing is None
    assert await counters(connection, workspace_id) == Counters(0, 0, 0, 200, 1)


async def test_a_reservation_that_is_published_while_it_is_released_is_freed_once(
    connection: Connection, workspace_id: WorkspaceId, connections: Any
):
    publisher, watcher = await connections(), await connections()
    reservation = make_reservation(workspace_id, 100)
    await quotas.reserve(connection, reservation, NARROW)
    await quotas.reserve(connection, make_reservation(workspace_id, 200), NARROW)
    publishing = publisher.transaction()
    await publishing.start()
    batch = make_batch(workspace_id, Content(bytes(50)), reservation=reservation.id)
    await store.publish(publisher, batch)
    releasing = asyncio.create_task(quotas.release(connection, reservation.id))
    await until_blocked(watcher, connection)

    await publishing.commit()
    await releasing

    assert await counters(connection, workspace_id) == Counters(1, 50, 1, 200, 1)


async def test_many_reservations_at_once_get_no_more_than_the_quota(
    db: Database, workspace_id: WorkspaceId
):
    async def reserve() -> bool:
        async with db.connection() as connection:
            wanted = make_reservation(workspace_id, 250)
            return await quotas.reserve(connection, wanted, NARROW) is not None

    reserved = await asyncio.gather(*(reserve() for _ in range(20)))

    async with db.connection() as connection:
        assert sum(reserved) == 4
        assert (await counters(connection, workspace_id)).reserved_bytes == 1000


async def test_usage_of_a_workspace_and_of_the_server(
    connection: Connection, workspace_id: WorkspaceId
):
    other = await make_workspace(connection)
    await make_upload(connection, workspace_id, Content(bytes(10)))
    await make_upload(connection, other, Content(bytes(20)), expires_at=NOW + HOUR)
    await quotas.reserve(connection, make_reservation(other, 300), NARROW)

    assert await quotas.usage_of(connection, workspace_id) == Usage(10, 1)
    assert await quotas.usage_of(connection, other) == Usage(320, 2)
    assert await quotas.usage_of(connection, WorkspaceId(uuid4())) is None
    assert await quotas.usage_of_server(connection) == ServerUsage(30, 2, 300, 1)
    assert await quotas.workspace_frees_at(connection, workspace_id) == NOW + DAY
    assert await quotas.workspace_frees_at(connection, WorkspaceId(uuid4())) is None


async def test_usage_of_an_empty_server(connection: Connection, workspace_id: WorkspaceId):
    assert await quotas.usage_of_server(connection) == ServerUsage(0, 0, 0, 0)
