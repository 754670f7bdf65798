"""The sweep beside one DELETE of rows that hold the bytes, while somebody writes."""

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import msgspec

from bench import http
from bench.report import Bound, Figure, show
from bench.server import Running, Workspace
from restante.core.leaves import Span
from restante.core.uploads import CHUNK_BYTES
from restante.store import leaves

FILES = 512
FILE_BYTES = 4 * CHUNK_BYTES
IDLE_SECONDS = 5
SMALL_ROUNDS = 5
SMALL_FILES = 2000


@dataclass(frozen=True, slots=True)
class Pass:
    """What one way of deleting cost."""

    seconds: float
    wal_bytes: int
    freed_bytes: int
    writer_p99_ms: float


async def measure(server: Running) -> None:
    """512 MiB of files that are due, deleted in both ways."""
    connection = await asyncpg.connect(server.dsn, server_settings={"search_path": "restante"})
    workspace = server.register()
    idle_p99 = await _idle_p99(server, workspace)
    await _fill_seed(connection)
    delete = await _costs(server, workspace, connection, lambda: _delete(connection))
    await connection.execute("drop table seed_uploads")
    await _fill_ours(connection, workspace)
    sweep = await _costs(server, workspace, connection, lambda: _sweep(server))
    _show(delete, sweep, idle_p99)
    await _held_snapshot(server, connection, workspace)
    await connection.close()


def _show(delete: Pass, sweep: Pass, idle_p99: float) -> None:
    mib = 1024 * 1024
    detail = f"{sweep.wal_bytes / mib:.1f} MiB beside {delete.wal_bytes / mib:.0f} MiB"
    percent = 100 * sweep.wal_bytes / delete.wal_bytes
    show(Bound("WAL of the sweep, as part of one DELETE's", "%", percent, 5, detail))
    detail = f"p99 {idle_p99:.1f} ms idle, {sweep.writer_p99_ms:.1f} ms during the sweep"
    times = sweep.writer_p99_ms / idle_p99
    show(Bound("Writer's p99 during the sweep, in idle ones", "x", times, 2, detail))
    print(f"    one DELETE: {delete.seconds:.2f} s, writer's p99 {delete.writer_p99_ms:.1f} ms, ")
    print(f"    {delete.freed_bytes / mib:.0f} MiB freed; the sweep: {sweep.seconds:.2f} s, ")
    print(f"    {sweep.freed_bytes / mib:.0f} MiB freed", flush=True)


async def _fill_seed(connection: "asyncpg.Connection[Any]") -> None:
    await connection.execute(
        "create table seed_uploads (id int, content bytea, acked_at timestamptz)"
    )
    await connection.execute("alter table seed_uploads alter column content set storage external")
    content = os.urandom(FILE_BYTES)
    for number in range(FILES):
        await connection.execute(
            "insert into seed_uploads values ($1, $2, now() - interval '2 hours')", number, content
        )


async def _fill_ours(connection: "asyncpg.Connection[Any]", workspace: Workspace) -> None:
    """The same bytes in a bucket of three hours ago, acknowledged two hours ago."""
    start = leaves.rules.floor(datetime.now(UTC), timedelta(hours=1)) - timedelta(hours=3)
    await leaves.create(connection, leaves.CHUNKS, Span(start, start + timedelta(hours=1)))
    await _stage(connection, workspace, start, FILES, FILE_BYTES)


