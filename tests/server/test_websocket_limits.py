"""WebSockets: every upgrade is answered in time, and watchers cannot flood the server."""

import asyncio
import os
from collections.abc import Sequence

import pytest
from attacks import assert_refused
from callers import Caller, Wire, registered, request_head, wire_to
from sites import Site
from watchers import UPGRADE, append, watch

from restante.server import websocket_limits
from restante.workspaces.auth import Access

pytestmark = pytest.mark.anyio

UPGRADE_LINES = [f"{name}: {value}" for name, value in UPGRADE.items()]


def upgrade(
    path: str, *lines: str, method: str = "GET", token: str = "", without: Sequence[str] = ()
) -> bytes:
    kept = [line for line in UPGRADE_LINES if line.partition(":")[0] not in without]
    return request_head(method, path, token=token, lines=[*kept, *lines])


@pytest.fixture
async def workspace(site: Site) -> Caller:
    return await registered(site)


async def test_an_upgrade_with_too_many_or_too_long_headers_is_refused(workspace: Caller):
    """It got no answer and stayed open for ever, without a token."""
    path = f"{workspace.path}/ws"
    for asked in (
        upgrade(path, *[f"X-{number}: x" for number in range(130)]),
        upgrade(path, "X-Long: " + "x" * 9000),
        upgrade(path + "?a=" + "x" * 9000),
    ):
        async with wire_to(workspace.site) as wire:
            await wire.send(asked)

            assert_refused(await wire.answer(), 431)
            assert await wire.is_closed()


@pytest.mark.parametrize(
    "asked",
    [
        upgrade("/ws", "Content-Length: 5"),
        upgrade("/ws", "Transfer-Encoding: chunked"),
        upgrade("/ws", method="POST"),
        upgrade("/ws", "a!#$%&'*+-.^_`|~z: \xff\xfe"),
        upgrade("/ws", without=["Sec-WebSocket-Key"]),
        upgrade("/ws", without=["Sec-WebSocket-Version"]),
        upgrade("/\xff%00"),
    ],
)
async def test_an_upgrade_that_is_not_understood_is_answered(site: Site, asked: bytes):
    async with wire_to(site) as wire:
        await wire.send(asked)

        assert (await wire.rest()).startswith(b"HTTP/1.1 4")


async def test_an_upgrade_must_be_accepted_in_time(
    workspace: Caller, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(websocket_limits, "MAX_HANDSHAKE_SECONDS", 0.2)

    async def find(_self: Access, _workspace_id: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Access, "find", find)
    async with wire_to(workspace.site) as wire:
        await wire.send(upgrade(f"{workspace.path}/ws", token=workspace.token))

        assert await wire.is_closed()


def frame(opcode: int, data: bytes = b"", *, is_last: bool = True) -> bytes:
    """A frame of a client, masked with zeros."""
    return bytes([opcode | (0x80 if is_last else 0), 0x80 | len(data)]) + bytes(4) + data


TEXT, CONT, PING, PONG = 1, 0, 9, 10
FLOODS = {
    "messages": [frame(TEXT)] * 2000,
    "pings": [frame(PING, b"x" * 100)] * 2000,
    "pongs": [frame(PONG)] * 2000,
    "fragments": [frame(TEXT, is_last=False), *[frame(CONT, is_last=False)] * 2000],
}


@pytest.mark.parametrize("what", FLOODS)
async def test_a_watcher_that_floods_the_server_with_frames_is_cut_off(
    workspace: Caller, what: str
):
    """Parsing them takes the event loop's time, and empty fragments were kept without end."""
    async with wire_to(workspace.site) as wire:
        await open_socket(wire, workspace)
        await wire.send(b"".join(FLOODS[what]))

        assert await wire.is_closed()


async def open_socket(wire: Wire, workspace: Caller) -> None:
    await wire.send(upgrade(f"{workspace.path}/ws", token=workspace.token))
    assert (await wire.read(12)) == b"HTTP/1.1 101"


async def test_a_watcher_may_send_pings(workspace: Caller):
    async with watch(workspace, "ws") as watcher:
        for _ in range(50):
            await watcher.way.ping(os.urandom(8))
        await append(workspace, "still there")

        assert await watcher.summaries(1) == ["still there"]
