"""Files are taken in piece by piece and published together: all of them, or none."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from factories import ROOMY, Counters, Parts, counters, make_parts, make_workspace
from restante.delivery.intake import Intake

from restante.database.pool import Database
from restante.delivery.blobs.postgres import WINDOW_CHUNKS
from restante.delivery.receive import Staging
from restante.delivery.rules import CHUNK_BYTES, MIB, Quota
from restante.errors import KeyReused, UploadMalformed, WorkspaceFull
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

PIECE = 64 * 1024
NARROW = Quota(max_bytes=8 * MIB, max_files=2)


@pytest.fixture
def db(db_with_partitions: Database) -> Database:
    return db_with_partitions


@pytest.fixture
async def workspace_id(db: Database) -> WorkspaceId:
    async with db.connection() as connection:
        return await make_workspace(connection)


@pytest.fixture
def parts(db: Database) -> Parts:
    return make_parts(db)


@pytest.fixture
def staging(parts: Parts) -> Staging:
    return parts.staging


async def take(intake: Intake, *contents: bytes, name: str = "letter.txt") -> None:
    """What the parser does with a body."""
    for content in contents:
        await intake.begin_file(name, "text/plain")
        for start in range(0, len(content), PIECE):
            await intake.write(content[start : start + PIECE])
        await intake.end_file()


async def upload(
    staging: Staging, workspace_id: WorkspaceId, *contents: bytes, key: str | None = None
) -> list[dict[str, Any]]:
    async with staging.intake(workspace_id, sum(map(len, contents))) as intake:
        await take(intake, *contents)
        return json.loads(await staging.publish(intake, key=key))["files"]


async def count(db: Database, table: str) -> int:
    async with db.connection() as connection:
        return await connection.fetchval(f"select count(*) from {table}")


async def counters_of(db: Database, workspace_id: WorkspaceId) -> Counters:
    async with db.connection() as connection:
        return await counters(connection, workspace_id)


async def test_a_small_request_is_one_statement(
    db: Database, staging: Staging, workspace_id: WorkspaceId
):
    """However many files: nothing is reserved or written before the publication."""
    async with staging.intake(workspace_id, 64_000) as intake:
        await take(intake, *[bytes(1000)] * 64)
        before = await count(db, "chunks")
        await staging.publish(intake)

    assert (before, intake.reservation) == (0, None)
    assert await counters_of(db, workspace_id) == Counters(64, 64_000, 64)
    assert await count(db, "chunks") == 64


async def test_nothing_is_visible_while_a_large_file_arrives(
    db: Database, staging: Staging, workspace_id: WorkspaceId
):
    size = 3 * MIB + 1
    async with staging.intake(workspace_id, size) as intake:
        await take(intake, bytes(size))
        arriving = await counters_of(db, workspace_id)
        visible = await count(db, "uploads") + await count(db, "feed")
        await staging.publish(intake)

    assert arriving == Counters(reserved_bytes=size, reserved_files=1)
    assert visible == 0
    assert await counters_of(db, workspace_id) == Counters(1, size, 1)
    assert await count(db, "reservations") == 0
    assert await count(db, "chunks") == 13


@pytest.mark.parametrize("size", [CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * MIB])
async def test_a_transfer_holds_a_few_chunks_whatever_it_brings(
    staging: Staging, workspace_id: WorkspaceId, size: int
):
    """Promise 10: that goes for many files of a chunk each as well as for a large one."""
    held: list[int] = []
    async with staging.intake(workspace_id, 50 * MIB) as intake:
        for _ in range(12 * MIB // size):
            await take(intake, bytes(size))
            held.append(sum(len(chunk.bytes) for chunk in intake._pending))
        await staging.publish(intake)

    assert max(held) < WINDOW_CHUNKS * CHUNK_BYTES


async def break_off(
    staging: Staging,
    workspace_id: WorkspaceId,
    before: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """A large body that ends in its middle."""
    async with staging.intake(workspace_id, 5 * MIB) as intake:
        await take(intake, bytes(3 * MIB))
        if before:
            await before()
        raise UploadMalformed("The body ends too early.")


async def test_a_request_that_breaks_off_leaves_nothing_but_unreachable_bytes(
    db: Database, staging: Staging, workspace_id: WorkspaceId
):
    with pytest.raises(UploadMalformed, match="ends too early"):
        await break_off(staging, workspace_id)

    assert await counters_of(db, workspace_id) == Counters()
    assert [await count(db, name) for name in ("uploads", "feed", "reservations")] == [0, 0, 0]


async def test_a_request_that_is_cancelled_gives_its_room_back(
    db: Database, staging: Staging, workspace_id: WorkspaceId
):
    arrived = asyncio.Event()

    async def send() -> None:
        async with staging.intake(workspace_id, 5 * MIB) as intake:
            await take(intake, bytes(3 * MIB))
            arrived.set()
            await asyncio.get_running_loop().create_future()

    sending = asyncio.create_task(send())
    await arrived.wait()
    sending.cancel()
    await asyncio.wait({sending})

    assert sending.cancelled()
    assert await counters_of(db, workspace_id) == Counters()


async def test_why_it_broke_off_is_heard_even_if_the_room_cannot_be_given_back(
    db: Database, staging: Staging, workspace_id: WorkspaceId
):
    """The room comes back when the reservation expires."""
    with pytest.raises(UploadMalformed, match="ends too early"):
        await break_off(staging, workspace_id, before=db.close)


async def test_without_room_for_the_bytes_nothing_is_written_ahead(
    db: Database, workspace_id: WorkspaceId
):
    staging = make_parts(db, quota=NARROW).staging
    await upload(staging, workspace_id, bytes(6 * MIB))
    before = await count(db, "chunks")

    with pytest.raises(WorkspaceFull) as refused:
        await upload(staging, workspace_id, bytes(3 * MIB))

    assert await count(db, "chunks") == before
    assert refused.value.facts["waiting_bytes"] == 6 * MIB
    assert await counters_of(db, workspace_id) == Counters(1, 6 * MIB, 1)


@pytest.mark.parametrize("key", [None, "a key"])
@pytest.mark.parametrize("size", [10, 2 * MIB])
async def test_without_room_for_the_files_nothing_is_published(
    db: Database, workspace_id: WorkspaceId, size: int, key: str | None
):
    """A promise for bytes does not help against too many files; it is given back."""
    staging = make_parts(db, quota=NARROW).staging
    await upload(staging, workspace_id, b"one")

    with pytest.raises(WorkspaceFull):
        await upload(staging, workspace_id, bytes(size), b"and another", key=key)

    assert await counters_of(db, workspace_id) == Counters(1, 3, 1)
    assert [await count(db, name) for name in ("feed", "reservations", "answers")] == [1, 0, 0]


@pytest.mark.parametrize("size", [10, 2 * MIB])
async def test_a_repeated_request_gets_the_first_answer(
    db: Database, staging: Staging, workspace_id: WorkspaceId, size: int
):
    first = await upload(staging, workspace_id, bytes(size), b"x", key="a key")
    stored = await counters_of(db, workspace_id)

    again = await upload(staging, workspace_id, bytes(size), b"x", key="a key")

    assert again == first
    assert await counters_of(db, workspace_id) == stored


async def test_a_request_that_is_known_to_be_repeated_is_read_and_not_kept(
    db: Database, staging: Staging, workspace_id: WorkspaceId
):
    contents = bytes(3 * MIB), b"x"
    first = await upload(staging, workspace_id, *contents, key="a key")
    stored = await count(db, "chunks")
    assert await staging.is_known(workspace_id, "a key")

    async with staging.intake(workspace_id, 3 * MIB, keep=False) as intake:
        await take(intake, *contents)
        again = json.loads(await staging.repeat(intake, "a key"))["files"]

    assert again == first
    assert await count(db, "chunks") == stored


@pytest.mark.parametrize("other", [[b"y"], [b"x", b"x"]])
async def test_a_key_for_other_files_is_refused(
    db: Database, staging: Staging, workspace_id: WorkspaceId, other: list[bytes]
):
    await upload(staging, workspace_id, b"x", key="a key")

    with pytest.raises(KeyReused):
        await upload(staging, workspace_id, *other, key="a key")

    assert await counters_of(db, workspace_id) == Counters(1, 1, 1)


@pytest.mark.parametrize("size", [10, 2 * MIB])
async def test_the_same_request_many_times_at_once_is_stored_once(
    db: Database, staging: Staging, workspace_id: WorkspaceId, size: int
):
    """A sender that loses patience sends again while the first is still on its way."""
    answers = await asyncio.gather(
        *(upload(staging, workspace_id, bytes(size), b"x", key="a key") for _ in range(6))
    )

    assert all(answer == answers[0] for answer in answers)
    assert await counters_of(db, workspace_id) == Counters(2, size + 1, 2)
    assert await count(db, "reservations") == 0


async def test_a_key_is_not_used_up_by_a_refusal(db: Database, workspace_id: WorkspaceId):
    """Once there is room, the same request goes through."""
    full = make_parts(db, quota=Quota(max_bytes=MIB, max_files=1)).staging
    await upload(full, workspace_id, b"one")
    with pytest.raises(WorkspaceFull):
        await upload(full, workspace_id, b"two", key="a key")

    roomy = make_parts(db, quota=ROOMY).staging
    assert not await roomy.is_known(workspace_id, "a key")
    assert len(await upload(roomy, workspace_id, b"two", key="a key")) == 1


async def test_a_key_can_be_used_again_when_its_answer_has_expired(
    db: Database, workspace_id: WorkspaceId
):
    staging = make_parts(db, answers_kept=timedelta(0)).staging
    first = await upload(staging, workspace_id, b"x", key="a key")

    second = await upload(staging, workspace_id, b"another", key="a key")

    assert second != first
    assert await counters_of(db, workspace_id) == Counters(2, 8, 2)


async def test_who_waits_is_woken_after_the_commit_and_not_before(
    parts: Parts, workspace_id: WorkspaceId
):
    async with parts.wakeups.waiting(workspace_id) as waiter:
        async with parts.staging.intake(workspace_id, 3 * MIB) as intake:
            await take(intake, bytes(3 * MIB))
            before = waiter.changed.is_set()
            await parts.staging.publish(intake)

        assert not before
        assert waiter.changed.is_set()
