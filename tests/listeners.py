"""
Things that listen on loopback beside the process under test: on a loop in a thread of their own, so
that a test can wait for the process meanwhile.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

T = TypeVar("T")

_GONE = (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it came; the names of its headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    raw: bytes

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> Self:
        """The next request of a connection, with its body."""
        head = await reader.readuntil(b"\r\n\r\n")
        line, *rest = head.decode("latin-1").rstrip().split("\r\n")
        method, path, _ = line.split(" ")
        pairs = (field.partition(":") for field in rest)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return cls(method, path, headers, head + body)


def reserved_port() -> socket.socket:
    """A port that nobody else is given; who sets SO_REUSEADDR can listen on it all the same."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


class Listener:
    """Listens on one port from beginning to end, except while it is cut off."""

    def __init__(self) -> None:
        self._reserved = reserved_port()
        self.port: int = self._reserved.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.requests: list[Request] = []
        self.changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._connections = set[asyncio.Task[None]]()

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stop_listening())
        self._run(self._drop_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._reserved.close()

    def until(self, holds: Callable[[], Any], *, seconds: float, what: str) -> None:
        """Wait until something holds that changes with a request."""
        with self.changed:
            assert self.changed.wait_for(holds, seconds), f"{what} within {seconds} s"

    def count(self, method: str, ending: str) -> int:
        """How many requests of a kind have come."""
        return sum(r.method == method and r.path.endswith(ending) for r in self.requests)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _stop_listening(self) -> None:
        if self._server:
            self._server.close()
        self._server = None

    async def _drop_all(self) -> None:
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._until_lost(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _until_lost(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection while its client is there."""
        asked = asyncio.Queue[Request]()
        reading = asyncio.create_task(self._read_requests(reader, asked))
        answering = asyncio.create_task(self._answer_each(asked, writer))
        try:
            await asyncio.wait({reading, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, answering):
                task.cancel()
            await asyncio.gather(reading, answering, return_exceptions=True)
            await _closed(writer)

    async def _read_requests(
        self, reader: asyncio.StreamReader, asked: "asyncio.Queue[Request]"
    ) -> None:
        with suppress(*_GONE):
            while True:
                request = await Request.read(reader)
                with self.changed:
                    self.requests.append(request)
                    self.changed.notify_all()
                asked.put_nowait(request)

    async def _answer_each(
        self, asked: "asyncio.Queue[Request]", writer: asyncio.StreamWriter
    ) -> None:
        raise NotImplementedError


async def _closed(writer: asyncio.StreamWriter) -> None:
    """Send what was written, unless nobody reads it any more."""
    writer.close()
    try:
        with suppress(OSError):
            async with asyncio.timeout(1):
                await writer.wait_closed()
    except TimeoutError:
        writer.transport.abort()
