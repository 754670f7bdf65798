"""
Every route against every kind of hostile client, all routes at once.

The routes come from the application, so a new one is attacked without being named here.  The server
is a process of its own, with short time limits.  After each attack it must answer others, its loop
must not have stood still, and its memory must not have grown.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from attacks import MIB, pour
from callers import FORM, Part, Wire, chunked, form, request_head, wire_to
from cluster import cloned
from sites import ADMIN_TOKEN
from starlette.routing import Route, WebSocketRoute
from waiting import until
from watched import Watched, Workspace, watched

from restante.http.operations import operation_of
from restante.server.app import ROUTES

pytestmark = pytest.mark.anyio

LIMITS = {
    "json_idle_seconds": 0.3,
    "json_seconds": 1.0,
    "upload_grace_seconds": 3.0,
    "upload_min_bytes_per_second": 10_000_000,
    "send_timeout_seconds": 1.0,
}

# All routes are attacked at once, so this is the sum of what about 30 requests cost.  The largest
# are a header of 60 KB with 50 ms, and a query of 60 KB with 45 ms; all others cost up to 40.
MOST_MS = 120
MOST_GROWTH_KIB = 96 * 1024

HANDSHAKE = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


@dataclass(frozen=True, slots=True)
class Target:
    """One method of one route, with a path and a token that its handler accepts."""

    url: str
    method: str
    path: str
    token: str
    lines: tuple[str, ...]

    def head(self, *lines: str, length: int | None = None, query: str = "") -> bytes:
        joint = "&" if "?" in self.path else "?"
        path = self.path + (joint + query if query else "")
        return request_head(
            self.method, path, token=self.token, length=length, lines=[*self.lines, *lines]
        )


Attack = Callable[[Target, Wire], Awaitable[None]]


def methods() -> Iterator[tuple[str, str, str]]:
    """Method, path and caller of everything that is served."""
    for route in ROUTES:
        if isinstance(route, WebSocketRoute):
            yield "GET", route.path, "workspace"
        else:
            assert isinstance(route, Route), f"no attack knows what {route} is"
            described = operation_of(route.endpoint)
            for method in route.methods or ():
                yield method, route.path, described.caller if described else "anyone"


async def send_message(server: Watched, workspace: Workspace, size: int) -> None:
    body = json.dumps({"method": "x", "params": ["y" * size]}).encode()
    path = workspace.path + "/a2a"
    assert (await server.ask("POST", path, token=workspace.token, body=body)).status == 200


async def with_much_to_read(server: Watched) -> tuple[Workspace, str]:
    """A workspace whose file and feed are more than a socket buffers; and its first row's id."""
    workspace = await server.with_file(await server.register(), bytes(8 * MIB))
    for _ in range(8):
        await send_message(server, workspace, MIB - 100)
    path = workspace.path + "/activity?since_seq=0&limit=1"
    rows = await server.ask("GET", path, token=workspace.token)
    return workspace, rows.json[0]["id"]


async def add_peer(server: Watched) -> str:
    """A peer of the op log, which cannot be reached; returns its token."""
    body = json.dumps({"url": "http://127.0.0.1:9"}).encode()
    answer = await server.ask("POST", "/admin/oplog/peers", token=ADMIN_TOKEN, body=body)
    return answer.json["token"]


async def targets_of(server: Watched) -> list[Target]:
    """A workspace of its own for each, because some of them change or remove it."""
    full, row_id = await with_much_to_read(server)
    peer_token = await add_peer(server)
    targets: list[Target] = []
    for method, path, caller in methods():
        workspace = full if method == "GET" else await server.register()
        where = path.format(workspace_id=workspace.id, file_id=full.file_id)
        lines = HANDSHAKE if path.endswith("/ws") else ()
        if path.endswith(("/ws", "/events", "/events/stream")):
            where += f"?last_event_id={row_id}"
        if path.endswith("/chat/uploads"):
            lines = (f"Content-Type: {FORM}",)
        token = {"admin": ADMIN_TOKEN, "peer": peer_token}.get(caller, workspace.token)
        targets.append(Target(server.url, method, where, token, lines))
    return targets


@dataclass(frozen=True, slots=True)
class Field:
    """Where the attacks take place, and a bystander."""

    server: Watched
    targets: list[Target]
    bystander: Workspace
    resident_kib: int


@pytest.fixture(scope="module")
async def field(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Field]:
    async with cloned(cluster) as dsn:
        with watched(dsn, tmp_path_factory.mktemp("server"), **LIMITS) as server:
            targets, bystander = await targets_of(server), await server.register()
            yield Field(server, targets, bystander, server.measured().resident_kib)


