"""The space account: sizes of tables and partitions, live and dead bytes, and locks in its way."""

import asyncio
import os
from typing import Any

import pytest
from factories import Content, make_upload, until_blocked
from sweeps import (
    CHUNKS,
    FEED,
    attached_to,
    detach_half_way,
    locked,
    make_old,
    make_partition,
    make_subjects,
    partition_names,
    size_of,
    utc_now,
)

from restante.database import partitions
from restante.database.pool import Database
from restante.delivery import store as uploads
from restante.feed.subject import MESSAGE_IDS
from restante.ids import WorkspaceId
from restante.retention import rules
from restante.retention.space import SpaceAccount
from restante.wire import TableSpaceView

pytestmark = pytest.mark.anyio


@pytest.fixture
def account(db: Database) -> SpaceAccount:
    return SpaceAccount(db, make_subjects())


async def table(account: SpaceAccount, name: str) -> TableSpaceView:
    seen = await account.look(now=utc_now())
    return next(one for one in seen.tables if one.name == name)


# Tables and partitions ---------------------------------------------------------------------------


async def test_every_table_is_listed_and_the_largest_comes_first(
    account: SpaceAccount, connection: Any
):
    found = (await account.look(now=utc_now())).tables

    expected = await connection.fetch(
        "select relname from pg_class where relnamespace = 'restante'::regnamespace"
        " and relkind in ('r', 'p') and not relispartition"
    )
    assert {one.name for one in found} == {row["relname"] for row in expected}
    assert [one.bytes for one in found] == sorted((one.bytes for one in found), reverse=True)


async def test_a_table_names_the_subjects_that_keep_it_bounded(account: SpaceAccount):
    assert (await table(account, "chunks")).subjects == ["buckets"]
    assert (await table(account, "feeds")).subjects == ["removed workspaces"]
    assert (await table(account, "schema_migrations")).subjects == []


async def test_partitions_are_part_of_their_table(
    account: SpaceAccount, connection: Any, workspace_id: WorkspaceId
):
    before = await table(account, "chunks")
    bucket = await make_partition(connection, CHUNKS)
    await make_old(connection, workspace_id, 4, data=os.urandom(256 * 1024))

    after = await table(account, "chunks")

    names = await partition_names(connection, CHUNKS)
    assert after.partitions == before.partitions + 1 == len(names)
    size = await size_of(connection, bucket)
    assert after.bytes == before.bytes + size
    assert size > 4 * 256 * 1024


async def test_a_leftover_counts_as_part_of_its_table(account: SpaceAccount, connection: Any):
    """It takes space until it is dropped, and its name must not become a label."""
    name = await make_partition(connection, FEED)
    before = await table(account, "feed")
    await partitions.detach(connection, attached_to("feed", name, FEED))

    after = await table(account, "feed")

    assert (after.bytes, after.partitions) == (before.bytes, before.partitions - 1)
    assert name not in {one.name for one in (await account.look(now=utc_now())).tables}


async def test_a_look_shows_each_partition_and_the_live_bytes_of_a_bucket(
    account: SpaceAccount, connection: Any, workspace_id: WorkspaceId
):
    """An acknowledged file is live until it is deleted, because its bytes must stay."""
    bucket = await make_partition(connection, CHUNKS)
    acked, *_ = await make_old(connection, workspace_id, 4, data=os.urandom(200_000))
    await uploads.acknowledge(connection, workspace_id, acked, now=utc_now())
    await connection.execute("delete from uploads where ctid = (select max(ctid) from uploads)")

    seen = (await account.look(now=utc_now())).partitions

    largest = seen[0]
    assert (largest.name, largest.live_bytes) == (bucket, 3 * 200_000)
    assert largest.dead_bytes == largest.bytes - 3 * 200_000 > 200_000
    assert {one.name for one in seen} == {
        *await partition_names(connection, CHUNKS),
        *await partition_names(connection, FEED),
        *await partition_names(connection, MESSAGE_IDS),
    }
    of_feed = [one for one in seen if one.name.startswith("feed")]
    assert {(one.live_bytes, one.dead_bytes) for one in of_feed} == {(None, None)}


