"""Resumed downloads, and files that differ from their announcement."""

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from callers import Caller, Part, pattern, registered
from impostors import Answering, Asked, Impostor, http, impostor, one_after_another, relay
from sites import Site

from restante import wire
from restante.client import AsyncClient
from restante.client.calls import Extent
from restante.client.disk import Directory, Partial
from restante.client.fetching import Fetch, WaitingFile, check_size, fetch_whole
from restante.client.sending import no_progress
from restante.delivery.rules import MAX_FILE_BYTES
from restante.errors import (
    AnswerInvalid,
    FileCorrupt,
    FileTooLarge,
    RestanteError,
    ServerUnreachable,
    UploadGone,
)
from restante.ids import FileId

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_delays")]

CONTENT = pattern(300_000)
GIB = 1024**3


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    with Directory.open(tmp_path / "received") as directory:
        yield directory


@pytest.fixture
def partial(directory: Directory) -> Iterator[Partial]:
    with directory.partial("a.part") as partial:
        yield partial


@pytest.fixture
async def caller(shared_site: Site) -> Caller:
    return await registered(shared_site)


def content_of(partial: Partial) -> bytes:
    return partial.path.read_bytes()


def filled(partial: Partial, content: bytes) -> Partial:
    """Write what an earlier run left."""
    partial.write(content)
    return partial


async def staged(caller: Caller, content: bytes = CONTENT) -> WaitingFile:
    (file_id,) = await caller.staged(Part(content, name="a.bin"))
    return WaitingFile(FileId(UUID(file_id)), "a.bin", "", len(content))


@asynccontextmanager
async def client_of(caller: Caller, url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(url, token=caller.token, workspace_id=UUID(caller.id)) as client:
        yield client


async def fetched(caller: Caller, file: WaitingFile, partial: Partial, **relayed: Any) -> Impostor:
    """Fetch through a relay that records the requests."""
    through = impostor(relay(caller.site, **relayed))
    async with through as line, client_of(caller, line.url) as client:
        await fetch_whole(client, file, partial, no_progress)
    return line


def ranges(line: Impostor) -> list[str | None]:
    return [asked.headers.get("Range") for asked in line.asked]


# Against a real server


async def test_a_file_is_fetched_and_progress_is_reported(caller: Caller, partial: Partial):
    file = await staged(caller)
    sizes: list[int] = []

    async with client_of(caller, caller.site.url) as client:
        await fetch_whole(client, file, partial, sizes.append)

    assert content_of(partial) == CONTENT
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(CONTENT)


@pytest.mark.parametrize("had", [1, 100_000, len(CONTENT) - 1])
async def test_a_download_is_resumed(caller: Caller, partial: Partial, had: int):
    """On a slow network, the time before the interruption is not lost."""
    file = await staged(caller)
    filled(partial, CONTENT[:had])

    line = await fetched(caller, file, partial)

    assert ranges(line) == [f"bytes={had}-"]
    assert content_of(partial) == CONTENT


async def test_a_complete_file_is_verified_by_fetching_its_last_byte(
    caller: Caller, partial: Partial
):
    """The answer to any range carries the hash of the whole file."""
    file = await staged(caller)
    filled(partial, CONTENT)

    line = await fetched(caller, file, partial)

    assert ranges(line) == [f"bytes={len(CONTENT) - 1}-"]
    assert content_of(partial) == CONTENT


async def test_a_partial_file_that_is_too_long_is_truncated(caller: Caller, partial: Partial):
    file = await staged(caller)
    filled(partial, CONTENT + b"and more")

    await fetched(caller, file, partial)

    assert content_of(partial) == CONTENT


async def test_a_server_without_ranges_sends_the_whole_file(caller: Caller, partial: Partial):
    file = await staged(caller)
    filled(partial, CONTENT[:100_000])

    await fetched(caller, file, partial, without=["Range"])

    assert content_of(partial) == CONTENT


@pytest.mark.parametrize("at", [0, 50_000, 99_999])
async def test_a_damaged_partial_file_is_detected_and_discarded(
    caller: Caller, partial: Partial, at: int
):
    """A disk may lose data in a power cut; the next attempt fetches the whole file."""
    file = await staged(caller)
    damaged = bytearray(CONTENT[:100_000])
    damaged[at] ^= 1
    filled(partial, bytes(damaged))

    with pytest.raises(FileCorrupt):
        await fetched(caller, file, partial)

    assert content_of(partial) == b""
    line = await fetched(caller, file, partial)
    assert ranges(line) == [None]
    assert content_of(partial) == CONTENT


async def test_a_file_of_one_byte(caller: Caller, partial: Partial):
    file = await staged(caller, b"x")

    await fetched(caller, file, partial)

    assert content_of(partial) == b"x"


async def test_an_acknowledged_file_is_gone(caller: Caller, partial: Partial):
    file = await staged(caller)
    await caller.ack(str(file.file_id))

    with pytest.raises(UploadGone):
        await fetched(caller, file, partial)


async def test_attempts_that_receive_bytes_do_not_count(caller: Caller, partial: Partial):
    """On a bad network, a download makes progress with every attempt and must finish."""
    file = await staged(caller)
    pass_on = relay(caller.site)
    came = asyncio.Event()

    async def breaking_off(asked: Asked) -> AsyncIterator[bytes]:
        head, _, body = (await pass_on(asked)).partition(b"\r\n\r\n")
        yield head + b"\r\n\r\n" + body[:40_000]
        while partial.size < file.size - len(body[40_000:]):
            came.clear()
            await came.wait()

    async with impostor(breaking_off) as line, client_of(caller, line.url) as client:
        await fetch_whole(client, file, partial, lambda _: came.set())

    assert ranges(line) == [None, *(f"bytes={n * 40_000}-" for n in range(1, 8))]
    assert content_of(partial) == CONTENT


# Against servers that lie

SHORT = WaitingFile(FileId(uuid4()), "a.bin", "", 10)
DIGITS = b"0123456789"


def digest(content: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(content).digest()).decode()}:"


