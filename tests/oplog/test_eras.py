"""A new era begins whenever transaction ids may have been handed out again."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from oplog.clusters import Cluster, running_cluster
from waiting import until

from restante.database import migrate
from restante.database.rules import BOTH_PHASES

pytestmark = pytest.mark.anyio

NOT_YET = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError)


@pytest.fixture
async def own_cluster(place: Path) -> AsyncIterator[Cluster]:
    with running_cluster(place / "cluster") as cluster:
        await migrate.apply(cluster.dsn, migrate.shipped(), phases=BOTH_PHASES)
        yield cluster


async def start_and_era(cluster: Cluster) -> tuple[object, int]:
    connection = await asyncpg.connect(cluster.dsn)
    try:
        start = await connection.fetchval("select pg_postmaster_start_time()")
        return start, await connection.fetchval("select restante.op_current_era()")
    finally:
        await connection.close()


async def test_an_era_ends_when_a_process_of_postgres_crashes(own_cluster: Cluster):
    """Commits that were not flushed are undone then, and the postmaster stays."""
    start, era = await start_and_era(own_cluster)
    assert await start_and_era(own_cluster) == (start, era)
    victim = await asyncpg.connect(own_cluster.dsn)

    os.kill(await victim.fetchval("select pg_backend_pid()"), signal.SIGKILL)

    async def has_new_era() -> bool:
        try:
            found = await start_and_era(own_cluster)
        except NOT_YET:  # it recovers
            return False
        assert found[0] == start
        return found[1] > era

    await until(has_new_era)
    victim.terminate()
