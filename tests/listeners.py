"""
Servers on loopback for the process under test: each runs on an event loop in a thread of its own,
so that a test can wait for the process meanwhile.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

T = TypeVar("T")

_RUN_SECONDS = 60
_END_SECONDS = 10
_GONE = (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it was received; header names are in lower case."""

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
    """A port that the system gives to nobody else; we can still listen on it, with SO_REUSEADDR."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


class Listener:
    """Listens on one port from beginning to end, except while it is stopped."""

    def __init__(self) -> None:
        self._reserved = reserved_port()
        self.port: int = self._reserved.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.requests: list[Request] = []
        self.changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._listening: socket.socket | None = None
        self._connections: dict[asyncio.Task[None], socket.socket] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._reserved.close()

    def until(self, holds: Callable[[], Any], *, seconds: float, what: str) -> None:
        """Wait for a condition that changes with a request."""
        with self.changed:
            assert self.changed.wait_for(holds, seconds), f"{what} within {seconds} s"

    def count(self, method: str, ending: str) -> int:
        """How many requests of a kind were received."""
        return sum(r.method == method and r.path.endswith(ending) for r in self.requests)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_RUN_SECONDS)

    async def _listen(self) -> None:
        """Listen; `asyncio.start_server` would lose connections that are accepted at its end."""
        self._listening = socket.create_server(("127.0.0.1", self.port), backlog=100)
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._accept, self._listening)

    async def _stop_listening(self) -> None:
        if self._listening:
            self._loop.remove_reader(self._listening)
            self._listening.close()
        self._listening = None

    async def _drop_all(self) -> None:
        connections = dict(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        for accepted in connections.values():
            accepted.close()  # a task that is cancelled before its first step has not done it

    async def _end(self) -> None:
        """Close everything."""
        await self._stop_listening()
        await self._drop_all()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=_END_SECONDS)
        await asyncio.sleep(0)  # a closed transport closes its socket in the next step of the loop

    def _accept(self, listening: socket.socket) -> None:
        try:
            accepted, _ = listening.accept()
        except OSError:  # the client has left
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = self._loop.create_task(self._until_lost(accepted))
        self._connections[connection] = accepted
        connection.add_done_callback(self._connections.pop)

    async def _until_lost(self, accepted: socket.socket) -> None:
        """Serve a connection until its client disconnects."""
        reader, writer = await asyncio.open_connection(sock=accepted)
        asked = asyncio.Queue[Request]()
        reading = asyncio.create_task(self._read_requests(reader, asked))
        answering = asyncio.create_task(self._answer_each(asked, writer))
        try:
            await asyncio.wait({reading, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, answering):
                task.cancel()
            try:
                await asyncio.gather(reading, answering, return_exceptions=True)
            finally:  # also when this task is cancelled meanwhile
                await closed(writer)

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


async def closed(writer: asyncio.StreamWriter) -> None:
    """Close a connection; what was written is sent, unless nobody reads it."""
    writer.close()
    try:
        with suppress(OSError):
            async with asyncio.timeout(1):
                await writer.wait_closed()
    except TimeoutError:
        writer.transport.abort()
