"""Starting and stopping: first use, second use, and everything that lies in the way."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest
import structlog.testing
from processes import alive, wait_until

from restante.errors import PostgresUnusable
from restante.postgres import DataDirectory, EmbeddedPostgres, sockets

pytestmark = pytest.mark.anyio


@contextmanager
def stranger_owned_like(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A live process under the account that owns the path, which is where Postgres looks twice."""
    owner = path.stat().st_uid
    with subprocess.Popen(["sleep", "60"], cwd="/", user=owner) as process:
        yield process
        process.kill()


async def test_a_second_start_finds_the_rows(
    postgres: EmbeddedPostgres, connect: Callable[[str], Any]
) -> None:
    await postgres.start()
    connection = await connect(postgres.dsn)
    await connection.execute("create table kept as select 1 as one")
    await postgres.stop()

    await postgres.start()

    assert await (await connect(postgres.dsn)).fetchval("select one from kept") == 1


async def test_it_is_a_durable_database_without_a_network(
    postgres: EmbeddedPostgres, connect: Callable[[str], Any]
) -> None:
    """An acknowledged row was synced, and nobody but this machine's own accounts can knock."""
    await postgres.start()

    connection = await connect(postgres.dsn)

    expected = {
        "fsync": "on",
        "synchronous_commit": "on",
        "data_checksums": "on",
        "listen_addresses": "",
        "server_encoding": "UTF8",
        "lc_collate": "C",
        "log_error_verbosity": "terse",
    }
    names = [name for name in expected if name != "lc_collate"]
    found = {name: await connection.fetchval(f"show {name}") for name in names}
    found["lc_collate"] = await connection.fetchval(
        "select datcollate from pg_database where datname = current_database()"
    )
    assert found == expected


async def test_the_callers_options_win(
    directory: DataDirectory, connect: Callable[[str], Any]
) -> None:
    postgres = EmbeddedPostgres(directory, options={"max_connections": "17"})
    await postgres.start()
    try:
        connection = await connect(postgres.dsn)

        assert await connection.fetchval("show max_connections") == "17"
    finally:
        await postgres.stop()


async def test_stopping_twice_is_stopping_once(postgres: EmbeddedPostgres) -> None:
    await postgres.start()
    pid = postgres.pid

    await postgres.stop()
    await postgres.stop()

    assert pid is not None
    assert postgres.pid is None
    assert not alive(pid)


async def test_a_busy_client_does_not_delay_the_stop(
    postgres: EmbeddedPostgres, connect: Callable[[str], Any]
) -> None:
    await postgres.start()
    connection = await connect(postgres.dsn)
    busy = asyncio.create_task(connection.execute("select pg_sleep(60)"))
    await asyncio.sleep(0)

    async with asyncio.timeout(5):
        await postgres.stop()

    assert isinstance((await asyncio.gather(busy, return_exceptions=True))[0], Exception)


async def test_a_start_that_is_cancelled_leaves_no_server(postgres: EmbeddedPostgres) -> None:
    starting = asyncio.create_task(postgres.start())
    await asyncio.to_thread(wait_until, lambda: postgres.pid, seconds=30, what="the start")
    pid = postgres.pid

    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)

    assert pid is not None
    assert not alive(pid)


async def test_why_it_does_not_start_is_in_postgres_own_words(directory: DataDirectory) -> None:
    postgres = EmbeddedPostgres(directory, options={"shared_buffers": "lots"})

    with pytest.raises(PostgresUnusable, match=r'does not start.*"shared_buffers": "lots"'):
        await postgres.start()


async def test_a_stale_pid_file_that_names_a_stranger_is_overlooked(
    postgres: EmbeddedPostgres, directory: DataDirectory, connect: Callable[[str], Any]
) -> None:
    """After a power cut the pid may belong to anybody; they are neither believed nor signalled."""
    await postgres.start()
    pid_file = directory.path / "postgres" / "postmaster.pid"
    _, *rest = pid_file.read_text().splitlines()
    await postgres.stop()

    with stranger_owned_like(directory.path / "postgres") as stranger:
        pid_file.write_text("\n".join([str(stranger.pid), *rest]))
        await postgres.start()
        await connect(postgres.dsn)
        await postgres.stop()

        assert stranger.poll() is None


