"""Startup and shutdown: the first start, later ones, and obstacles."""

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
from waiting import until

from restante.errors import PostgresUnusable
from restante.postgres import DataDirectory, EmbeddedPostgres
from restante.postgres.account import Account
from restante.postgres.sockets import socket_directory

pytestmark = pytest.mark.anyio


@contextmanager
def process_of_owner(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the account that owns the path; Postgres takes only such a pid seriously."""
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
    """Commits are synced, and only accounts of this machine can connect."""
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


async def test_stopping_is_idempotent(postgres: EmbeddedPostgres) -> None:
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
    connection, observer = await connect(postgres.dsn), await connect(postgres.dsn)
    busy = asyncio.create_task(connection.execute("select pg_sleep(3600)"))
    await until(
        lambda: observer.fetchval(
            "select exists (select from pg_stat_activity where wait_event = 'PgSleep')"
        )
    )

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


async def test_a_failed_start_reports_the_message_of_postgres(directory: DataDirectory) -> None:
    postgres = EmbeddedPostgres(directory, options={"shared_buffers": "lots"})

    with pytest.raises(PostgresUnusable, match=r'does not start.*"shared_buffers": "lots"'):
        await postgres.start()


async def test_a_stale_pid_file_with_a_reused_pid_is_ignored(
    postgres: EmbeddedPostgres, directory: DataDirectory, connect: Callable[[str], Any]
) -> None:
    """After a power cut the pid may belong to any process, which must not be signalled."""
    await postgres.start()
    pid_file = directory.path / "postgres" / "postmaster.pid"
    _, *rest = pid_file.read_text().splitlines()
    await postgres.stop()

    with process_of_owner(directory.path / "postgres") as unrelated:
        pid_file.write_text("\n".join([str(unrelated.pid), *rest]))
        await postgres.start()
        await connect(postgres.dsn)
        await postgres.stop()

        assert unrelated.poll() is None


async def test_leftovers_of_a_failed_initdb_are_removed(
    postgres: EmbeddedPostgres, directory: DataDirectory
) -> None:
    leftover = directory.path / "postgres.new"
    leftover.mkdir()
    (leftover / "PG_VERSION").write_text("18\n")

    await postgres.start()

    assert not leftover.exists()


async def test_a_kill_during_initdb_does_no_harm(
    directory: DataDirectory, owned_by: Callable[..., Any], connect: Callable[[str], Any]
) -> None:
    """An incomplete cluster never gets the final name."""
    first = owned_by(directory.path)
    wait_until(lambda: [*directory.path.glob("*.new.*/base/*")], seconds=30, what="initdb")
    first.kill()

    dsn, _ = owned_by(directory.path).ready()

    await connect(dsn)
    assert not [*directory.path.glob("*.new*")]


def remove_outside(place: Path, dsn: str) -> None:
    """Remove a socket directory that is outside of the test's own directory."""
    sockets = Path(parse_qs(urlsplit(dsn).query)["host"][0])
    if place not in sockets.parents:
        sockets.rmdir()


@pytest.mark.parametrize("name", ["d" * 150, "with space, comma and 'quotes\"", "päth?&=%41"])
async def test_any_path_works(place: Path, connect: Callable[[str], Any], name: str) -> None:
    """Also paths longer than the kernel's limit for sockets, or with odd characters."""
    postgres = EmbeddedPostgres(DataDirectory.open(place / name))
    await postgres.start()
    try:
        connection = await connect(postgres.dsn)

        assert await connection.fetchval("select 1") == 1
    finally:
        await postgres.stop()
        remove_outside(place, postgres.dsn)


async def test_a_socket_directory_that_is_not_ours_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shared directory anybody can create it first, and a link would expose our socket."""
    (place / "theirs").mkdir()
    (place / "restante").symlink_to(place / "theirs")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))

    with pytest.raises(PostgresUnusable, match="is not a directory that belongs to user id 1000"):
        socket_directory(place / ("d" * 150), Account("ada", uid=1000, gid=1000))


async def test_values_in_statements_are_not_logged(
    postgres: EmbeddedPostgres, connect: Callable[[str], Any]
) -> None:
    """Error messages of Postgres quote values; the client gets them, the log does not."""
    with structlog.testing.capture_logs() as events:
        await postgres.start()
        connection = await connect(postgres.dsn)
        with pytest.raises(asyncpg.PostgresError, match="contents"):
            await connection.execute("select e'some\\nERROR:  contents'::int")
        await postgres.stop()
        await asyncio.to_thread(
            wait_until, lambda: "is shut down" in str(events), seconds=60, what="its last log line"
        )

    assert "contents" not in str(events)


async def test_a_directory_that_is_not_a_cluster_is_refused(
    postgres: EmbeddedPostgres, directory: DataDirectory
) -> None:
    (directory.path / "postgres").mkdir()
    if os.geteuid() == 0:
        shutil.chown(directory.path / "postgres", "nobody")

    with pytest.raises(PostgresUnusable, match="is not a Postgres database"):
        await postgres.start()


async def test_a_running_cluster_is_not_started_twice(
    directory: DataDirectory, owned_by: Callable[..., Any]
) -> None:
    """Even without our lock, the lock file of Postgres prevents it."""
    _, pid = owned_by(directory.path).ready()

    with pytest.raises(PostgresUnusable, match=r'lock file "postmaster.pid" already exists'):
        await EmbeddedPostgres(directory, retry_timeout_seconds=0.3).start()

    assert alive(pid)
