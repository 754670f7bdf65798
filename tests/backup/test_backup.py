"""A backup of a busy server, restored: everything of one moment, and nothing else."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from callers import Caller, Part, ask, everything, pattern, registered, waits_for_a_lock
from cluster import connected
from factories import HOUR, NOW, make_workspace
from sites import Site, running_site
from waiting import until

from restante.backup.archive import Reader
from restante.backup.destination import Destination
from restante.backup.restore import restore
from restante.backup.take import Taken, take
from restante.database import migrate, partitions
from restante.database.rules import BOTH_PHASES
from restante.database.spans import Span, floor
from restante.delivery.subject import CHUNKS
from restante.errors import BackupFailed, BackupUnusable
from restante.postgres import DataDirectory, EmbeddedPostgres
from restante.postgres.binaries import choose_binaries
from restante.settings import Settings

pytestmark = pytest.mark.anyio

TOKEN = "the-admin-token-in-the-backup"


async def taken(dsn: str, *, major: int | None = None) -> tuple[Taken, bytes]:
    """A backup in memory."""
    file = BytesIO()
    done = await take(
        dsn,
        Destination(file, None, 0),
        bin_dir=choose_binaries(None, major=major).bin_dir,
        admin_token=TOKEN,
        on_progress=lambda _done, _total: None,
    )
    return done, file.getvalue()


@asynccontextmanager
async def restored_site(data_dir: Path) -> AsyncIterator[Site]:
    """A server on the restored directory, with its embedded Postgres."""
    async with running_site(Settings(data_dir=str(data_dir)), with_jobs=False) as site:
        yield site


class Sender:
    """Uploads one file after another, and notes those that were accepted."""

    def __init__(self, caller: Caller, seed: int) -> None:
        self.caller = caller
        self.accepted: list[tuple[str, bytes]] = []
        self.enough = asyncio.Event()
        self._seed = seed

    async def run(self) -> None:
        while True:
            content = pattern(300_000, self._seed + len(self.accepted))
            (file_id,) = await self.caller.staged(Part(content))
            self.accepted.append((file_id, hashlib.sha256(content).digest()))
            if len(self.accepted) >= 3:
                self.enough.set()


async def test_a_backup_under_load_has_all_that_was_accepted_before_it(
    site: Site, dsn: str, place: Path
):
    """The senders go on meanwhile: what they send is in it or not, whole and announced."""
    senders = [Sender(await registered(site), seed) for seed in (0, 1000)]
    acked = await registered(site)
    for file_id in await acked.staged(Part(b"one"), Part(b"two")):
        await acked.ack(file_id)
    running = [asyncio.create_task(sender.run()) for sender in senders]
    await asyncio.gather(*(sender.enough.wait() for sender in senders))

    before = [len(sender.accepted) for sender in senders]
    done, backup = await taken(dsn)
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    await restore(Reader(BytesIO(backup)), DataDirectory.open(place / "restored"))

    assert sum(before) + 2 <= done.about.files
    async with restored_site(place / "restored") as restored:
        for sender, least in zip(senders, before, strict=True):
            await check_prefix(
                Caller(restored, sender.caller.id, sender.caller.token), sender, least
            )
        assert (await Caller(restored, acked.id, acked.token).waiting()).json["uploads"] == []
        assert (await ask(restored, "GET", "/admin/status", headers=admin())).status == 200


def admin() -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKEN}"}


async def check_prefix(restored: Caller, sender: Sender, least: int) -> None:
    """The first files of a sender, at least so many, with their bytes and their feed rows."""
    rows = await restored.feed(since_seq=0)
    announced = [row["request_body"]["file_id"] for row in rows]
    fetched = [await restored.fetch(file_id) for file_id in announced]

    assert least <= len(rows) <= len(sender.accepted) + 1
    assert [row["seq"] for row in rows] == list(range(1, len(rows) + 1))
    known = sender.accepted[: len(rows)]
    assert announced[: len(known)] == [file_id for file_id, _ in known]
    found = [hashlib.sha256(answer.body).digest() for answer in fetched]
    assert found[: len(known)] == [digest for _, digest in known]
    assert (await restored.staged(Part(b"after the restore"))) != []


async def test_the_snapshot_is_younger_than_the_locks(
    dsn: str, connections: Callable[[], Awaitable[Any]]
):
    """A partition that was emptied between the two would be read as if it had always been empty."""
    writer, watcher = await connections(), await connections()
    change = writer.transaction()
    await change.start()
    await writer.execute("lock table feeds in access exclusive mode")
    await writer.execute(
        "insert into workspaces (id, name, delivery_mode, agent_card, inbound_secret)"
        " values (gen_random_uuid(), 'late', 'poll', '{}', 'secret')"
    )

    backup = asyncio.create_task(taken(dsn))
    await until(lambda: waits_for_a_lock(watcher))
    await change.commit()

    done, _ = await backup
    assert done.about.workspaces == 1


async def test_a_table_that_is_dropped_meanwhile_does_not_matter(
    dsn: str, connections: Callable[[], Awaitable[Any]]
):
    """A sweep drops partitions at any time."""
    dropper, watcher = await connections(), await connections()
    await dropper.execute("create table passing ()")
    change = dropper.transaction()
    await change.start()
    await dropper.execute("drop table passing")

    backup = asyncio.create_task(taken(dsn))
    await until(lambda: waits_for_a_lock(watcher))
    await change.commit()

    done, _ = await backup
    assert done.about.files == 0


async def test_a_database_without_tables_is_not_backed_up(empty_dsn: str):
    with pytest.raises(BackupFailed, match="nothing to back up"):
        await taken(empty_dsn)


async def test_a_damaged_backup_leaves_an_empty_directory(site: Site, dsn: str, place: Path):
    """Also when the damage is in its last part, and almost everything was loaded."""
    caller = await registered(site)
    await caller.staged(Part(pattern(500_000)))
    _, backup = await taken(dsn)
    damaged = bytearray(backup)
    damaged[backup.index(b"end/") - 1000] ^= 1
    directory = DataDirectory.open(place / "restored")

    with pytest.raises(BackupUnusable, match="damaged"):
        await restore(Reader(BytesIO(bytes(damaged))), directory)

    assert [file.name for file in directory.path.iterdir()] == ["lock"]


async def fill(connection: Any) -> None:
    """A file in a sealed bucket, bytes that belong to no file, and a table of somebody else."""
    workspace_id = await make_workspace(connection)
    span = Span(floor(NOW, HOUR), floor(NOW, HOUR) + HOUR)
    bucket = await partitions.create(connection, CHUNKS, span)
    await connection.execute(
        "insert into uploads (workspace_id, file_id, bucket, name, mimetype, size, sha256,"
        " created_at, expires_at)"
        " values ($1, $1::uuid, $2, 'a', 'text/plain', 3, sha256('abc'), $2, $2)",
        workspace_id,
        span.start,
    )
    await connection.execute(
        "insert into chunks"
        " select $2, $1::uuid, id, 0, 'abc' from unnest(array[$1, $3::uuid]) as id",
        workspace_id,
        span.start,
        uuid4(),
    )
    await partitions.seal(connection, bucket)
    await connection.execute("create role somebody; create table public.theirs (id integer)")
    await connection.execute("alter table public.theirs owner to somebody")


async def test_a_database_of_an_older_postgres_is_restored_into_the_newest(place: Path):
    """The way to a release that no longer has the old version; sealed buckets included."""
    oldest = choose_binaries(None, major=16)
    old = EmbeddedPostgres(DataDirectory.open(place / "old"), bin_dir=oldest.bin_dir)
    await old.start()
    try:
        await migrate.apply(old.dsn, migrate.shipped(), phases=BOTH_PHASES)
        async with connected(old.dsn) as connection:
            await fill(connection)
            before = await everything(connection)
        done, backup = await taken(old.dsn, major=16)
    finally:
        await old.stop()

    await restore(Reader(BytesIO(backup)), DataDirectory.open(place / "new"))

    new = EmbeddedPostgres(DataDirectory.open(place / "new"))
    await new.start()
    try:
        async with connected(new.dsn) as connection:
            after = await everything(connection)
            version = connection.get_server_version().major
            stored = await connection.fetchval("select count(*) from chunks")
            owner = await connection.fetchval(
                "select tableowner from pg_tables where tablename = 'theirs'"
            )
    finally:
        await new.stop()
    assert done.about.postgres == 16 < version
    assert before == after
    assert len(after["chunks"]) == stored == 1  # the other one could not be fetched
    assert owner == "somebody"