async def test_what_a_broken_initdb_left_is_removed(
    postgres: EmbeddedPostgres, directory: DataDirectory
) -> None:
    leftover = directory.path / "postgres.new"
    leftover.mkdir()
    (leftover / "PG_VERSION").write_text("18\n")

    await postgres.start()

    assert not leftover.exists()


async def test_a_kill_in_the_middle_of_initdb_does_no_harm(
    directory: DataDirectory, owned_by: Callable[..., Any], connect: Callable[[str], Any]
) -> None:
    """Half a cluster never has the name of a whole one."""
    first = owned_by(directory.path)
    wait_until(lambda: [*directory.path.glob("*.new.*/base/*")], seconds=30, what="initdb")
    first.kill()

    dsn, _ = owned_by(directory.path).ready()

    await connect(dsn)
    assert not [*directory.path.glob("*.new*")]


def remove_outside(place: Path, dsn: str) -> None:
    """A socket directory in the short place is not removed with the test's own."""
    sockets = Path(parse_qs(urlsplit(dsn).query)["host"][0])
    if place not in sockets.parents:
        sockets.rmdir()


@pytest.mark.parametrize("name", ["d" * 150, "with space, comma and 'quotes\"", "päth?&=%41"])
async def test_any_path_will_do(place: Path, connect: Callable[[str], Any], name: str) -> None:
    """The kernel takes 107 bytes for a socket's path; ours may be longer, or odd."""
    postgres = EmbeddedPostgres(DataDirectory.open(place / name))
    await postgres.start()
    try:
        connection = await connect(postgres.dsn)

        assert await connection.fetchval("select 1") == 1
    finally:
        await postgres.stop()
        remove_outside(place, postgres.dsn)


async def test_a_short_place_that_is_not_ours_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /tmp anybody can be first, and a link would put our socket into their hands."""
    (place / "theirs").mkdir()
    (place / "short").symlink_to(place / "theirs")
    monkeypatch.setattr(sockets, "_short_place", lambda: place / "short")

    with pytest.raises(PostgresUnusable, match="short is not a directory that belongs to user id"):
        await EmbeddedPostgres(DataDirectory.open(place / ("d" * 150))).start()


async def test_what_a_statement_held_is_not_in_the_log(
    postgres: EmbeddedPostgres, connect: Callable[[str], Any]
) -> None:
    """Postgres's errors quote values; the client gets them, the log does not."""
    with structlog.testing.capture_logs() as events:
        await postgres.start()
        connection = await connect(postgres.dsn)
        with pytest.raises(asyncpg.PostgresError, match="contents"):
            await connection.execute("select e'some\\nERROR:  contents'::int")
        await postgres.stop()
        await asyncio.to_thread(
            wait_until, lambda: "is shut down" in str(events), seconds=5, what="its last word"
        )

    assert "contents" not in str(events)


async def test_a_directory_that_is_no_cluster_is_left_alone(
    postgres: EmbeddedPostgres, directory: DataDirectory
) -> None:
    (directory.path / "postgres").mkdir()
    if os.geteuid() == 0:
        shutil.chown(directory.path / "postgres", "nobody")

    with pytest.raises(PostgresUnusable, match="is not a Postgres database"):
        await postgres.start()


async def test_a_cluster_that_is_served_already_is_not_started_twice(
    directory: DataDirectory, owned_by: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even past the lock, Postgres's own one stands: two servers would destroy the cluster."""
    monkeypatch.setattr("restante.postgres.supervisor.RETRY_FOR_SECONDS", 0.3)
    _, pid = owned_by(directory.path).ready()

    with pytest.raises(PostgresUnusable, match=r'lock file "postmaster.pid" already exists'):
        await EmbeddedPostgres(directory).start()

    assert alive(pid)
