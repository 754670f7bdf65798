"""A client that takes nothing of what is sent to it is cut off, whatever it was sent."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from callers import Caller, Part, ask, pattern, registered, request_head
from prometheus_client.parser import text_string_to_metric_families
from sites import Site, SiteFactory
from waiting import until
from watchers import UPGRADE, append, choose

from restante.server import send_timeouts
from restante.server.send_timeouts import SendTimeouts

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
CLOSE = ["Connection: close"]
UPGRADE_LINES = [f"{name}: {value}" for name, value in UPGRADE.items()]
HEALTH = request_head("GET", "/health")


@pytest.fixture
async def site(run_site: SiteFactory) -> AsyncIterator[Site]:
    async with run_site(send_timeout_seconds=1) as site:
        choose(site, send_seconds=60)  # watchers have a timeout of their own
        yield site


@asynccontextmanager
async def small_socket(site: Site) -> AsyncIterator[socket.socket]:
    """A connection that takes few bytes unless they are read."""
    where = urlsplit(site.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (where.hostname, where.port))
        yield connection


async def send(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, data)


async def cut_off(site: Site, reason: str = "slow_reader") -> float:
    page = (await ask(site, "GET", "/metrics")).body.decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "molecule_connections_cut_off_total" and sample.labels["reason"] == reason
    )


async def download(workspace: Caller, *lines: str) -> bytes:
    (file,) = await workspace.staged(Part(pattern(4 * MIB)))
    path = f"{workspace.path}/pending-uploads/{file}/content"
    return request_head("GET", path, token=workspace.token, lines=lines)


async def closing_download(workspace: Caller) -> bytes:
    return await download(workspace, *CLOSE)


async def page(workspace: Caller, *lines: str) -> bytes:
    await append(workspace, "a row", b'"' + b"x" * MIB + b'"', count=3)
    return request_head("GET", f"{workspace.path}/activity", token=workspace.token, lines=lines)


async def closing_page(workspace: Caller) -> bytes:
    return await page(workspace, *CLOSE)


async def stream(workspace: Caller) -> bytes:
    return request_head("GET", f"{workspace.path}/events", token=workspace.token)


async def websocket(workspace: Caller) -> bytes:
    path = f"{workspace.path}/ws"
    return request_head("GET", path, token=workspace.token, lines=UPGRADE_LINES)


async def many_requests(_workspace: Caller) -> bytes:
    return HEALTH * 2000


async def many_refusals(workspace: Caller) -> bytes:
    return request_head("GET", f"{workspace.path}/activity") * 2000


ANSWERS = [
    download,
    closing_download,
    page,
    closing_page,
    stream,
    websocket,
    many_requests,
    many_refusals,
]


@pytest.mark.parametrize("request_for", ANSWERS)
async def test_a_client_that_takes_nothing_is_cut_off(
    site: Site, request_for: Callable[[Caller], Awaitable[bytes]]
):
    workspace = await registered(site)
    asked = await request_for(workspace)
    async with small_socket(site) as connection:
        sending = asyncio.create_task(send(connection, asked))
        if request_for in {stream, websocket}:
            await until(lambda: bool(site.state.wakeups._waiters))
            await append(workspace, "a row", b'"' + b"x" * MIB + b'"', count=3)

        await until(lambda: is_cut_off(site))

        sending.cancel()
        await asyncio.wait({sending})


async def is_cut_off(site: Site) -> bool:
    return await cut_off(site) == 1


async def test_a_slow_client_that_takes_something_is_served_to_the_end(site: Site):
    """It takes several times as long as a client may be silent."""
    workspace = await registered(site)
    loop = asyncio.get_running_loop()
    async with small_socket(site) as connection:
        await send(connection, await download(workspace, *CLOSE))
        received = bytearray()
        for _ in range(40):
            received += await loop.sock_recv(connection, 8192)
            await asyncio.sleep(0.1)
        while piece := await loop.sock_recv(connection, 65536):
            received += piece

    assert received.endswith(pattern(4 * MIB))
    assert await cut_off(site) == 0


async def test_a_client_that_takes_almost_nothing_is_cut_off(
    run_site: SiteFactory, monkeypatch: pytest.MonkeyPatch
):
    """It could keep a connection and its answer for weeks."""
    monkeypatch.setattr(send_timeouts, "_MIN_BYTES_PER_SECOND", 16 * 1024)
    loop = asyncio.get_running_loop()
    async with run_site(send_timeout_seconds=1) as site:
        workspace = await registered(site)
        async with small_socket(site) as connection:
            await send(connection, await download(workspace))

            async def takes_little() -> None:
                while True:
                    await loop.sock_recv(connection, 1024)
                    await asyncio.sleep(1)

            taking = asyncio.create_task(takes_little())
            await until(lambda: is_cut_off(site))
            taking.cancel()
            await asyncio.wait({taking})


class Line:
    """The transport of a client with a steady rate, for the parts of it that are looked at."""

    def __init__(self) -> None:
        self.unsent = 25 * MIB
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def get_extra_info(self, _name: str) -> None:
        """A system whose kernel does not tell what was acknowledged."""

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize(("bytes_per_second", "is_aborted"), [(1024 / 30, True), (2048, False)])
@pytest.mark.parametrize("seconds", [1.0, 30.0, 300.0])
def test_a_minimum_rate_decides_whether_a_client_is_slow_or_stuck(
    bytes_per_second: float, is_aborted: bool, seconds: float
):
    line: Any = Line()
    timeouts = SendTimeouts(seconds, on_abort=lambda: None)
    for tenth in range(50):
        line.unsent = 25 * MIB - int(tenth * seconds / 10 * bytes_per_second)
        timeouts.check([line], now=tenth * seconds / 10)

    assert line.is_aborted == is_aborted
