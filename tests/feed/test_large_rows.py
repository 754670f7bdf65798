"""Large rows are read when there is room for them, and slow readers give way to others."""

import asyncio
from asyncio import IncompleteReadError
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from attacks import MIB
from callers import Caller, Wire, registered, request_head, wire_to
from large_rows import taken
from sites import Site
from waiting import until
from watchers import append, watch

from restante.database import shares
from restante.errors import TooManyAtOnce
from restante.feed import store
from restante.feed.readers import LargeRoom
from restante.feed.store import Extent
from restante.http.body_room import BodyRoom

pytestmark = pytest.mark.anyio

ROW = 4 * MIB  # more than what the sockets of both sides buffer
SLOW = 8
ROOM = SLOW * (ROW + 1000)


@pytest.fixture
async def victim(site: Site) -> Caller:
    return await registered(site)


async def with_row(site: Site, size: int) -> Caller:
    caller = await registered(site)
    await append(caller, "large", body(size))
    return caller


def body(size: int) -> bytes:
    return b'"%b"' % (b"x" * (size - 2))


async def asks(wire: Wire, caller: Caller) -> None:
    await wire.send(request_head("GET", f"{caller.path}/activity", token=caller.token))


async def test_a_caller_without_a_place_gets_one_while_slow_ones_have_them_all():
    room = BodyRoom(8 * MIB, guaranteed_seconds=0)
    inside = 0

    async def slow(number: int) -> None:
        nonlocal inside
        shares.caller.set(number)
        async with LargeRoom(room) as large:
            await large.take(MIB)
            inside += 1
            await asyncio.Event().wait()

    holders = [asyncio.create_task(slow(number)) for number in range(8)]
    await until(lambda: inside == 8)

    shares.caller.set("victim")
    async with LargeRoom(room) as large:
        await large.take(100_000)
    (ended,), others = await asyncio.wait(holders, return_when=asyncio.FIRST_COMPLETED)
    for holder in others:
        holder.cancel()

    assert isinstance(ended.exception(), TooManyAtOnce)


async def test_a_page_arrives_while_slow_readers_have_all_of_the_room(site: Site, victim: Caller):
    """Each of them would have its place for hours.  The one that gives way gets no whole answer."""
    room = site.state.feed.large_answers = BodyRoom(ROOM, guaranteed_seconds=0)
    slow = [await with_row(site, ROW) for _ in range(SLOW)]
    await append(victim, "large", body(100_000))
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(wire_to(site)) for _ in slow]
        for wire, caller in zip(wires, slow, strict=True):
            await asks(wire, caller)
            await wire.head()
        assert room.free_bytes < 100_000

        answer = await victim.read_feed()

        assert [len(row["request_body"]) for row in answer.json] == [100_000 - 2]
        # The first one has given way.
        with pytest.raises((IncompleteReadError, ConnectionError)):
            await wires[0].read(ROW)
    await until(lambda: room.free_bytes == ROOM)


async def test_without_room_a_large_page_is_refused_and_a_small_one_is_not(
    site: Site, victim: Caller
):
    room = site.state.feed.large_answers = BodyRoom(ROOM, longest_wait_seconds=0)
    await append(victim, "large", body(100_000))
    await append(victim, "small")

    async with taken(room):
        large = await victim.read_feed()
        small = await victim.read_feed(since_seq=1)
    afterwards = await victim.read_feed()

    assert (large.status, large.json["code"]) == (429, "too_many_at_once")
    assert "large rows" in large.json["error"]
    assert int(large.headers["Retry-After"]) >= 1
    assert (len(small.json), len(afterwards.json)) == (1, 2)


