"""
Limits what a request may cost before a handler looks at it.

Everything that is not body is counted: the head, chunk sizes and their extensions, trailers, blank
lines.  Whenever no handler is at work, the client has a limited time to complete its next request.
"""

import asyncio
import random
import socket
from contextlib import suppress
from typing import Any, cast

from websockets.http11 import MAX_LINE_LENGTH, MAX_NUM_HEADERS

from restante.errors import BadRequest, TooManyConnections
from restante.server.connections import Connections, Place
from restante.server.lingering import LingeringHttp
from restante.server.raw_answers import identified, raw_answer
from restante.server.websocket_limits import BoundedWebSocket
from restante.workspaces.concurrency import PLACE, RECEIVED

MAX_HEAD_BYTES = 64 * 1024
MAX_HEAD_SECONDS = 30.0

# Each costs memory and a callback.  In 64 KiB there is room for 16,000, which cost 8 ms and 3 MB.
MAX_HEADERS = 256
_MAX_TRAILERS = 64  # they are ignored

# All headers about the upgrade to a WebSocket; they are parsed slowly.
MAX_UPGRADE_BYTES = 4096

# Bytes in the kernel that were not sent yet; without a limit it takes megabytes for each client.
# Bytes that are on their way do not count, so long fast lines are not slowed down.
_MAX_UNSENT_BYTES = 128 * 1024

# The parser cannot be stopped within a piece.  A small one has few pipelined requests in it.
_HEAD_PIECE = 2 * 1024
_BODY_PIECE = 16 * 1024
_MAX_HELD_BYTES = 1024 * 1024

_REFUSED_SECONDS = 2.0
_MAX_BYTES_AFTER_REFUSAL = 1024 * 1024

_TOO_LONG = raw_answer(
    "431 Request Header Fields Too Large", "The head of the request is too long.", BadRequest.code
)
_MALFORMED = raw_answer("400 Bad Request", "The request is not valid HTTP.", BadRequest.code)
_REFUSED = raw_answer(
    "503 Service Unavailable",
    "The server has too many open connections. Try again in a moment.",
    TooManyConnections.code,
    "Retry-After: 1",
)


class _TooManyHeaders(Exception):
    """Stops the parser, which then reports an error."""


