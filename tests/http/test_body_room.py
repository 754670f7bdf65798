"""Large bodies share a bounded room, and slow ones give way."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from waiting import until

from restante.database import shares
from restante.errors import TooManyAtOnce
from restante.http.body_room import SMALL_BYTES, BodyRoom, Place

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024


@asynccontextmanager
async def body(room: BodyRoom, size: int, caller: str = "a") -> AsyncIterator[Place]:
    """A body that has arrived."""
    shares.caller.set(caller)
    async with room.place(size) as place:
        await place.grow(size)
        yield place


async def kept(room: BodyRoom, size: int, caller: str, leave: asyncio.Event) -> str:
    """A body that stays until it may leave; whose it was."""
    async with body(room, size, caller):
        await leave.wait()
    return caller


@pytest.fixture
async def run() -> AsyncIterator[Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"]]:
    tasks: list[asyncio.Task[Any]] = []

    def start(work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        tasks.append(asyncio.create_task(work))
        return tasks[-1]

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_small_bodies_take_no_room():
    room = BodyRoom(10)

    async with AsyncExitStack() as stack:
        for _ in range(10):
            await stack.enter_async_context(body(room, SMALL_BYTES))

    assert room.free_bytes == 10


async def test_a_body_has_its_room_until_it_ends():
    room = BodyRoom(4 * MIB)

    async with body(room, 3 * MIB) as place:
        inside = room.free_bytes
        await place.grow(MIB)
    with pytest.raises(ZeroDivisionError):
        async with body(room, 3 * MIB):
            raise ZeroDivisionError

    assert (inside, room.free_bytes) == (MIB, 4 * MIB)


async def test_who_gets_no_room_in_time_is_refused():
    room = BodyRoom(4 * MIB, longest_wait_seconds=0)

    async with body(room, 3 * MIB):
        with pytest.raises(TooManyAtOnce) as caught:
            async with body(room, 3 * MIB):
                pass

    assert caught.value.facts["retry_after_seconds"] == 5
    assert room.free_bytes == 4 * MIB


async def test_the_caller_that_has_least_of_the_room_is_next(run: Any):
    """However many bodies of somebody else came before."""
    room = BodyRoom(4 * MIB, guaranteed_seconds=60, longest_wait_seconds=60)
    first, second, never = asyncio.Event(), asyncio.Event(), asyncio.Event()
    run(kept(room, 2 * MIB, "a", first))
    run(kept(room, 2 * MIB, "a", second))
    await until(lambda: room.free_bytes == 0)
    for caller in ("a", "a", "b"):
        run(kept(room, 2 * MIB, caller, never))
        await asyncio.sleep(0)

    first.set()
    await until(lambda: room.callers == ["a", "b"])


async def test_a_body_that_has_had_its_time_gives_way_to_one_that_waits(run: Any):
    room = BodyRoom(4 * MIB, guaranteed_seconds=0, longest_wait_seconds=60)
    slow = run(kept(room, 3 * MIB, "a", asyncio.Event()))
    await until(lambda: room.free_bytes == MIB)

    async with body(room, 3 * MIB, "b"):
        pass

    with pytest.raises(TooManyAtOnce):
        await slow
    assert room.free_bytes == 4 * MIB


async def test_a_body_that_does_not_wait_for_its_client_does_not_give_way(run: Any):
    """What has arrived is stored soon; to begin anew would cost everybody more."""
    room = BodyRoom(4 * MIB, guaranteed_seconds=0, longest_wait_seconds=60)
    leave = asyncio.Event()

    async def store() -> None:
        async with body(room, 3 * MIB) as place:
            place.gives_way = False
            await leave.wait()

    storing = run(store())
    await until(lambda: room.free_bytes == MIB)
    waiting = run(kept(room, 3 * MIB, "b", leave))
    await until(lambda: room.waiting == 1)
    leave.set()

    await asyncio.gather(storing, waiting)


async def test_no_body_gives_way_that_need_not(run: Any):
    """Only as many end as make room, the longest ones first."""
    room = BodyRoom(4 * MIB, guaranteed_seconds=0, longest_wait_seconds=60)
    oldest = run(kept(room, 2 * MIB, "a", asyncio.Event()))
    await until(lambda: room.free_bytes == 2 * MIB)
    younger = run(kept(room, 2 * MIB, "a", asyncio.Event()))
    await until(lambda: room.free_bytes == 0)

    async with body(room, MIB, "b"):
        pass

    assert isinstance((await asyncio.gather(oldest, return_exceptions=True))[0], TooManyAtOnce)
    assert not younger.done()


async def test_a_body_keeps_its_room_for_the_guaranteed_time(run: Any):
    room = BodyRoom(4 * MIB, guaranteed_seconds=60, longest_wait_seconds=0.05)
    leave = asyncio.Event()
    first = run(kept(room, 3 * MIB, "a", leave))
    await until(lambda: room.free_bytes == MIB)

    with pytest.raises(TooManyAtOnce):
        async with body(room, 3 * MIB, "b"):
            pass
    leave.set()

    assert await first == "a"


async def test_a_body_that_stands_still_does_not_keep_what_it_announced(run: Any):
    room = BodyRoom(4 * MIB, guaranteed_seconds=60, longest_wait_seconds=60)
    whole = run(kept(room, MIB, "a", asyncio.Event()))
    await until(lambda: room.free_bytes == 3 * MIB)

    async def announce() -> None:
        shares.caller.set("b")
        async with room.place(3 * MIB) as place:
            await place.grow(SMALL_BYTES + 1)
            await asyncio.Event().wait()

    stalled = run(announce())
    await until(lambda: room.free_bytes == 0)

    async with body(room, 2 * MIB, "c"):
        assert isinstance((await asyncio.gather(stalled, return_exceptions=True))[0], TooManyAtOnce)
    assert not whole.done()


async def test_room_is_made_for_all_that_wait(run: Any):
    """One that finds its room taken by another is not left to wait in vain."""
    room = BodyRoom(4 * MIB, guaranteed_seconds=0, longest_wait_seconds=60)
    for _ in range(4):
        run(kept(room, MIB, "slow", asyncio.Event()))
    await until(lambda: room.free_bytes == 0)
    leave = asyncio.Event()
    waiting = [run(kept(room, MIB, caller, leave)) for caller in "abc"]
    await until(lambda: room.waiting == 0)
    leave.set()

    assert await asyncio.gather(*waiting) == ["a", "b", "c"]


async def test_of_callers_that_have_nothing_the_smallest_body_is_next(run: Any):
    room = BodyRoom(4 * MIB, guaranteed_seconds=60, longest_wait_seconds=60)
    leave, never = asyncio.Event(), asyncio.Event()
    run(kept(room, 4 * MIB, "first", leave))
    await until(lambda: room.free_bytes == 0)
    large = [run(kept(room, 4 * MIB, caller, never)) for caller in "abc"]
    await until(lambda: room.waiting == 3)
    small = run(kept(room, MIB, "d", leave))
    await until(lambda: room.waiting == 4)

    leave.set()

    assert await small == "d"
    assert not any(one.done() for one in large)


async def test_a_body_that_is_cancelled_while_it_waits_takes_no_room(run: Any):
    room = BodyRoom(4 * MIB, guaranteed_seconds=60, longest_wait_seconds=60)
    leave = asyncio.Event()
    run(kept(room, 3 * MIB, "a", leave))
    await until(lambda: room.free_bytes == MIB)
    waiting = run(kept(room, 3 * MIB, "b", leave))
    await until(lambda: room.waiting == 1)

    waiting.cancel()
    leave.set()

    await until(lambda: room.free_bytes == 4 * MIB)
    assert room.waiting == 0
