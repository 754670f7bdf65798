"""Those who wait for new ops are woken when these can be read, in whatever order writers end."""

import asyncio
from typing import Any

import pytest
from waiting import until

from restante.database.pool import Database
from restante.oplog.serving.watch import Watcher

pytestmark = pytest.mark.anyio

IS_PAST = "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint > $1"


async def writing(connection: Any) -> int:
    """The id of a transaction that has begun to write."""
    await connection.execute("begin")
    return await connection.fetchval("select pg_current_xact_id()::text::bigint")


async def test_every_open_writer_wakes_them_when_it_ends(db: Database, connections: Any):
    """The watcher has looked while both were open, and no snapshot showed the younger one."""
    older, younger, other = await connections(), await connections(), await connections()
    async with Watcher(db, look_seconds=0.002).waiting() as waiting:
        await waiting.next(5)  # the first look
        await writing(older)
        last = await writing(younger)
        await younger.fetchval("select op_tick(1)")
        await until(lambda: other.fetchval(IS_PAST, last))

        await older.execute("commit")
        first = await waiting.next(5)
        while await waiting.next(0.2):
            pass
        await younger.execute("commit")

        assert first
        assert await waiting.next(5)


async def test_transactions_that_write_no_op_wake_nobody(db: Database, connections: Any):
    other = await connections()
    async with Watcher(db, look_seconds=0.002).waiting() as waiting:
        while await waiting.next(0.2):
            pass
        for _ in range(3):
            await other.fetchval("select pg_current_xact_id()")

        assert not await waiting.next(0.2)


async def test_nobody_waits_for_a_server_that_stops(db: Database):
    watcher = Watcher(db)
    async with watcher.waiting() as waiting:
        await waiting.next(5)  # the first look
        asyncio.get_running_loop().call_soon(watcher.stop)

        assert not await waiting.next(60)
        assert waiting.is_over
