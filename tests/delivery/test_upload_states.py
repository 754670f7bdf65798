"""Uploads in any state: how the state is derived, listed and filtered, and how uploads expire."""

import asyncio
from datetime import datetime, timedelta
from typing import Any, get_args
from uuid import uuid4

import pytest
from factories import (
    DAY,
    HOUR,
    NOW,
    ROOMY,
    Content,
    Counters,
    counters,
    make_upload,
    make_workspace,
    sweep_uploads,
    until_blocked,
)

from restante import wire
from restante.database.pool import Connection
from restante.delivery import store
from restante.delivery.store import BEGINNING, Wanted
from restante.ids import FileId, WorkspaceId, new_activity_id

pytestmark = pytest.mark.anyio

MOMENT = timedelta(microseconds=1)
STATES = get_args(wire.UploadState)


async def uploads(
    connection: Connection,
    now: datetime = NOW,
    *,
    limit: int = 100,
    after: Any = BEGINNING,
    **wanted: Any,
) -> list[wire.UploadView]:
    return await store.in_any_state(
        connection, Wanted(**wanted), after=after, limit=limit, ack_retention=HOUR, now=now
    )


async def found(connection: Connection, now: datetime = NOW, **wanted: Any) -> list[Any]:
    return [(one.file_id, one.state) for one in await uploads(connection, now, **wanted)]


# Which state


async def test_an_upload_is_never_fetched_fetched_acked_or_expired(
    connection: Connection, workspace_id: WorkspaceId
):
    """An acknowledged upload stays acknowledged after its expiry."""
    unfetched, fetched, acked = [
        await make_upload(connection, workspace_id, now=NOW + number * MOMENT)
        for number in range(3)
    ]
    await store.mark_fetched(connection, workspace_id, fetched, now=NOW)
    await store.acknowledge(connection, workspace_id, acked, now=NOW)

    assert await found(connection) == [
        (unfetched, "never_fetched"),
        (fetched, "fetched"),
        (acked, "acked"),
    ]
    assert await found(connection, NOW + 2 * DAY) == [
        (unfetched, "expired"),
        (fetched, "expired"),
        (acked, "acked"),
    ]


async def test_a_filter_finds_the_uploads_of_one_state_and_no_others(
    connection: Connection, workspace_id: WorkspaceId
):
    """Each upload is found by exactly one state."""
    made = dict[str, FileId]()
    for state in STATES:
        expires_at = NOW if state == "expired" else NOW + DAY
        made[state] = await make_upload(connection, workspace_id, expires_at=expires_at)
    await store.mark_fetched(connection, workspace_id, made["fetched"], now=NOW)
    await store.acknowledge(connection, workspace_id, made["acked"], now=NOW)

    for state in STATES:
        assert await found(connection, state=state) == [(made[state], state)]


async def test_a_fetched_upload_is_listed_as_never_fetched_only_after_it_was_reopened(
    connection: Connection, workspace_id: WorkspaceId
):
    """Neither expiry nor acknowledgement forgets that it was fetched."""
    expired, reopened = [await make_upload(connection, workspace_id) for _ in range(2)]
    for file_id in (expired, reopened):
        await store.mark_fetched(connection, workspace_id, file_id, now=NOW)
    await store.expire(connection, workspace_id, expired, now=NOW)
    await store.acknowledge(connection, workspace_id, reopened, now=NOW)
    acked = await store.get_acked(connection, workspace_id, reopened)
    assert acked

    before = await found(connection, state="never_fetched")
    await store.reopen(
        connection,
        acked,
        row_id=new_activity_id(NOW),
        now=NOW,
        acked_since=NOW - HOUR,
        expires_at=NOW + HOUR,
        quota=ROOMY,
    )

    assert before == []
    assert await found(connection, state="never_fetched") == [(reopened, "never_fetched")]


async def test_it_expires_at_the_moment_from_which_it_cannot_be_fetched(
    connection: Connection, workspace_id: WorkspaceId
):
    file_id = await make_upload(connection, workspace_id)

    for now, state in ((NOW + DAY - MOMENT, "never_fetched"), (NOW + DAY, "expired")):
        can_be_fetched = await store.get(connection, workspace_id, file_id, now=now) is not None
        assert await found(connection, now) == [(file_id, state)]
        assert can_be_fetched == (state == "never_fetched")


async def test_it_is_found_by_its_file_id_alone_and_not_in_another_workspace(
    connection: Connection, workspace_id: WorkspaceId
):
    other = await make_workspace(connection)
    theirs, file_id = [await make_upload(connection, one) for one in (other, workspace_id)]

    assert await found(connection, file_id=file_id) == [(file_id, "never_fetched")]
    assert await found(connection, file_id=file_id, workspace_id=other) == []
    assert await found(connection, workspace_id=other) == [(theirs, "never_fetched")]
    assert await found(connection, file_id=FileId(uuid4())) == []