async def _stage(
    connection: "asyncpg.Connection[Any]",
    workspace: Workspace,
    bucket: datetime,
    files: int,
    file_bytes: int,
) -> None:
    chunk = os.urandom(min(CHUNK_BYTES, file_bytes))
    for _ in range(files):
        file_id = uuid4()
        await connection.execute(
            "insert into uploads values ($1, $2, $3, 'bench.bin', '', $4, $5, $3, null, "
            "now() - interval '2 hours', now() + interval '1 day')",
            *(workspace.id, file_id, bucket, file_bytes, bytes(32)),
        )
        await connection.execute(
            "insert into chunks select $1, $2, $3, seq, $4 from generate_series(0, $5 - 1) seq",
            *(bucket, workspace.id, file_id, chunk, file_bytes // len(chunk)),
        )


async def _delete(connection: "asyncpg.Connection[Any]") -> None:
    await connection.execute(
        "with deleted as (delete from seed_uploads where acked_at < now() - interval '1 hour' "
        "returning 1) select count(*) from deleted"
    )


async def _sweep(server: Running) -> dict[str, Any]:
    connection = await http.Connection.open(server.port)
    request = http.request("POST", "/admin/retention/sweep", server.admin_token)
    status, body = await connection.ask(request)
    assert status == 200, body
    connection.close()
    return msgspec.json.decode(body)


async def _costs(
    server: Running,
    workspace: Workspace,
    connection: "asyncpg.Connection[Any]",
    act: Callable[[], Awaitable[object]],
) -> Pass:
    await connection.execute("checkpoint")
    directory = Path(await connection.fetchval("show data_directory")) / "base"
    before, wal = _size(directory), await connection.fetchval("select pg_current_wal_insert_lsn()")
    async with _writing(server, workspace) as latencies:
        started = time.monotonic()
        await act()
        seconds = time.monotonic() - started
    written = await connection.fetchval(
        "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), $1::pg_lsn)", wal
    )
    return Pass(seconds, int(written), before - _size(directory), _p99(latencies))


@asynccontextmanager
async def _writing(server: Running, workspace: Workspace) -> AsyncIterator[list[float]]:
    """Messages, one after the other, beside what happens inside."""
    connection = await http.Connection.open(server.port)
    body = b'{"jsonrpc": "2.0", "method": "message/send", "params": {}}'
    path = f"/workspaces/{workspace.id}/a2a"
    request = http.request("POST", path, server.admin_token, body)
    latencies: list[float] = []
    ended = asyncio.Event()

    async def write() -> None:
        while not ended.is_set() or len(latencies) < 100:
            started = time.monotonic()
            status, _ = await connection.ask(request)
            assert status == 200
            latencies.append((time.monotonic() - started) * 1000)

    writing = asyncio.create_task(write())
    try:
        yield latencies
    finally:
        ended.set()
        await writing
        connection.close()


async def _idle_p99(server: Running, workspace: Workspace) -> float:
    async with _writing(server, workspace) as latencies:
        await asyncio.sleep(IDLE_SECONDS)
    return _p99(latencies)


async def _held_snapshot(
    server: Running, connection: "asyncpg.Connection[Any]", workspace: Workspace
) -> None:
    """Sweeps of many small files, alone and while another session holds a snapshot open."""
    alone = [await _sweep_speed(server, connection, workspace) for _ in range(SMALL_ROUNDS)]
    holder = await asyncpg.connect(server.dsn)
    transaction = holder.transaction(isolation="repeatable_read")
    await transaction.start()
    await holder.fetchval("select count(*) from pg_class")
    held = [await _sweep_speed(server, connection, workspace) for _ in range(SMALL_ROUNDS)]
    await transaction.rollback()
    await holder.close()
    show(Figure("Sweep with a held snapshot", "files/s", held, alone, "without", 0.8))


async def _sweep_speed(
    server: Running, connection: "asyncpg.Connection[Any]", workspace: Workspace
) -> float:
    start = leaves.rules.floor(datetime.now(UTC), timedelta(hours=1)) - timedelta(hours=5)
    await leaves.create(connection, leaves.CHUNKS, Span(start, start + timedelta(hours=1)))
    await _stage(connection, workspace, start, SMALL_FILES, 4096)
    started = time.monotonic()
    report = await _sweep(server)
    assert report["acked"] == SMALL_FILES, report
    return SMALL_FILES / (time.monotonic() - started)


def _size(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def _p99(latencies: list[float]) -> float:
    return statistics.quantiles(latencies, n=100)[98]
