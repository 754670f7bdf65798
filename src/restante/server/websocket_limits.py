"""Limits what a WebSocket may cost: the time until it is accepted, and the frames that it sends."""

from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from restante.errors import BadRequest
from restante.server.connections import Connections, Place
from restante.server.raw_answers import identified, raw_answer
from restante.workspaces.concurrency import PLACE

MAX_HANDSHAKE_SECONDS = 30.0

# Watchers have nothing to send; this is room for pings and pongs.
MAX_FRAMES = 256
FRAMES_PER_SECOND = 8

# Frames of a few bytes cost most; a piece has at most so many that nobody else notices.
_PIECE = 1024
_POLICY_VIOLATION = 1008

_NOT_UNDERSTOOD = raw_answer("400 Bad Request", "This is not a WebSocket request.", BadRequest.code)


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """Uvicorn's protocol, which by itself waits for ever for what it did not understand."""

    def __init__(self, *args: Any, connections: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._connections = connections
        self._place: Place | None = None
        self._frames = 0.0
        self._counted_at = self.loop.time()
        self._timer = self.loop.call_later(MAX_HANDSHAKE_SECONDS, self._on_timeout)

    def take_place(self, place: Place | None) -> None:
        """Take over the connection from the protocol that read the request."""
        self._place = place
        if self.handshake_initiated and not self.handshake_complete:
            cast("dict[str, Any]", self.scope)[PLACE] = place
            # Nothing is read before the application has accepted; its first `receive` resumes.
            self.read_paused = True
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        if self._place:
            self._place.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.handshake_initiated:
            self._shake_hands(data)
            return
        for start in range(0, len(data), _PIECE):
            if not self.transport.is_closing():
                super().data_received(data[start : start + _PIECE])

    def _shake_hands(self, request: bytes) -> None:
        super().data_received(request)
        if not self.handshake_initiated:
            delays, network = self._connections.refusal_delays, self._place and self._place.network
            self.loop.call_later(delays.next(network, now=self.loop.time()), self._refuse)

    def _refuse(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(identified(_NOT_UNDERSTOOD, self.client and self.client[0]))
            self.transport.close()

    def handle_events(self) -> None:
        now = self.loop.time()
        spent = self._frames - (now - self._counted_at) * FRAMES_PER_SECOND
        self._frames, self._counted_at = max(0.0, spent) + len(self.conn.events), now
        super().handle_events()
        if self._frames > MAX_FRAMES and not self.transport.is_closing():
            self._connections.metrics.cut_off.labels("noisy_watcher").inc()
            self.conn.fail(_POLICY_VIOLATION, "too many frames")
            self.handle_parser_exception()

    def _on_timeout(self) -> None:
        if not self.handshake_complete:
            self._connections.metrics.cut_off.labels("slow_request").inc()
            self.transport.abort()
