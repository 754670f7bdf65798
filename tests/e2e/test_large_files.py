"""Large files through a real server: its memory does not grow with them."""

import hashlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

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

    async def upload(self, size: int, *, is_declared: bool) -> str:
        """Upload so many bytes, with a Content-Length or chunked; returns the path of the file."""
        headers = {"Content-Type": FORM, **bearer(self.token)}
        if is_declared:
            headers["Content-Length"] = str(len(START) + size + len(END))
        path = f"/workspaces/{self.id}"
        async with self.session.post(
            f"{path}/chat/uploads", data=_body(size), headers=headers
        ) as answer:
            assert answer.status == 200, await answer.text()
            (file,) = (await answer.json())["files"]
        assert file["size"] == size
        return f"{path}/pending-uploads/{file['uri'].rpartition('/')[2]}"

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

    async def post(self, path: str, token: str) -> Any:
        async with self.session.post(path, headers=bearer(token)) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()


def _blocks(size: int) -> Iterator[bytes]:
    """Bytes that differ from block to block."""
    for start in range(0, size, MIB):
        block = start.to_bytes(8, "big") + BLOCK[8:]
        yield block[: size - start]


async def _body(size: int) -> AsyncIterator[bytes]:
    yield START
    for block in _blocks(size):
        yield block
    yield END


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[Client]:
    timeout = ClientTimeout(total=1200)
    async with ClientSession(server.address, timeout=timeout) as session:
        yield Client(server, session, *registered_at(server))


async def transfer(client: Client, size: int, *, is_declared: bool) -> int:
    """Send a file, fetch, acknowledge and sweep it; the peak of the server's memory in MiB."""
    expected = hashlib.sha256()
    for block in _blocks(size):
        expected.update(block)
    times = [time.monotonic()]
    path = await client.upload(size, is_declared=is_declared)
    times.append(time.monotonic())
    assert await client.digest(path, size) == expected.digest()
    times.append(time.monotonic())
    await client.post(f"{path}/ack", client.token)
    swept = await client.post("/admin/retention/sweep", client.server.admin_token)
    times.append(time.monotonic())
    assert swept["deleted"]["acked"] == 1, swept
    sent, fetched, ended = (f"{after - before:.1f} s" for before, after in pairwise(times))
    peak = peak_kib(client.server.pid) // 1024
    print(f"{size // MIB} MiB: sent {sent}, fetched {fetched}, swept {ended}, peak {peak} MiB")
    return peak


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
        connection = await asyncpg.connect(server.dsn, server_settings={"search_path": SCHEMA})
        await until(
            lambda: connection.fetchval("select not exists (select from chunks)"), seconds=120
        )
        await connection.close()

    assert max(large, chunked) - small < 32
