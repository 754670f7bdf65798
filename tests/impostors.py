"""HTTP servers with the answers of a test; they record every request."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

import msgspec
from endings import stop_listening
from multidict import CIMultiDict
from sites import Site

# Raw bytes of an answer, at once or in pieces; None aborts the connection.
Said: TypeAlias = bytes | AsyncIterator[bytes] | None


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it was received."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return {name: values[-1] for name, values in parse_qs(urlsplit(self.target).query).items()}


Answering: TypeAlias = Callable[[Asked], Said | Awaitable[Said]]


@dataclass(slots=True)
class Impostor:
    """A server with made-up answers."""

    answering: Answering
    url: str = ""
    asked: list[Asked] = field(default_factory=list[Asked])
    _connections: "dict[asyncio.Task[None], asyncio.StreamWriter]" = field(default_factory=dict)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections[connection] = writer
        connection.add_done_callback(self._connections.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, then close the connection."""
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                asked = await _request(reader)
                self.asked.append(asked)
                await self._answer(asked, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        said = self.answering(asked)
        said = await said if isinstance(said, Awaitable) else said
        if said is None:
            writer.transport.abort()
            return
        async for piece in _pieces(said):
            writer.write(piece)
            await writer.drain()

    async def end(self) -> None:
        """End the answers that are still being sent, also to clients that no longer read."""
        connections = dict(self._connections)
        for connection, writer in connections.items():
            connection.cancel()
            writer.transport.abort()
        closing = [writer.wait_closed() for writer in connections.values()]
        await asyncio.gather(*connections, *closing, return_exceptions=True)


async def _request(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = CIMultiDict[str]()
    for name, _, value in (line.partition(": ") for line in head[1:] if line):
        headers.add(name, value)
    body = await reader.readexactly(int(headers.get("Content-Length", "0")))
    return Asked(method, target, headers, body)


async def _pieces(said: bytes | AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if isinstance(said, bytes):
        yield said
        return
    async for piece in said:
        yield piece


@asynccontextmanager
async def impostor(answering: Answering) -> AsyncIterator[Impostor]:
    """Serve on a free loopback port."""
    served = Impostor(answering)
    server = await asyncio.start_server(served.accept, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        await stop_listening(server)
        await served.end()


def http(status: int = 200, body: Any = b"", **headers: str | None) -> bytes:
    """An answer; what is not bytes becomes JSON.  A header's name is written with _ for -."""
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    given = {name.replace("_", "-").title(): value for name, value in headers.items()}
    said = {"Content-Length": str(len(content)), "Connection": "close"} | given
    lines = [f"{name}: {value}" for name, value in said.items() if value is not None]
    head = "\r\n".join([f"HTTP/1.1 {status} Said", *lines, "", ""])
    return head.encode("latin-1") + content


def one_after_another(*answers: Said) -> Answering:
    """Each request gets the next answer, and all later ones the last."""
    left = list(answers)
    return lambda _asked: left.pop(0) if len(left) > 1 else left[0]


def relay(site: Site, *, without: Collection[str] = ()) -> Callable[[Asked], Awaitable[bytes]]:
    """Forwards everything to a real server, except some headers of the requests."""

    async def passed_on(asked: Asked) -> bytes:
        headers = {name: text for name, text in asked.headers.items() if name not in without}
        async with site.http.request(
            asked.method, asked.path, params=asked.query, headers=headers, data=asked.body or None
        ) as answer:
            return http(answer.status, await answer.read(), **dict(answer.headers))

    return passed_on
