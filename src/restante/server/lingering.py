"""
Closes a connection so that its client can still read the answer.

If a socket is closed while the client sends, the client's kernel discards what it has received, and
the answer with it.  So we shut down our side only, and discard what arrives for a while.  This is
done for every answer that is complete before its request is: refusals, and bodies that no handler
reads.
"""

import asyncio
import weakref
from contextlib import suppress
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from restante.server.header_names import with_usual_names

# A client that connects again as soon as it is cut off would otherwise cost more than any other.
_STOPPED_SECONDS = 1.0

# Some clients send all of a body before they read, and the files that are offered have 100 MB.
MAX_LINGER_BYTES = 128 * 1024 * 1024
MAX_LINGER_SECONDS = 30.0

_INTERIM = b"HTTP/1.1 1"

# Of all connections together.  It is more than a refused upload needs, and little for a processor.
_DISCARDED_BYTES_PER_SECOND = 64 * 1024 * 1024


class DiscardPace:
    """How fast all connections that linger are read."""

    def __init__(self) -> None:
        self._due = 0.0

    def next(self, size: int, *, now: float) -> float:
        """How many seconds a connection waits that has just discarded so much."""
        self._due = max(self._due, now) + size / _DISCARDED_BYTES_PER_SECOND
        return self._due - now


class LingeringHttp(HttpToolsProtocol):
    """Uvicorn's protocol, which by itself closes at once, or discards a body without an end."""

    _lingering: asyncio.TimerHandle | None = None
    _bytes_left = 0  # that are discarded before the connection is cut off
    _running: RequestResponseCycle | None = None  # `cycle` is the one that was parsed last

    def __init__(self, *args: Any, discard_pace: DiscardPace, **options: Any) -> None:
        super().__init__(*args, **options)
        self._discard_pace = discard_pace

    @property
    def is_lingering(self) -> bool:
        return self._lingering is not None

    def linger(self, *, max_seconds: float | None = None, max_bytes: int | None = None) -> None:
        """Nothing more will be sent: close when the client does, or after a while."""
        if not self.is_lingering and not self.transport.is_closing():
            self._bytes_left = max_bytes or MAX_LINGER_BYTES
            self._lingering = self.loop.call_later(
                max_seconds or MAX_LINGER_SECONDS, self.transport.abort
            )
            with suppress(OSError):  # the client has closed already
                self.transport.write_eof()
            self.flow.resume_reading()
            self.disconnect_handler()

    def stop(self) -> None:
        """Read and send nothing more, and close a moment later."""
        if not self.is_lingering and not self.transport.is_closing():
            self._lingering = self.loop.call_later(_STOPPED_SECONDS, self.transport.abort)
            self.flow.pause_reading()
            self.disconnect_handler()

    def disconnect_handler(self) -> None:
        """Whatever it sends from now on is discarded, and no pipelined request begins."""
        self.pipeline.clear()
        for cycle in (self._running, self.cycle):
            if cycle and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def shutdown(self) -> None:
        """The server stops; a connection that waits to be closed is not waited for."""
        if self.is_lingering or (self.cycle and self.cycle.disconnected):
            self.transport.abort()
        else:
            super().shutdown()

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.cycle.transport = CycleTransport(self, self.cycle)  # pyright: ignore[reportAttributeAccessIssue] - it has all methods that are called

    def on_response_complete(self) -> None:
        if not self.is_lingering:
            super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        if not self.is_lingering:
            super().data_received(data)
            return
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            self.transport.abort()
            return
        self.flow.pause_reading()
        seconds = self._discard_pace.next(len(data), now=self.loop.time())
        self.loop.call_later(seconds, self._discard_more)

    def _discard_more(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
        self.disconnect_handler()
        super().connection_lost(exc)
        self.break_circles()

    def break_circles(self) -> None:
        """Be freed now, with the bodies that nobody has read, and not by a later collection."""
        self.parser = None  # pyright: ignore[reportAttributeAccessIssue] - as uvicorn does
        self.cycle = self.scope = self._running = None  # pyright: ignore[reportAttributeAccessIssue] - uvicorn begins with None too


class CycleTransport:
    """The transport as one request and its answer see it."""

    def __init__(self, protocol: LingeringHttp, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = weakref.ref(cycle)  # which refers to us
        self._head_is_due = True

    @property
    def body_is_due(self) -> bool:
        """Whether the client is still sending the request."""
        cycle = self._cycle()
        return cycle is not None and cycle.more_body

    def write(self, data: bytes) -> None:
        """Send what uvicorn writes: the head in one piece, and then the body."""
        if not self._protocol.is_lingering and not self.is_closing():
            if self._head_is_due:
                self._head_is_due = data.startswith(_INTERIM)
                data = with_usual_names(data)
            self._protocol.transport.write(data)

    def is_closing(self) -> bool:
        return self._protocol.transport.is_closing()

    def close(self) -> None:
        if self.body_is_due:
            self._protocol.linger()
        else:
            self._protocol.transport.close()

    def abort(self) -> None:
        self._protocol.transport.abort()
