"""The sweep of a real server on its own Postgres: the disk comes back, and a killed pass heals."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from aiohttp import ClientError, ClientSession
from processes import Server
from senders import MIB, File, Mailbox, Request, registered, session_with
from sweeps import grow_older, leaf_names, locked, state_of
from waiting import until

from restante.store.database import SCHEMA
from restante.store.leaves import CHUNKS

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

# Bounded for everyday runs; `make soak` stages what the promise names.
STAGED_MIB = 2000 if "SOAK_RUNS" in os.environ else 200
FILE = 5 * MIB
FILES_PER_REQUEST = 8
AT_LEAST_BACK = 0.95


@pytest.fixture
def running(server: Server) -> Server:
    server.environment |= {
        "RESTANTE_WORKSPACE_MAX_BYTES": str(10**11),
        "RESTANTE_SWEEP_INTERVAL_SECONDS": "3600",
    }
    return server.start()


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(server.dsn, server_settings={"search_path": SCHEMA})
    try:
        yield connection
    finally:
        with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            await connection.close(timeout=2)


def on_disk(server: Server) -> int:
    """What du says of the databases' files; the log is not among them."""
    assert server.home is not None
    base = server.home / "postgres" / "base"
    total = 0
    for directory, _, names in os.walk(base):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(directory) / name).stat().st_blocks * 512
    return total


def admin(server: Server) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.admin_token}"}


async def sweep(http: ClientSession, server: Server) -> dict[str, Any]:
    async with http.post("/admin/retention/sweep", headers=admin(server)) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


def some_files(count: int, start: int) -> list[File]:
    """Files that no compression makes smaller and of which no two are alike."""
    return [
        File(f"{start + n}.bin", hashlib.shake_256(f"{start + n}".encode()).digest(FILE))
        for n in range(count)
    ]


async def stage(mailbox: Mailbox, files: Sequence[File]) -> list[str]:
    """Stage files; their ids."""
    ids: list[str] = []
    for first in range(0, len(files), FILES_PER_REQUEST):
        request = await mailbox.send(Request(files[first : first + FILES_PER_REQUEST], key=None))
        assert request.is_confirmed, request.status
        ids += [file["uri"].rpartition("/")[2] for file in request.answer]
    return ids


async def ack(mailbox: Mailbox, file_id: str) -> None:
    path = f"{mailbox.path}/pending-uploads/{file_id}/ack"
    async with mailbox.http.post(path, headers=mailbox.headers) as answer:
        assert answer.status == 200, await answer.text()


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_the_bytes_are_back_in_the_data_directory_within_two_passes(running: Server):
    """Promise 4, as the filesystem sees it; then again with a workspace that is offline."""
    for live_share in (0, 0.05):
        await stage_and_sweep(running, live_share)


async def stage_and_sweep(running: Server, live_share: float) -> None:
    """
    In two buckets, half of the files are acknowledged and half expire.

    The part that lives is in both buckets, for a workspace that has yet to fetch it.
    """
    count = STAGED_MIB * MIB // FILE // 2
    live = round(count * live_share)
    kept: dict[str, File] = {}
    async with session_with(running) as http, connected(running) as connection:
        busy, offline = await registered(http), await registered(http)
        await sweep(http, running)
        empty = on_disk(running)
        for by in (timedelta(hours=36), timedelta(hours=24)):
            files = some_files(count, len(kept))
            waiting = await stage(offline, files[:live])
            kept |= zip(waiting, files[:live], strict=True)
            for number, file_id in enumerate(await stage(busy, files[live:])):
                if number % 2:
                    await ack(busy, file_id)
            await grow_older(connection, by)
        await connection.execute(
            "update uploads set expires_at = now() + interval '1 day' where workspace_id = $1",
            offline.id,
        )
        full = on_disk(running)

        reports = [await sweep(http, running) for _ in range(2)]
        after = on_disk(running)

        found = {file_id: await offline.sha256_of(file_id) for file_id in kept}

    staged = 2 * count * FILE
    dead = staged - len(kept) * FILE
    assert full - empty >= staged
    assert full - after >= AT_LEAST_BACK * dead
    assert sum(report["bytes_back"] for report in reports) >= AT_LEAST_BACK * dead
    assert sum(report["acked"] + report["expired"] for report in reports) == 2 * (count - live)
    assert all(report["postponed"] == [] for report in reports)
    assert found == {file_id: file.sha256 for file_id, file in kept.items()}


async def test_a_server_that_is_killed_in_a_pass_finishes_it_after_its_next_start(running: Server):
    """
    Somebody holds the table, so the pass stands still in a step when kill -9 comes.

    Once after the seal, before the detach begins; once in the middle of the detach.
    """
    for mode, state in (("share update exclusive", "sealed"), ("access share", "detaching")):
        await kill_and_start(running, mode, state)


async def kill_and_start(running: Server, mode: str, state: str) -> None:
    live, *dead = some_files(8, 0)
    async with session_with(running) as http, connected(running) as connection:
        mailbox = await registered(http)
        ids = await stage(mailbox, [live, *dead])
        for file_id in ids[1:]:
            await ack(mailbox, file_id)
        await grow_older(connection)
        (leaf,) = await filled_leaves(connection)
        await connection.execute("update uploads set expires_at = now() + interval '1 day'")
        sweeping = None
        with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            async with connected(running) as holder, locked(holder, "only chunks", mode):
                sweeping = asyncio.create_task(sweep(http, running))
                await until(lambda: has_come_to(connection, leaf, state))
                await asyncio.to_thread(running.kill)
        assert sweeping is not None
        with pytest.raises((ClientError, OSError)):
            await sweeping

    running.start()

    async with session_with(running) as http, connected(running) as connection:
        await until(lambda: has_come_to(connection, leaf, "gone"), seconds=20)
        assert await mailbox.at(http).sha256_of(ids[0]) == live.sha256
        assert len(await mailbox.at(http).waiting()) == 1
        assert leaf not in await filled_leaves(connection)
        attached = await connection.fetchval(
            "select count(*) from pg_inherits where inhparent = 'chunks'::regclass"
        )
        assert len(await leaf_names(connection, CHUNKS)) == attached
        # So that the next round begins with nothing.
        await connection.execute("truncate uploads, chunks")


async def filled_leaves(connection: Any) -> set[str]:
    rows = await connection.fetch("select distinct tableoid::regclass::text as leaf from chunks")
    return {row["leaf"] for row in rows}


async def has_come_to(connection: Any, leaf: str, state: str) -> bool:
    return await state_of(connection, leaf) == state
