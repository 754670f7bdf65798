"""The sweep of a real server on its own Postgres: disk is freed, a killed pass is finished."""

import asyncio
import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from cluster import connected
from processes import Server
from senders import MIB, File, Mailbox, Request, registered
from sweeps import CHUNKS, FEED, grow_older, make_old_feed, partition_names, state_of
from waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

# Bounded for everyday runs; `make soak` stages what the promise names.
STAGED_MIB, KILLED_ROUNDS, KILLED_FILE = (
    (2000, 5, 5 * MIB) if "SOAK_RUNS" in os.environ else (200, 1, MIB)
)
FILE = 5 * MIB
FILES_PER_REQUEST = 8
AT_LEAST_BACK = 0.95


@pytest.fixture
def running(server: Server) -> Server:
    server.environment |= {
        "RESTANTE_WORKSPACE_MAX_BYTES": str(10**11),
        "RESTANTE_SWEEP_INTERVAL_SECONDS": "3600",
        "RESTANTE_FEED_RETENTION_DAYS": "30",
    }
    return server.start()


def session(server: Server) -> ClientSession:
    """
    A connection for each request.

    The test works on the database for longer than the server keeps an idle connection open, and a
    POST on a connection that is being closed fails.
    """
    connector = TCPConnector(force_close=True)
    return ClientSession(server.address, connector=connector, timeout=ClientTimeout(total=60))


def on_disk(server: Server) -> int:
    """Disk usage of the databases' files, without WAL."""
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