async def test_a_page_without_room_is_not_read(
    site: Site, victim: Caller, monkeypatch: pytest.MonkeyPatch
):
    """Readers that go away before their answer begins would read 16 MiB each."""
    room = site.state.feed.large_answers = BodyRoom(ROOM)
    await append(victim, "large", body(MIB))
    found = list[int]()
    on_read(monkeypatch, lambda _extent, rows: found.append(rows))

    async with taken(room), wire_to(site) as wire:
        await asks(wire, victim)
        await until(lambda: room.waiting == 1)
        wire.close()
        await until(lambda: room.waiting == 0)

    assert found == [0]
    assert room.free_bytes == ROOM


def on_read(monkeypatch: pytest.MonkeyPatch, done: Callable[[Extent, int], object]) -> None:
    """Call this after each read of the newest rows, with how many were found."""
    original = store.newest_rows

    async def read(*args: Any) -> Any:
        found = await original(*args)
        done(args[-1], len(found.rows))
        return found

    monkeypatch.setattr(store, "newest_rows", read)


async def test_a_few_large_pages_are_read_at_once(site: Site, monkeypatch: pytest.MonkeyPatch):
    """Postgres takes several times the size of a row to read it."""
    readers = [await with_row(site, 100_000) for _ in range(6)]
    small, large, goes_on = list[int](), list[int](), asyncio.Event()
    original: Callable[..., Awaitable[Any]] = store.newest_rows

    async def read(*args: Any) -> Any:
        is_small = args[-1].read_bytes < 100_000
        (small if is_small else large).append(1)
        if not is_small:
            await goes_on.wait()
        return await original(*args)

    monkeypatch.setattr(store, "newest_rows", read)
    answers = [asyncio.create_task(one.read_feed()) for one in readers]
    await until(lambda: (len(small), len(large)) == (6, 4))
    await until(lambda: waiting_reads(site) == 2)
    at_once = len(large)
    goes_on.set()

    assert [len((await answer).json) for answer in answers] == [1] * 6
    assert at_once == 4


def waiting_reads(site: Site) -> int:
    return len(site.state.feed._large_reads._running._waiters or ())


async def test_a_larger_row_that_arrives_meanwhile_gets_its_room_too(
    site: Site, victim: Caller, monkeypatch: pytest.MonkeyPatch
):
    """The newest row was measured, and is no longer the newest when it is read."""
    await append(victim, "large", body(100_000))
    arrived = asyncio.Event()
    original: Callable[..., Awaitable[Any]] = store.newest_rows

    async def read(*args: Any) -> Any:
        found = await original(*args)
        if not arrived.is_set():
            arrived.set()
            await append(victim, "larger", body(MIB))
        return found

    monkeypatch.setattr(store, "newest_rows", read)

    (row,) = await victim.feed(limit=1)
    assert row["summary"] == "larger"


UNLIMITED = {"events": {"read_bufsize": 64 * MIB}, "ws": {"max_msg_size": 0}}


@pytest.mark.parametrize(("way", "copies"), [("events", 1), ("ws", 4)])
async def test_slow_watchers_give_way_and_can_resume(
    site: Site, victim: Caller, way: str, copies: int
):
    """The text of a WebSocket's message may take four times its size, and counts so much."""
    size = copies * (ROW + 1000)
    site.state.feed.large_events = room = BodyRoom(size, guaranteed_seconds=0)
    slow = await registered(site)
    await append(slow, "first")
    (first,) = await slow.feed()
    async with watch(slow, way, **UNLIMITED[way]) as watcher, watch(victim, way) as other:
        transport = getattr(watcher.way, "connection", None) or watcher.way._conn
        transport.transport.pause_reading()
        await append(slow, "large", body(ROW))
        await until(lambda: room.free_bytes < 4000)
        await append(victim, "victim", body(100_000))

        assert await other.summaries(1) == ["victim"]
    await until(lambda: room.free_bytes == size)
    resumed = {"headers": {"Last-Event-ID": first["id"]}, **UNLIMITED[way]}
    async with watch(slow, way, **resumed) as watcher:
        assert await watcher.summaries(1) == ["large"]
