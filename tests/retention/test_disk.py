"""What is known about the database's disk, and what follows from it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import OtherProgram, small_disk
from factories import make_feed
from sweeps import make_subjects, utc_now

from restante.database.pool import Database
from restante.errors import DatabaseFull, DiskLow
from restante.feed.rules import NewActivity
from restante.ids import WorkspaceId
from restante.postgres import Ballast
from restante.postgres.ballast import PIECES
from restante.retention import disk as disks, store
from restante.retention.disk import Disk
from restante.retention.space import SpaceAccount

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
MORE_THAN_ANY_DISK = 1 << 62


@pytest.fixture(autouse=True)
def _read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of this machine is used by others too; each test sees it as it was at first."""
    monkeypatch.setattr(disks, "_FRESH_SECONDS", 3600)


async def located(db: Database, **chosen: Any) -> Disk:
    disk = Disk(db, **chosen)
    async with db.connection() as connection:
        await disk.locate(connection)
    return disk


async def fail(db: Database, sqlstate: str) -> None:
    """Postgres reports this error."""
    with pytest.raises(DatabaseFull):
        async with db.connection() as connection:
            await connection.execute(f"do $$ begin raise sqlstate '{sqlstate}'; end $$")


async def test_nothing_new_is_stored_below_the_reserve(db: Database):
    roomy, low = await located(db), await located(db, reserve_bytes=MORE_THAN_ANY_DISK)

    roomy.check()
    with pytest.raises(DiskLow) as refused:
        low.check()

    assert (roomy.is_low, low.is_low) == (False, True)
    assert refused.value.facts == {"retry_after_seconds": 30}
    assert not any(character.isdigit() for character in str(refused.value))


async def test_what_was_accepted_since_the_disk_was_read_counts(db: Database):
    """Twice: it is written to the WAL and to its table."""
    free = (await located(db)).state().free_bytes
    assert free is not None
    disk = await located(db, reserve_bytes=free - 1000 * MIB)
    assert disk.room
    disk._room = disks.Room(disk.room.total, free)

    disk.take(400 * MIB)
    disk.take(400 * MIB)

    with pytest.raises(DiskLow):
        disk.take(1)


async def test_the_disk_is_read_again_after_a_second(db: Database, monkeypatch: pytest.MonkeyPatch):
    disk = await located(db, reserve_bytes=0)
    disk.take(MORE_THAN_ANY_DISK)
    assert disk.is_low

    monkeypatch.setattr(disks, "_FRESH_SECONDS", 0)

    assert not disk.is_low


async def test_a_disk_that_cannot_be_seen_is_full_for_a_while_after_an_error(
    db: Database, monkeypatch: pytest.MonkeyPatch
):
    disk = Disk(db)
    assert not disk.is_low

    await fail(db, "53100")

    assert disk.is_low
    assert disk.scarce_bytes == 0
    monkeypatch.setattr(disks, "_FULL_SECONDS", 0)
    assert not disk.is_low


async def test_a_lack_of_memory_does_not_look_like_a_full_disk(db: Database):
    """Else anybody who exhausts the lock table could stop all uploads."""
    await fail(db, "53200")

    assert not Disk(db).is_low


async def test_an_unseen_disk_is_probed_before_it_counts_as_free(
    db: Database, monkeypatch: pytest.MonkeyPatch
):
    """The probe finds it full, so it counts as full for another while."""

    async def find_it_full(tx: Any) -> None:
        await tx.execute("do $$ begin raise sqlstate '53100'; end $$")

    monkeypatch.setattr(disks, "_PROBE_AFTER_SECONDS", 0)
    monkeypatch.setattr(store, "probe", find_it_full)
    disk = Disk(db)
    db.disk_full_at = before = time.monotonic() - 1

    state = await disk.tend()

    assert state.is_low
    assert db.disk_full_at > before


async def test_the_probe_writes_16_mib(db: Database, connection: Any):
    """The limit on temporary files stops it shortly before its end."""
    async with db.transaction(readonly=True) as tx:
        await store.probe(tx)

    async with connection.transaction():
        await connection.execute("set local temp_file_limit = '16000kB'")
        with pytest.raises(Exception, match="temp_file_limit"):
            await store.probe(connection)


async def test_a_checkpoint_moves_the_redo_point(db: Database, connection: Any):
    async def redo() -> str:
        return await connection.fetchval("select redo_lsn::text from pg_control_checkpoint()")

    before = await redo()
    await Disk(db).checkpoint()

    assert await redo() != before


