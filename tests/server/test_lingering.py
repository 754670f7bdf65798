"""An answer arrives although its request is still being sent, and the connection then ends."""

import asyncio
import gc
import weakref

import pytest
from attacks import MIB, assert_refused, pour
from callers import (
    Answer,
    Wire,
    chunked,
    registered,
    request_head,
    upload_head,
    wire_to,
)
from sites import Site
from waiting import until

from restante.server import lingering
from restante.server.http_limits import BoundedHttp

pytestmark = pytest.mark.anyio


async def sent_and_read(site: Site, head: bytes, body: bytes) -> Answer:
    """Like a client that reads nothing before it has sent everything."""
    async with wire_to(site) as wire:
        await wire.send(head)
        for at in range(0, len(body), MIB):
            await wire.send(body[at : at + MIB])
        answer = await wire.answer()
        assert await wire.rest() == b""
    return answer


@pytest.mark.parametrize("size", [2 * MIB, 60 * MIB])
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("POST", "/health", 405),
        ("GET", "/nothing", 404),
        ("POST", "/registry/register", 413),
        ("PATCH", "{own}", 401),
        ("POST", "{own}/a2a", 413),
        ("GET", "{own}/activity", 200),
        ("POST", "/workspaces/x/chat/uploads", 400),
        ("POST", "{own}/pending-uploads", 405),
        ("GET", "{own}/activity HTTP/1.1\r\nContent-Length: x\r\nY:", 400),
    ],
)
async def test_a_body_that_nobody_reads_does_not_cost_the_answer(
    shared_site: Site, method: str, path: str, status: int, size: int
):
    caller = await registered(shared_site)
    head = request_head(
        method, path.format(own=caller.path), token=caller.token, length=size, lines=["X: y"]
    )

    answer = await sent_and_read(shared_site, head, b"[" * size)

    assert answer.status == status
    assert answer.headers["Connection"] == "close"


async def test_a_request_above_the_limit_reads_its_refusal(shared_site: Site):
    """A hundred megabytes, as newer senders offer them, in a file or announced by the length."""
    caller = await registered(shared_site)
    size = 100_000_000
    declared = await sent_and_read(shared_site, upload_head(caller, size), bytes(size))
    counted = await sent_and_read(
        shared_site, upload_head(caller), chunked(bytes(MIB)) * 95 + b"0\r\n\r\n"
    )

    for answer in (declared, counted):
        assert_refused(answer, 413)
        assert answer.json["code"] == "request_too_large"


async def test_a_small_body_that_nobody_reads_keeps_the_connection(shared_site: Site):
    """A body that has arrived by then is no reason to close."""
    async with wire_to(shared_site) as wire:
        for _ in range(2):
            await wire.send(request_head("GET", "/health", length=5) + b"hello")
            answer = await wire.answer()
            assert answer.status == 200
            assert "Connection" not in answer.headers


async def test_a_client_that_never_stops_sending_is_cut_off(
    shared_site: Site, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lingering, "MAX_LINGER_BYTES", MIB)

    async with wire_to(shared_site) as wire:
        await wire.send(request_head("GET", "/health", lines=["Transfer-Encoding: chunked"]))
        assert (await wire.answer()).status == 200
        sent = await pour(wire, chunked(bytes(64 * 1024)), most=64 * MIB)

    assert sent < 32 * MIB  # what the sockets buffer included


async def test_a_client_that_neither_sends_nor_leaves_is_cut_off(
    shared_site: Site, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lingering, "MAX_LINGER_SECONDS", 0.2)

    async with wire_to(shared_site) as wire:
        await wire.send(request_head("GET", "/health", length=10))
        assert (await wire.answer()).status == 200
        assert await wire.rest() == b""  # our side is shut down at once
        await until(lambda: is_cut_off(wire), seconds=15)


async def is_cut_off(wire: Wire) -> bool:
    try:
        await wire.send(b"x")
    except ConnectionError:
        return True
    return False


def test_all_connections_that_linger_are_read_at_one_pace():
    pace, per_second = lingering.DiscardPace(), lingering._DISCARDED_BYTES_PER_SECOND

    waits = [pace.next(per_second // 10, now=100) for _ in range(20)]

    assert waits == pytest.approx([number / 10 for number in range(1, 21)])
    assert pace.next(per_second, now=200) == pytest.approx(1)


async def test_a_request_whose_client_has_gone_ends_although_another_was_pipelined(site: Site):
    """Otherwise it waits to its end, and keeps one of the workspace's waiters."""
    caller = await registered(site)
    head = request_head("GET", f"{caller.path}/activity?wait=60", token=caller.token)
    async with wire_to(site) as wire:
        await wire.send(head + request_head("GET", "/health"))
        await until(lambda: len(site.state.wakeups._waiters) == 1)
    await until(lambda: not site.state.wakeups._waiters)


HANDSHAKE = [
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
]
LEFT_EARLY = {
    "answered": request_head("GET", "/health"),
    "in the head": b"GET /health HTTP/1.1\r\n",
    "pipelined": request_head("GET", "/metrics") * 20,
    "in a body that nobody reads": request_head("POST", "/nowhere", length=600_000)
    + b"x" * 300_000,
    "in a chunked body": request_head("POST", "/health", lines=["Transfer-Encoding: chunked"])
    + chunked(b"x" * 100_000),
    "broken": b"broken\r\n\r\n",
    "after a WebSocket was refused": request_head("GET", "/workspaces/x/ws", lines=HANDSHAKE),
}


@pytest.mark.parametrize("how", LEFT_EARLY)
async def test_what_a_client_leaves_behind_is_freed_at_once(site: Site, how: str):
    """Collections of everything are rare, because they stall the event loop."""
    gc.collect()
    gc.disable()
    try:
        async with wire_to(site) as wire:
            await wire.send(LEFT_EARLY[how])
            await until(lambda: bool(protocols_of(wire)))
            left = protocols_of(wire)
        await until(lambda: not any(protocol() for protocol in left))
    finally:
        gc.enable()


def protocols_of(wire: Wire) -> "list[weakref.ref[BoundedHttp]]":
    return [
        weakref.ref(found)
        for found in gc.get_objects()
        if isinstance(found, BoundedHttp) and found.client and found.client[1] == wire.ports[0]
    ]


async def test_a_client_that_is_cut_off_is_closed_a_moment_later(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise it comes back at once, and costs more than any other."""
    monkeypatch.setattr(lingering, "_STOPPED_SECONDS", 1000)
    caller = await registered(site)
    head = request_head(
        "POST", f"{caller.path}/a2a", token=caller.token, lines=["Transfer-Encoding: chunked"]
    )
    cut_off = site.state.metrics.connections.cut_off.labels("long_request")._value
    async with wire_to(site) as wire:
        await wire.send(head + chunked(b"{}") + b"0\r\n" + b"a: b\r\n" * 100)
        await until(lambda: cut_off.get() == 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await wire.rest()
        await until(lambda: not site.state.concurrency._running)
        (protocol,) = protocols_of(wire)
        found = protocol()
        assert found is not None
        found.shutdown()  # but a server that stops does not wait for it
        assert await wire.is_closed()
