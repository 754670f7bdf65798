"""The listening socket and the HTTP server on it."""

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from restante.database import outcomes
from restante.errors import AddressTaken
from restante.server.connections import Connections
from restante.server.http_limits import BoundedHttp
from restante.server.send_timeouts import SendTimeouts
from restante.server.websocket_limits import BoundedWebSocket


def listen(host: str, port: int) -> socket.socket:
    """
    Bind before anything else is started, so that a mistake fails fast.

    Raises AddressTaken.
    """
    try:
        return _bound(host, port)
    except (OSError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else None
        words = os.strerror(number) if number and number > 0 else error
        raise AddressTaken(
            f"Restante cannot listen on {host} port {port}: {words}. "
            f"Choose another --host or --port."
        ) from error


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with contextlib.ExitStack() as closed_on_failure:
        listening = closed_on_failure.enter_context(socket.socket(family, kind, protocol))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
        closed_on_failure.pop_all()
    return listening


def address_of(listening: socket.socket, host: str) -> str:
    """The URL as a person would type it."""
    port = listening.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class HttpServer(uvicorn.Server):
    """Uvicorn that reports when it is ready and leaves signal handling to us."""

    def __init__(
        self,
        app: ASGIApp,
        connections: Connections,
        *,
        send_timeout_seconds: float,
        grace_seconds: float,
        on_ready: Callable[[], None],
    ) -> None:
        http: Any = partial(BoundedHttp, connections=connections)
        websocket: Any = partial(BoundedWebSocket, connections=connections)
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                proxy_headers=False,
                http=http,
                ws=websocket,
                ws_max_size=64 * 1024,  # watchers have nothing to send
                timeout_graceful_shutdown=grace_seconds,  # pyright: ignore[reportArgumentType] - a float works
            )
        )
        self._on_ready = on_ready
        self._send_timeouts = SendTimeouts(
            send_timeout_seconds, on_abort=connections.metrics.cut_off.labels("slow_reader").inc
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn would raise the signal again once it has stopped, before we have."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests that were cancelled during a commit find out how it ended, and answer."""
        await super().shutdown(sockets)
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=outcomes.CANCELLED_SECONDS + 1)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Uvicorn calls it ten times a second."""
        if counter % max(1, int(self._send_timeouts.seconds)) == 0:
            transports = [connection.transport for connection in self.server_state.connections]
            self._send_timeouts.check(transports, now=asyncio.get_running_loop().time())
        return await super().on_tick(counter)
