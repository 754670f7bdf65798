"""The server's quota: one process never accepts more, however many requests arrive at once."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from factories import (
    NOW,
    Content,
    HeldDatabase,
    Parts,
    make_parts,
    make_reservation,
    make_upload,
)
from waiting import until

from restante.database.pool import Connection, Database
from restante.delivery import quotas, store
from restante.delivery.receive import Incoming, Receiver
from restante.delivery.rules import MIB, Quota, Usage
from restante.errors import DatabaseUnavailable, ServerFull
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

SERVER = Quota(max_bytes=1000, max_files=5)


@pytest.fixture
def parts(db: Database) -> Parts:
    return make_parts(db, server=SERVER)


@pytest.fixture
def receiver(parts: Parts) -> Receiver:
    return parts.receiver


def always_reading(db: Database, server: Quota = SERVER) -> Receiver:
    """Reads the sum over all workspaces for every request, not once a second."""
    return make_parts(db, server=server, fresh_seconds=0).receiver


async def is_accepted(receiver: Receiver, size: int, files: int = 1) -> bool:
    try:
        await receiver.server.check(Usage(size, files))
    except ServerFull:
        return False
    return True


async def write_file(incoming: Incoming, content: bytes = b"x") -> None:
    await incoming.begin_file("a.txt", "", now=NOW)
    await incoming.write(content, now=NOW)
    await incoming.end_file(now=NOW)


async def fill(connection: Connection, workspace_id: WorkspaceId, size: int) -> None:
    await make_upload(connection, workspace_id, Content(bytes(size)))


async def test_files_are_accepted_up_to_the_quota_and_not_beyond(
    receiver: Receiver, connection: Connection, workspace_id: WorkspaceId
):
    await fill(connection, workspace_id, 400)

    assert await is_accepted(receiver, 600)
    assert not await is_accepted(receiver, 601)
    assert await is_accepted(receiver, 1, files=4)
    assert not await is_accepted(receiver, 1, files=5)


async def test_a_declared_size_that_does_not_fit_is_refused_before_it_arrives(
    receiver: Receiver, connection: Connection, workspace_id: WorkspaceId
):
    await fill(connection, workspace_id, 400)

    with pytest.raises(ServerFull):
        async with receiver.receive(workspace_id, 601):
            pass


async def test_bytes_that_have_arrived_count_until_their_request_ends(
    receiver: Receiver, workspace_id: WorkspaceId
):
    async with AsyncExitStack() as arriving:
        for _ in range(4):
            incoming = await arriving.enter_async_context(receiver.receive(workspace_id, 250))
            await write_file(incoming, bytes(250))
        while_they_arrive = await is_accepted(receiver, 1)

    assert not while_they_arrive
    assert await is_accepted(receiver, 1000)


async def test_a_repeated_request_needs_no_room(receiver: Receiver, workspace_id: WorkspaceId):
    """Its files are stored already; only the first answer is sent again."""
    async with receiver.receive(workspace_id, 2000, repeats_key=True) as incoming:
        for _ in range(6):
            await write_file(incoming)
        assert await is_accepted(receiver, 1000, files=5)


async def test_a_request_is_refused_at_the_file_that_does_not_fit(
    receiver: Receiver, workspace_id: WorkspaceId
):
    """How many files it has is known only when they arrive."""
    async with (
        receiver.receive(workspace_id, 10),
        receiver.receive(workspace_id, 10) as incoming,
    ):
        for _ in range(4):
            await write_file(incoming)

        with pytest.raises(ServerFull):
            await incoming.begin_file("a.txt", "", now=NOW)
        assert incoming.claimed.files == 4


async def test_requests_before_the_first_read_of_the_sum_wait_for_it(
    receiver: Receiver, connection: Connection, workspace_id: WorkspaceId
):
    """None is accepted because nothing was counted yet."""
    await fill(connection, workspace_id, 1000)

    accepted = await asyncio.gather(*(is_accepted(receiver, 1) for _ in range(20)))

    assert accepted == [False] * 20


async def test_a_commit_during_the_read_of_the_sum_is_not_forgotten(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """The sum is from before the commit, and the request has ended when the sum arrives."""
    held = HeldDatabase(db)
    receiver = always_reading(held)
    async with receiver.receive(workspace_id, 500) as incoming:
        await write_file(incoming, bytes(500))
        held.may_go_on.clear()
        held.is_held.clear()
        reading = asyncio.create_task(is_accepted(receiver, 600))
        await held.is_held.wait()
        async with connection.transaction():
            await incoming.publish_in(connection, now=NOW)

    held.may_go_on.set()

    assert not await reading


async def test_a_sum_that_could_not_be_read_is_read_by_the_next_request(
    receiver: Receiver, connection: Any, workspace_id: WorkspaceId
):
    """A failed read must not let later requests in."""
    await fill(connection, workspace_id, 1000)
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute("lock table feeds in access exclusive mode")
    reading = asyncio.create_task(is_accepted(receiver, 1))
    waits = "select exists (select from pg_locks where not granted)"
    await until(lambda: connection.fetchval(waits))
    await connection.execute(
        "select pg_terminate_backend(pid) from pg_locks"
        " where not granted and pid <> pg_backend_pid()"
    )
    with pytest.raises(DatabaseUnavailable):
        await reading
    await transaction.rollback()

    assert not await is_accepted(receiver, 1)


async def test_reservations_of_other_processes_count(
    receiver: Receiver, connection: Connection, workspace_id: WorkspaceId
):
    await quotas.reserve(connection, make_reservation(workspace_id, 700), SERVER)

    assert not await is_accepted(receiver, 301)
    assert await is_accepted(receiver, 300)


async def test_a_processs_own_reservation_is_not_counted_twice(
    db: Database, workspace_id: WorkspaceId
):
    """It is in the sum of the database and among the requests in progress."""
    receiver = always_reading(db, Quota(max_bytes=10 * MIB, max_files=8))
    async with receiver.receive(workspace_id, 7 * MIB) as incoming:
        await write_file(incoming, bytes(2 * MIB))

        assert incoming.room.usage == incoming.claimed == Usage(4 * MIB, 1)
        assert await is_accepted(receiver, 6 * MIB)
        assert not await is_accepted(receiver, 6 * MIB + 1)


async def test_files_that_follow_a_reservation_do_not_hide_those_of_other_processes(
    db: Database, connection: Connection, workspace_id: WorkspaceId
):
    """Only what was reserved is in the sum; the files after it are not."""
    quota = Quota(max_bytes=10 * MIB, max_files=8)
    receiver = always_reading(db, quota)
    others = make_reservation(workspace_id, room=Usage(100, 4))
    await quotas.reserve(connection, others, quota)
    async with receiver.receive(workspace_id, 3 * MIB) as incoming:
        await write_file(incoming, bytes(2 * MIB))
        await write_file(incoming)
        await write_file(incoming)

        assert (incoming.room.usage.files, incoming.claimed.files) == (1, 3)
        assert await is_accepted(receiver, 1, files=1)
        assert not await is_accepted(receiver, 1, files=2)


async def test_there_is_room_again_after_an_acknowledgement(
    db: Database, connection: Connection, workspace_id: WorkspaceId
):
    receiver = always_reading(db)
    file_id = await make_upload(connection, workspace_id, Content(bytes(1000)))
    is_full = not await is_accepted(receiver, 1)

    await store.acknowledge(connection, workspace_id, file_id, now=NOW)

    assert is_full
    assert await is_accepted(receiver, 1000)


async def test_many_uploads_at_once_fill_the_server_and_no_more(
    parts: Parts, connection: Connection, workspace_id: WorkspaceId
):
    async def is_staged() -> bool:
        try:
            await parts.stage(workspace_id, bytes(300))
        except ServerFull:
            return False
        return True

    staged = await asyncio.gather(*(is_staged() for _ in range(12)))

    usage = await quotas.usage_of_server(connection)
    assert sum(staged) == 3
    assert (usage.waiting_bytes, usage.waiting_files) == (900, 3)
