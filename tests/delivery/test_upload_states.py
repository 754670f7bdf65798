"""Uploads in any state: which one that is, how they are listed, and how they expire."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from factories import (
    DAY,
    HOUR,
    NOW,
    Content,
    Counters,
    counters,
    make_upload,
    make_workspace,
    until_blocked,
)

from restante.database.pool import Database, Tx
from restante.delivery import store as uploads
from restante.delivery.rules import State, Swept
from restante.delivery.store import Wanted
from restante.ids import FileId, WorkspaceId, new_file_id

pytestmark = pytest.mark.anyio

MOMENT = timedelta(microseconds=1)
BEGINNING = (datetime.fromtimestamp(0, UTC), UUID(int=0))


@pytest.fixture
async def connection(db_with_partitions: Database, connections: Any) -> Any:
    return await connections()


@pytest.fixture
async def workspace_id(connection: Tx) -> WorkspaceId:
    return await make_workspace(connection)


async def found(connection: Tx, now: datetime = NOW, **wanted: Any) -> list[tuple[FileId, State]]:
    rows = await uploads.standing(connection, Wanted(**wanted), after=BEGINNING, limit=100, now=now)
    return [(row.upload.file_id, row.state) for row in rows]


# Which state


async def test_an_upload_is_never_fetched_fetched_acked_or_expired(
    connection: Tx, workspace_id: WorkspaceId
):
    """An acknowledged one stays so, also past the time until which it would have waited."""
    waiting, fetched, acked = [
        await make_upload(connection, workspace_id, now=NOW + number * MOMENT)
        for number in range(3)
    ]
    await uploads.mark_fetched(connection, workspace_id, fetched, now=NOW)
    await uploads.acknowledge(connection, workspace_id, acked, now=NOW)

    assert await found(connection) == [
        (waiting, "never_fetched"),
        (fetched, "fetched"),
        (acked, "acked"),
    ]
    assert await found(connection, NOW + 2 * DAY) == [
        (waiting, "expired"),
        (fetched, "expired"),
        (acked, "acked"),
    ]
    for state, file_id in (("never_fetched", waiting), ("fetched", fetched), ("acked", acked)):
        assert await found(connection, state=state) == [(file_id, state)]


async def test_it_expires_at_the_moment_from_which_it_cannot_be_fetched(
    connection: Tx, workspace_id: WorkspaceId
):
    file_id = await make_upload(connection, workspace_id)

    for now, state in ((NOW + DAY - MOMENT, "never_fetched"), (NOW + DAY, "expired")):
        can_be_fetched = await uploads.get(connection, workspace_id, file_id, now=now) is not None
        assert await found(connection, now) == [(file_id, state)]
        assert can_be_fetched == (state == "never_fetched")


async def test_it_is_found_by_its_file_id_alone_and_not_in_another_workspace(
    connection: Tx, workspace_id: WorkspaceId
):
    other = await make_workspace(connection)
    theirs, file_id = [await make_upload(connection, one) for one in (other, workspace_id)]

    assert await found(connection, file_id=file_id) == [(file_id, "never_fetched")]
    assert await found(connection, file_id=file_id, workspace_id=other) == []
    assert await found(connection, workspace_id=other) == [(theirs, "never_fetched")]
    assert await found(connection, file_id=new_file_id()) == []


async def test_all_are_listed_oldest_first_page_by_page(connection: Tx, workspace_id: WorkspaceId):
    """Those of one moment, be they of several workspaces, come in the order of their ids."""
    other = await make_workspace(connection)
    made = [
        await make_upload(connection, one, now=NOW + number // 4 * HOUR)
        for number, one in enumerate([workspace_id, other] * 4)
    ]
    after, listed = BEGINNING, list[FileId]()

    while page := await uploads.standing(connection, Wanted(), after=after, limit=3, now=NOW):
        listed += [one.upload.file_id for one in page]
        after = (page[-1].upload.created_at, page[-1].upload.file_id)

    assert listed == [*sorted(made[:4]), *sorted(made[4:])]


async def test_its_leaf_is_the_one_that_has_its_bytes(connection: Any, workspace_id: WorkspaceId):
    await make_upload(connection, workspace_id)
    (one,) = await uploads.standing(connection, Wanted(), after=BEGINNING, limit=1, now=NOW)

    leaf = await uploads.leaf_of(connection, one.upload)
    assert await connection.fetchval(f"select count(*) from {leaf}") == 1
    await connection.execute("delete from chunks")

    assert await uploads.leaf_of(connection, one.upload) is None


# Expiring


async def expires_at(connection: Any, file_id: FileId) -> datetime:
    return await connection.fetchval("select expires_at from uploads where file_id = $1", file_id)


async def test_what_was_told_to_expire_cannot_be_fetched_and_is_swept_with_its_room(
    connection: Tx, workspace_id: WorkspaceId
):
    file_id = await make_upload(connection, workspace_id, Content(bytes(10)))
    await make_upload(connection, workspace_id, Content(bytes(7)))
    now = NOW + HOUR

    expired = await uploads.expire(connection, workspace_id, file_id, now=now)

    assert expired
    assert (expired.first_time, expired.expired_at) == (True, now)
    assert await uploads.get(connection, workspace_id, file_id, now=now) is None
    assert await uploads.acknowledge(connection, workspace_id, file_id, now=now) is None
    assert await counters(connection, workspace_id) == Counters(2, 17, 2)
    later = now + MOMENT
    swept = await uploads.sweep(connection, acked_before=later, expired_before=later)
    assert swept == Swept(expired=1)
    assert await counters(connection, workspace_id) == Counters(2, 7, 1)


async def test_the_first_time_it_expired_stays(connection: Tx, workspace_id: WorkspaceId):
    """Whether it was told to, or its time was over."""
    told = await make_upload(connection, workspace_id)
    by_itself = await make_upload(connection, workspace_id, expires_at=NOW - HOUR)
    await uploads.expire(connection, workspace_id, told, now=NOW)

    for file_id, since in ((told, NOW), (by_itself, NOW - HOUR)):
        again = await uploads.expire(connection, workspace_id, file_id, now=NOW + HOUR)
        assert again
        assert (again.first_time, again.expired_at) == (False, since)
        assert await expires_at(connection, file_id) == since


async def test_what_is_not_there_does_not_expire(connection: Tx, workspace_id: WorkspaceId):
    other = await make_workspace(connection)
    file_id = await make_upload(connection, workspace_id)

    assert await uploads.expire(connection, other, file_id, now=NOW) is None
    assert await uploads.expire(connection, workspace_id, new_file_id(), now=NOW) is None
    assert await expires_at(connection, file_id) == NOW + DAY


async def test_an_acknowledgement_that_comes_first_stays(
    connection: Tx, workspace_id: WorkspaceId, connections: Any
):
    """The operator is told, and the file can still be reopened as if nothing had been tried."""
    second, watcher = await connections(), await connections()
    file_id = await make_upload(connection, workspace_id)
    acking = connection.transaction()
    await acking.start()
    await uploads.acknowledge(connection, workspace_id, file_id, now=NOW)
    expiring = asyncio.create_task(uploads.expire(second, workspace_id, file_id, now=NOW + HOUR))
    await until_blocked(watcher, second)

    await acking.commit()

    expired = await expiring
    assert expired
    assert (expired.first_time, expired.acked_at) == (False, NOW)
    assert await expires_at(watcher, file_id) == NOW + DAY
    assert await found(watcher) == [(file_id, "acked")]
    assert await counters(watcher, workspace_id) == Counters(1, 0, 0)


@pytest.mark.parametrize(
    ("acked_at", "state", "swept"),
    [(NOW + HOUR, "expired", Swept(expired=1)), (NOW - HOUR, "acked", Swept(acked=1))],
    ids=["asked for after", "asked for before"],
)
async def test_an_acknowledgement_that_waited_for_the_expiry_counts_if_it_was_asked_for_in_time(
    *,
    connection: Tx,
    workspace_id: WorkspaceId,
    connections: Any,
    acked_at: datetime,
    state: State,
    swept: Swept,
):
    """One or the other, and the room is given back once."""
    second, watcher = await connections(), await connections()
    file_id = await make_upload(connection, workspace_id)
    expiring = connection.transaction()
    await expiring.start()
    await uploads.expire(connection, workspace_id, file_id, now=NOW)
    acking = asyncio.create_task(uploads.acknowledge(second, workspace_id, file_id, now=acked_at))
    await until_blocked(watcher, second)

    await expiring.commit()

    assert (await acking is None) == (state == "expired")
    assert await found(watcher, NOW + HOUR) == [(file_id, state)]
    later = NOW + DAY
    assert await uploads.sweep(watcher, acked_before=later, expired_before=later) == swept
    assert await counters(watcher, workspace_id) == Counters(1, 0, 0)


async def test_an_expiry_that_the_sweep_was_faster_than_finds_nothing(
    connection: Tx, workspace_id: WorkspaceId, connections: Any
):
    second, watcher = await connections(), await connections()
    file_id = await make_upload(connection, workspace_id)
    sweeping = connection.transaction()
    await sweeping.start()
    later = NOW + 2 * DAY
    await uploads.sweep(connection, acked_before=later, expired_before=later)
    expiring = asyncio.create_task(uploads.expire(second, workspace_id, file_id, now=NOW))
    await until_blocked(watcher, second)

    await sweeping.commit()

    assert await expiring is None
    assert await counters(watcher, workspace_id) == Counters(1, 0, 0)
