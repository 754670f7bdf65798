"""What a client sends beside bodies is bounded in size and time, as long as it is connected."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from uuid import UUID

import pytest
from attacks import assert_refused
from callers import (
    Caller,
    Part,
    Wire,
    chunked,
    form,
    registered,
    request_head,
    upload_head,
    wire_to,
)
from sites import Site, SiteFactory
from waiting import until

from restante.feed.rules import NewActivity
from restante.http import refusal_delays
from restante.ids import WorkspaceId
from restante.server import http_limits
from restante.server.http_limits import BoundedHttp

pytestmark = pytest.mark.anyio

CHUNKED = ["Transfer-Encoding: chunked"]
HEALTH = request_head("GET", "/health")
CHUNKED_HEALTH = request_head("GET", "/health", lines=CHUNKED)
KIB = 1024

ENDLESS = {
    "trailers": (CHUNKED_HEALTH + b"0\r\n", b"a: " + b"x" * 1000 + b"\r\n"),
    "a trailer": (CHUNKED_HEALTH + b"0\r\na: ", b"x" * 1000),
    "the name of a trailer": (CHUNKED_HEALTH + b"0\r\n", b"x" * 1000),
    "a chunk extension": (CHUNKED_HEALTH + b"5;a=", b"x" * 1000),
    "chunk extensions": (CHUNKED_HEALTH, b"1;" + b"x" * 1000 + b"\r\nx\r\n"),
    "zeros of a chunk size": (CHUNKED_HEALTH, b"0" * 1000),
    "tiny chunks": (CHUNKED_HEALTH, b"1\r\nx\r\n" * 100),
    "blank lines": (HEALTH, b"\r\n" * 500),
    "headers": (b"GET /health HTTP/1.1\r\n", b"a: " + b"x" * 1000 + b"\r\n"),
    "the name of a header": (b"GET /health HTTP/1.1\r\n", b"x" * 1000),
    "a path": (b"GET /", b"x" * 1000),
}


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a client has is over soon."""
    monkeypatch.setattr(http_limits, "MAX_HEAD_SECONDS", 0.3)