def some_files(count: int, start: int, size: int = FILE) -> list[File]:
    """Files that cannot be compressed, no two alike."""
    return [
        File(f"{start + n}.bin", hashlib.shake_256(f"{start + n}".encode()).digest(size))
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
async def test_dead_bytes_are_freed_on_disk_within_two_passes(running: Server):
    """Promise 4, as the filesystem sees it; then again with a workspace that is offline."""
    for live_share in (0, 0.05):
        await stage_and_sweep(running, live_share)


async def stage_and_sweep(running: Server, live_share: float) -> None:
    """
    In two buckets, half of the files are acknowledged and half expire.

    The live part is in both buckets, for a workspace that has not fetched it yet.
    """
    count = STAGED_MIB * MIB // FILE // 2
    live = round(count * live_share)
    kept: dict[str, File] = {}
    async with session(running) as http, connected(running.dsn) as connection:
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


# Killed in each step ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stop:
    """A lock that makes a pass wait in one step, and how the wait is recognised."""

    lock: str
    statement: str  # words of the statement that waits
    state: str  # of the partition when the server is killed
    of_the_feed: bool = False


STOPS = {
    "delete": Stop("lock table uploads in share mode", "delete from uploads", "attached"),
    "move": Stop("lock table only chunks in share mode", "insert into chunks", "attached"),
    "seal": Stop(
        "lock table {partition} in share update exclusive mode", "trigger sealed", "attached"
    ),
    "detach": Stop("lock table only chunks in share update exclusive mode", "detach", "sealed"),
    "half detached": Stop("lock table only chunks in access share mode", "detach", "detaching"),
    "drop": Stop("lock table {partition} in access share mode", "detach", "detached"),
    "trim": Stop("select from feeds for update", "with wanted as", "sealed", of_the_feed=True),
}


@pytest.mark.soak
@pytest.mark.timeout(120)
async def test_a_server_that_is_killed_in_any_step_finishes_it_after_its_next_start(
    running: Server,
):
    """Another session holds a lock, so the pass waits in that step at the time of kill -9."""
    for step in [*STOPS] * KILLED_ROUNDS:
        await kill_and_start(running, step, file_bytes=KILLED_FILE)


@dataclass(frozen=True, slots=True)
class Staged:
    """Eight files in a past bucket, one of them live; half of their feed rows are too old."""

    mailbox: Mailbox
    live: File
    file_id: str
    rows: Sequence[str]
    bucket: str
    feed: str


async def kill_and_start(running: Server, step: str, *, file_bytes: int) -> None:
    async with session(running) as http, connected(running.dsn) as connection:
        await first_pass(running)
        there = await stage_old(http, connection, file_bytes)
        full = on_disk(running)
        await kill_in(running, http, connection, step, there)

    running.start()

    async with session(running) as http, connected(running.dsn) as connection:
        await first_pass(running)
        assert await state_of(connection, there.bucket) == "gone", (step, running.said)
        assert await state_of(connection, there.feed) == "gone", (step, running.said)
        assert full - on_disk(running) >= AT_LEAST_BACK * 7 * file_bytes - file_bytes
        await assert_nothing_is_lost(there.mailbox.at(http), there)
        await assert_no_partition_is_left_over(connection)
        # The next round starts with an empty table.
        await connection.execute("truncate uploads, chunks")


async def stage_old(http: ClientSession, connection: Any, file_bytes: int) -> Staged:
    live, *dead = some_files(8, 0, file_bytes)
    mailbox = await registered(http)
    file_id, *others = await stage(mailbox, [live, *dead])
    for other in others:
        await ack(mailbox, other)
    await grow_older(connection)
    await connection.execute("update uploads set expires_at = now() + interval '1 day'")
    (bucket,) = await filled_partitions(connection)
    feed = await make_old_feed(connection, UUID(mailbox.id), up_to=4)
    rows = [row["id"] for row in await mailbox.whole_feed()]
    return Staged(mailbox, live, file_id, rows, bucket, feed)


async def kill_in(
    running: Server, http: ClientSession, connection: Any, step: str, there: Staged
) -> None:
    """Killing the server ends its Postgres, and with it the session that holds the lock."""
    stop = STOPS[step]
    partition = there.feed if stop.of_the_feed else there.bucket
    async with connected(running.dsn) as holder, connected(running.dsn) as second:
        await holder.execute("begin; " + stop.lock.format(partition=partition))
        sweeping = asyncio.create_task(sweep(http, running))
        await until(lambda: a_session_waits_in(connection, stop.statement))
        if step == "drop":
            await wait_before_the_drop(connection, holder, second, partition)
        found = await state_of(connection, partition)
        await asyncio.to_thread(running.kill)
    with pytest.raises((ClientError, OSError)):
        await sweeping
    assert found == stop.state, step


async def first_pass(running: Server) -> None:
    """Wait for the sweep that a server runs at its start."""
    ended = b'molecule_loop_passes_total{loop="sweep",outcome="ok"} 1.0'

    async def has_ended() -> bool:
        return ended in (await asyncio.to_thread(running.get, "/metrics"))[1]

    await until(has_ended, seconds=20)


async def wait_before_the_drop(connection: Any, holder: Any, second: Any, partition: str) -> None:
    """Queue behind the detach, which locks the partition, and before the drop."""
    lock = f"begin; lock table {partition} in access share mode"
    locking = asyncio.create_task(second.execute(lock))
    await until(lambda: a_session_waits_in(connection, "begin; lock table"))
    await holder.execute("rollback")
    await locking
    await until(lambda: a_session_waits_in(connection, "drop table"))


async def a_session_waits_in(connection: Any, words: str) -> bool:
    return await connection.fetchval(
        "select exists (select from pg_stat_activity where pid <> pg_backend_pid()"
        " and cardinality(pg_blocking_pids(pid)) > 0 and query like '%' || $1 || '%')",
        words,
    )


async def assert_nothing_is_lost(mailbox: Mailbox, there: Staged) -> None:
    """The live file is whole; a cursor to a trimmed row is refused."""
    assert [file["file_id"] for file in await mailbox.waiting()] == [there.file_id]
    assert await mailbox.sha256_of(there.file_id) == there.live.sha256
    assert [row["seq"] for row in await mailbox.whole_feed()] == [5, 6, 7, 8]
    for row_id, status in ((there.rows[3], 410), (there.rows[4], 200)):
        path = f"{mailbox.path}/activity?since_id={row_id}"
        async with mailbox.http.get(path, headers=mailbox.headers) as answer:
            assert answer.status == status, await answer.text()


async def assert_no_partition_is_left_over(connection: Any) -> None:
    for table in (CHUNKS, FEED):
        attached = await connection.fetchval(
            "select count(*) from pg_inherits where inhparent = $1::text::regclass", table.name
        )
        assert len(await partition_names(connection, table)) == attached


async def filled_partitions(connection: Any) -> set[str]:
    rows = await connection.fetch("select distinct tableoid::regclass::text as name from chunks")
    return {row["name"] for row in rows}
