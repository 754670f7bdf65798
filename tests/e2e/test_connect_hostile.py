"""
A server that lies: `restante connect` says what is wrong, and nothing worse happens.

It writes nothing outside of its folder, acknowledges nothing that it does not have, sends its token
nowhere else, stays small, and is there when the server speaks the truth again.
"""

import asyncio
import base64
import gzip
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from connecting import ARRIVED, Connect
from impostors import Asked, Impostor, Said, http, impostor
from processes import wait_until

from restante.client import Credentials
from restante.client.folder import Folder
from restante.core.uploads import MAX_FILE_BYTES
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
MEMORY_MIB = 300
TOKEN = "a-secret-token"
CONTENT = b"what was really sent " * 1000
NAME = "report.pdf"
WORKSPACE = uuid4()

Saying = Callable[[Asked], Said]


@dataclass(slots=True)
class Server:
    """Has a few files for one workspace, and is honest but for what a test makes it say."""

    says: dict[str, Saying] = field(default_factory=dict[str, Saying])
    names: Sequence[str] = (NAME,)
    size: int = len(CONTENT)
    acked: list[str] = field(default_factory=list[str])

    async def __call__(self, asked: Asked) -> Said:
        kind = kind_of(asked)
        if kind in self.says:
            return self.says[kind](asked)
        if kind == "feed":
            return await self._feed(asked)
        if kind == "pending":
            return http(200, {"uploads": [self._pending(n) for n in range(len(self.names))]})
        if kind == "content":
            return content(CONTENT)
        if kind == "ack":
            self.acked.append(asked.path)
            return http(200, {"acked": True})
        return http(200, {"acked_seq": 1})

    async def _feed(self, asked: Asked) -> bytes:
        if "since_id" in asked.query:
            await asyncio.sleep(float(asked.query.get("wait", "0")))
            return http(200, [])
        return http(200, [self.row(number) for number in range(len(self.names))])

    def row(self, number: int, **changes: Any) -> dict[str, Any]:
        """The row of a file."""
        file = {"file_id": str(UUID(int=number)), "name": self.names[number], "mimeType": "a/b"}
        return row_of(number + 1) | {
            "method": "chat_upload_receive",
            "request_body": file | {"size": self.size, "uri": "x"},
            **changes,
        }

    def _pending(self, number: int) -> dict[str, Any]:
        then = "2030-01-01T00:00:00Z"
        return self.row(number)["request_body"] | {
            "sha256": "",
            "created_at": then,
            "fetched_at": None,
            "expires_at": then,
        }


def kind_of(asked: Asked) -> str:
    if asked.path.endswith("/activity/ack"):
        return "mark"
    return {"activity": "feed", "pending-uploads": "pending"}.get(
        asked.path.rpartition("/")[2], asked.path.rpartition("/")[2]
    )


def row_of(seq: int, body: Any = None, method: str = "message/send") -> dict[str, Any]:
    """The row of a message."""
    return {
        "id": str(UUID(int=seq % 2**100)),
        "workspace_id": str(WORKSPACE),
        "activity_type": "a2a_receive",
        "source_id": None,
        "target_id": None,
        "method": method,
        "summary": None,
        "request_body": body,
        "response_body": None,
        "duration_ms": None,
        "status": "ok",
        "error_detail": None,
        "created_at": "2030-01-01T00:00:00Z",
        "seq": seq,
    }


def content(sent: bytes, status: int = 200, **headers: str | None) -> bytes:
    """The answer that carries a file, with the hash of what should be in it."""
    digest = base64.b64encode(hashlib.sha256(CONTENT).digest()).decode()
    return http(status, sent, **{"repr_digest": f"sha-256=:{digest}:"} | headers)


def always(said: bytes) -> Saying:
    return lambda _asked: said