class BoundedHttp(LingeringHttp):
    """Uvicorn's protocol, which by itself accepts heads and trailers of any length."""

    def __init__(self, *args: Any, connections: Connections, **options: Any) -> None:
        super().__init__(*args, discard_pace=connections.discard_pace, **options)
        self._connections = connections
        self._place: Place | None = None
        self._is_in_head = True
        self._is_upgraded = False
        self._is_broken = False  # what follows the request that is being answered is not HTTP
        self._body_bytes = 0  # of the request that is arriving
        self._other_bytes = 0
        self._trailers = 0
        self._held = b""  # received and not parsed yet
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as in the base class
        super().connection_made(transport)
        self._place = self._connections.enter(self.client[0] if self.client else "")
        _limit_unsent(transport)
        if not self._place.refused_for:
            self._begin_timer(MAX_HEAD_SECONDS)
        elif self._connections.has_room_to_refuse():
            seconds = random.uniform(_REFUSED_SECONDS / 2, _REFUSED_SECONDS)  # noqa: S311 - not a secret
            self._timer = self.loop.call_later(seconds, self._refuse_connection)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._held = b""
        if self._place:
            self._place.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_lingering:
            super().data_received(data)
            return
        if self._place and self._place.refused_for:
            self.flow.pause_reading()
            return
        rest = memoryview(self._held + data if self._held else data)
        self._held = b""
        while rest and not self._is_over:
            if self.pipeline:
                self._hold(bytes(rest))
                return
            rest = self._parse_piece(rest)
        self._limit_time()

    def _refuse_connection(self) -> None:
        """Not at once: whoever connects again without a pause would cost more than the others."""
        self.transport.write(identified(_REFUSED, self.client and self.client[0]))
        self.linger(max_seconds=_REFUSED_SECONDS, max_bytes=_MAX_BYTES_AFTER_REFUSAL)

    @property
    def _is_over(self) -> bool:
        """Whether this protocol has nothing more to parse."""
        return (
            self._is_upgraded or self._is_broken or self.is_lingering or self.transport.is_closing()
        )

    def _parse_piece(self, rest: memoryview) -> memoryview:
        size = _HEAD_PIECE if self._is_in_head else _BODY_PIECE
        piece = rest[:size]
        self._other_bytes += len(piece)  # until the parser says which of it is body
        super().data_received(cast("bytes", piece))
        if self._other_bytes > MAX_HEAD_BYTES + self._body_bytes:
            self._cut_off("long_request")
        return rest[size:]

    def _hold(self, rest: bytes) -> None:
        """Keep pipelined requests for later: each that is parsed takes memory."""
        self._held = rest
        self.flow.pause_reading()
        if len(rest) > _MAX_HELD_BYTES:
            self._cut_off("long_request")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_lingering:
            return
        if self.pipeline:
            self.flow.pause_reading()
        elif self._held:
            self.loop.call_soon(self.data_received, b"")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        scope = cast("dict[str, Any]", self.scope)
        scope[PLACE], scope[RECEIVED] = self._place, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            self._trailers += 1
            if self._trailers > _MAX_TRAILERS:
                raise _TooManyHeaders
            return
        if len(self.headers) >= MAX_HEADERS:
            raise _TooManyHeaders
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._other_bytes -= len(body)
        self._body_bytes += len(body)
        cast("dict[str, Any]", self.scope)[RECEIVED] = self._body_bytes
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head = True
        self._body_bytes = self._other_bytes = self._trailers = 0
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """Refuse here what the WebSocket protocol would leave without an answer."""
        if self._is_answering:
            self.transport.abort()  # a pipelined request; its answer would be mixed with another
            return
        if _is_too_long_to_upgrade(self.url, self.headers):
            self._cut_off("long_request")
            return
        self._is_upgraded = True
        super().handle_websocket_upgrade()
        upgraded = self.transport.get_protocol()
        assert isinstance(upgraded, BoundedWebSocket)  # noqa: S101 - as the listener has configured
        upgraded.take_place(self._place)
        self.break_circles()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's words
        if self._trailers > _MAX_TRAILERS:
            self._cut_off("long_request")
        elif self._is_answering and not self.cycle.more_body:
            self.cycle.keep_alive = False
            self._is_broken = True
        elif self._is_answering and self.cycle.response_started:
            self.transport.abort()
        else:
            has_all_headers = len(self.headers or ()) >= MAX_HEADERS
            self._refuse(_TOO_LONG if has_all_headers else _MALFORMED)

    def _refuse(self, answer: bytes) -> None:
        """Answer and close; a moment later, if this address gets many refusals."""
        if self._is_over:
            return
        self._is_broken = True
        self._stop_timer()
        self.disconnect_handler()
        delays, network = self._connections.refusal_delays, self._place and self._place.network
        self.loop.call_later(delays.next(network, now=self.loop.time()), self._say, answer)

    def _say(self, last: bytes) -> None:
        """Send the last answer on this connection."""
        if not self.transport.is_closing():
            self.transport.write(identified(last, self.client and self.client[0]))
            self.linger()

    @property
    def _is_answering(self) -> bool:
        """Whether a handler is at work, or has requests to do."""
        return bool(self.cycle) and not self.cycle.response_complete

    def _limit_time(self) -> None:
        """Uvicorn's keep-alive timeout ends with the first byte, even with that of a blank line."""
        if not self._is_answering and not self._is_over:
            self._begin_timer(MAX_HEAD_SECONDS)

    def _begin_timer(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(seconds, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        if not self.transport.is_closing():
            self._connections.metrics.cut_off.labels("slow_request").inc()
            self.transport.close()

    def _cut_off(self, reason: str) -> None:
        """Answer if nothing else is being answered, and close."""
        if self._is_over:
            return
        self._connections.metrics.cut_off.labels(reason).inc()
        if self._is_answering:
            self.stop()
        elif self._is_in_head:
            self._refuse(_TOO_LONG)
        else:
            self.transport.close()


def _is_too_long_to_upgrade(url: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
    line = max(len(url) + 32, *(len(name) + len(value) + 4 for name, value in headers))
    about_upgrade = [
        value for name, value in headers if name.startswith((b"sec-websocket", b"conn"))
    ]
    return (
        len(headers) > MAX_NUM_HEADERS
        or line > MAX_LINE_LENGTH
        or sum(map(len, about_upgrade)) > MAX_UPGRADE_BYTES
    )


def _limit_unsent(transport: asyncio.Transport) -> None:
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None:
        with suppress(OSError):  # the client is gone already
            transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, option, _MAX_UNSENT_BYTES
            )
