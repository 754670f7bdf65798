"""Push workspaces of the tests: real HTTP servers on loopback, and their senders."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

from aiohttp import web
from endings import stop_listening
from sites import Site

MIB = 1024 * 1024
FORM = "multipart/form-data; boundary=xyzzy"
BODY = b'--xyzzy\r\nContent-Disposition: form-data; name="files"\r\n\r\nhello\r\n--xyzzy--\r\n'
MESSAGE = (
    b'{"jsonrpc": "2.0", "method": "message/send", "id": 1, "params": {"message": '
    b'{"role": "user", "messageId": "m", "parts": [{"kind": "text", "text": "\xc3\xa9"}]}}}'
)
UNREACHABLE = {"error": "workspace unreachable", "code": "workspace_unreachable"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def receiver(handler: Handler) -> AsyncIterator[str]:
    """A workspace that can be called; yields its URL."""
    app = web.Application(client_max_size=100 * MIB)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    assert runner.server is not None
    server = await asyncio.get_running_loop().create_server(runner.server, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await stop_listening(server)
        await runner.cleanup()


@asynccontextmanager
async def raw_receiver(answer: bytes) -> AsyncIterator[str]:
    """A workspace that answers every request with these bytes and closes the connection."""

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await stop_listening(server)


@dataclass(frozen=True, slots=True)
class Workspace:
    """A registered push workspace."""

    id: UUID
    token: str
    secret: str

    @property
    def uploads(self) -> str:
        return f"/workspaces/{self.id}/chat/uploads"

    @property
    def messages(self) -> str:
        return f"/workspaces/{self.id}/a2a"

    @property
    def auth(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


async def registered(site: Site, url: str, mode: str = "push") -> Workspace:
    chosen = uuid4()
    given = {"id": str(chosen), "delivery_mode": mode, "url": url, "agent_card": {"name": "w"}}
    async with site.http.post("/registry/register", json=given) as answer:
        assert answer.status == 200
        got = await answer.json()
    return Workspace(chosen, got["auth_token"], got["platform_inbound_secret"])


async def upload(site: Site, to: Workspace, body: Any = BODY, **headers: str) -> tuple[int, bytes]:
    sent = {**to.auth, "Content-Type": FORM, **headers}
    async with site.http.post(to.uploads, data=body, headers=sent) as answer:
        return answer.status, await answer.read()


async def send_message(site: Site, to: Workspace) -> tuple[int, bytes]:
    sent = {**to.auth, "Content-Type": "application/json"}
    async with site.http.post(to.messages, data=MESSAGE, headers=sent) as answer:
        return answer.status, await answer.read()


async def in_pieces(size: int) -> AsyncIterator[bytes]:
    piece = bytes(64 * 1024)
    for _ in range(size // len(piece)):
        yield piece


@asynccontextmanager
async def half_sent(
    site: Site, workspace: Workspace, length: int, body: bytes
) -> AsyncIterator[asyncio.StreamReader]:
    """A sender that begins a request and disconnects at the end."""
    where = urlsplit(site.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = (
        f"POST {workspace.uploads} HTTP/1.1\r\nHost: r\r\nContent-Type: {FORM}\r\n"
        f"Authorization: Bearer {workspace.token}\r\nContent-Length: {length}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()
