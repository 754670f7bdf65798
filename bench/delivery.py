"""Large and small uploads and fetches, compared with Postgres alone."""

import asyncio
import os
import re
import struct
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID, uuid4

import asyncpg
import msgspec

from bench import http
from bench.report import Bound, Figure, show
from bench.server import PROGRAMS, Running, Workspace
from restante.delivery.rules import CHUNK_BYTES, MAX_FILE_BYTES, bucket_of

ROUNDS = 5
LARGE_PER_ROUND = 6
SMALL_BYTES = 10 * 1024
SMALL_CLIENTS = 16
SMALL_SECONDS = 4

_EPOCH_2000 = datetime(2000, 1, 1, tzinfo=UTC)


async def measure(server: Running) -> None:
    """Run all measurements of this file."""
    await large_uploads(server)
    await small_uploads(server)
    await large_fetches(server)
    await memory_of_uploads(server)


async def large_uploads(server: Running) -> None:
    """25 MiB files over HTTP, compared with psql copying the same bytes into the same table."""
    content = os.urandom(MAX_FILE_BYTES)
    ours: list[float] = []
    floor: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        copy_file = Path(folder) / "chunks.bin"
        for _ in range(ROUNDS):
            ours.append(await _upload_speed(server, content))
            floor.append(_copy_speed(server, content, copy_file))
    show(Figure("25 MiB uploads", "MB/s", ours, floor, "psql COPY BINARY", 0.7))


async def _upload_speed(server: Running, content: bytes) -> float:
    workspace = server.register()
    connection = await http.Connection.open(server.port)
    request = http.upload(f"/workspaces/{workspace.id}/chat/uploads", workspace.token, content)
    started = time.monotonic()
    for _ in range(LARGE_PER_ROUND):
        status, _ = await connection.ask(request)
        assert status == 200
    seconds = time.monotonic() - started
    connection.close()
    return LARGE_PER_ROUND * len(content) / seconds / 1e6


def _copy_speed(server: Running, content: bytes, copy_file: Path) -> float:
    seconds = 0.0
    for _ in range(LARGE_PER_ROUND):
        copy_file.write_bytes(_copy_format(content))
        started = time.monotonic()
        command = rf"\copy restante.chunks from '{copy_file}' (format binary)"
        subprocess.run([PROGRAMS / "psql", "-qX", server.dsn, "-c", command], check=True)
        seconds += time.monotonic() - started
    return LARGE_PER_ROUND * len(content) / seconds / 1e6


def _copy_format(content: bytes) -> bytes:
    """Rows of `chunks` in the format of COPY BINARY."""
    bucket = bucket_of(datetime.now(UTC))
    moment = struct.pack("!q", int((bucket - _EPOCH_2000).total_seconds() * 1_000_000))
    workspace, file = uuid4().bytes, uuid4().bytes
    rows = [
        [moment, workspace, file, struct.pack("!i", seq), content[at : at + CHUNK_BYTES]]
        for seq, at in enumerate(range(0, len(content), CHUNK_BYTES))
    ]
    return (
        b"PGCOPY\n\xff\r\n\0"
        + struct.pack("!ii", 0, 0)
        + b"".join(_copy_row(row) for row in rows)
        + struct.pack("!h", -1)
    )


def _copy_row(fields: list[bytes]) -> bytes:
    return struct.pack("!h", len(fields)) + b"".join(
        struct.pack("!i", len(field)) + field for field in fields
    )


async def small_uploads(server: Running) -> None:
    """10 KiB files from 16 clients, compared with pgbench committing the same rows."""
    workspaces = [server.register() for _ in range(SMALL_CLIENTS)]
    ours: list[float] = []
    floor: list[float] = []
    for _ in range(ROUNDS):
        ours.append(await _small_rate(server, workspaces))
        floor.append(_pgbench_rate(server, workspaces))
    show(Figure("10 KiB uploads, 16 clients", "a second", ours, floor, "pgbench", 0.5))


async def _small_rate(server: Running, workspaces: list[Workspace]) -> float:
    content = os.urandom(SMALL_BYTES)
    ends_at = time.monotonic() + SMALL_SECONDS

    async def client(workspace: Workspace) -> int:
        path = f"/workspaces/{workspace.id}/chat/uploads"
        request = http.upload(path, workspace.token, content)
        connection = await http.Connection.open(server.port)
        done = 0
        while time.monotonic() < ends_at:
            status, body = await connection.ask(request)
            assert status == 200, body
            done += 1
        connection.close()
        return done

    return sum(await asyncio.gather(*map(client, workspaces))) / SMALL_SECONDS