async def test_all_are_listed_oldest_first_page_by_page(
    connection: Connection, workspace_id: WorkspaceId
):
    """Uploads of the same time are in the order of their ids, whatever their workspace."""
    other = await make_workspace(connection)
    made = [
        await make_upload(connection, one, now=NOW + number // 4 * HOUR)
        for number, one in enumerate([workspace_id, other] * 4)
    ]
    after, listed = BEGINNING, list[FileId]()

    while page := await uploads(connection, after=after, limit=3):
        listed += [FileId(one.file_id) for one in page]
        after = (page[-1].created_at, page[-1].file_id)

    assert listed == [*sorted(made[:4]), *sorted(made[4:])]


async def test_its_partition_is_the_one_that_has_its_bytes(
    connection: Any, workspace_id: WorkspaceId
):
    await make_upload(connection, workspace_id)
    (one,) = await uploads(connection)

    partition = await store.partition_of(connection, one)
    assert await connection.fetchval(f"select count(*) from {partition}") == 1
    await connection.execute("delete from chunks")

    assert await store.partition_of(connection, one) is None


async def test_it_can_be_reopened_for_the_retention_after_its_acknowledgement(
    connection: Connection, workspace_id: WorkspaceId
):
    file_id = await make_upload(connection, workspace_id)
    (unacked,) = await uploads(connection)
    await store.acknowledge(connection, workspace_id, file_id, now=NOW)
    (acked,) = await uploads(connection)

    assert (unacked.reopenable_until, acked.reopenable_until) == (None, NOW + HOUR)


# Expiring


async def expires_at(connection: Any, file_id: FileId) -> datetime:
    return await connection.fetchval("select expires_at from uploads where file_id = $1", file_id)


async def test_an_upload_that_was_let_expire_cannot_be_fetched_and_frees_its_room_when_swept(
    connection: Connection, workspace_id: WorkspaceId
):
    file_id = await make_upload(connection, workspace_id, Content(bytes(10)))
    await make_upload(connection, workspace_id, Content(bytes(7)))
    now = NOW + HOUR

    expired = await store.expire(connection, workspace_id, file_id, now=now)

    assert expired
    assert (expired.is_first, expired.expired_at) == (True, now)
    assert await store.get(connection, workspace_id, file_id, now=now) is None
    assert await store.acknowledge(connection, workspace_id, file_id, now=now) is None
    assert await counters(connection, workspace_id) == Counters(2, 17, 2)
    assert await sweep_uploads(connection, now=now + MOMENT) == {"expired": 1}
    assert await counters(connection, workspace_id) == Counters(2, 7, 1)


async def test_the_is_first_it_expired_stays(connection: Connection, workspace_id: WorkspaceId):
    """Whether the operator let it expire or its TTL was over."""
    by_hand = await make_upload(connection, workspace_id)
    by_itself = await make_upload(connection, workspace_id, expires_at=NOW - HOUR)
    await store.expire(connection, workspace_id, by_hand, now=NOW)

    for file_id, since in ((by_hand, NOW), (by_itself, NOW - HOUR)):
        again = await store.expire(connection, workspace_id, file_id, now=NOW + HOUR)
        assert again
        assert (again.is_first, again.expired_at) == (False, since)
        assert await expires_at(connection, file_id) == since


async def test_an_absent_or_foreign_upload_does_not_expire(
    connection: Connection, workspace_id: WorkspaceId
):
    other = await make_workspace(connection)
    file_id = await make_upload(connection, workspace_id)

    assert await store.expire(connection, other, file_id, now=NOW) is None
    assert await store.expire(connection, workspace_id, FileId(uuid4()), now=NOW) is None
    assert await expires_at(connection, file_id) == NOW + DAY


async def test_an_acknowledgement_before_the_expiry_stays(
    connection: Connection, workspace_id: WorkspaceId, connections: Any
):
    """The operator gets to know, and the file can be reopened as before."""
    second, watcher = await connections(), await connections()
    file_id = await make_upload(connection, workspace_id)
    acking = connection.transaction()
    await acking.start()
    await store.acknowledge(connection, workspace_id, file_id, now=NOW)
    expiring = asyncio.create_task(store.expire(second, workspace_id, file_id, now=NOW + HOUR))
    await until_blocked(watcher, second)

    await acking.commit()

    expired = await expiring
    assert expired
    assert (expired.is_first, expired.acked_at) == (False, NOW)
    assert await expires_at(watcher, file_id) == NOW + DAY
    assert await found(watcher) == [(file_id, "acked")]
    assert await counters(watcher, workspace_id) == Counters(1, 0, 0)


@pytest.mark.parametrize(
    ("acked_at", "state", "swept"),
    [(NOW + HOUR, "expired", {"expired": 1}), (NOW - HOUR, "acked", {"acked": 1})],
    ids=["requested after", "requested before"],
)
async def test_an_acknowledgement_that_waited_for_the_expiry_counts_if_it_was_requested_before(
    *,
    connection: Connection,
    workspace_id: WorkspaceId,
    connections: Any,
    acked_at: datetime,
    state: wire.UploadState,
    swept: dict[str, int],
):
    """One of the two happens, and the room is freed once."""
    second, watcher = await connections(), await connections()
    file_id = await make_upload(connection, workspace_id)
    expiring = connection.transaction()
    await expiring.start()
    await store.expire(connection, workspace_id, file_id, now=NOW)
    acking = asyncio.create_task(store.acknowledge(second, workspace_id, file_id, now=acked_at))
    await until_blocked(watcher, second)

    await expiring.commit()

    acked = await acking
    assert acked
    assert (acked.is_gone, acked.is_first) == (state == "expired", state == "acked")
    assert await found(watcher, NOW + HOUR) == [(file_id, state)]
    assert await sweep_uploads(watcher, now=NOW + DAY) == swept
    assert await counters(watcher, workspace_id) == Counters(1, 0, 0)


async def test_an_expiry_that_waited_for_the_sweep_finds_nothing(
    connection: Connection, workspace_id: WorkspaceId, connections: Any
):
    second, watcher = await connections(), await connections()
    file_id = await make_upload(connection, workspace_id)
    sweeping = connection.transaction()
    await sweeping.start()
    await sweep_uploads(connection, now=NOW + 2 * DAY)
    expiring = asyncio.create_task(store.expire(second, workspace_id, file_id, now=NOW))
    await until_blocked(watcher, second)

    await sweeping.commit()

    assert await expiring is None
    assert await counters(watcher, workspace_id) == Counters(1, 0, 0)
