"""Commands other than `serve` use the running Postgres, or start a temporary one."""

from collections.abc import Callable
from typing import Any

import asyncpg
import pytest
from processes import alive, wait_until

from restante.errors import DataDirectoryInUse
from restante.postgres import DataDirectory, EmbeddedPostgres, postgres_for, running_dsn

pytestmark = pytest.mark.anyio


async def one(dsn: str) -> int:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval("select 1")
    finally:
        await connection.close()


async def test_nothing_runs_before_the_first_start(directory: DataDirectory) -> None:
    assert running_dsn(directory) is None


async def test_a_running_postgres_is_used(
    directory: DataDirectory, owned_by: Callable[..., Any]
) -> None:
    dsn, pid = owned_by(directory.path).ready()

    async with postgres_for(directory) as found:
        assert found == dsn
        assert await one(found) == 1

    assert alive(pid)


async def test_otherwise_one_is_started_and_stopped_again(directory: DataDirectory) -> None:
    async with postgres_for(directory) as dsn:
        assert await one(dsn) == 1
        assert running_dsn(directory) == dsn
        with pytest.raises(DataDirectoryInUse), directory.claim():
            pass

    assert running_dsn(directory) is None
    with directory.claim():
        pass


async def test_a_postgres_that_is_starting_is_waited_for(
    directory: DataDirectory, owned_by: Callable[..., Any]
) -> None:
    owner = owned_by(directory.path)
    wait_until((directory.path / "lock").exists, seconds=30, what="the claim")

    async with postgres_for(directory) as found:
        assert (found, True) == (owner.ready()[0], await one(found) == 1)


async def test_an_owner_whose_postgres_never_starts_is_an_error(
    directory: DataDirectory,
) -> None:
    with directory.claim(), pytest.raises(DataDirectoryInUse):
        async with postgres_for(directory, owner_timeout_seconds=0.2):
            pass


async def test_a_killed_postgres_does_not_count_as_running(
    directory: DataDirectory, owned_by: Callable[..., Any]
) -> None:
    """The pid file and the socket survive kill -9."""
    owner = owned_by(directory.path)
    _, pid = owner.ready()
    owner.kill()
    wait_until(lambda: not alive(pid), seconds=60, what="the end of Postgres")

    assert running_dsn(directory) is None


async def test_an_error_in_the_context_stops_postgres(
    directory: DataDirectory, postgres: EmbeddedPostgres
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with postgres_for(directory):
            raise ZeroDivisionError

    await postgres.start()
