"""Files are received piece by piece and published together: all of them, or none."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from factories import NOW, ROOMY, Counters, HeldDatabase, Parts, counters, make_parts
from waiting import until

from restante import wire
from restante.database.pool import Database
from restante.delivery import store
from restante.delivery.blobs import WINDOW_CHUNKS
from restante.delivery.receive import Incoming, Receiver
from restante.delivery.rules import CHUNK_BYTES, MIB, Quota
from restante.delivery.subject import ExpiredReservations
from restante.errors import (
    BadRequest,
    KeyReused,
    QuotaTooSmall,
    UploadMalformed,
    UploadTooSlow,
    WorkspaceFull,
)
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

PIECE = 64 * 1024
NARROW = Quota(max_bytes=8 * MIB, max_files=2)


@pytest.fixture
def receiver(parts: Parts) -> Receiver:
    return parts.receiver


async def write_files(incoming: Incoming, *contents: bytes, name: str = "letter.txt") -> None:
    """What the parser does with a body."""
    for content in contents:
        await incoming.begin_file(name, "text/plain", now=NOW)
        for start in range(0, len(content), PIECE):
            await incoming.write(content[start : start + PIECE], now=NOW)
        await incoming.end_file(now=NOW)


async def upload(
    receiver: Receiver, workspace_id: WorkspaceId, *contents: bytes, key: str | None = None
) -> list[wire.StagedFile]:
    async with receiver.receive(workspace_id, sum(map(len, contents))) as incoming:
        await write_files(incoming, *contents)
        return (await incoming.publish(now=NOW, key=key)).files


async def count(connection: Any, table: str) -> int:
    return await connection.fetchval(f"select count(*) from {table}")


async def test_a_small_request_is_one_statement(
    receiver: Receiver, connection: Any, workspace_id: WorkspaceId
):
    """However many files: nothing is reserved or written before it is published."""
    async with receiver.receive(workspace_id, 64_000) as incoming:
        await write_files(incoming, *[bytes(1000)] * 64)
        before = await count(connection, "chunks")
        await incoming.publish(now=NOW)

    assert (before, incoming.room.bucket) == (0, None)
    assert await counters(connection, workspace_id) == Counters(64, 64_000, 64)
    assert await count(connection, "chunks") == 64


async def test_nothing_is_visible_while_a_large_file_arrives(
    receiver: Receiver, connection: Any, workspace_id: WorkspaceId
):
    size = 3 * MIB + 1
    async with receiver.receive(workspace_id, size) as incoming:
        await write_files(incoming, bytes(size))
        arriving = await counters(connection, workspace_id)
        visible = await count(connection, "uploads") + await count(connection, "feed")
        await incoming.publish(now=NOW)

    assert arriving == Counters(reserved_bytes=size, reserved_files=1)
    assert visible == 0
    assert await counters(connection, workspace_id) == Counters(1, size, 1)
    assert await count(connection, "reservations") == 0
    assert await count(connection, "chunks") == 13


@pytest.mark.parametrize("size", [CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * MIB])
async def test_a_transfer_holds_a_few_chunks_in_memory_whatever_its_size(
    receiver: Receiver, workspace_id: WorkspaceId, size: int
):
    """Promise 10, for many files of about a chunk each as well as for a large one."""
    held: list[int] = []
    async with receiver.receive(workspace_id, 50 * MIB) as incoming:
        for _ in range(12 * MIB // size):
            await write_files(incoming, bytes(size))
            held.append(sum(len(chunk.bytes) for chunk in incoming._chunks))
        await incoming.publish(now=NOW)

    assert max(held) < WINDOW_CHUNKS * CHUNK_BYTES


async def abort_halfway(
    receiver: Receiver,
    workspace_id: WorkspaceId,
    before: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """A large body that ends in its middle."""
    async with receiver.receive(workspace_id, 5 * MIB) as incoming:
        await write_files(incoming, bytes(3 * MIB))
        if before:
            await before()
        raise UploadMalformed("The body ends too early.")


async def test_an_aborted_request_leaves_nothing_but_unreachable_bytes(
    receiver: Receiver, connection: Any, workspace_id: WorkspaceId
):
    with pytest.raises(UploadMalformed, match="ends too early"):
        await abort_halfway(receiver, workspace_id)

    assert await counters(connection, workspace_id) == Counters()
    for table in ("uploads", "feed", "reservations"):
        assert await count(connection, table) == 0


async def test_a_cancelled_request_releases_its_reservation(
    receiver: Receiver, connection: Any, workspace_id: WorkspaceId
):
    arrived = asyncio.Event()

    async def send() -> None:
        async with receiver.receive(workspace_id, 5 * MIB) as incoming:
            await write_files(incoming, bytes(3 * MIB))
            arrived.set()
            await asyncio.get_running_loop().create_future()

    sending = asyncio.create_task(send())
    await arrived.wait()
    sending.cancel()
    await asyncio.wait({sending})

    assert sending.cancelled()
    assert await counters(connection, workspace_id) == Counters()


async def test_a_request_that_is_cancelled_while_it_reserves_releases_its_reservation(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """The statement may have been committed before its caller has seen the result."""
    held = HeldDatabase(db)
    receiver = make_parts(held).receiver

    async def send() -> None:
        async with receiver.receive(workspace_id, 5 * MIB) as incoming:
            held.is_held.clear()
            held.may_go_on.clear()
            await write_files(incoming, bytes(3 * MIB))

    sending = asyncio.create_task(send())
    await until(lambda: count(connection, "reservations"))
    sending.cancel()
    await asyncio.wait({sending})

    assert sending.cancelled()
    assert await counters(connection, workspace_id) == Counters()


async def test_a_reservation_that_cannot_be_released_does_not_hide_why_the_request_failed(
    db: Database, receiver: Receiver, workspace_id: WorkspaceId
):
    """The room is free when the reservation expires."""
    with pytest.raises(UploadMalformed, match="ends too early"):
        await abort_halfway(receiver, workspace_id, before=db.close)


async def test_without_room_for_the_bytes_nothing_is_written_ahead(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    receiver = make_parts(db, quota=NARROW).receiver
    await upload(receiver, workspace_id, bytes(6 * MIB))
    before = await count(connection, "chunks")

    with pytest.raises(WorkspaceFull) as refused:
        await upload(receiver, workspace_id, bytes(3 * MIB))

    assert await count(connection, "chunks") == before
    assert refused.value.facts["waiting_bytes"] == 6 * MIB
    assert await counters(connection, workspace_id) == Counters(1, 6 * MIB, 1)


@pytest.mark.parametrize("key", [None, "a key"])
@pytest.mark.parametrize("size", [10, 2 * MIB])
async def test_without_room_for_the_files_nothing_is_published(
    db: Database, connection: Any, workspace_id: WorkspaceId, size: int, key: str | None
):
    """A large request has reserved room for its bytes by then; it is released."""
    receiver = make_parts(db, quota=NARROW).receiver
    await upload(receiver, workspace_id, b"one")

    with pytest.raises(WorkspaceFull):
        await upload(receiver, workspace_id, bytes(size), b"and another", key=key)

    assert await counters(connection, workspace_id) == Counters(1, 3, 1)
    stored = [await count(connection, name) for name in ("feed", "reservations", "answers")]
    assert stored == [1, 0, 0]


@pytest.mark.parametrize("size", [10, 2 * MIB])
async def test_a_repeated_request_gets_the_first_answer(
    receiver: Receiver, connection: Any, workspace_id: WorkspaceId, size: int
):
    first = await upload(receiver, workspace_id, bytes(size), b"x", key="a key")
    stored = await counters(connection, workspace_id)

    again = await upload(receiver, workspace_id, bytes(size), b"x", key="a key")

    assert again == first
    assert await counters(connection, workspace_id) == stored


async def test_a_request_that_is_known_to_be_repeated_is_hashed_and_not_stored(
    receiver: Receiver, connection: Any, workspace_id: WorkspaceId
):
    contents = bytes(3 * MIB), b"x"
    first = await upload(receiver, workspace_id, *contents, key="a key")
    stored = await count(connection, "chunks")

    async with receiver.receive(workspace_id, 3 * MIB, repeats_key=True) as incoming:
        await write_files(incoming, *contents)
        again = (await incoming.repeated_answer("a key", now=NOW)).files

    assert again == first
    assert await count(connection, "chunks") == stored


@pytest.mark.parametrize("other", [[b"y"], [b"x", b"x"]])
async def test_a_key_for_other_files_is_refused(
    receiver: Receiver, connection: Any, workspace_id: WorkspaceId, other: list[bytes]
):
    await upload(receiver, workspace_id, b"x", key="a key")

    with pytest.raises(KeyReused):
        await upload(receiver, workspace_id, *other, key="a key")

    assert await counters(connection, workspace_id) == Counters(1, 1, 1)


@pytest.mark.parametrize("size", [10, 2 * MIB])
async def test_the_same_request_many_times_at_once_is_stored_once(
    receiver: Receiver, connection: Any, workspace_id: WorkspaceId, size: int
):
    """After a timeout, a sender repeats its request while the first is still processed."""
    answers = await asyncio.gather(
        *(upload(receiver, workspace_id, bytes(size), b"x", key="a key") for _ in range(6))
    )

    assert all(answer == answers[0] for answer in answers)
    assert await counters(connection, workspace_id) == Counters(2, size + 1, 2)
    assert await count(connection, "reservations") == 0


async def test_a_refused_request_does_not_use_up_its_key(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """Once there is room, the same request succeeds."""
    full = make_parts(db, quota=Quota(max_bytes=MIB, max_files=1)).receiver
    await upload(full, workspace_id, b"one")
    with pytest.raises(WorkspaceFull):
        await upload(full, workspace_id, b"two", key="a key")

    roomy = make_parts(db, quota=ROOMY).receiver
    assert await store.remembered(connection, workspace_id, "a key", now=NOW) is None
    assert len(await upload(roomy, workspace_id, b"two", key="a key")) == 1


async def test_a_key_can_be_used_again_when_its_answer_has_expired(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    receiver = make_parts(db, answers_kept=timedelta(0)).receiver
    first = await upload(receiver, workspace_id, b"x", key="a key")

    second = await upload(receiver, workspace_id, b"another", key="a key")

    assert second != first
    assert await counters(connection, workspace_id) == Counters(2, 8, 2)


async def test_waiting_readers_are_woken_after_the_commit_and_not_before(
    parts: Parts, workspace_id: WorkspaceId
):
    async with parts.wakeups.waiting(workspace_id) as waiter:
        async with parts.receiver.receive(workspace_id, 3 * MIB) as incoming:
            await write_files(incoming, bytes(3 * MIB))
            before = waiter.changed.is_set()
            await incoming.publish(now=NOW)

        assert not before
        assert waiter.changed.is_set()


@pytest.mark.parametrize("contents", [[bytes(101)], [bytes(60), bytes(41)], [b"x"] * 4])
async def test_a_request_that_alone_exceeds_the_quota_is_refused_while_it_arrives(
    db: Database, connection: Any, workspace_id: WorkspaceId, contents: list[bytes]
):
    """No acknowledgement could make room for it, so its sender must not retry."""
    receiver = make_parts(db, quota=Quota(max_bytes=100, max_files=3)).receiver

    with pytest.raises(QuotaTooSmall):
        await upload(receiver, workspace_id, *contents)

    assert await counters(connection, workspace_id) == Counters()
    assert len(await upload(receiver, workspace_id, bytes(60), bytes(39), b"x")) == 3


@pytest.mark.parametrize("ttl", [timedelta(seconds=59), timedelta(days=2, seconds=1)])
async def test_a_ttl_outside_of_the_operators_limits_is_refused(
    db: Database, workspace_id: WorkspaceId, ttl: timedelta
):
    shortest, longest = timedelta(minutes=1), timedelta(days=2)
    receiver = make_parts(db, ttl_min=shortest, ttl_max=longest).receiver

    with pytest.raises(BadRequest, match="from 60 to 172800 s"):
        async with receiver.receive(workspace_id, 1, ttl=ttl):
            pass


async def test_a_ttl_counts_from_the_time_of_publishing(
    receiver: Receiver, connection: Any, workspace_id: WorkspaceId
):
    ttl, later = timedelta(minutes=10), NOW + timedelta(seconds=5)
    async with receiver.receive(workspace_id, 1, ttl=ttl) as incoming:
        await write_files(incoming, b"x")
        await incoming.publish(now=later)

    row = await connection.fetchrow("select created_at, expires_at from uploads")
    assert tuple(row) == (later, later + ttl)


async def test_room_is_free_again_when_an_upload_never_ends(
    receiver: Receiver, connection: Any, workspace_id: WorkspaceId
):
    """A killed server leaves a reservation that nobody releases; a late publish is refused."""
    expired = ExpiredReservations()
    async with receiver.receive(workspace_id, 3 * MIB) as incoming:
        await write_files(incoming, bytes(2 * MIB))

        too_early = await expired.delete_due(connection, now=NOW)
        kept = await counters(connection, workspace_id)
        in_time = await expired.delete_due(connection, now=NOW + timedelta(days=1))
        freed = await counters(connection, workspace_id)
        with pytest.raises(UploadTooSlow, match="send it again"):
            await incoming.publish(now=NOW)

    assert (too_early, in_time) == ({"reservations": 0}, {"reservations": 1})
    assert (kept.reserved_bytes, freed) == (3 * MIB, Counters())
    assert await counters(connection, workspace_id) == Counters()
