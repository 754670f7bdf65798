"""What the whole server may hold: one process never accepts more, however many come at once."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from factories import (
    DAY,
    NOW,
    Content,
    make_parts,
    make_reservation,
    make_upload,
    make_workspace,
)
from restante.delivery.capacity import Capacity
from waiting import until

from restante.database.pool import Database
from restante.delivery import capacity as module
from restante.delivery import quota_store as quotas
from restante.delivery import store as uploads
from restante.delivery.fetch import NewFile
from restante.delivery.rules import Quota
from restante.errors import DatabaseUnavailable, ServerFull
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

SERVER = Quota(max_bytes=1000, max_files=5)


@pytest.fixture
def db(db_with_partitions: Database) -> Database:
    return db_with_partitions


@pytest.fixture
async def workspace_id(db: Database) -> WorkspaceId:
    async with db.connection() as connection:
        return await make_workspace(connection)


@pytest.fixture
def capacity(db: Database) -> Capacity:
    return Capacity(db, SERVER)


async def is_accepted(capacity: Capacity, size: int, files: int = 1) -> bool:
    try:
        async with capacity.claimed(size, files):
            return True
    except ServerFull:
        return False


async def fill(db: Database, workspace_id: WorkspaceId, size: int) -> None:
    async with db.connection() as connection:
        await make_upload(connection, workspace_id, Content(bytes(size)))


async def test_up_to_the_limit_and_not_beyond(
    db: Database, capacity: Capacity, workspace_id: WorkspaceId
):
    await fill(db, workspace_id, 400)

    assert await is_accepted(capacity, 600)
    assert not await is_accepted(capacity, 601)
    assert await is_accepted(capacity, 1, files=4)
    assert not await is_accepted(capacity, 1, files=5)


async def test_the_refusal_says_how_much_waits_and_until_when(
    db: Database, capacity: Capacity, workspace_id: WorkspaceId
):
    await fill(db, workspace_id, 400)

    with pytest.raises(ServerFull) as refused:
        async with capacity.claimed(601, 1):
            pass

    facts = refused.value.facts
    assert (facts["waiting_bytes"], facts["waiting_files"], facts["max_bytes"]) == (400, 1, 1000)
    assert facts["frees_at"] == (NOW + DAY).isoformat()


async def test_what_is_on_its_way_counts_until_it_is_in_or_given_up(capacity: Capacity):
    async with AsyncExitStack() as arriving:
        for _ in range(4):
            await arriving.enter_async_context(capacity.claimed(250, 1))
        while_they_arrive = await is_accepted(capacity, 1)

    assert not while_they_arrive
    assert await is_accepted(capacity, 1000)


async def test_a_request_that_turns_out_to_bring_more_files_is_refused_when_they_do_not_fit(
    capacity: Capacity,
):
    async with capacity.claimed(10, 1) as claim, capacity.claimed(10, 1):
        await claim.grow_to(4)
        await claim.grow_to(2)

        with pytest.raises(ServerFull):
            await claim.grow_to(5)
        assert claim.files == 4


async def test_those_that_come_before_the_first_sum_is_read_wait_for_it(
    db: Database, workspace_id: WorkspaceId
):
    """Nobody is let in by a sum of nothing."""
    await fill(db, workspace_id, 1000)
    capacity = Capacity(db, SERVER)

    accepted = await asyncio.gather(*(is_accepted(capacity, 1) for _ in range(20)))

    assert accepted == [False] * 20


async def test_what_is_committed_while_the_sum_is_read_is_not_forgotten(
    db: Database, capacity: Capacity, connections: Any
):
    """The sum may be from before that commit, whose claim is gone when the sum arrives."""
    locker = await connections()
    transaction = locker.transaction()
    await transaction.start()
    await locker.execute("lock table feeds in access exclusive mode")
    reading = asyncio.create_task(is_accepted(capacity, 600))
    await until(lambda: locker.fetchval("select exists (select from pg_locks where not granted)"))

    capacity.stored(500, 1)
    await transaction.rollback()

    assert not await reading


async def test_a_sum_that_could_not_be_read_is_read_by_the_next(
    dsn: str, db: Database, workspace_id: WorkspaceId, connections: Any
):
    """The failure of one must not open the door to those after it."""
    await fill(db, workspace_id, 1000)
    capacity, cutter = Capacity(db, SERVER), await connections()
    transaction = cutter.transaction()
    await transaction.start()
    await cutter.execute("lock table feeds in access exclusive mode")
    reading = asyncio.create_task(is_accepted(capacity, 1))
    await until(lambda: cutter.fetchval("select exists (select from pg_locks where not granted)"))
    await cutter.execute(
        "select pg_terminate_backend(pid) from pg_locks"
        " where not granted and pid <> pg_backend_pid()"
    )
    with pytest.raises(DatabaseUnavailable):
        await reading
    await transaction.rollback()

    assert not await is_accepted(capacity, 1)


async def test_promises_of_other_processes_count(
    db: Database, capacity: Capacity, workspace_id: WorkspaceId
):
    async with db.connection() as connection:
        await quotas.reserve(connection, make_reservation(workspace_id, 700), SERVER)

    assert not await is_accepted(capacity, 301)
    assert await is_accepted(capacity, 300)


async def test_an_own_promise_is_not_counted_twice(
    db: Database, workspace_id: WorkspaceId, monkeypatch: pytest.MonkeyPatch
):
    """It is in the sum and among the claims."""
    monkeypatch.setattr(module, "_FRESH_SECONDS", 0.0)
    capacity = Capacity(db, SERVER)
    async with capacity.claimed(700, 1) as claim:
        async with db.connection() as connection:
            await quotas.reserve(connection, make_reservation(workspace_id, 700), SERVER)
        claim.is_reserved()

        assert await is_accepted(capacity, 300)
        assert not await is_accepted(capacity, 301)


async def test_there_is_room_again_after_an_acknowledgement(
    db: Database, workspace_id: WorkspaceId, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_FRESH_SECONDS", 0.0)
    capacity = Capacity(db, SERVER)
    async with db.connection() as connection:
        file_id = await make_upload(connection, workspace_id, Content(bytes(1000)))
    full = not await is_accepted(capacity, 1)

    async with db.connection() as connection:
        await uploads.acknowledge(connection, workspace_id, file_id, now=NOW)

    assert full
    assert await is_accepted(capacity, 1000)


async def test_many_uploads_at_once_fill_the_server_and_no_more(
    db: Database, workspace_id: WorkspaceId
):
    delivery = make_parts(db, server=SERVER).delivery

    async def stage() -> bool:
        try:
            await delivery.stage(workspace_id, NewFile("a.txt", "", bytes(300)))
        except ServerFull:
            return False
        return True

    staged = await asyncio.gather(*(stage() for _ in range(12)))

    async with db.connection() as connection:
        usage = await quotas.usage_of_server(connection)
    assert sum(staged) == 3
    assert (usage.waiting_bytes, usage.waiting_files) == (900, 3)