async def refused(said: bytes, partial: Partial) -> tuple[RestanteError, int]:
    """The error, and the number of requests before it."""
    async with talking_to(lambda _: said) as (liar, client):
        with pytest.raises(RestanteError) as caught:
            await fetch_whole(client, SHORT, partial, no_progress)
    return caught.value, len(liar.asked)


@asynccontextmanager
async def talking_to(answering: Answering) -> AsyncIterator[tuple[Impostor, AsyncClient]]:
    async with (
        impostor(answering) as liar,
        AsyncClient(liar.url, token="t", workspace_id=uuid4()) as client,
    ):
        yield liar, client


@pytest.mark.parametrize("content", [DIGITS + b"x", DIGITS[:-1], b""])
async def test_a_file_of_another_size_than_announced_is_refused(partial: Partial, content: bytes):
    """Before a byte is written: the size limit was checked against the announced size."""
    filled(partial, b"012")

    error, asked = await refused(http(200, content, Repr_Digest=digest(content)), partial)

    assert isinstance(error, AnswerInvalid)
    assert asked == 1
    assert content_of(partial) == b"012"


async def test_a_file_with_another_hash_is_refused_and_discarded(partial: Partial):
    error, asked = await refused(http(200, DIGITS, Repr_Digest=digest(b"other")), partial)

    assert isinstance(error, FileCorrupt)
    assert asked == 1
    assert content_of(partial) == b""


async def test_another_range_than_requested_is_refused(partial: Partial):
    filled(partial, b"012")
    said = http(206, b"56789", Content_Range="bytes 5-9/10", Repr_Digest=digest(DIGITS))

    error, _ = await refused(said, partial)

    assert isinstance(error, AnswerInvalid)
    assert content_of(partial) == b"012"


