"""A large file is moved to another bucket in steps, by one pass or several."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest
from callers import pattern
from factories import HOUR, Counters, Parts, counters
from sweeps import (
    CHUNKS,
    PAST,
    content_of,
    make_old,
    make_partition,
    make_sweep,
    state_of,
    utc_now,
)

from restante.database import partitions
from restante.database.partitions import Partition
from restante.database.pool import Database
from restante.database.spans import Span
from restante.delivery import buckets, subject
from restante.delivery.rules import CHUNK_BYTES
from restante.delivery.subject import MOVE_FILES, ExpiredReservations
from restante.ids import FileId, WorkspaceId
from restante.retention.subjects import OUT_OF_TIME
from restante.server.parts import subjects_of
from restante.settings import Settings
from restante.wire import PlanStep

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("small_steps")]

DAY = timedelta(days=1)
BUCKET = f"chunks_{PAST:%Y%m%d_%H%M%S}"


@pytest.fixture
async def db(db: Database) -> Database:
    """One bucket with a past range, and one for the current time."""
    async with db.connection() as connection:
        await make_partition(connection, CHUNKS)
    return db


@dataclass
class Interrupted:
    """The work of a pass whose time is over after so many steps."""

    connection: Any
    steps: int
    now: datetime = field(default_factory=utc_now)
    moved_bytes: int = 0

    @property
    def is_out_of_time(self) -> bool:
        self.steps -= 1
        return self.steps < 0

    def moved(self, size: int) -> None:
        self.moved_bytes += size

    def freed(self, size: int) -> None:
        raise AssertionError("nothing is dropped here")

    async def detach_and_drop(self, partition: Partition) -> None:
        raise AssertionError("nothing is dropped here")


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of more than two chunks are large."""
    monkeypatch.setattr(subject, "_STEP_CHUNKS", 2)


async def move(
    connection: Any, *, steps: int, interval: timedelta = HOUR
) -> tuple[str | None, int]:
    """One pass over the bucket with the past range; why it ended, and the bytes that it moved."""
    (partition,) = [
        one
        for one in await partitions.partitions_of(connection, [CHUNKS])
        if one.name.endswith(BUCKET)
    ]
    work = Interrupted(connection, steps)
    step = PlanStep(MOVE_FILES, partition.name, 1, 0, "", "buckets")
    settings = Settings(sweep_interval_seconds=interval.total_seconds())
    its_subject = subjects_of(settings).of_partition(partition)
    why = await its_subject.carry_out(step, partition, work)
    return why, work.moved_bytes


async def copied(connection: Any) -> list[int]:
    return [
        row["seq"]
        for row in await connection.fetch(
            "select seq from chunks where bucket <> $1 order by seq", PAST
        )
    ]


async def stage_large(
    connection: Any, parts: Parts, workspace_id: WorkspaceId
) -> tuple[FileId, bytes]:
    """A file of six chunks, in the bucket with the past range."""
    content = pattern(5 * CHUNK_BYTES + 1)
    (file_id,) = await parts.stage(workspace_id, content)
    await connection.execute("update chunks set bucket = $1", PAST)
    await connection.execute("update uploads set bucket = $1", PAST)
    return file_id, content


async def test_a_large_file_is_moved_in_steps_by_several_passes(
    connection: Any, workspace_id: WorkspaceId, parts: Parts
):
    """Until the last one, readers find it where it was; then nothing of the move is left."""
    file_id, content = await stage_large(connection, parts, workspace_id)

    first = await move(connection, steps=2)
    copied_first = await copied(connection)
    read_meanwhile = await content_of(parts, workspace_id, file_id)
    usage = await counters(connection, workspace_id)
    second = await move(connection, steps=9)

    assert first == (OUT_OF_TIME, 0)
    assert copied_first == [0, 1]
    assert read_meanwhile == content
    assert usage == Counters(1, len(content), 1)
    assert second == (None, len(content))
    assert await copied(connection) == list(range(6))
    assert await connection.fetchval("select count(*) from reservations") == 0
    await connection.execute("delete from chunks where bucket = $1", PAST)
    assert await content_of(parts, workspace_id, file_id) == content


