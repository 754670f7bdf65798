"""An answer arrives although its request is still being sent, and the connection then ends."""

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