def _pgbench_rate(server: Running, workspaces: list[Workspace]) -> float:
    """One statement and one commit per file, over the same socket."""
    ids = ", ".join(f"'{workspace.id}'" for workspace in workspaces)
    body = '{"file_id": "x", "name": "bench.bin", "mimeType": "", "size": 10240, "uri": "x"}'
    script = f"""
        with counter as (
            update restante.feeds set last_seq = last_seq + 1, waiting_files = waiting_files + 1,
                   waiting_bytes = waiting_bytes + {SMALL_BYTES}
             where workspace_id = (array[{ids}]::uuid[])[:client_id + 1]
            returning workspace_id, last_seq
        ), file as (
            insert into restante.uploads (workspace_id, file_id, bucket, name, mimetype, size,
                                          sha256, created_at, expires_at)
            select workspace_id, gen_random_uuid(), date_trunc('hour', now()), 'bench.bin', '',
                   {SMALL_BYTES}, decode(repeat('ab', 32), 'hex'), now(), now() + interval '1 day'
              from counter
            returning workspace_id, file_id, bucket
        ), chunk as (
            insert into restante.chunks (bucket, workspace_id, file_id, seq, bytes)
            select bucket, workspace_id, file_id, 0, decode(repeat('ab', {SMALL_BYTES}), 'hex')
              from file
        )
        insert into restante.feed (id, workspace_id, seq, activity_type, target_id, method,
                                   summary, request_body, status, created_at)
        select (lpad(to_hex((extract(epoch from clock_timestamp()) * 1000)::bigint), 12, '0')
                || substr(md5(random()::text), 1, 20))::uuid,
               workspace_id, last_seq, 'a2a_receive', workspace_id, 'chat_upload_receive',
               'chat_upload_receive: bench.bin', '{body}', 'ok', now()
          from counter;
    """
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(" ".join(script.split()) + "\n")
        file.flush()
        flags = ["-n", "-M", "prepared", "-c", str(SMALL_CLIENTS), "-j", "1"]
        output = subprocess.run(
            [PROGRAMS / "pgbench", *flags, "-T", str(SMALL_SECONDS), "-f", file.name, server.dsn],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found = re.search(r"tps = ([\d.]+)", output)
    assert found is not None, output
    return float(found[1])


async def large_fetches(server: Running) -> None:
    """25 MiB files over HTTP, compared with asyncpg reading the same chunks."""
    workspace = server.register()
    connection = await http.Connection.open(server.port)
    path = f"/workspaces/{workspace.id}/chat/uploads"
    _, body = await connection.ask(http.upload(path, workspace.token, os.urandom(MAX_FILE_BYTES)))
    file_id = UUID(msgspec.json.decode(body)["files"][0]["uri"].rpartition("/")[2])
    driver = await asyncpg.connect(server.dsn, server_settings={"search_path": "restante"})
    ours: list[float] = []
    floor: list[float] = []
    for _ in range(ROUNDS):
        ours.append(await _fetch_speed(connection, workspace, file_id))
        floor.append(await _driver_speed(driver, workspace, file_id))
    await driver.close()
    connection.close()
    show(Figure("25 MiB fetches", "MB/s", ours, floor, "the driver alone", 0.6))


async def _fetch_speed(connection: http.Connection, workspace: Workspace, file_id: UUID) -> float:
    path = f"/workspaces/{workspace.id}/pending-uploads/{file_id}/content"
    request = http.request("GET", path, workspace.token)
    started = time.monotonic()
    for _ in range(LARGE_PER_ROUND):
        status, length = await connection.ask_head(request)
        assert (status, length) == (200, MAX_FILE_BYTES)
        await connection.skip(length)
    return LARGE_PER_ROUND * MAX_FILE_BYTES / (time.monotonic() - started) / 1e6


async def _driver_speed(
    driver: "asyncpg.Connection[asyncpg.Record]", workspace: Workspace, file_id: UUID
) -> float:
    """1 MiB per query by key: the queries of the fetch path, without HTTP."""
    bucket = await driver.fetchval(
        "select bucket from uploads where workspace_id = $1 and file_id = $2", workspace.id, file_id
    )
    query = """select bytes from chunks where bucket = $1 and workspace_id = $2 and file_id = $3
                  and seq between $4 and $5 order by seq"""
    started = time.monotonic()
    for _ in range(LARGE_PER_ROUND):
        for first in range(0, MAX_FILE_BYTES // CHUNK_BYTES, 4):
            await driver.fetch(query, bucket, workspace.id, file_id, first, first + 3)
    return LARGE_PER_ROUND * MAX_FILE_BYTES / (time.monotonic() - started) / 1e6


async def memory_of_uploads(server: Running) -> None:
    """Additional memory of the server while 16 clients send 25 MiB each at once."""
    content = os.urandom(MAX_FILE_BYTES)
    workspaces = [server.register() for _ in range(16)]
    before = server.memory_mib()
    server.forget_peak_memory()

    async def client(workspace: Workspace) -> None:
        connection = await http.Connection.open(server.port)
        path = f"/workspaces/{workspace.id}/chat/uploads"
        status, _ = await connection.ask(http.upload(path, workspace.token, content))
        assert status == 200
        connection.close()

    await asyncio.gather(*map(client, workspaces))
    extra = server.memory_mib("VmHWM") - before
    detail = f"{before:.0f} MiB before, {server.memory_mib('VmHWM'):.0f} MiB at the peak"
    show(Bound("Extra memory, 16 uploads of 25 MiB at once", "MiB", extra, 100, detail))
