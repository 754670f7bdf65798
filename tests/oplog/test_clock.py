"""The hybrid clock: capture takes most ticks without a lock, and none of them goes back."""

import asyncio
from typing import Any

import pytest
from factories import until_blocked
from oplog.captured import log_of, track

from restante.database.pool import Database

pytestmark = pytest.mark.anyio

# How many ticks are taken without the lock after the clock was set under it.
FREE = 256
MINUTE = 60_000 << 15


@pytest.fixture
async def writers(db: Database, connections: Any) -> list[Any]:
    """Two connections of the application; `pages` is tracked."""
    found = [await connections() for _ in range(2)]
    for one in found:
        await one.execute("set search_path = public")
    await found[0].execute("create table pages (id text primary key, n integer, body text)")
    await track(db)
    return found


async def set_ahead(connection: Any) -> int:
    """Set the clock ahead of the wall clock, so that time changes nothing; the tick."""
    last = await connection.fetchval("select last_value from restante.op_clock")
    return await connection.fetchval("select restante.op_tick(1, $1)", last + MINUTE)


async def ticks(connection: Any) -> list[int]:
    return [one.ulid.int >> 65 for one in await log_of(connection)]


async def test_ticks_never_go_back_whoever_takes_them(writers: list[Any]):
    await set_ahead(writers[0])

    for n in range(2 * FREE):
        await writers[n % 2].execute("insert into pages values ($1)", str(n))
        if n % 100 == 50:
            await writers[0].execute("select restante.op_tick(3)")
        if n % 100 == 75:
            await set_ahead(writers[1])

    found = await ticks(writers[0])
    assert len(found) == 2 * FREE
    assert found == sorted(set(found))


async def test_only_so_many_ticks_are_taken_without_the_lock(writers: list[Any]):
    """More would reach the ticks that whoever holds the lock is about to take."""
    writer, holder = writers
    start = await set_ahead(writer)

    async with holder.transaction():
        await holder.execute("lock table restante.op_clock_lock in exclusive mode")
        for n in range(FREE):
            await writer.execute("insert into pages values ($1)", str(n))
        one_more = asyncio.create_task(writer.execute("insert into pages values ('last')"))
        await until_blocked(holder, writer)
        assert not one_more.done()
    await one_more

    found = await ticks(writer)
    assert found[:FREE] == [*range(start + 1, start + FREE + 1)]
    assert found[FREE] > start + FREE


async def test_a_tick_that_was_taken_before_the_clock_was_set_does_not_count(writers: list[Any]):
    """Somebody set the clock and has not moved the mark yet: those ticks are theirs."""
    writer, setter = writers
    start = await set_ahead(writer)

    await setter.execute("select setval('restante.op_clock', $1)", start + FREE + 5)
    await writer.execute("insert into pages values ('a')")
    await setter.execute("select setval('restante.op_clock_mark', $1)", start + FREE + 5)
    await writer.execute("insert into pages values ('b')")

    assert all(tick > start + FREE + 5 for tick in await ticks(writer))


async def test_a_clock_that_stood_still_is_set_to_the_time(writers: list[Any]):
    writer = writers[0]
    await writer.execute(
        "select setval('restante.op_clock', last_value - $1), setval('restante.op_clock_mark',"
        " last_value - $1) from restante.op_clock",
        MINUTE,
    )
    before = await writer.fetchval("select (extract(epoch from now()) * 1000)::bigint << 15")

    await writer.execute("insert into pages values ('a')")

    assert (await ticks(writer))[0] >= before
