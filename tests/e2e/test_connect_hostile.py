"""
A server that lies: `restante connect` reports what is wrong and stays safe.

It writes nothing outside its folder, acknowledges only files that it has, sends its token to no
other server, uses bounded memory, and continues when the server is honest again.
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
from restante.delivery.rules import MAX_FILE_BYTES
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
    """Has a few files for one workspace, and answers honestly except where a test overrides it."""

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
        """The feed row of a file."""
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
    """The feed row of a message."""
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
    """The answer of a download, with the hash of the real content."""
    digest = base64.b64encode(hashlib.sha256(CONTENT).digest()).decode()
    return http(status, sent, **{"repr_digest": f"sha-256=:{digest}:"} | headers)


def always(said: bytes) -> Saying:
    return lambda _asked: said


def endless(piece: bytes, *, pause_seconds: float = 0) -> Saying:
    """An answer that never ends."""

    async def pieces() -> AsyncIterator[bytes]:
        yield http(200, content_length=None) + b"["
        while True:
            yield piece
            await asyncio.sleep(pause_seconds)

    return lambda _asked: pieces()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a space in its name, next to a file that must not change."""
    (tmp_path / "beside").write_text("mine")
    return tmp_path / "an inbox"


@contextmanager
def connecting(root: Path, server: Impostor, *flags: str) -> Iterator[Connect]:
    """A `restante connect` with stored credentials for this server."""
    with Folder.open(root) as folder:
        folder.keep(Credentials(server.url, WorkspaceId(WORKSPACE), TOKEN))
    with Connect(root, server.url, *flags) as connect:
        yield connect.begin()


def assert_nothing_outside(root: Path) -> None:
    """Every file is in the folder or does not exist."""
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
        "Busy. Trying again.",
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
async def test_a_lie_is_reported_and_does_no_harm(root: Path, lie: str):
    says, sentence = LIES[lie]
    server = Server(says)
    async with impostor(server) as other:
        with connecting(root, other) as ana:
            await asyncio.to_thread(ana.until_said, sentence)

            assert ana.memory_mib("VmHWM") < MEMORY_MIB
            assert await asyncio.to_thread(ana.stop) == 0

    assert "Traceback" not in ana.said
    # If only the feed lies, the list of pending uploads may still bring the file.
    assert len(set(server.acked)) == len(ana.names())
    assert all(path.read_bytes() == CONTENT for path in ana.uploads.iterdir())
    assert "content" not in says or not server.acked
    assert_nothing_outside(root)


@pytest.mark.parametrize(
    "lie", ["garbage", "a login page", "gone for ever", "another file", "rows without end"]
)
async def test_once_exits_with_1_and_a_message(root: Path, lie: str):
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
async def test_a_redirect_is_not_followed(root: Path, kind: str):
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
async def test_a_file_above_the_limit_is_not_fetched(root: Path, size: int):
    server = Server(size=size)
    async with impostor(server) as other:
        with connecting(root, other) as ana:
            await asyncio.to_thread(ana.until_said, f"this side accepts at most {MAX_FILE_BYTES}")

    assert not server.acked
    assert "content" not in {kind_of(asked) for asked in other.asked}


async def test_an_endless_feed_needs_bounded_memory(root: Path):
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


async def test_once_ends_although_the_server_announces_more_rows(root: Path):
    """Rows that never come are not waited for."""
    promising = {"X_Restante_Latest_Seq": "9" * 17}
    server = Server({"feed": always(http(200, [], **promising))}, names=())
    async with impostor(server) as other:
        with connecting(root, other, "--once") as ana:
            assert await asyncio.to_thread(ana.wait) == 0


async def test_deeply_nested_messages_do_not_end_it(root: Path):
    """Each message is nested deeper, until its page cannot be decoded."""

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


async def test_a_hostile_method_name_does_not_break_the_command(root: Path):
    """An environment variable cannot contain a NUL, and its length is limited."""
    rows = [row_of(1, {}, "a\0b"), row_of(2, {}, "m" * 500_000)]
    server = Server({"feed": lambda asked: http(200, [] if asked.query.get("wait") else rows)}, ())
    async with impostor(server) as other:
        with connecting(root, other, "--once", "--on-message", "printenv RESTANTE_METHOD") as ana:
            code = await asyncio.to_thread(ana.wait)

    assert code == 0, ana.said[:1000]
    assert "  ab\n" in ana.said


async def test_an_endless_list_of_pending_files_is_refused(root: Path):
    again = {"uploads": [Server()._pending(0)], "next_after": str(uuid4())}
    server = Server({"feed": always(http(200, [])), "pending": always(http(200, again))})
    async with impostor(server) as other:
        with connecting(root, other) as ana:
            await asyncio.to_thread(ana.until_said, "list of pending uploads does not advance")


async def test_a_very_slow_answer_is_cut_off(root: Path, tmp_path: Path):
    """No read times out, but the whole answer would take a year."""
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


async def test_it_continues_when_the_server_is_honest_again(root: Path):
    server = Server({"feed": always(http(200, b"<html>")), "content": always(content(b"no"))})
    async with impostor(server) as other:
        with connecting(root, other) as ana:
            await asyncio.to_thread(ana.until_said, "web page")
            del server.says["feed"]
            await asyncio.to_thread(ana.until_said, "not taken: report.pdf")
            del server.says["content"]
            await asyncio.to_thread(ana.until_received, "report.pdf")

    assert ana.path_of(NAME).read_bytes() == CONTENT
    assert len(server.acked) == 1


async def test_a_refused_token_ends_it_with_instructions(root: Path):
    refused = http(401, {"error": "No.", "code": "not_authenticated"})
    async with impostor(Server({"feed": always(refused)})) as other:
        with connecting(root, other) as ana:
            code = await asyncio.to_thread(ana.wait)

    assert code == 1
    assert "no longer accepts the token of this workspace" in ana.said
    assert f"--dir '{root}' --new-token`, which asks for it" in ana.said
