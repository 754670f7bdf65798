"""Limits the size of a request's head and the time it may take."""

import asyncio

from restante.server.lingering import LingeringHttp

MAX_HEAD_BYTES = 64 * 1024
MAX_HEAD_SECONDS = 30.0

# All headers about the upgrade to a WebSocket; they are parsed slowly.
MAX_UPGRADE_BYTES = 4096


def _refusal(status: str, sentence: str) -> bytes:
    body = f'{{"error":"{sentence}","code":"bad_request"}}'
    head = f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}"
    return f"HTTP/1.1 {status}\r\n{head}\r\n\r\n{body}".encode()


_TOO_LONG = _refusal("431 Request Header Fields Too Large", "The head of the request is too long.")
_MALFORMED = _refusal("400 Bad Request", "The request is not valid HTTP.")
_NO_WEBSOCKET = _refusal("400 Bad Request", "This head cannot begin a WebSocket.")


class BoundedHttp(LingeringHttp):
    """Uvicorn's protocol, which by itself accepts a head of any length."""

    _head_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as in the base class
        super().connection_made(transport)
        self._begin_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_TOO_LONG)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's words
        self._refuse(_MALFORMED)

    def _refuse(self, answer: bytes) -> None:
        if not self.is_lingering:
            self.transport.write(answer)
            self.linger()

    def handle_websocket_upgrade(self) -> None:
        """Refuse a head that the WebSocket protocol would not answer, or would parse too slowly."""
        parsed = [
            value for name, value in self.headers if name.startswith((b"sec-websocket", b"conn"))
        ]
        if sum(map(len, parsed)) > MAX_UPGRADE_BYTES:
            self._refuse(_TOO_LONG)
            return
        super().handle_websocket_upgrade()
        upgraded = self.transport.get_protocol()
        if not getattr(upgraded, "handshake_initiated", True):
            self.transport.write(_NO_WEBSOCKET)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _begin_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if self._timer is None:
            self._timer = self.loop.call_later(MAX_HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
