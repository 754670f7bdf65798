"""kill -9 of the owner or of Postgres: committed rows survive, no process is left behind."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
import pytest
from processes import alive, wait_until

from restante.postgres import DataDirectory, EmbeddedPostgres

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The server runs on uvloop, which handles child processes differently."""
    return "asyncio", {"use_uvloop": True}


@asynccontextmanager
async def watched(postgres: EmbeddedPostgres) -> AsyncIterator[asyncio.Task[None]]:
    watching = asyncio.create_task(postgres.watch())
    yield watching
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching


async def reconnected(dsn: str) -> Any:
    """Connect as soon as Postgres accepts connections again."""
    while True:
        try:
            return await asyncpg.connect(dsn)
        except (OSError, asyncpg.PostgresError):
            await asyncio.sleep(0.02)


async def until(condition: Callable[[], bool], *, what: str) -> None:
    await asyncio.to_thread(wait_until, condition, seconds=60, what=what)


async def commit_and_leave_open(dsn: str) -> tuple[Any, Any]:
    """Commit a row on one connection, and leave a transaction open on another."""
    first, second = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    await first.execute("create table rows as select 'committed' as text")
    await second.execute("begin; insert into rows values ('not committed')")
    return first, second


async def rows(connection: Any) -> list[str]:
    try:
        return [row["text"] for row in await connection.fetch("select text from rows")]
    finally:
        await connection.close()


async def test_postgres_ends_when_its_owner_is_killed(
    directory: DataDirectory, owned_by: Callable[..., Any]
) -> None:
    owner = owned_by(directory.path)
    dsn, pid = owner.ready()
    connections = await commit_and_leave_open(dsn)

    owner.kill()
    wait_until(lambda: not alive(pid), seconds=60, what="the end of Postgres")

    dsn, _ = owned_by(directory.path).ready()
    assert await rows(await asyncpg.connect(dsn)) == ["committed"]
    for connection in connections:
        connection.terminate()


async def test_a_killed_postgres_is_restarted(postgres: EmbeddedPostgres) -> None:
    await postgres.start()
    killed = postgres.pid
    assert killed is not None
    connections = await commit_and_leave_open(postgres.dsn)

    async with watched(postgres):
        os.kill(killed, signal.SIGKILL)
        connection = await reconnected(postgres.dsn)

        assert await rows(connection) == ["committed"]
        assert postgres.pid != killed
    for connection in connections:
        connection.terminate()


async def test_it_is_restarted_after_each_crash(postgres: EmbeddedPostgres) -> None:
    await postgres.start()

    async with watched(postgres):
        for _ in range(3):
            connection = await reconnected(postgres.dsn)
            pid = await connection.fetchval(
                "select split_part(pg_read_file('postmaster.pid'), e'\\n', 1)::int"
            )
            os.kill(pid, signal.SIGKILL)
            connection.terminate()
            await until(lambda pid=pid: postgres.pid not in {None, pid}, what="another Postgres")

        await (await reconnected(postgres.dsn)).close()


async def test_a_stopped_postgres_is_not_restarted(postgres: EmbeddedPostgres) -> None:
    await postgres.start()

    async with watched(postgres) as watching:
        await postgres.stop()
        await watching

    assert postgres.pid is None


async def test_the_restart_is_retried_until_it_succeeds(
    postgres: EmbeddedPostgres, directory: DataDirectory
) -> None:
    """A full disk or a missing file may be fixed hours later."""
    await postgres.start()
    killed = postgres.pid
    assert killed is not None
    hba = directory.path / "postgres.hba"

    async with watched(postgres):
        hidden = hba.rename(hba.with_suffix(".hidden"))
        os.kill(killed, signal.SIGKILL)
        await until(lambda: postgres.pid not in {None, killed}, what="a first try")
        await until(lambda: postgres.pid is None, what="its failure")
        hidden.rename(hba)

        await (await reconnected(postgres.dsn)).close()
