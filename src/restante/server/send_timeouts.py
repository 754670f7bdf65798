"""
Aborts the connections of clients that take nothing of what is sent to them.

This holds for every answer and for WebSockets, and also for the last bytes before a connection is
closed: closing waits until they are sent.  A slow client is not aborted as long as its side
acknowledges bytes.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# `tcpi_bytes_acked` in Linux's `struct tcp_info`.
_BYTES_ACKED = struct.Struct("120x Q")

# A client that takes less within the timeout is not slow: it keeps a connection from being closed.
_MIN_BYTES = 1024


@dataclass(frozen=True, slots=True)
class _Sent:
    """How far a connection was when it last made progress."""

    progress: int
    at: float


class SendTimeouts:
    """Remembers which connections have unsent bytes, and since when they are stuck."""

    def __init__(self, seconds: float, *, on_abort: Callable[[], object]) -> None:
        self.seconds = seconds
        self._on_abort = on_abort
        self._waiting: dict[asyncio.Transport, _Sent] = {}

    def check(self, transports: Iterable[asyncio.Transport], *, now: float) -> None:
        """Call this several times within the timeout, with every open connection."""
        waiting = [one for one in transports if one.get_write_buffer_size()]
        self._waiting = {one: self._seen(one, now) for one in waiting}
        for transport, sent in self._waiting.items():
            if now - sent.at >= self.seconds:
                self._on_abort()
                transport.abort()

    def _seen(self, transport: asyncio.Transport, now: float) -> _Sent:
        progress, before = _progress(transport), self._waiting.get(transport)
        is_stuck = before is not None and abs(progress - before.progress) < _MIN_BYTES
        return before if before and is_stuck else _Sent(progress, now)


def _progress(transport: asyncio.Transport) -> int:
    """
    A number that changes when the client takes bytes.

    The kernel accepts bytes from us in large steps, which are minutes apart for a slow client.  So
    we ask how many were acknowledged, where the kernel can tell.
    """
    try:
        info = transport.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size
        )
        return _BYTES_ACKED.unpack(info)[0]
    except (AttributeError, OSError, struct.error):
        return transport.get_write_buffer_size()
