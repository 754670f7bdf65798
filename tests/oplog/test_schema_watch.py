"""A running server follows changes of the schema of tracked tables by itself."""

import asyncio
from typing import Any

import pytest
from oplog.captured import changes_of, track
from structlog.testing import capture_logs

from restante.database.pool import Database
from restante.oplog.tracking.schema_changes import Watch

pytestmark = pytest.mark.anyio

PAGES = "create table public.pages (id text, n int, primary key (id, n)) partition by range (n)"
FIRST = "create table public.pages_1 partition of public.pages for values from (0) to (10)"
SECOND = "create table public.pages_2 partition of public.pages for values from (10) to (20)"


async def test_a_new_partition_is_captured_and_said_once(db: Database, connections: Any):
    """Programs may write straight to a partition."""
    writer = await connections()
    await writer.execute(f"{PAGES}; {FIRST}")
    await track(db)
    watch = Watch(db)
    await watch.look()
    await writer.execute(SECOND)

    with capture_logs() as said:
        await watch.look()
        await watch.look()
    await writer.execute("insert into public.pages_2 values ('a', 11)")

    assert await changes_of(writer) == [("c", {"id": "a", "n": 11})]
    assert [entry["event"] for entry in said] == ["oplog_table"]


async def test_a_new_column_is_followed_while_a_transaction_is_open(db: Database, connections: Any):
    """Writers would wait behind whoever waits for the table."""
    writer, other = await connections(), await connections()
    await writer.execute("create table public.pages (id text primary key)")
    await track(db)
    await writer.execute("alter table public.pages add n integer")

    async with other.transaction():
        await other.execute("insert into public.pages values ('a', 1)")
        with capture_logs() as said:
            await Watch(db).look()

    assert said == []
    assert await writer.fetchval(
        "select shape = restante.op_shape('public.pages'::regclass) from restante.op_tables"
    )


async def test_a_new_partition_in_use_is_not_waited_for(db: Database, connections: Any):
    writer, other, watcher = await connections(), await connections(), await connections()
    await writer.execute(f"{PAGES}; {FIRST}")
    await track(db)
    await writer.execute(SECOND)
    await other.execute("set lock_timeout = 1000")
    watch = Watch(db)

    async with writer.transaction():
        await writer.execute("insert into public.pages_2 values ('a', 11)")
        looking = asyncio.create_task(watch.look())
        await asyncio.sleep(0)
        while not looking.done():
            await other.execute("insert into public.pages values (gen_random_uuid(), 1)")
        await looking
    await watch.look()
    await writer.execute("insert into public.pages_2 values ('b', 12)")

    assert ("c", {"id": "b", "n": 12}) in await changes_of(watcher)
