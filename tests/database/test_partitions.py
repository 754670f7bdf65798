"""Partitions are created ahead of the clock, by any number of servers, without blocking writers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from factories import Content, make_upload, make_workspace
from sweeps import CHUNKS, FEED
from waiting import until

from restante.database import partitions
from restante.database.partitions import PartitionedTable
from restante.database.pool import Database
from restante.database.spans import Span

pytestmark = pytest.mark.anyio

NOON = datetime(2026, 3, 29, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)

both = pytest.mark.parametrize("table", [CHUNKS, FEED], ids=lambda table: table.name)


async def create(
    db: Database,
    table: PartitionedTable,
    now: datetime = NOON,
    width: timedelta = HOUR,
    lead: timedelta = 3 * HOUR,
) -> list[Span]:
    return await partitions.create_ahead(
        db, table, parent=table.name, now=now, width=width, lead=lead
    )


async def spans(db: Database, table: PartitionedTable) -> list[Span]:
    async with db.connection() as connection:
        found = await partitions.partitions_of(connection, [table])
    return [one.span for one in found if one.span]


@both
async def test_every_moment_of_the_lead_has_a_partition(db: Database, table: PartitionedTable):
    created = await create(db, table, NOON + 10 * MINUTE)

    expected = [Span(NOON + n * HOUR, NOON + (n + 1) * HOUR) for n in range(4)]
    assert created == expected
    assert await spans(db, table) == expected


@both
async def test_existing_partitions_are_not_created_again(db: Database, table: PartitionedTable):
    await create(db, table)

    assert await create(db, table) == []
    assert len(await create(db, table, NOON + HOUR)) == 1


@both
async def test_ten_servers_at_once_create_each_partition_once(dsn: str, table: PartitionedTable):
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


async def test_a_server_waits_for_another_longer_than_for_a_lock_on_a_table(
    db: Database, connections: Any
):
    """The other may have hundreds of partitions to create; that is no reason to fail."""
    slow, watcher = await connections(), await connections()
    turn = slow.transaction()
    await turn.start()
    await slow.execute(partitions.queries.lock_partition_creation, CHUNKS.name)
    creating = asyncio.create_task(create(db, CHUNKS))

    # The lock timeout of the statements after it has passed by then.
    await until(lambda: has_waited(watcher, timedelta(seconds=2.5)))
    await turn.rollback()

    assert len(await creating) == 4


async def has_waited(watcher: Any, time: timedelta) -> bool:
    """Whether a session in this database has been waiting for an advisory lock for that long."""
    return await watcher.fetchval(
        "select exists (select from pg_locks where not granted and locktype = 'advisory'"
        " and database = (select oid from pg_database where datname = current_database())"
        " and clock_timestamp() - waitstart > $1)",
        time,
    )


@both
@pytest.mark.parametrize("width", [10 * MINUTE, 6 * HOUR])
async def test_a_new_width_leaves_neither_gap_nor_overlap(
    db: Database, table: PartitionedTable, width: timedelta
):
    await create(db, table)

    await create(db, table, NOON + 20 * MINUTE, width=width, lead=8 * HOUR)

    found = await spans(db, table)
    assert all(before.end == after.start for before, after in pairwise(found))
    assert found[-1].end > NOON + 8 * HOUR


@both
async def test_bounds_are_parsed_whatever_the_settings_of_the_database(
    dsn: str, table: PartitionedTable
):
    """Postgres prints them in the time zone and the date style of the session."""
    async with _server(dsn) as before, before.connection() as connection:
        name = await connection.fetchval("select quote_ident(current_database())")
        await connection.execute(f"alter database {name} set timezone = 'Asia/Kathmandu'")
        await connection.execute(f"alter database {name} set datestyle = 'SQL, DMY'")

    async with _server(dsn) as db:
        await create(db, table)

        assert (await spans(db, table))[0] == Span(NOON, NOON + HOUR)


async def test_rows_are_stored_in_the_partitions(db_with_partitions: Database):
    async with db_with_partitions.connection() as connection:
        workspace_id = await make_workspace(connection)
        await make_upload(connection, workspace_id, Content())
        found = await connection.fetch(
            "select tableoid::regclass::text as partition from chunks"
            " union all select tableoid::regclass::text from feed"
        )

    assert [row["partition"].split("_")[0] for row in found] == ["chunks", "feed"]


async def test_a_bucket_is_not_vacuumed_and_its_bytes_are_not_compressed(db: Database):
    await create(db, CHUNKS, lead=timedelta(0))

    async with db.connection() as connection:
        bucket = await connection.fetchrow(
            "select bucket.reloptions, toast.reloptions as toast_options, bytes.attstorage::text"
            "  from pg_class bucket join pg_class toast on toast.oid = bucket.reltoastrelid"
            "  join pg_attribute bytes on bytes.attrelid = bucket.oid and bytes.attname = 'bytes'"
            " where bucket.oid = 'chunks_20260329_120000'::regclass"
        )

    assert bucket
    assert tuple(bucket) == (["autovacuum_enabled=off"], ["autovacuum_enabled=off"], "e")


@both
async def test_a_new_partition_does_not_block_a_writer(
    db_with_partitions: Database, connections: Any, table: PartitionedTable
):
    """It is attached while a transaction that has written is open, and that can write on."""
    writer = await connections()
    workspace_id = await make_workspace(writer)
    await writer.execute("set lock_timeout = '1s'")
    async with writer.transaction():
        await make_upload(writer, workspace_id)

        created = await create(db_with_partitions, table, datetime.now(UTC) + timedelta(days=1))
        await make_upload(writer, workspace_id)

    assert created
    assert await writer.fetchval("select last_seq from feeds") == 2