async def test_a_role_that_may_not_write_a_checkpoint_asks_for_none(connection: Any):
    await connection.execute("set role pg_read_all_data")

    await store.checkpoint(connection)


async def test_a_role_that_may_not_know_the_directory_sees_no_disk(connection: Any):
    await connection.execute("set role pg_read_all_data")

    assert await store.directories(connection) == []


async def test_tables_and_wal_are_looked_at(connection: Any):
    data, wal = await store.directories(connection)

    assert (Path(data) / "PG_VERSION").exists()
    assert wal == f"{data}/pg_wal"


async def test_a_write_that_met_a_full_disk_is_repeated_with_the_ballast(
    db: Database, tmp_path: Path
):
    disk, tries = await located(db, ballast=Ballast(tmp_path, 4 * MIB)), 0

    async def write() -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise DatabaseFull("The database has no space left; nothing was stored.")
        return "written"

    assert await disk.with_room(write) == "written"


@pytest.fixture
def ballast(place: Path) -> Iterator[Ballast]:
    """On a small disk of its own that another program has filled."""
    with small_disk(place, 64) as home:
        ballast = Ballast(home, 4 * MIB)
        while not ballast.is_complete():
            ballast.refill()
        OtherProgram(home).take_all()
        yield ballast


async def test_requests_and_the_watch_leave_the_last_piece_of_the_ballast_to_the_sweep(
    db: Database, ballast: Ballast
):
    """Any number of acknowledgements must not keep a server from starting and sweeping."""
    disk = await located(db, ballast=ballast, reserve_bytes=MORE_THAN_ANY_DISK)
    other = OtherProgram(ballast.home)

    async def write() -> None:
        other.take_all()
        raise DatabaseFull("The database has no space left; nothing was stored.")

    for _ in range(2 * PIECES):
        with pytest.raises(DatabaseFull):
            await disk.with_room(write)
        await disk.tend()
    left = ballast.in_place()

    assert left == ballast.piece_bytes
    other.take_all()
    assert disk.make_room_for_sweep()
    assert ballast.in_place() == 0


async def test_the_last_piece_is_given_up_if_postgres_accepts_no_session(
    db: Database, ballast: Ballast
):
    """Without a session nothing can be swept; this ends the start of Postgres."""
    disk = await located(db, ballast=ballast, reserve_bytes=MORE_THAN_ANY_DISK)
    other = OtherProgram(ballast.home)
    for _ in range(PIECES):
        await disk.tend()
        other.take_all()
    kept = ballast.in_place()

    db.refuses_sessions = True
    await disk.tend()

    assert kept == ballast.piece_bytes
    assert ballast.in_place() == 0


async def test_without_ballast_the_error_reaches_the_caller(db: Database):
    async def write() -> None:
        raise DatabaseFull("The database has no space left; nothing was stored.")

    with pytest.raises(DatabaseFull):
        await Disk(db).with_room(write)


async def test_the_ballast_comes_back_while_there_is_room(db: Database, tmp_path: Path):
    disk = await located(db, ballast=Ballast(tmp_path, 40_000), reserve_bytes=0)

    states = [await disk.tend() for _ in range(5)]

    assert [state.ballast_bytes for state in states] == [10_000, 20_000, 30_000, 40_000, 40_000]


async def test_the_ballast_does_not_come_back_on_a_low_disk(db: Database, tmp_path: Path):
    ballast = Ballast(tmp_path, 40_000)
    disk = await located(db, ballast=ballast, reserve_bytes=MORE_THAN_ANY_DISK)

    assert (await disk.tend()).ballast_bytes == 0


async def test_a_message_is_refused_and_a_feed_is_still_acknowledged(
    db: Database, workspace_id: WorkspaceId
):
    disk = await located(db, reserve_bytes=MORE_THAN_ANY_DISK)
    feed = make_feed(db, disk=disk)

    with pytest.raises(DiskLow):
        await feed.append(workspace_id, NewActivity("a", "a", b"{}"), now=utc_now())

    assert await feed.acknowledge(workspace_id, 0) == 0


async def test_the_status_says_that_the_disk_is_low(db: Database):
    disk = await located(db, reserve_bytes=MORE_THAN_ANY_DISK)

    seen = await SpaceAccount(db, make_subjects(), disk).look(now=utc_now())

    assert seen.is_disk_low
    assert seen.reserve_bytes == MORE_THAN_ANY_DISK
    assert seen.free_bytes
