"""
A quiet workspace: it polls, receives files and messages in a steady rhythm, and notes latencies.

Each operation begins at its time, whether or not the one before has been answered, and its latency
counts from that time: a server that stalls cannot hide it by slowing the client down.
"""

import asyncio
import os
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from bench import http
from bench.server import Running, Workspace

# An operation that fails, or takes longer, counts as this long.
LIMIT_SECONDS = 5.0

# More than an idle server needs, so that operations do not wait for each other.
_SLOTS = 40
_FILE = os.urandom(10 * 1024)
# A file that was never sent cannot be fetched: there is no value.
_NEVER = [LIMIT_SECONDS] * 2
_FAILURES = (AssertionError, OSError, TimeoutError, ValueError, EOFError)

Seconds: TypeAlias = float


@dataclass(slots=True)
class Latencies:
    """The latencies of one operation, in seconds."""

    values: list[Seconds] = field(default_factory=list[Seconds])
    failed: int = 0

    def note(self, began_at: Seconds) -> None:
        self.values.append(time.monotonic() - began_at)

    def fail(self) -> None:
        self.failed += 1
        self.values.append(LIMIT_SECONDS)

    @property
    def p50(self) -> Seconds:
        return statistics.median(self.values or _NEVER)

    @property
    def p95(self) -> Seconds:
        return statistics.quantiles(self.values if len(self.values) > 1 else _NEVER, n=20)[18]


Measured: TypeAlias = dict[str, Latencies]


class Slot:
    """A workspace with its connections; one operation at a time uses it."""

    def __init__(self, server: Running, workspace: Workspace) -> None:
        self._port = server.port
        self._path = f"/workspaces/{workspace.id}"
        self._token = workspace.token
        self._connection: http.Connection | None = None
        self._waiting: http.Connection | None = None
        self._last_seq = 0

    async def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        return await self._answer(http.request(method, self._path + path, self._token, body))

    async def send_file(self) -> str:
        """Send a file; returns its id."""
        request = http.upload(f"{self._path}/chat/uploads", self._token, _FILE)
        answer = msgspec.json.decode(await self._answer(request))
        return answer["files"][0]["uri"].rpartition("/")[2]

    async def _answer(self, request: bytes) -> bytes:
        """Anything but a 200 is a failure."""
        # The server closes a connection that was idle while an attack was prepared.
        if self._connection is None or self._connection.reader.at_eof():
            self._connection = await http.Connection.open(self._port)
        status, body = await self._connection.ask(request)
        assert status == 200, status
        return body

    async def wait(self) -> None:
        """Begin a long poll, unless one waits already."""
        if self._waiting is None:
            self._waiting = await http.Connection.open(self._port)
            path = f"{self._path}/activity?since_seq={self._last_seq}&wait=60"
            self._waiting.writer.write(http.request("GET", path, self._token))

    async def hear(self) -> None:
        """Read what the long poll is answered, and close its connection."""
        assert self._waiting is not None
        status, length = await self._waiting.head()
        rows = msgspec.json.decode(await self._waiting.reader.readexactly(length))
        assert status == 200
        self._last_seq = rows[-1]["seq"]
        self._waiting.close()
        self._waiting = None

    def close(self) -> None:
        for connection in (self._connection, self._waiting):
            if connection is not None:
                connection.close()
        self._connection = self._waiting = None


@dataclass(frozen=True, slots=True)
class Rhythm:
    """An operation and how often it begins."""

    operation: Callable[[Slot, Seconds, Measured], Awaitable[None]]
    per_second: float
    free: "asyncio.Queue[Slot]"

    async def keep(self, seconds: Seconds, measured: Measured) -> None:
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(int(seconds * self.per_second)):
                due = started + number / self.per_second
                await asyncio.sleep(due - time.monotonic())
                group.create_task(self._begin(due, measured))

    async def _begin(self, due: Seconds, measured: Measured) -> None:
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                await self._operate(await self.free.get(), due, measured)
        except _FAILURES:
            measured[self.operation.__name__].fail()

    async def _operate(self, slot: Slot, due: Seconds, measured: Measured) -> None:
        try:
            await self.operation(slot, due, measured)
        except (*_FAILURES, asyncio.CancelledError):
            slot.close()
            raise
        finally:
            self.free.put_nowait(slot)


async def poll(slot: Slot, due: Seconds, measured: Measured) -> None:
    assert await slot.ask("GET", "/activity?since_seq=0") == b"[]"
    measured["poll"].note(due)


async def send(slot: Slot, due: Seconds, measured: Measured) -> None:
    """Send a file; then fetch and acknowledge it."""
    file_id = await slot.send_file()
    measured["send"].note(due)
    began_at = time.monotonic()
    assert await slot.ask("GET", f"/pending-uploads/{file_id}/content") == _FILE
    measured["fetch"].note(began_at)
    began_at = time.monotonic()
    await slot.ask("POST", f"/pending-uploads/{file_id}/ack")
    measured["ack"].note(began_at)


async def message(slot: Slot, due: Seconds, measured: Measured) -> None:
    """From sending a message to the answer of the long poll that waits for it."""

    async def heard() -> None:
        await slot.hear()
        measured["message"].note(due)

    await slot.wait()
    await asyncio.gather(slot.ask("POST", "/a2a", http.message()), heard())
    await slot.wait()


async def push(slot: Slot, due: Seconds, measured: Measured) -> None:
    """A message to a workspace that is called, and answers at once."""
    await slot.ask("POST", "/a2a", http.message())
    measured["push"].note(due)


RATES = {poll: 20, send: 8, message: 8}


class Quiet:
    """The quiet client; a few workspaces for each operation, so that none waits for the other."""

    def __init__(self, server: Running, push_url: str | None) -> None:
        self._rhythms = [
            Rhythm(operation, rate, _slots(server)) for operation, rate in RATES.items()
        ]
        if push_url:
            slots = _slots(server, delivery_mode="push", url=push_url)
            self._rhythms.append(Rhythm(push, 8, slots))

    @classmethod
    @asynccontextmanager
    async def opened(cls, server: Running, *, pushes: bool) -> AsyncIterator["Quiet"]:
        """With `pushes`, it is called too, and answers at once."""
        if not pushes:
            yield cls(server, None)
            return
        async with await asyncio.start_server(_answer_at_once, "127.0.0.1", 0) as place:
            yield cls(server, f"http://127.0.0.1:{place.sockets[0].getsockname()[1]}/")

    async def measure(self, seconds: Seconds) -> Measured:
        """Work for so long; returns the latencies of each operation."""
        measured: Measured = defaultdict(Latencies)
        async with asyncio.TaskGroup() as group:
            for rhythm in self._rhythms:
                group.create_task(rhythm.keep(seconds, measured))
        return measured


def _slots(server: Running, **registration: Any) -> "asyncio.Queue[Slot]":
    free: asyncio.Queue[Slot] = asyncio.LifoQueue()
    for _ in range(_SLOTS):
        free.put_nowait(Slot(server, server.register(**registration)))
    return free


async def _answer_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
    await writer.drain()
    writer.close()
