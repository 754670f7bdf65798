"""Sending from open files, pipes and asynchronous iterators, with progress."""

import asyncio
import io
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, cast
from uuid import uuid4

import pytest
from callers import Caller, pattern, registered
from impostors import http, impostor, one_after_another
from sites import Site

from restante.client import AsyncClient, Bytes, Client, Stream
from restante.client.streams import must_be_stored, stored
from restante.errors import FileTooLarge, FileUnreadable

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_delays")]

SENT = http(200, {"files": []})
LIMITS = http(200, {"per_file_bytes": 8, "per_request_bytes": 80, "max_attachments_per_message": 8})


@pytest.fixture
async def caller(shared_site: Site) -> Caller:
    return await registered(shared_site)


@pytest.fixture
def pipe() -> Iterator[BinaryIO]:
    """A pipe that has `hello` in it."""
    reading, writing = os.pipe()
    os.write(writing, b"hello")
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        yield file


async def downloaded() -> AsyncIterator[bytes]:
    """Pieces as an HTTP client gives them."""
    yield b"by"
    yield b"e"


async def test_open_files_pipes_and_iterators_are_sent(
    caller: Caller, pipe: BinaryIO, tmp_path: Path
):
    """Each from where it stands, with the type of its name; file objects stay open."""
    (tmp_path / "a.pdf").write_bytes(pattern(300_000))
    sizes: list[int] = []

    with (tmp_path / "a.pdf").open("rb") as opened:
        opened.seek(100_000)
        async with AsyncClient(caller.site.url, token=caller.token) as client:
            accepted = await client.send_files(
                caller.id,
                [opened, Stream("b.txt", pipe), Stream("c", downloaded(), "text/x-odd")],
                progress=sizes.append,
            )
        assert not opened.closed
        assert not pipe.closed

    assert [(file.name, file.mime_type, file.size) for file in accepted] == [
        ("a.pdf", "application/pdf", 200_000),
        ("b.txt", "text/plain", 5),
        ("c", "text/x-odd", 3),
    ]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 200_008
    fetched = [(await caller.fetch(file.uri.rpartition("/")[2])).body for file in accepted]
    assert fetched == [pattern(300_000)[100_000:], b"hello", b"bye"]


async def test_a_retry_sends_a_pipe_from_its_start(pipe: BinaryIO):
    answers = one_after_another(LIMITS, None, SENT)
    async with (
        impostor(answers) as other,
        AsyncClient(other.url, token="t", workspace_id=uuid4()) as client,
    ):
        await client.send_files(client.workspace_id, [Stream("a", pipe), Bytes("b", b"x")])

    _, first, second = other.asked
    assert b"hello" in first.body
    assert second.body == first.body


async def test_a_pipe_travels_inside_of_a_message(caller: Caller, pipe: BinaryIO):
    async with AsyncClient(caller.site.url, token=caller.token) as client:
        await client.send_message(caller.id, "Look.", files=[Stream("a.txt", pipe)])

    (row,) = await caller.feed()
    assert row["request_body"]["params"]["message"]["parts"][1]["file"] == {
        "name": "a.txt",
        "mimeType": "text/plain",
        "bytes": "aGVsbG8=",
    }


async def test_the_blocking_client_sends_streams_too(shared_site: Site, pipe: BinaryIO):
    def program() -> list[tuple[str, int]]:
        with Client(shared_site.url) as client:
            me = client.register("a script").workspace_id
            client.send_files(str(me), iter([Stream("a", pipe), Stream("b", io.BytesIO(b"x"))]))
            return sorted((one.name, one.size) for one in client.pending())

    assert await asyncio.to_thread(program) == [("a", 5), ("b", 1)]


async def test_a_pipe_without_an_end_is_refused_before_anything_is_sent():
    """At the server's own limit, which is asked for."""
    async with (
        impostor(lambda _: LIMITS) as other,
        AsyncClient(other.url, token="t", workspace_id=uuid4()) as client,
    ):
        with pytest.raises(FileTooLarge, match="zero has more than 8 bytes"):
            await client.send_files(client.workspace_id, [Stream("zero", Endless())])

    assert [asked.path for asked in other.asked] == ["/uploads/limits"]


async def test_what_was_stored_on_the_way_is_removed(pipe: BinaryIO):
    with ExitStack() as until:
        kept: Any = (await stored(Stream("a", pipe), 5, until)).source
        assert kept.read() == b"hello"

    assert kept.closed


class Endless:
    def read(self, size: int, /) -> bytes:
        return bytes(size)


class Broken:
    def read(self, _size: int, /) -> bytes:
        raise OSError("the cable is out")


def shortened() -> io.BytesIO:
    class Shorter(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return b""

    return Shorter(b"hello")


def closed() -> io.BytesIO:
    file = io.BytesIO(b"hello")
    file.close()
    return file


@pytest.mark.parametrize(
    ("source", "error", "sentence"),
    [
        (Stream("a", Broken()), FileUnreadable, "a cannot be read: the cable is out"),
        (Stream("a", shortened()), FileUnreadable, "a became shorter"),
        (Stream("a", closed()), FileUnreadable, "closed file"),
        (
            Stream("a", cast("Any", io.StringIO("hello"))),
            TypeError,
            "a gives str: open it in binary mode",
        ),
        (io.BytesIO(b"hello"), TypeError, r"has no file name: pass Stream\('report.pdf'"),
    ],
    ids=["broken", "shorter", "closed", "text", "nameless"],
)
async def test_what_cannot_be_read_is_refused_with_a_sentence(
    source: Any, error: type[Exception], sentence: str
):
    async with (
        impostor(lambda asked: LIMITS if asked.method == "GET" else SENT) as other,
        AsyncClient(other.url, token="t", workspace_id=uuid4()) as client,
    ):
        with pytest.raises(error, match=sentence):
            await client.send_files(client.workspace_id, [source])


def test_only_what_cannot_be_rewound_is_stored_first(tmp_path: Path, pipe: BinaryIO):
    """A large file on disk is not copied."""
    with (tmp_path / "a").open("wb+") as opened:
        streams = [opened, Stream("a", opened), pipe, Stream("a", pipe), Bytes("a", b""), "a"]

        assert list(map(must_be_stored, streams)) == [False, False, True, True, False, False]
