"""Large files through a real server: its memory does not grow with them."""

import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

import asyncpg
import pytest
import soak
from aiohttp import ClientSession, ClientTimeout
from callers import FORM, Part, bearer, form, pattern
from processes import Server, peak_kib, registered_at
from waiting import until

from restante.database.pool import SCHEMA

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
GIB = 1024 * MIB
START = form(Part(b"", name="large.bin"), closed=False)[:-2]
END = b"\r\n" + form()
BLOCK = pattern(MIB)
LIMITS = ("--max-file-bytes", str(4 * GIB), "--max-request-bytes", str(4 * GIB))
ROOM = ("--workspace-max-bytes", str(8 * GIB), "--server-max-bytes", str(8 * GIB))


@dataclass(frozen=True, slots=True)
class Client:
    """A workspace at a server process; it sends files to itself and fetches them."""

    server: Server
    session: ClientSession
    id: str
    token: str

    async def upload(self, size: int, *, is_declared: bool) -> tuple[str, bytes]:
        """Upload so many bytes, with a Content-Length or chunked; the file's path and its hash."""
        headers = {"Content-Type": FORM, **bearer(self.token)}
        if is_declared:
            headers["Content-Length"] = str(len(START) + size + len(END))
        path, digest = f"/workspaces/{self.id}", hashlib.sha256()
        body = _body(size, digest.update)
        async with self.session.post(f"{path}/chat/uploads", data=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            (file,) = (await answer.json())["files"]
        assert file["size"] == size
        return f"{path}/pending-uploads/{file['uri'].rpartition('/')[2]}", digest.digest()

    async def digest(self, path: str, size: int) -> bytes:
        """The hash of a file that is fetched in three ranges."""
        digest, third = hashlib.sha256(), size // 3
        for first, last in ((0, third), (third + 1, 2 * third), (2 * third + 1, size - 1)):
            headers = {"Range": f"bytes={first}-{last}", **bearer(self.token)}
            async with self.session.get(f"{path}/content", headers=headers) as answer:
                assert answer.status == 206
                assert answer.headers["Content-Range"] == f"bytes {first}-{last}/{size}"
                async for piece in answer.content.iter_chunked(MIB):
                    digest.update(piece)
        return digest.digest()

    async def post(self, path: str, token: str) -> None:
        async with self.session.post(path, headers=bearer(token)) as answer:
            assert answer.status == 200, await answer.text()


async def _body(size: int, on_block: Callable[[bytes], None]) -> AsyncIterator[bytes]:
    """A form with one file, whose bytes differ from block to block."""
    yield START
    for start in range(0, size, MIB):
        block = (start.to_bytes(8, "big") + BLOCK[8:])[: size - start]
        on_block(block)
        yield block
    yield END


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[Client]:
    timeout = ClientTimeout(total=1200)
    async with ClientSession(server.address, timeout=timeout) as session:
        yield Client(server, session, *registered_at(server))


async def transfer(client: Client, size: int, *, is_declared: bool) -> int:
    """Send a file, fetch, acknowledge and sweep it; the peak of the server's memory in MiB."""
    times = [time.monotonic()]
    path, digest = await client.upload(size, is_declared=is_declared)
    times.append(time.monotonic())
    assert await client.digest(path, size) == digest
    times.append(time.monotonic())
    await client.post(f"{path}/ack", client.token)
    await client.post("/admin/retention/sweep", client.server.admin_token)
    await until_empty(client.server, "uploads")
    times.append(time.monotonic())
    sent, fetched, ended = (f"{after - before:.1f} s" for before, after in pairwise(times))
    peak = peak_kib(client.server.pid) // 1024
    print(f"{size // MIB} MiB: sent {sent}, fetched {fetched}, swept {ended}, peak {peak} MiB")
    return peak


async def until_empty(server: Server, table: str) -> None:
    """Wait for a sweep, which may be that of the server's own loop."""
    connection = await asyncpg.connect(server.dsn, server_settings={"search_path": SCHEMA})
    is_empty = f"select not exists (select from {table})"
    await until(lambda: connection.fetchval(is_empty), seconds=120)
    await connection.close()


async def test_a_large_file_takes_no_more_memory_than_a_small_one(server: Server):
    server.flags = (*LIMITS, *ROOM, "--ack-retention-seconds", "0")
    server.start()
    async with client_of(server) as client:
        small = await transfer(client, 4 * MIB, is_declared=True)
        large = await transfer(client, 96 * MIB, is_declared=True)
        chunked = await transfer(client, 32 * MIB, is_declared=False)

    assert max(large, chunked) - small < 24


@soak.only_long
@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_a_file_of_2_gib_passes_many_buckets_and_sweeps(server: Server):
    """Its bucket must stay when its range has ended; at the end all space is free again."""
    room = (*ROOM, "--ack-retention-seconds", "0")
    server.flags = (*LIMITS, *room, "--bucket-seconds", "1", "--sweep-interval-seconds", "1")
    server.start()
    async with client_of(server) as client:
        small = await transfer(client, 4 * MIB, is_declared=True)
        large = await transfer(client, 2 * GIB + 1, is_declared=True)
        chunked = await transfer(client, 2 * GIB + 1, is_declared=False)
        await until_empty(server, "chunks")

    assert max(large, chunked) - small < 32
