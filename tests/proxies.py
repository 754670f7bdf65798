"""A network with faults: a proxy that drops, delays, truncates and holds back."""

import asyncio
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from listeners import Listener, Request, closed

_PIECE = 64 * 1024
_HEAD_LIMIT = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one request and its answer."""

    is_dropped: bool = False  # the connection is closed before the request reaches the server
    is_unanswered: bool = False  # the server acts, and the connection is closed before its answer
    answer_bytes: int | None = None  # a longer body is cut there, and the connection closed
    is_stalled: bool = False  # a longer body stops there, and the connection stays open
    delay_seconds: float = 0  # before each piece of the answer


CALM = Fault()
Weather = Callable[[Request], Fault]


def calm(_request: Request) -> Fault:
    """Everything passes."""
    return CALM


def files_with(fault: Fault) -> Weather:
    """The fault for the contents of files only."""
    return lambda request: fault if request.path.endswith("/content") else CALM


def stalled_files(after: int) -> Weather:
    """The contents of files stall after so many bytes."""
    return files_with(Fault(answer_bytes=after, is_stalled=True))


class Hold:
    """Holds back what matches until it is released."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, method: str, path: str, *, answers: bool
    ) -> None:
        self.reached = threading.Event()
        self.answers = answers
        self._method = method
        self._path = re.compile(path)
        self._loop = loop
        self._released = asyncio.Event()

    def matches(self, request: Request) -> bool:
        return request.method == self._method and self._path.search(request.path) is not None

    def until_reached(self, seconds: float = 20) -> None:
        """Wait until something is held back."""
        assert self.reached.wait(seconds), f"nothing was held back within {seconds} s"

    def release(self) -> None:
        """Let everything pass."""
        self._loop.call_soon_threadsafe(self._released.set)

    async def passed(self) -> None:
        self.reached.set()
        await self._released.wait()


class Proxy(Listener):
    """A proxy of a server on 127.0.0.1; `requests` has every request that it received."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.server_port = port
        self.weather: Weather = calm
        self._holds: list[Hold] = []

    def cut(self) -> None:
        """Close every connection and refuse new ones."""
        self._run(self._stop_listening())
        self._run(self._drop_all())

    def restore(self) -> None:
        """Accept connections again."""
        self._run(self._listen())

    def drop(self) -> None:
        """Close every open connection."""
        self._run(self._drop_all())

    def hold(self, method: str, path: str, *, answers: bool = False) -> Hold:
        """Hold back requests with a matching path, or their answers."""
        hold = Hold(self._loop, method, path, answers=answers)
        self._holds.append(hold)
        return hold

    def release(self) -> None:
        """Release everything that is held back."""
        for hold in self._holds:
            hold.release()
        self._holds = []

    async def _answer_each(
        self, asked: "asyncio.Queue[Request]", writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            there, back = await asyncio.open_connection(
                "127.0.0.1", self.server_port, limit=_HEAD_LIMIT
            )
            try:
                while await self._relay(await asked.get(), there, back, writer):
                    pass
            finally:
                await closed(back)

    async def _relay(
        self,
        request: Request,
        there: asyncio.StreamReader,
        back: asyncio.StreamWriter,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Forward a request and relay its answer; False if the connection must be closed."""
        fault = self.weather(request)
        await self._held(request, answers=False)
        if fault.is_dropped:
            return False
        back.write(request.raw)
        head = await there.readuntil(b"\r\n\r\n")
        await self._held(request, answers=True)
        if fault.is_unanswered:
            return False
        writer.write(head)
        if _is_chunked(head):
            return await _relay_chunks(fault, there, writer)
        length = _content_length(head)
        most = length if fault.answer_bytes is None else fault.answer_bytes
        passing = min(length, most)
        while passing:
            await asyncio.sleep(fault.delay_seconds)
            piece = await there.read(min(_PIECE, passing))
            if not piece:
                return False
            writer.write(piece)
            await writer.drain()
            passing -= len(piece)
        if most >= length:  # the whole answer has passed
            return True
        if fault.is_stalled:
            await asyncio.Event().wait()
        return False

    async def _held(self, request: Request, *, answers: bool) -> None:
        for hold in list(self._holds):
            if hold.answers is answers and hold.matches(request):
                await hold.passed()


async def _relay_chunks(
    fault: Fault, there: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    """Relay a body whose length is not known; False if it was cut."""
    passed = 0
    while True:
        await asyncio.sleep(fault.delay_seconds)
        size = await there.readuntil(b"\r\n")
        chunk = size + await there.readexactly(int(size, 16) + len(b"\r\n"))
        passed += len(chunk)
        if fault.answer_bytes is not None and passed > fault.answer_bytes:
            return False
        writer.write(chunk)
        await writer.drain()
        if int(size, 16) == 0:
            return True


def _is_chunked(head: bytes) -> bool:
    return re.search(rb"(?i)\r\ntransfer-encoding: *chunked", head) is not None


def _content_length(head: bytes) -> int:
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return int(found[1]) if found else 0