# Sums --------------------------------------------------------------------------------------------


async def test_dead_bytes_are_what_the_chunks_take_beyond_the_live_files(
    account: SpaceAccount, connection: Any, workspace_id: WorkspaceId
):
    for _ in range(3):
        await make_upload(connection, workspace_id, Content(os.urandom(200_000)))
    await connection.execute("delete from uploads where ctid = (select max(ctid) from uploads)")

    seen = await account.look(now=utc_now())

    (chunks,) = [one for one in seen.tables if one.name == "chunks"]
    assert seen.total_bytes == sum(one.bytes for one in seen.tables)
    assert seen.live_bytes == 2 * 200_000
    assert seen.dead_bytes == chunks.bytes - 2 * 200_000 > 200_000


async def test_files_that_are_larger_than_their_table_leave_nothing_dead(
    account: SpaceAccount, connection: Any, workspace_id: WorkspaceId
):
    """Files are measured by their length, and a table by its pages."""
    await make_upload(connection, workspace_id)
    await connection.execute("update uploads set size = 10000000")

    seen = await account.look(now=utc_now())

    assert (seen.live_bytes, seen.dead_bytes) == (10_000_000, 0)
    assert {one.dead_bytes for one in seen.partitions if one.live_bytes} == {0}


async def test_a_look_reads_only_and_a_sample_records_the_total(
    account: SpaceAccount, connection: Any
):
    seen = await account.look(now=utc_now())
    after_the_look = await connection.fetchval("select count(*) from space_samples")
    sampled = await account.sample(now=utc_now())
    kept = await connection.fetchval("select bytes from space_samples")

    assert (after_the_look, kept) == (0, sampled.total_bytes)
    assert seen.growth_bytes_per_day is None
    assert seen.free_bytes is None or seen.free_bytes > 0


async def test_the_days_until_the_disk_is_full_follow_from_growth_and_free_space(
    account: SpaceAccount, connection: Any
):
    """Unknown growth gives no forecast."""
    now = utc_now()
    before = await account.look(now=now)
    await connection.execute(
        "insert into space_samples values ($1::timestamptz - interval '1 day', 0), ($1, 1000000)",
        now,
    )

    seen = await account.look(now=now)

    assert before.days_until_full is None
    assert seen.growth_bytes_per_day == pytest.approx(1_000_000)
    assert seen.days_until_full == rules.days_until_full(seen.free_bytes, seen.growth_bytes_per_day)


# Locks -------------------------------------------------------------------------------------------


async def test_a_look_does_not_wait_for_a_locked_partition(
    account: SpaceAccount, connection: Any, connections: Any
):
    bucket = await make_partition(connection, CHUNKS)
    async with locked(await connections(), bucket, "access exclusive"):
        seen = await account.look(now=utc_now())

    assert bucket not in {one.name for one in seen.partitions}
    assert {"chunks", "feed", "uploads"} <= {one.name for one in seen.tables}


async def test_a_look_does_not_wait_for_a_partition_that_is_being_removed(
    account: SpaceAccount, connection: Any, connections: Any
):
    """FINALIZE holds a lock on it and waits for all older statements; it must not wait for us."""
    finisher, reader = await connections(), await connections()
    bucket = attached_to("chunks", await make_partition(connection, CHUNKS), CHUNKS)
    await detach_half_way(connections, bucket)
    async with locked(reader, "only chunks"):
        finishing = asyncio.create_task(partitions.finish_detaching(finisher, bucket))
        await until_blocked(connection, finisher)

        seen = await account.look(now=utc_now())
    await finishing

    assert bucket.name not in {one.name for one in seen.partitions}