@pytest.mark.parametrize("what", ENDLESS)
async def test_what_is_not_body_is_bounded_in_size(shared_site: Site, what: str):
    """Trailers took sixteen times their size in memory, and no token is needed to send them."""
    start, piece = ENDLESS[what]
    async with wire_to(shared_site) as wire:
        await wire.send(start)
        await send_ignoring_the_end(wire, piece * (256 * KIB // len(piece)))

        assert await wire.is_closed()


async def send_ignoring_the_end(wire: Wire, data: bytes) -> None:
    """Send, whether or not the server reads all of it."""
    with suppress(ConnectionError):
        await wire.send(data)


BEGUN = {
    "nothing": b"",
    "a head": b"GET /health HTTP/1.1\r\nHost: ",
    "trailers": CHUNKED_HEALTH + b"0\r\na: b\r\n",
    "a chunk size": CHUNKED_HEALTH + b"5",
    "a chunk": CHUNKED_HEALTH + b"5\r\nhel",
    "a body": request_head("GET", "/health", length=100) + b"hello",
    "a blank line": HEALTH + b"\r\n",
    "the next head": HEALTH + HEALTH + b"GET /hea",
}


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("what", BEGUN)
async def test_a_client_that_does_not_end_what_it_began_is_closed(shared_site: Site, what: str):
    """An answer that was sent already does not change that."""
    async with wire_to(shared_site) as wire:
        await wire.send(BEGUN[what])

        assert await wire.is_closed()


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("dribble", [b"\r\n", b"a: b\r\n"])
async def test_dribbling_does_not_gain_time(shared_site: Site, dribble: bytes):
    """Blank lines after an answer ended the keep-alive timeout, and began no other."""
    start = HEALTH if dribble == b"\r\n" else CHUNKED_HEALTH + b"0\r\n"
    async with wire_to(shared_site) as wire:
        await wire.send(start)
        closed = asyncio.create_task(wire.is_closed())
        while not closed.done():
            await send_ignoring_the_end(wire, dribble)
            await asyncio.wait({closed}, timeout=0.05)

        assert await closed


async def test_a_long_head_is_refused_even_if_it_arrives_at_once(shared_site: Site):
    async with wire_to(shared_site) as wire:
        lines = [f"X-{number}: {'x' * 1000}" for number in range(80)]
        await wire.send(request_head("GET", "/health", lines=lines))

        assert_refused(await wire.answer(), 431)
        assert await wire.is_closed()


@pytest.mark.parametrize(("count", "status"), [(255, 200), (256, 431), (15_000, 431)])
async def test_a_head_has_a_limited_number_of_headers(shared_site: Site, count: int, status: int):
    """Host is one more."""
    async with wire_to(shared_site) as wire:
        await wire.send(request_head("GET", "/health", lines=["a:"] * count))

        answer = await wire.answer()
        assert answer.status == status
        if status != 200:
            assert_refused(answer, status)
            assert await wire.is_closed()


async def test_an_upload_in_small_chunks_with_trailers_is_accepted(shared_site: Site):
    workspace = await registered(shared_site)
    body = form(Part(b"x" * 5000))
    pieces = [body[at : at + 1] for at in range(len(body))]
    async with wire_to(shared_site) as wire:
        await wire.send(upload_head(workspace) + b"".join(map(chunked, pieces)))
        await wire.send(b"0\r\nx-checksum: abc\r\n\r\n")
        assert (await wire.answer()).status == 200

        await wire.send(HEALTH)
        assert (await wire.answer()).status == 200


@pytest.mark.parametrize(("count", "is_cut_off"), [(64, False), (65, True)])
async def test_a_request_has_a_limited_number_of_trailers(
    shared_site: Site, count: int, is_cut_off: bool
):
    """They are small enough for the limit of bytes, but each costs a callback."""
    workspace = await registered(shared_site)
    head = request_head("POST", f"{workspace.path}/a2a", token=workspace.token, lines=CHUNKED)
    cut_off = shared_site.state.metrics.connections.cut_off.labels("long_request")
    before = cut_off._value.get()
    async with wire_to(shared_site) as wire:
        await wire.send(head + chunked(b"{}") + b"0\r\n" + b"a: b\r\n" * count + b"\r\n")
        answer = await wire.rest() if is_cut_off else (await wire.answer()).body

    assert bool(answer) != is_cut_off
    assert cut_off._value.get() == before + is_cut_off


async def test_repeated_refusals_of_broken_requests_are_delayed(
    run_site: SiteFactory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(refusal_delays, "_AT_ONCE", 1)
    monkeypatch.setattr(refusal_delays, "_PER_SECOND", 0.01)
    monkeypatch.setattr(refusal_delays, "_MAX_SECONDS", 100)
    async with run_site() as site, wire_to(site) as first, wire_to(site) as second:
        await first.send(b"broken\r\n\r\n")
        assert (await first.answer()).status == 400
        await second.send(b"broken\r\n\r\n")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await second.answer()
        async with wire_to(site) as third:
            await third.send(HEALTH)
            assert (await third.answer()).status == 200


async def test_trailers_are_no_headers(shared_site: Site):
    """A proxy that removes a header from requests does not remove it from their trailers."""
    workspace = await registered(shared_site)
    head = request_head("GET", f"{workspace.path}/activity", lines=CHUNKED)
    async with wire_to(shared_site) as wire:
        await wire.send(head + f"0\r\nAuthorization: Bearer {workspace.token}\r\n\r\n".encode())

        assert_refused(await wire.answer(), 401)


async def test_few_pipelined_requests_are_parsed_ahead_and_all_are_answered(shared_site: Site):
    """Each one that is parsed takes memory until the one before it is answered."""
    workspace = await registered(shared_site)
    poll = request_head(
        "GET", f"{workspace.path}/activity?since_seq=0&wait=15", token=workspace.token
    )
    async with wire_to(shared_site) as wire:
        await wire.send(poll + HEALTH * 3000)
        await until(lambda: any(protocol.pipeline for protocol in protocols()))
        ahead = max(len(protocol.pipeline) for protocol in protocols())

        await wake(workspace)

        assert ahead < 200
        assert [(await wire.answer()).status for _ in range(3001)] == [200] * 3001


def protocols() -> Iterator[BoundedHttp]:
    return (one for one in gc.get_objects() if isinstance(one, BoundedHttp) and one.parser)


async def wake(workspace: Caller) -> None:
    feed, row = workspace.site.state.feed, NewActivity("test", "wake up", b"{}")
    await feed.append(WorkspaceId(UUID(workspace.id)), row, now=datetime.now(UTC))


@pytest.mark.parametrize("garbage", [b"garbage\r\n\r\n", b"a: " + b"x" * 70 * KIB])
async def test_garbage_behind_a_request_is_not_answered_inside_its_answer(
    shared_site: Site, garbage: bytes
):
    workspace = await registered(shared_site)
    (file,) = await workspace.staged(Part(b"x" * 300_000))
    path = f"{workspace.path}/pending-uploads/{file}/content"
    async with wire_to(shared_site) as wire:
        await wire.send(request_head("GET", path, token=workspace.token) + garbage)

        received = await everything_from(wire)

    assert received.count(b"HTTP/1.1 ") <= 1


async def everything_from(wire: Wire) -> bytes:
    try:
        return await wire.rest()
    except ConnectionError:
        return b""