async def test_retries_stop_when_nothing_is_received(partial: Partial):
    filled(partial, b"012")
    head = http(206, b"", Content_Length="7", Content_Range="bytes 3-9/10")
    said = head.replace(b"\r\n\r\n", f"\r\nRepr-Digest: {digest(DIGITS)}\r\n\r\n".encode())

    error, asked = await refused(said, partial)

    assert isinstance(error, ServerUnreachable)
    assert asked == 4
    assert content_of(partial) == b"012"


async def test_a_temporary_failure_is_retried(partial: Partial):
    said = http(200, DIGITS, Repr_Digest=digest(DIGITS))

    async with talking_to(one_after_another(None, http(503), None, said)) as (_, client):
        await fetch_whole(client, SHORT, partial, no_progress)

    assert content_of(partial) == DIGITS


async def test_a_compressed_body_is_not_unpacked(partial: Partial):
    """It could expand to more than the announced size."""
    said = http(200, DIGITS, Repr_Digest=digest(DIGITS), Content_Encoding="gzip")

    async with talking_to(lambda _: said) as (packer, client):
        await fetch_whole(client, SHORT, partial, no_progress)

    assert content_of(partial) == DIGITS
    assert packer.asked[0].headers["Accept-Encoding"] == "identity"


class Endless:
    """Sends more than it announced, which HTTP itself would not allow."""

    @asynccontextmanager
    async def fetch(self, file_id: FileId, start: int = 0) -> AsyncIterator[Fetch]:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"0123"

        yield Fetch(Extent(0, 10, hashlib.sha256(DIGITS).digest()), pieces())


async def test_more_bytes_than_announced_are_refused_at_once(partial: Partial):
    with pytest.raises(AnswerInvalid, match="longer"):
        await fetch_whole(Endless(), SHORT, partial, no_progress)

    assert content_of(partial) == b""


class Limited:
    """A server that accepts files of this size, and counts how often it is asked."""

    def __init__(self, per_file_bytes: int) -> None:
        self._limits = wire.UploadLimits(per_file_bytes, per_file_bytes, 64)
        self.asked = 0

    async def upload_limits(self) -> wire.UploadLimits:
        self.asked += 1
        return self._limits


async def test_a_file_above_our_own_limit_is_refused_whatever_the_server_accepts():
    server = Limited(1000)
    await check_size(server, SHORT, max_bytes=10)

    with pytest.raises(FileTooLarge) as caught:
        await check_size(server, SHORT, max_bytes=9)

    assert caught.value.facts == {"filename": "a.bin", "size": 10, "max": 9}
    assert server.asked == 0


@pytest.mark.parametrize(
    ("size", "per_file_bytes", "asked"),
    [
        (MAX_FILE_BYTES, 0, 0),  # what every server accepts by default
        (MAX_FILE_BYTES + 1, MAX_FILE_BYTES + 1, 1),
        (GIB, GIB, 1),
        (64 * GIB, 2**70, 1),
        (64 * GIB, 64 * GIB, 1),
    ],
)
async def test_without_a_limit_of_our_own_the_servers_holds(
    size: int, per_file_bytes: int, asked: int
):
    server = Limited(per_file_bytes)

    await check_size(server, replace(SHORT, size=size), None)

    assert server.asked == asked


@pytest.mark.parametrize(
    ("size", "per_file_bytes", "most"),
    [
        (MAX_FILE_BYTES + 1, 1000, MAX_FILE_BYTES),
        (MAX_FILE_BYTES + 2, MAX_FILE_BYTES + 1, MAX_FILE_BYTES + 1),
        (64 * GIB + 1, 64 * GIB, 64 * GIB),
        (MAX_FILE_BYTES + 1, -1, MAX_FILE_BYTES),
    ],
)
async def test_a_file_above_what_the_server_accepts_is_refused(
    size: int, per_file_bytes: int, most: int
):
    with pytest.raises(FileTooLarge, match=f"at most {most}"):
        await check_size(Limited(per_file_bytes), replace(SHORT, size=size), None)