@pytest.mark.parametrize("interval", [timedelta(minutes=1), DAY])
async def test_a_copy_is_kept_until_the_next_pass_but_one(
    connection: Any, workspace_id: WorkspaceId, parts: Parts, interval: timedelta
):
    """However rarely the operator sweeps: a copy that expires before it would never be complete."""
    await stage_large(connection, parts, workspace_id)
    await move(connection, steps=2, interval=interval)
    next_but_one = utc_now() + 2.2 * interval

    released = await ExpiredReservations().delete_due(connection, now=next_but_one)

    assert released == {"reservations": 0}


async def test_a_command_does_not_shorten_the_time_that_a_server_keeps_a_copy(
    connection: Any, workspace_id: WorkspaceId, parts: Parts
):
    """It sweeps once, and does not know how often the server does."""
    await stage_large(connection, parts, workspace_id)
    await move(connection, steps=2, interval=DAY)
    await move(connection, steps=2, interval=timedelta(minutes=5))

    released = await ExpiredReservations().delete_due(connection, now=utc_now() + 2 * DAY)

    assert released == {"reservations": 0}
    assert await copied(connection) == [0, 1, 2, 3]


async def test_the_bucket_of_a_copy_stays_until_the_file_is_moved(
    connection: Any, workspace_id: WorkspaceId, parts: Parts
):
    await stage_large(connection, parts, workspace_id)
    await move(connection, steps=2)
    to = await connection.fetchval("select bucket from reservations")

    assert await buckets.is_bucket_in_use(connection, Span(to, to + HOUR))
    assert list(await buckets.arriving_in(connection, [Span(to, to + HOUR)])) == [1]


async def test_a_copy_that_is_no_longer_kept_is_begun_again(
    connection: Any, workspace_id: WorkspaceId, parts: Parts
):
    """Its reservation has expired while no server was running, and its bucket was sealed."""
    file_id, content = await stage_large(connection, parts, workspace_id)
    earlier = await make_partition(connection, CHUNKS, PAST - HOUR)
    await move(connection, steps=2)
    await connection.execute("update reservations set bucket = $1", PAST - HOUR)
    await connection.execute("update chunks set bucket = $1 where bucket <> $2", PAST - HOUR, PAST)
    await partitions.seal(connection, earlier)

    assert await move(connection, steps=9) == (None, len(content))

    await connection.execute("delete from chunks where bucket <= $1", PAST)
    assert await content_of(parts, workspace_id, file_id) == content


async def test_a_large_file_that_is_locked_is_moved_by_the_next_pass(
    connection: Any, workspace_id: WorkspaceId, parts: Parts, connections: Any
):
    """Nothing is copied twice."""
    _, content = await stage_large(connection, parts, workspace_id)
    client = await connections()
    async with client.transaction():
        await client.execute("select from uploads for update")
        why, moved = await move(connection, steps=9)

    again = await move(connection, steps=2)

    assert (why, moved) == ("the files that are left in it are locked", 0)
    assert again == (None, len(content))


async def test_a_large_file_that_was_deleted_while_it_was_moved_stays_deleted(
    connection: Any, workspace_id: WorkspaceId, parts: Parts
):
    await stage_large(connection, parts, workspace_id)
    await move(connection, steps=2)
    (file,) = await buckets.files_in(connection, Span(PAST, PAST + HOUR), 10)
    await connection.execute("delete from uploads")

    assert await buckets.end_move(connection, file) is None
    assert await move(connection, steps=9) == (None, 0)


async def test_a_sweep_moves_large_files_and_drops_their_bucket(
    db: Database, connection: Any, workspace_id: WorkspaceId, parts: Parts
):
    file_id, content = await stage_large(connection, parts, workspace_id)
    await make_old(connection, workspace_id, 30, data=bytes(CHUNK_BYTES), expires_at=PAST)

    await make_sweep(db).run(now=utc_now())

    assert await state_of(connection, BUCKET) == "gone"
    assert await content_of(parts, workspace_id, file_id) == content
