"""
A server, or its Postgres, is killed with -9 while it removes ops: it recovers and finishes.

Nothing is left of what was interrupted, in the catalogue or on the disk.
"""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
import pytest
import soak
from aiohttp import ClientError
from oplog.captured import log_of
from oplog.killed import make_stop_in_copies
from oplog.test_trimming_interrupted import make_old
from oplog.test_trimming_killed import Scene, stops_in
from oplog.trimmed import make_wide
from processes import Server, wait_until
from sweeps import Stop, in_the_way, partition_names, state_of, until_stopped

from restante.database.pool import SCHEMA, Database
from restante.oplog.tables import OPS

from .test_sweeping import first_pass, session, sweep

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
def running(server: Server) -> Server:
    server.environment |= {
        "RESTANTE_SWEEP_INTERVAL_SECONDS": "3600",
        "RESTANTE_OPS_RETENTION_DAYS": "7",
    }
    return server.start()


@asynccontextmanager
async def connecting(server: Server) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
    """Opens connections to the Postgres of a server, which may be killed meanwhile."""
    opened, dsn = list[Any](), server.dsn

    async def connect() -> Any:
        opened.append(await asyncpg.connect(dsn, server_settings={"search_path": SCHEMA}))
        return opened[-1]

    try:
        yield connect
    finally:
        for one in opened:
            with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await one.close(timeout=2)


async def make_scene(server: Server, connection: Any, kind: str) -> Scene:
    """A log of which a whole partition is due, or most of one."""
    db = await Database.open(
        server.dsn, pool_size=2, acquire_timeout_seconds=5, statement_timeout_seconds=20
    )
    try:
        if kind == "whole":
            pages, old = await make_old(db, connection)
            return Scene(f"ops_{pages}", old, keeps=0)
        pages, wide = await make_wide(db, connection)
        await make_stop_in_copies(connection, f"ops_{pages}")
        return Scene(f"ops_{pages}", wide, keeps=102)
    finally:
        await db.close()


async def kill_in(server: Server, connect: Any, stop: Stop, scene: Scene, kill: Any) -> None:
    """Killing either of them ends Postgres, and with it the session that holds the lock."""
    holder = await in_the_way(stop, connect)
    async with session(server) as http:
        sweeping = asyncio.create_task(sweep(http, server))
        await until_stopped(stop, holder, connect, scene.partition)
        await asyncio.to_thread(kill)
        with suppress(ClientError, OSError, AssertionError):
            await sweeping


async def assert_all_is_gone(connection: Any, scene: Scene, logged: list[Any]) -> None:
    """Except for what stays."""
    assert await log_of(connection) == logged[len(logged) - scene.keeps :]
    attached = await connection.fetchval(
        "select count(*) from pg_inherits where inhparent = $1::text::regclass", scene.log
    )
    assert len(await partition_names(connection, OPS)) == attached
    assert (await state_of(connection, scene.partition) == "gone") == (scene.keeps == 0)


async def files_of_nobody(connection: Any) -> list[str]:
    """Files with contents in the directory of the database that belong to no relation."""
    await connection.execute("checkpoint")
    data, database = await connection.fetchrow(
        "select current_setting('data_directory'),"
        " (select oid::text from pg_database where datname = current_database())"
    )
    rows = await connection.fetch("select pg_relation_filenode(oid)::text as name from pg_class")
    known = {row["name"] for row in rows}
    found = [one for one in os.scandir(f"{data}/base/{database}") if one.stat().st_size]
    numbered = [one.name for one in found if re.match(r"\d+", one.name)]
    return [name for name in numbered if re.split(r"[._]", name)[0] not in known]


@pytest.mark.parametrize(
    "step", [pytest.param("drop", marks=(pytest.mark.soak, soak.only_long)), "copy"]
)
async def test_a_postgres_that_is_killed_recovers_and_its_server_finishes(
    running: Server, step: str
):
    await first_pass(running)
    async with connecting(running) as connect:
        connection = await connect()
        scene = await make_scene(running, connection, "whole" if step == "drop" else "wide")
        logged = await log_of(connection)
        postgres = running.postgres_pid()
        await kill_in(
            running,
            connect,
            stops_in(scene)[step],
            scene,
            lambda: os.kill(postgres, signal.SIGKILL),
        )

    wait_until(lambda: running.get("/ready")[0] == 200, seconds=60, what="ready")
    async with session(running) as http, connecting(running) as connect:
        connection = await connect()
        left_over = await files_of_nobody(connection)
        report = await sweep(http, running)

        assert left_over == []
        assert report["postponed"] == []
        await assert_all_is_gone(connection, scene, logged)


@pytest.mark.soak
@soak.only_long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "step",
    ["seal", "marks", "detach", "half detached", "drop", "copy", "swap", "marks of a swap"],
)
async def test_a_server_that_is_killed_in_any_step_finishes_it_after_its_next_start(
    running: Server, step: str
):
    await first_pass(running)
    is_cut = step in {"copy", "swap", "marks of a swap"}
    async with connecting(running) as connect:
        connection = await connect()
        scene = await make_scene(running, connection, "wide" if is_cut else "whole")
        logged = await log_of(connection)
        await kill_in(running, connect, stops_in(scene)[step], scene, running.kill)

    running.start()

    await first_pass(running)
    async with connecting(running) as connect:
        connection = await connect()
        await assert_all_is_gone(connection, scene, logged)
        assert await files_of_nobody(connection) == []
