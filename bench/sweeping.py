"""The sweep compared with a DELETE of rows that hold the bytes, under concurrent writes."""

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import msgspec

from bench import http
from bench.report import Bound, Figure, show
from bench.server import Running, Workspace
from restante.database import partitions
from restante.database.pool import transaction
from restante.database.spans import Span, floor
from restante.delivery.rules import CHUNK_BYTES
from restante.delivery.subject import CHUNKS

FILES = 512
FILE_BYTES = 4 * CHUNK_BYTES
ROUNDS = 6
IDLE_SECONDS = 1.0
SMALL_ROUNDS = 5
SMALL_FILES = 2000
MIB = 1024 * 1024


@dataclass(slots=True)
class Way:
    """The cost of one way to free 512 MiB, over all rounds."""

    seconds: list[float] = field(default_factory=list[float])
    wal_bytes: list[int] = field(default_factory=list[int])
    freed_bytes: list[int] = field(default_factory=list[int])
    # Latencies of the writer in milliseconds: right before, and of every overlapping write.
    idle: list[float] = field(default_factory=list[float])
    during: list[float] = field(default_factory=list[float])

    def line(self, name: str) -> str:
        seconds, freed = statistics.median(self.seconds), statistics.median(self.freed_bytes)
        return f"    {name}: {seconds:.2f} s, {freed / MIB:.0f} MiB freed, {_spread(self.during)}"


async def measure(server: Running) -> None:
    """Delete 512 MiB of due files in each way, in every round."""
    connection = await asyncpg.connect(server.dsn, server_settings={"search_path": "restante"})
    workspace = server.register()
    costs = partial(_costs, server, workspace, connection)
    delete, sweep, truncate = Way(), Way(), Way()
    for _ in range(ROUNDS):
        await _fill_seed(connection)
        await costs(delete, partial(_delete, connection))
        await connection.execute("drop table seed_uploads")
        await _fill_ours(connection, workspace)
        await costs(sweep, partial(_sweep, server))
        async with _plain_file(connection) as path:
            await costs(truncate, lambda path=path: asyncio.to_thread(os.truncate, path, 0))
    _show(delete, sweep, truncate)
    await _held_snapshot(server, connection, workspace)
    await connection.close()


def _show(delete: Way, sweep: Way, truncate: Way) -> None:
    wal, of_delete = statistics.median(sweep.wal_bytes), statistics.median(delete.wal_bytes)
    detail = f"{wal / MIB:.1f} MiB compared with {of_delete / MIB:.0f} MiB"
    percent = 100 * wal / of_delete
    show(Bound("WAL of the sweep, relative to one DELETE", "%", percent, 5, detail))
    idle = [*delete.idle, *sweep.idle, *truncate.idle]
    times = _p99(sweep.during) / _p99(idle)
    detail = f"idle, before each: {_spread(idle)}"
    show(Bound("Writer's p99 during the sweep, relative to idle", "x", times, 2, detail))
    print(sweep.line("the sweep"))
    print(delete.line("one DELETE"))
    print(truncate.line("a plain file of that size, truncated"))
    beside = _p99(sweep.during) / _p99(truncate.during)
    print(f"    the sweep's p99 is {beside:.2f} times the plain file's", flush=True)


def _spread(latencies: list[float]) -> str:
    p50, p99 = statistics.median(latencies), _p99(latencies)
    return f"p50 {p50:.1f}, p99 {p99:.1f}, max {max(latencies):.1f} ms of {len(latencies)} writes"


@asynccontextmanager
async def _plain_file(connection: "asyncpg.Connection[Any]") -> AsyncIterator[Path]:
    """
    A file of the same size on the same disk, outside of Postgres.

    Truncating it shows how much of the writers' latency is due to the filesystem freeing blocks.
    """
    path = Path(await connection.fetchval("show data_directory")).parent / "plain-file"
    await asyncio.to_thread(_write_out, path)
    try:
        yield path
    finally:
        path.unlink()


def _write_out(path: Path) -> None:
    content = os.urandom(FILE_BYTES)
    with path.open("wb") as file:
        for _ in range(FILES):
            file.write(content)
        os.fsync(file.fileno())


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
    """The same bytes in a bucket from three hours ago, acknowledged two hours ago."""
    bucket = await _create_bucket(connection, hours_ago=3)
    await _stage(connection, workspace, bucket, FILES, FILE_BYTES)


async def _create_bucket(connection: "asyncpg.Connection[Any]", *, hours_ago: int) -> datetime:
    start = floor(datetime.now(UTC), timedelta(hours=1)) - timedelta(hours=hours_ago)
    async with transaction(connection) as tx:
        await partitions.create(tx, CHUNKS, Span(start, start + timedelta(hours=1)))
    return start


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
    way: Way,
    act: Callable[[], Awaitable[object]],
) -> None:
    await connection.execute("checkpoint")
    directory = Path(await connection.fetchval("show data_directory")).parent
    # Measured before and after the writes, because it takes longer than one write.
    before = _size(directory)
    async with _writing(server, workspace) as writes:
        await asyncio.sleep(IDLE_SECONDS)
        wal = await connection.fetchval("select pg_current_wal_insert_lsn()")
        started = time.monotonic()
        await act()
        ended = time.monotonic()
        written = await connection.fetchval(
            "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), $1::pg_lsn)", wal
        )
    way.freed_bytes.append(before - _size(directory))
    way.seconds.append(ended - started)
    way.wal_bytes.append(int(written))
    way.idle += [write.milliseconds for write in writes if write.ended <= started]
    way.during += [w.milliseconds for w in writes if w.ended > started and w.started < ended]


@dataclass(frozen=True, slots=True)
class Write:
    """One message, from request to answer."""

    started: float
    ended: float

    @property
    def milliseconds(self) -> float:
        return (self.ended - self.started) * 1000


@asynccontextmanager
async def _writing(server: Running, workspace: Workspace) -> AsyncIterator[list[Write]]:
    """Send one message after the other while the context lasts."""
    connection = await http.Connection.open(server.port)
    body = b'{"jsonrpc": "2.0", "method": "message/send", "params": {}}'
    path = f"/workspaces/{workspace.id}/a2a"
    request = http.request("POST", path, server.admin_token, body)
    writes: list[Write] = []
    ended = asyncio.Event()

    async def write() -> None:
        while not ended.is_set():
            started = time.monotonic()
            status, _ = await connection.ask(request)
            assert status == 200
            writes.append(Write(started, time.monotonic()))

    writing = asyncio.create_task(write())
    try:
        yield writes
    finally:
        ended.set()
        await writing
        connection.close()


async def _held_snapshot(
    server: Running, connection: "asyncpg.Connection[Any]", workspace: Workspace
) -> None:
    """Sweeps of many small files, with and without a snapshot held by another session."""
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
    bucket = await _create_bucket(connection, hours_ago=5)
    await _stage(connection, workspace, bucket, SMALL_FILES, 4096)
    started = time.monotonic()
    report = await _sweep(server)
    assert report["acked"] == SMALL_FILES, report
    return SMALL_FILES / (time.monotonic() - started)


def _size(directory: Path) -> int:
    """Disk usage of the files there, without WAL, which Postgres recycles by its own rules."""
    return sum(
        path.stat().st_blocks * 512
        for path in directory.rglob("*")
        if path.is_file() and path.parent.name != "pg_wal"
    )


def _p99(latencies: list[float]) -> float:
    return statistics.quantiles(latencies, n=100, method="inclusive")[98]
