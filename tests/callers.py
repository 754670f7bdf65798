"""Clients of a server: workspaces with tokens, and raw sockets."""

import asyncio
import hashlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

from multidict import CIMultiDict
from sites import ADMIN_TOKEN, Site

BOUNDARY = "the-boundary-of-the-tests"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


ADMIN = bearer(ADMIN_TOKEN)


class Answer(NamedTuple):
    """A complete answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(site: Site, method: str, path: str, **options: Any) -> Answer:
    """One request and its whole answer."""
    async with site.http.request(method, path, **options) as answer:
        return Answer(answer.status, CIMultiDict(answer.headers), await answer.read())


async def until_refused(asked: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """
    The answers up to the first refusal, as long as there is one.

    An allowance per minute grows while slow requests run: those after the refusal may be accepted.
    """
    answers: list[Answer] = []
    for one in asked:
        answers.append(await one)
        if answers[-1].status != 200:
            break
    return answers


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a form, exactly as it is sent."""

    content: bytes = b"hello"
    name: str | None = "a.txt"
    mimetype: str | None = "text/plain"
    field: str = "files"
    headers: Sequence[bytes] = ()  # instead of those that follow from the above

    def lines(self) -> list[bytes]:
        if self.headers:
            return list(self.headers)
        named = "" if self.name is None else f'; filename="{self.name}"'
        lines = [f'Content-Disposition: form-data; name="{self.field}"{named}'.encode()]
        if self.mimetype is not None:
            lines.append(f"Content-Type: {self.mimetype}".encode())
        return lines


