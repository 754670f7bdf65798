"""Leaves are created ahead of the clock, by as many servers as there are."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from factories import Content, make_batch, make_workspace

from restante.database import partitions as leaves
from restante.database.partitions import CHUNKS, FEED, Table
from restante.database.pool import Database
from restante.database.spans import Span
from restante.delivery import store as uploads

pytestmark = pytest.mark.anyio

NOON = datetime(2026, 3, 29, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)

both = pytest.mark.parametrize("table", [CHUNKS, FEED], ids=lambda table: table.name)


async def create(
    db: Database,
    table: Table,
    now: datetime = NOON,
    width: timedelta = HOUR,
    lead: timedelta = 3 * HOUR,
) -> list[Span]:
    return await leaves.create_ahead(db, table, now=now, width=width, lead=lead)


async def spans(db: Database, table: Table) -> list[Span]:
    async with db.connection() as connection:
        return await leaves.spans_of(connection, table)


@both
async def test_every_moment_of_the_lead_has_a_leaf(db: Database, table: Table):
    created = await create(db, table, NOON + 10 * MINUTE)

    expected = [Span(NOON + n * HOUR, NOON + (n + 1) * HOUR) for n in range(4)]
    assert created == expected
    assert await spans(db, table) == expected


@both
async def test_the_second_time_there_is_nothing_to_do(db: Database, table: Table):
    await create(db, table)

    assert await create(db, table) == []
    assert len(await create(db, table, NOON + HOUR)) == 1


@both
async def test_ten_servers_at_once_create_each_leaf_once(dsn: str, table: Table):
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(_server(dsn)) for _ in range(10)]

        created = await asyncio.gather(*(create(db, table, width=10 * MINUTE) for db in servers))

        found = await spans(servers[0], table)
    assert sorted(map(len, created)) == [0] * 9 + [19]
    assert len(found) == 19
    assert all(before.end == after.start for before, after in pairwise(found))


@asynccontextmanager
async def _server(dsn: str) -> AsyncIterator[Database]:
    db = await Database.open(
        dsn, pool_size=2, acquire_timeout_seconds=5, statement_timeout_seconds=30
    )
    try:
        yield db
    finally:
        await db.close()


async def test_a_server_waits_for_its_turn_as_long_as_it_takes(db: Database, connections: Any):
    """The one before may have hundreds to create; nobody fails because of that."""
    slow = await connections()
    turn = slow.transaction()
    await turn.start()
    await slow.execute(leaves.queries.take_turns, CHUNKS.name)
    creating = asyncio.create_task(create(db, CHUNKS))
    # Longer than anything below the turn may wait for a lock.
    done, _ = await asyncio.wait({creating}, timeout=2.5)

    await turn.rollback()

    assert not done
    assert len(await creating) == 4


@both
@pytest.mark.parametrize("width", [10 * MINUTE, 6 * HOUR])
async def test_a_change_of_the_width_leaves_neither_gap_nor_overlap(
    db: Database, table: Table, width: timedelta
):
    await create(db, table)

    await create(db, table, NOON + 20 * MINUTE, width=width, lead=8 * HOUR)

    found = await spans(db, table)
    assert all(before.end == after.start for before, after in pairwise(found))
    assert found[-1].end > NOON + 8 * HOUR


@both
async def test_bounds_are_read_back_whatever_the_database_s_habits(dsn: str, table: Table):
    """The catalogue writes them in the time zone and the style of the session."""
    async with _server(dsn) as before, before.connection() as connection:
        name = await connection.fetchval("select quote_ident(current_database())")
        await connection.execute(f"alter database {name} set timezone = 'Asia/Kathmandu'")
        await connection.execute(f"alter database {name} set datestyle = 'SQL, DMY'")

    async with _server(dsn) as db:
        await create(db, table)

        assert (await spans(db, table))[0] == Span(NOON, NOON + HOUR)


async def test_rows_find_their_leaf(db_with_partitions: Database):
    async with db_with_partitions.connection() as connection:
        workspace_id = await make_workspace(connection)
        await uploads.publish(connection, make_batch(workspace_id, Content()))
        found = await connection.fetch(
            "select tableoid::regclass::text as leaf from chunks"
            " union all select tableoid::regclass::text from feed"
        )

    assert [row["leaf"].split("_")[0] for row in found] == ["chunks", "feed"]


async def test_a_bucket_is_never_vacuumed_and_its_bytes_are_stored_as_they_are(db: Database):
    await create(db, CHUNKS, lead=timedelta(0))

    async with db.connection() as connection:
        leaf = await connection.fetchrow(
            "select leaf.reloptions, toast.reloptions as toast_options, bytes.attstorage::text"
            "  from pg_class leaf join pg_class toast on toast.oid = leaf.reltoastrelid"
            "  join pg_attribute bytes on bytes.attrelid = leaf.oid and bytes.attname = 'bytes'"
            " where leaf.oid = 'chunks_20260329_120000'::regclass"
        )

    assert leaf
    assert tuple(leaf) == (["autovacuum_enabled=off"], ["autovacuum_enabled=off"], "e")


@both
async def test_a_writer_is_not_held_up(
    db_with_partitions: Database, connections: Any, table: Table
):
    """Leaves are attached while a transaction that has written is open, and while one writes."""
    writer = await connections()
    workspace_id = await make_workspace(writer)
    async with writer.transaction():
        await uploads.publish(writer, make_batch(workspace_id))

        async with asyncio.timeout(5):
            created = await create(db_with_partitions, table, datetime.now(UTC) + timedelta(days=1))
            seq = await uploads.publish(writer, make_batch(workspace_id))

    assert created
    assert seq == 2