def endless(piece: bytes, *, pause_seconds: float = 0) -> Saying:
    """An answer that goes on for ever."""

    async def pieces() -> AsyncIterator[bytes]:
        yield http(200, content_length=None) + b"["
        while True:
            yield piece
            await asyncio.sleep(pause_seconds)

    return lambda _asked: pieces()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a space in its name, and beside it something that is none of its business."""
    (tmp_path / "beside").write_text("mine")
    return tmp_path / "an inbox"


@contextmanager
def connecting(root: Path, server: Impostor, *flags: str) -> Iterator[Connect]:
    """A workspace that was registered there once."""
    with Folder.open(root) as folder:
        folder.keep(Credentials(server.url, WorkspaceId(WORKSPACE), TOKEN))
    with Connect(root, server.url, *flags) as connect:
        yield connect.begin()


def assert_nothing_outside(root: Path) -> None:
    """Whatever was offered, it is in its place or nowhere."""
    outside = {path for path in root.parent.rglob("*") if root / ".molecule" not in path.parents}
    assert outside == {root.parent / "beside", root, root / ".molecule"}
    assert (root.parent / "beside").read_text() == "mine"
    inside = {path.name for path in (root / ".molecule").rglob("*") if path.is_dir()}
    assert inside == {"chat-uploads", "restante", "arriving"}


DEEP = b"[" * 100_000 + b"]" * 100_000
LIES: dict[str, tuple[dict[str, Saying], str]] = {
    "garbage": ({"feed": always(http(200, b"\x00\xff{"))}, "cannot be understood"),
    "an object": ({"feed": always(http(200, {"rows": 1}))}, "cannot be understood"),
    "a login page": (
        {"feed": always(http(200, b"<!DOCTYPE html><h1>Pay for wifi"))},
        "it is a web page. Check the address, or log in to this network.",
    ),
    "no HTTP": ({"feed": always(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")}, "does not speak valid HTTP"),
    "zipped rows": (
        {"feed": always(http(200, gzip.compress(b"[]"), content_encoding="gzip"))},
        "cannot be understood",
    ),
    "rows without end": ({"feed": endless(b'"abcdefgh",' * 20_000)}, "answer is too long"),
    "depth": ({"feed": always(http(200, DEEP))}, "cannot be understood"),
    "huge numbers": (
        {"feed": always(http(200, [row_of(2**63)]))},
        "rows with an invalid seq",
    ),
    "hugest numbers": (
        {"feed": always(http(200, [row_of(10**40)]))},
        "rows with an invalid seq",
    ),
    "old rows again": (
        {"feed": always(http(200, [row_of(1)]))},
        "does not advance",
    ),
    "gone for ever": (
        {"feed": always(http(410, {"error": "gone", "code": "cursor_gone", "lowest_seq": 10**40}))},
        "rejects every position in its feed as gone",
    ),
    "later": (
        {"feed": always(http(503, {"error": "Busy.", "code": "not_ready"}, retry_after="9" * 30))},
        "Busy. Trying again, first in",
    ),
    "a longer file": (
        {"content": always(content(CONTENT + b"more"))},
        f"was announced with {len(CONTENT)} bytes and has {len(CONTENT) + 4}",
    ),
    "bytes behind the end": (
        {"content": always(content(CONTENT) + b"more")},
        "does not speak valid HTTP: Data after `Connection: close`.",
    ),
    "a longer part": (
        {
            "content": always(
                content(CONTENT, 206, content_range=f"bytes 5-{len(CONTENT) + 4}/{len(CONTENT)}")
            )
        },
        "do not give the length of the file",
    ),
    "another part": (
        {
            "content": always(
                content(
                    CONTENT[5:], 206, content_range=f"bytes 5-{len(CONTENT) - 1}/{len(CONTENT)}"
                )
            )
        },
        "sent a different range of report.pdf than requested",
    ),
    "a shorter file": (
        {"content": always(content(CONTENT[:-1], content_length=str(len(CONTENT))))},
        "was lost",
    ),
    "another file": ({"content": always(content(bytes(len(CONTENT))))}, "the SHA-256 differs"),
    "no hash": (
        {"content": always(content(CONTENT, repr_digest=None))},
        "do not give the SHA-256 of the file",
    ),
    "chunks": (
        {
            "content": always(
                content(
                    b"%x\r\n%s\r\n0\r\n\r\n" % (len(CONTENT), CONTENT),
                    content_length=None,
                    transfer_encoding="chunked",
                )
            )
        },
        "do not give the length of the file",
    ),
    "a zipped file": (
        {"content": always(content(gzip.compress(CONTENT), content_encoding="gzip"))},
        "was announced with",
    ),
    "a web page for a file": (
        {"content": always(http(200, b"<html>"))},
        "do not give the SHA-256 of the file",
    ),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_is_named_and_nothing_comes_of_it(root: Path, lie: str):
    says, sentence = LIES[lie]
    server = Server(says)
    async with impostor(server) as other:
        with connecting(root, other) as ana:
            await asyncio.to_thread(ana.until_said, sentence)

            assert ana.memory_mib("VmHWM") < MEMORY_MIB
            assert await asyncio.to_thread(ana.stop) == 0

    assert "Traceback" not in ana.said
    # Where the feed lies, the list of what waits may still bring the file.
    assert len(set(server.acked)) == len(ana.names())
    assert all(path.read_bytes() == CONTENT for path in ana.uploads.iterdir())
    assert "content" not in says or not server.acked
    assert_nothing_outside(root)


@pytest.mark.parametrize(
    "lie", ["garbage", "a login page", "gone for ever", "another file", "rows without end"]
)
async def test_once_ends_with_1_and_a_sentence(root: Path, lie: str):
    says, sentence = LIES[lie]
    server = Server(says)
    async with impostor(server) as other:
        with connecting(root, other, "--once") as ana:
            code = await asyncio.to_thread(ana.wait)

    assert code == 1
    assert sentence in ana.said
    assert any(line.startswith("restante: ") for line in ana.lines)
    assert "Traceback" not in ana.said
    assert not server.acked


@pytest.mark.parametrize("kind", ["feed", "content", "ack", "mark", "pending"])
async def test_a_redirect_is_not_followed_and_the_token_stays_here(root: Path, kind: str):
    async with impostor(always(http(200, []))) as elsewhere:
        away = http(307, b"", location=f"{elsewhere.url}/login")
        async with impostor(Server({kind: always(away)})) as other:
            with connecting(root, other) as ana:
                said = await asyncio.to_thread(ana.until_said, "redirects to")

    assert f"{elsewhere.url}/login; the token is not sent there" in said
    assert not elsewhere.asked
    assert {asked.headers["Authorization"] for asked in other.asked} == {f"Bearer {TOKEN}"}
    assert {asked.headers["Accept-Encoding"] for asked in other.asked} == {"identity"}


async def test_names_that_are_paths_become_plain_names(root: Path, tmp_path: Path):
    absolute = tmp_path / "absolute"
    names = [
        "../../x",
        "../" * 20 + "tmp/x",
        str(absolute),
        "/etc/passwd",
        "a\0b",
        ".molecule/../..",
        "..",
        ".",
        "",
        "x/",
        "C:\\windows\\x",
        "\u202efdp.exe",
        "\x1b[2J\n\r",
        "-rf",
        "n" * 5000,
    ]
    server = Server(names=names)
    async with impostor(server) as other:
        with connecting(root, other) as ana:
            await asyncio.to_thread(
                wait_until, lambda: len(set(server.acked)) == len(names), seconds=20, what="acks"
            )

    arrived = list(ana.uploads.iterdir())
    assert len(arrived) == len(names)
    assert all(ARRIVED.fullmatch(path.name) for path in arrived)
    assert all(path.read_bytes() == CONTENT for path in arrived)
    assert all(len(path.name) <= 133 and path.name.isascii() for path in arrived)
    assert "\x1b" not in ana.said
    assert_nothing_outside(root)


@pytest.mark.parametrize("size", [MAX_FILE_BYTES + 1, 10**18, 2**64 - 1])
async def test_a_file_over_the_cap_is_not_even_asked_for(root: Path, size: int):
    server = Server(size=size)
    async with impostor(server) as other:
        with connecting(root, other) as ana:
            await asyncio.to_thread(ana.until_said, f"this side accepts at most {MAX_FILE_BYTES}")

    assert not server.acked
    assert "content" not in {kind_of(asked) for asked in other.asked}


async def test_a_feed_without_end_is_read_and_forgotten(root: Path):
    """There is always a next page; memory does not grow with what was read."""
    pages = 0

    def page(_asked: Asked) -> bytes:
        nonlocal pages
        first = 1 + pages * 10
        pages += 1
        text = {"parts": [{"text": "x" * 10_000}]}
        return http(200, [row_of(seq, text) for seq in range(first, first + 10)])

    async with impostor(Server({"feed": page})) as other:
        with connecting(root, other) as ana:
            await asyncio.to_thread(wait_until, lambda: pages > 10, seconds=30, what="pages")
            before = ana.memory_mib()
            await asyncio.to_thread(wait_until, lambda: pages > 60, seconds=30, what="more pages")
            assert ana.memory_mib() - before < 10
            assert await asyncio.to_thread(ana.stop) == 0


async def test_once_ends_although_the_server_promises_more(root: Path):
    """Rows that are announced and never given are not waited for."""
    promising = {"X_Restante_Latest_Seq": "9" * 17}
    server = Server({"feed": always(http(200, [], **promising))}, names=())
    async with impostor(server) as other:
        with connecting(root, other, "--once") as ana:
            assert await asyncio.to_thread(ana.wait) == 0


async def test_messages_as_deep_as_can_be_read_do_not_end_it(root: Path):
    """Each is a little deeper than the one before, until nothing of a page can be read."""

    def page(asked: Asked) -> bytes:
        depth = max(UUID(asked.query["since_id"]).int if "since_id" in asked.query else 1, 930) + 1
        body = json.dumps(row_of(depth, "BODY")).replace('"BODY"', "[" * depth + "]" * depth)
        return http(200, f"[{body}]".encode())

    async with impostor(Server({"feed": page}, names=())) as other:
        with connecting(root, other) as ana:
            await asyncio.to_thread(ana.until_said, "cannot be understood")
            assert ana.is_running()

    assert "message message/send" in ana.said
    assert "Traceback" not in ana.said


async def test_what_a_method_is_called_cannot_stop_the_command(root: Path):
    """A variable holds neither a NUL nor a mebibyte."""
    rows = [row_of(1, {}, "a\0b"), row_of(2, {}, "m" * 500_000)]
    server = Server({"feed": lambda asked: http(200, [] if asked.query.get("wait") else rows)}, ())
    async with impostor(server) as other:
        with connecting(root, other, "--once", "--on-message", "printenv RESTANTE_METHOD") as ana:
            code = await asyncio.to_thread(ana.wait)

    assert code == 0, ana.said[:1000]
    assert "  ab\n" in ana.said


async def test_a_list_that_goes_in_circles_is_left(root: Path):
    again = {"uploads": [Server()._pending(0)], "next_after": str(uuid4())}
    server = Server({"feed": always(http(200, [])), "pending": always(http(200, again))})
    async with impostor(server) as other:
        with connecting(root, other) as ana:
            await asyncio.to_thread(ana.until_said, "list of pending uploads does not advance")


async def test_bytes_that_drip_are_not_waited_for_until_they_end(root: Path, tmp_path: Path):
    """Each byte comes in time, and all of them would come in a year."""
    heads = {"feed": http(200), "content": content(b"")}

    def dripping(asked: Asked) -> AsyncIterator[bytes]:
        async def drops() -> AsyncIterator[bytes]:
            size = str(len(CONTENT)).encode()
            yield heads[kind_of(asked)].replace(b"Content-Length: 0", b"Content-Length: " + size)
            while True:
                yield CONTENT[:1]
                await asyncio.sleep(0.2)

        return drops()

    servers = [Server({kind: dripping}) for kind in heads]
    async with impostor(servers[0]) as feed, impostor(servers[1]) as file:
        with connecting(root, feed) as ana, connecting(tmp_path / "ben", file) as ben:
            await asyncio.to_thread(ana.until_said, "answer is too slow", 40)
            await asyncio.to_thread(ben.until_said, "not taken: report.pdf", 40)

    assert "answer is too slow" in ben.said
    assert [server.acked for server in servers] == [[], []]


async def test_it_goes_on_when_the_server_is_honest_again(root: Path):
    server = Server({"feed": always(http(200, b"<html>")), "content": always(content(b"no"))})
    async with impostor(server) as other:
        with connecting(root, other) as ana:
            await asyncio.to_thread(ana.until_said, "web page")
            del server.says["feed"]
            await asyncio.to_thread(ana.until_said, "not taken: report.pdf")
            del server.says["content"]
            await asyncio.to_thread(ana.until_said, "received report.pdf")

    assert ana.path_of(NAME).read_bytes() == CONTENT
    assert len(server.acked) == 1


async def test_a_refused_token_ends_it_with_what_to_do(root: Path):
    refused = http(401, {"error": "No.", "code": "not_authenticated"})
    async with impostor(Server({"feed": always(refused)})) as other:
        with connecting(root, other) as ana:
            code = await asyncio.to_thread(ana.wait)

    assert code == 1
    assert "no longer accepts the token of this workspace" in ana.said
    assert str(root / ".molecule/restante/credentials.json") in ana.said