def form(*parts: Part, closed: bool = True) -> bytes:
    """A multipart body."""
    delimiter = b"--" + BOUNDARY.encode()
    pieces: list[bytes] = []
    for part in parts:
        pieces += [delimiter, b"\r\n", b"\r\n".join(part.lines()), b"\r\n\r\n", part.content]
        pieces.append(b"\r\n")
    if closed:
        pieces += [delimiter, b"--\r\n"]
    return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class Caller:
    """A registered workspace and its requests."""

    site: Site
    id: str
    token: str

    @property
    def path(self) -> str:
        return f"/workspaces/{self.id}"

    async def ask(self, method: str, path: str, **options: Any) -> Answer:
        """A request below the path of the workspace, with its token."""
        headers = {**bearer(self.token), **options.pop("headers", {})}
        return await ask(self.site, method, self.path + path, headers=headers, **options)

    async def send(self, body: bytes, headers: Mapping[str, str] | None = None) -> Answer:
        """Upload a body as it is."""
        headers = {"Content-Type": FORM, **(headers or {})}
        return await self.ask("POST", "/chat/uploads", data=io.BytesIO(body), headers=headers)

    async def upload(self, *parts: Part, **headers: str) -> Answer:
        """Upload parts; a header's name is written with _ for -."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.send(form(*parts), named)

    async def staged(self, *parts: Part) -> list[str]:
        """Upload parts that must be accepted; their file ids."""
        answer = await self.upload(*(parts or [Part()]))
        assert answer.status == 200, answer.body
        return [file["uri"].rpartition("/")[2] for file in answer.json["files"]]

    async def feed(self, **query: Any) -> list[dict[str, Any]]:
        """The rows of the feed."""
        answer = await self.read_feed(**query)
        assert answer.status == 200, answer.body
        return answer.json

    async def read_feed(self, **query: Any) -> Answer:
        params = {name: str(value) for name, value in query.items()}
        return await self.ask("GET", "/activity", params=params)

    async def fetch(self, file_id: str, method: str = "GET", **headers: str) -> Answer:
        """The content; a header's name is written with _ for -."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.ask(method, f"/pending-uploads/{file_id}/content", headers=named)

    async def ack(self, file_id: str) -> Answer:
        return await self.ask("POST", f"/pending-uploads/{file_id}/ack")

    async def waiting(self, **query: Any) -> Answer:
        params = {name: str(value) for name, value in query.items()}
        return await self.ask("GET", "/pending-uploads", params=params)

    async def message(self, body: Mapping[str, Any], *, to: "Caller", **headers: str) -> Answer:
        """Send a message to another workspace in this one's name."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await ask(
            self.site,
            "POST",
            f"{to.path}/a2a",
            json=body,
            headers={**bearer(self.token), **named},
        )


async def register(site: Site, *, headers: Mapping[str, str] | None = None, **body: Any) -> Answer:
    """Register a workspace; by default a poll workspace with a new id."""
    given = {"id": str(uuid4()), "delivery_mode": "poll", "agent_card": {"name": "tester"}}
    sent = {name: value for name, value in (given | body).items() if value is not ...}
    return await ask(site, "POST", "/registry/register", json=sent, headers=headers)


async def registered(site: Site, **body: Any) -> Caller:
    """A new workspace."""
    workspace_id = body.setdefault("id", str(uuid4()))
    answer = await register(site, headers=ADMIN, **body)
    assert answer.status == 200, answer.body
    return Caller(site, workspace_id, answer.json["auth_token"])


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes that differ when a piece is missing, doubled or moved."""
    block = b"".join(hashlib.sha256(f"{seed}.{n}".encode()).digest() for n in range(33))
    return (block * (size // len(block) + 1))[:size]


async def everything(connection: Any, workspace_id: str | None = None) -> dict[str, Any]:
    """Everything that is stored, or that is of one workspace; without unreachable chunks."""
    tables = {
        "uploads": "select * from uploads {where} order by workspace_id, file_id",
        "feed": "select * from feed {where} order by workspace_id, seq",
        # Unreachable chunks count as written.
        "feeds": "select workspace_id, last_seq, trimmed_seq, acked_seq, waiting_bytes, "
        "waiting_files, reserved_bytes, reserved_files, feed_bytes from feeds {where} "
        "order by workspace_id",
        "message_ids": "select * from message_ids {where} order by workspace_id, digest",
        "answers": "select * from answers {where} order by workspace_id, idempotency_key",
        "reservations": "select * from reservations {where} order by id",
        "chunks": "select workspace_id, file_id, seq, md5(bytes) from chunks "
        "join uploads using (bucket, workspace_id, file_id) {where} "
        "order by workspace_id, file_id, seq",
        "workspaces": "select * from workspaces {own} order by id",
    }
    where = f"where workspace_id = '{workspace_id}'" if workspace_id else ""
    own = f"where id = '{workspace_id}'" if workspace_id else ""
    return {
        name: [tuple(row) for row in await connection.fetch(query.format(where=where, own=own))]
        for name, query in tables.items()
    }


async def waits_for_a_lock(connection: Any, sessions: int = 1) -> bool:
    """Whether so many sessions of this database wait for a lock."""
    blocked = await connection.fetchval(
        "select count(*) from pg_stat_activity"
        " where wait_event_type = 'Lock' and datname = current_database()"
    )
    return blocked >= sessions


class Wire:
    """A socket to the server, for what an HTTP client would never send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """Send; raises ConnectionError once the server has closed."""
        self._writer.write(data)
        await self._writer.drain()

    @property
    def ports(self) -> tuple[int, int]:
        """Ours and the server's."""
        ours, servers = (self._writer.get_extra_info(f"{end}name") for end in ("sock", "peer"))
        return ours[1], servers[1]

    def half_close(self) -> None:
        """Nothing more will be sent."""
        self._writer.write_eof()

    async def head(self) -> Answer:
        """Read the head of an answer; interim answers are skipped."""
        while True:
            lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(lines[0].split(" ")[1])
            if status >= 200:
                break
        headers = CIMultiDict[str]()
        for name, _, value in (line.partition(": ") for line in lines[1:] if line):
            headers.add(name, value)
        return Answer(status, headers, b"")

    async def answer(self) -> Answer:
        """Read a whole answer."""
        head = await self.head()
        size = int(head.headers["Content-Length"])
        return head._replace(body=await self._reader.readexactly(size))

    async def until(self, end: bytes) -> bytes:
        return await self._reader.readuntil(end)

    async def read(self, size: int) -> bytes:
        return await self._reader.readexactly(size)

    async def rest(self) -> bytes:
        """Everything until the server closes the connection."""
        return await self._reader.read()

    async def is_closed(self) -> bool:
        """Discard everything until the server closes the connection."""
        with suppress(ConnectionError):
            while await self._reader.read(65536):
                pass
        return True

    def close(self) -> None:
        """Abort the connection."""
        self._writer.transport.abort()


@asynccontextmanager
async def wire_to(server: Site | str, *, source: str | None = None) -> AsyncIterator[Wire]:
    """A connection to a site, or to a URL; all of 127.0.0.0/8 are addresses of this machine."""
    where = urlsplit(server if isinstance(server, str) else server.url)
    reader, writer = await asyncio.open_connection(
        where.hostname, where.port, local_addr=(source, 0) if source else None
    )
    try:
        async with asyncio.timeout(20):
            yield Wire(reader, writer)
    finally:
        writer.close()


def request_head(
    method: str, path: str, *, token: str = "", length: int | None = None, lines: Sequence[str] = ()
) -> bytes:
    """The head of a request; further lines as they are."""
    head = [f"{method} {path} HTTP/1.1", "Host: restante"]
    if token:
        head.append(f"Authorization: Bearer {token}")
    if length is not None:
        head.append(f"Content-Length: {length}")
    return "\r\n".join([*head, *lines, "", ""]).encode("latin-1")


def upload_head(
    caller: Caller, length: int | None = None, *, lines: Sequence[str] = (f"Content-Type: {FORM}",)
) -> bytes:
    """The head of an upload; chunked if no length is given."""
    if length is None:
        lines = [*lines, "Transfer-Encoding: chunked"]
    path = f"{caller.path}/chat/uploads"
    return request_head("POST", path, token=caller.token, length=length, lines=lines)


def chunked(data: bytes) -> bytes:
    """One piece of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