async def is_answered(wire: Wire) -> None:
    """An answer begins, and it is no failure of ours."""
    begin = await wire.read(12)
    assert begin.startswith(b"HTTP/1.1 "), begin
    assert begin[9:12] != b"500", begin


async def body_that_is_not_read(target: Target, wire: Wire) -> None:
    """The client reads nothing before it has sent everything."""
    await wire.send(target.head(length=4 * MIB))
    for _ in range(4):
        await wire.send(bytes(MIB))
    await is_answered(wire)


async def endless_body(target: Target, wire: Wire) -> None:
    start = form(Part(b"x"), closed=False)[:-2] if FORM in str(target.lines) else b"{"
    await wire.send(target.head("Transfer-Encoding: chunked") + chunked(start))
    pouring = asyncio.create_task(pour(wire, chunked(b"x" * 256 * 1024), most=200 * MIB))
    try:
        await is_answered(wire)
    finally:
        pouring.cancel()
        await asyncio.wait({pouring})


async def slow_body(target: Target, wire: Wire) -> None:
    """A byte now and then, for as long as the server takes it."""
    await wire.send(target.head(length=MIB) + b"{")
    answering = asyncio.create_task(is_answered(wire))
    with suppress(ConnectionError):
        while not (await asyncio.wait({answering}, timeout=0.1))[0]:
            await wire.send(b" ")
    await answering


async def body_that_stands_still(target: Target, wire: Wire) -> None:
    await wire.send(target.head(length=MIB) + b"{")
    await is_answered(wire)


async def slow_reader(target: Target, wire: Wire) -> None:
    """
    Reads the beginning of the answer and then nothing, while the others do the same.

    A short answer fits into the buffers of the sockets; then the connection is idle, which ends
    too.  A long one never ends by itself.
    """
    await wire.send(target.head())
    await is_answered(wire)
    await until(lambda: not is_open_at_the_server(wire))


def is_open_at_the_server(wire: Wire) -> bool:
    """The client cannot tell: what was sent before the end waits to be read."""
    client, server = wire.ports
    established = rf":{server:04X} [0-9A-F]+:{client:04X} 01 "
    return re.search(established, Path("/proc/net/tcp").read_text()) is not None


async def huge_header(target: Target, wire: Wire) -> None:
    await wire.send(target.head('Content-Type: multipart/form-data;a="' + ";" * 60_000, length=0))
    await is_answered(wire)


async def huge_query(target: Target, wire: Wire) -> None:
    await wire.send(target.head(length=0, query="a&" * 30_000))
    await is_answered(wire)


async def many_headers(target: Target, wire: Wire) -> None:
    await wire.send(target.head(*["a:"] * 15_000, length=0))
    await is_answered(wire)


async def huge_json(target: Target, wire: Wire) -> None:
    body = b'{"params": [' + b"[]," * 349_000 + b"1]}"
    await wire.send(target.head(length=len(body)) + body)
    await is_answered(wire)


async def deep_json(target: Target, wire: Wire) -> None:
    body = b'{"params": ' + b"[" * 500_000 + b"]" * 500_000 + b"}"
    await wire.send(target.head(length=len(body)) + body)
    await is_answered(wire)


ATTACKS: tuple[Attack, ...] = (
    body_that_is_not_read,
    endless_body,
    slow_body,
    body_that_stands_still,
    slow_reader,
    huge_header,
    huge_query,
    many_headers,
    huge_json,
    deep_json,
)


async def attacked(attack: Attack, target: Target) -> None:
    try:
        async with wire_to(target.url) as wire:
            await attack(target, wire)
    except Exception as error:
        if isinstance(error, ConnectionError) and target.lines == HANDSHAKE:
            return  # a body is no frame of a WebSocket
        raise AssertionError(f"{target.method} {target.path}: {error!r}") from error


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
async def test_every_route_withstands(field: Field, attack: Attack):
    field.server.measured()

    async with asyncio.timeout(60):
        attacks = asyncio.gather(*(attacked(attack, target) for target in field.targets))
        meanwhile = await field.server.ask(
            "GET", field.bystander.path + "/activity", token=field.bystander.token
        )
        await attacks
    await send_message(field.server, field.bystander, 10)
    measured = field.server.measured()

    assert meanwhile.status == 200
    assert measured.stall_ms < MOST_MS
    assert measured.resident_kib - field.resident_kib < MOST_GROWTH_KIB
