"""What the tables take, what holds it, and how fast it grows."""

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from factories import (
    DAY,
    HOUR,
    NOW,
    Content,
    make_message,
    make_upload,
    make_workspace,
    until_blocked,
)
from restante.retention.account import Lag, States, TableSpace
from sweeps import locked, make_old, make_partition, partition_names

from restante.database import partitions as leaves
from restante.database.partitions import CHUNKS, FEED
from restante.database.pool import Database
from restante.delivery import store as uploads
from restante.feed import store as feed
from restante.ids import WorkspaceId
from restante.retention import space_store as space
from restante.retention import store as retention
from restante.retention.space import SpaceAccount

pytestmark = pytest.mark.anyio


@pytest.fixture
async def connection(db_with_partitions: Database, connections: Any) -> Any:
    connection = await connections()
    await connection.execute("set timezone = 'UTC'; set datestyle = 'ISO'")
    return connection


@pytest.fixture
async def workspace_id(connection: Any) -> WorkspaceId:
    return await make_workspace(connection)


@pytest.fixture
def account(db_with_partitions: Database) -> SpaceAccount:
    return SpaceAccount(db_with_partitions)


async def table(account: SpaceAccount, name: str) -> TableSpace:
    return next(one for one in (await account.look()).tables if one.name == name)


async def counted(connection: Any) -> space.Uploads:
    return await space.uploads(connection, [], now=NOW)


# Tables and leaves


async def test_every_table_is_there_and_the_largest_comes_first(
    account: SpaceAccount, connection: Any
):
    found = (await account.look()).tables

    expected = await connection.fetch(
        "select relname from pg_class where relnamespace = 'restante'::regnamespace"
        " and relkind in ('r', 'p') and not relispartition"
    )
    assert {one.name for one in found} == {row["relname"] for row in expected}
    assert [one.bytes for one in found] == sorted((one.bytes for one in found), reverse=True)


async def test_leaves_are_part_of_their_table(
    account: SpaceAccount, connection: Any, workspace_id: WorkspaceId
):
    before = await table(account, "chunks")
    leaf = await make_partition(connection, CHUNKS)
    await make_old(connection, workspace_id, 4, data=os.urandom(256 * 1024))

    after = await table(account, "chunks")

    assert after.leaves == before.leaves + 1 == len(await partition_names(connection, CHUNKS))
    size = await connection.fetchval("select pg_total_relation_size($1::text::regclass)", leaf)
    assert after.bytes == before.bytes + size
    assert size > 4 * 256 * 1024


async def test_what_is_left_over_of_a_leaf_still_counts_for_its_table(
    account: SpaceAccount, connection: Any
):
    """It takes space until it is dropped, and its name must not become a label."""
    leaf = await make_partition(connection, FEED)
    before = await table(account, "feed")
    await retention.detach(connection, "feed", leaf)

    after = await table(account, "feed")

    assert (after.bytes, after.leaves) == (before.bytes, before.leaves - 1)
    assert leaf not in {one.name for one in (await account.look()).tables}


async def test_live_bytes_are_those_of_the_files_that_are_there(
    connection: Any, workspace_id: WorkspaceId
):
    assert (await counted(connection)).bytes == 0
    for size in (10, 200):
        await make_upload(connection, workspace_id, Content(bytes(size)))

    assert (await counted(connection)).bytes == 210


# Uploads by how far they got


async def make_states(connection: Any, workspace_id: WorkspaceId, counts: States) -> None:
    async def make(**other: Any) -> Any:
        return await make_upload(connection, workspace_id, Content(bytes(10)), **other)

    for _ in range(counts.never_fetched):
        await make()
    for _ in range(counts.fetched):
        await uploads.mark_fetched(connection, workspace_id, await make(), now=NOW)
    for _ in range(counts.acked):
        await uploads.acknowledge(connection, workspace_id, await make(), now=NOW)
    for _ in range(counts.expired):
        await make(expires_at=NOW)


async def test_uploads_are_counted_by_how_far_they_got(connection: Any, workspace_id: WorkspaceId):
    await make_states(connection, workspace_id, States(4, 3, 2, 1))

    assert (await counted(connection)).states == States(4, 3, 2, 1)


async def test_the_same_for_each_workspace_those_with_most_waiting_first(
    connection: Any, workspace_id: WorkspaceId
):
    other, idle = await make_workspace(connection), await make_workspace(connection)
    await make_states(connection, workspace_id, States(1, 1, 5, 0))
    await make_states(connection, other, States(2, 0, 0, 1))

    found = (await counted(connection)).workspaces

    assert [(one.workspace_id, one.states, one.waiting_bytes) for one in found] == [
        (other, States(2, 0, 0, 1), 30),
        (workspace_id, States(1, 1, 5, 0), 20),
    ]
    assert found[0].waiting_since == NOW
    assert idle not in {one.workspace_id for one in found}


async def test_a_workspace_that_has_acknowledged_everything_waits_for_nothing(
    connection: Any, workspace_id: WorkspaceId
):
    await make_states(connection, workspace_id, States(0, 0, 2, 0))

    (found,) = (await counted(connection)).workspaces

    assert (found.waiting_bytes, found.waiting_since) == (0, None)


async def test_only_so_many_workspaces_are_shown(connection: Any):
    """Promise 5: a page and its labels stay bounded, however many workspaces there are."""
    for _ in range(25):
        workspace_id = await make_workspace(connection)
        await make_upload(connection, workspace_id)

    assert len((await counted(connection)).workspaces) == 20
    assert len(await space.lags(connection)) == 20


async def test_lags_are_what_was_not_handled_the_furthest_first(
    connection: Any, workspace_id: WorkspaceId
):
    other, done = await make_workspace(connection), await make_workspace(connection)
    for each, rows, acked in ((workspace_id, 3, 1), (other, 4, 0), (done, 2, 2)):
        for _ in range(rows):
            await feed.append(connection, each, make_message(), now=NOW)
        await feed.acknowledge(connection, each, acked)

    assert await space.lags(connection) == [Lag(other, 4), Lag(workspace_id, 2)]


async def test_workspaces_that_were_removed_are_not_active(
    connection: Any, workspace_id: WorkspaceId
):
    await make_workspace(connection)
    await connection.execute("update workspaces set status = 'removed' where id = $1", workspace_id)

    assert await space.workspaces_active(connection) == 1


# What pins space


async def test_an_open_transaction_is_no_pin_in_its_first_minute(connection: Any, connections: Any):
    """Its age cannot be moved by data; that the others are found is shown below."""
    reader = await connections()
    async with reader.transaction():
        await reader.execute("select from uploads")

        found = await space.pins(connection)

    assert f"process {reader.get_server_pid()}" not in {pin.who.split(" (")[0] for pin in found}


async def test_a_transaction_that_has_been_open_for_long_is_named_with_the_way_out(
    connection: Any, connections: Any, monkeypatch: pytest.MonkeyPatch
):
    reader = await connections()
    pid = reader.get_server_pid()
    query = space.queries.oldest_transactions
    assert "interval '1 minute'" in query
    monkeypatch.setitem(
        space.queries._by_name,
        "oldest_transactions",
        query.replace("interval '1 minute'", "interval '0'"),
    )
    async with reader.transaction():
        await reader.execute("select from uploads")

        found = await space.pins(connection)

    (pin,) = [pin for pin in found if pin.who.startswith(f"process {pid} ")]
    assert pin.what == "an open transaction"
    assert f"pg_terminate_backend({pid})" in pin.way_out
    assert pin.seconds > 0


@pytest.fixture
async def slot(connection: Any) -> AsyncIterator[str]:
    """A replication slot that keeps log and that nobody reads."""
    name = f"test_{uuid4().hex}"
    await connection.execute("select pg_create_physical_replication_slot($1, true)", name)
    yield name
    await connection.execute("select pg_drop_replication_slot($1)", name)


async def test_a_replication_slot_is_named_with_the_log_it_keeps(
    connection: Any, workspace_id: WorkspaceId, slot: str
):
    await make_upload(connection, workspace_id, Content(bytes(200_000)))

    (pin,) = [pin for pin in await space.pins(connection) if slot in pin.who]

    assert pin.bytes > 0
    assert "nobody reads it" in pin.what
    assert "drop the slot" in pin.way_out


async def test_workspaces_that_do_not_fetch_are_named_those_with_most_first(connection: Any):
    """An hour is given to everybody; what was fetched or has been acknowledged does not count."""
    sizes = (10, 60, 20, 50, 40, 30)
    ids = [await make_workspace(connection) for _ in sizes]
    for workspace_id, size in zip(ids, sizes, strict=True):
        await make_upload(connection, workspace_id, Content(bytes(size)), now=NOW - 2 * HOUR)
        await make_upload(connection, workspace_id, Content(bytes(999)), now=NOW)
    fetched = await make_upload(connection, ids[0], Content(bytes(998)), now=NOW - 2 * HOUR)
    await uploads.mark_fetched(connection, ids[0], fetched, now=NOW)
    acked = await make_upload(connection, ids[2], Content(bytes(997)), now=NOW - 2 * HOUR)
    await uploads.acknowledge(connection, ids[2], acked, now=NOW)

    silent = (await counted(connection)).silent

    assert [pin.bytes for pin in silent] == [60, 50, 40, 30, 20]
    assert silent[0].who == f"workspace {ids[1]}"
    assert silent[0].what == "1 files that it does not fetch"
    assert silent[0].seconds == 2 * 3600


async def test_uploads_are_counted_in_one_pass_over_the_table(
    connection: Any, workspace_id: WorkspaceId
):
    """Every server does it every five minutes, and the table may have millions of rows."""
    await make_upload(connection, workspace_id)
    explained = await connection.fetchval(
        f"explain (format json) {space.queries.uploads}", NOW, [NOW], 20, 5
    )

    assert explained.count('"Relation Name": "uploads"') == 1


# Growth


async def take(connection: Any, *samples: tuple[timedelta, int]) -> None:
    for ago, size in samples:
        await space.take_sample(connection, size, now=NOW - ago)


async def growth(connection: Any) -> float | None:
    return await space.growth_bytes_per_day(connection, now=NOW)


async def test_growth_is_not_known_before_the_samples_cover_an_hour(connection: Any):
    assert await growth(connection) is None
    await take(connection, (timedelta(minutes=59), 0), (timedelta(0), 10**6))
    assert await growth(connection) is None


async def test_growth_is_what_came_a_day_since_the_first_sample(connection: Any):
    await take(connection, (2 * DAY, 1000), (DAY, 9000), (timedelta(0), 5000))

    assert await growth(connection) == pytest.approx(2000)


async def test_what_shrinks_grows_by_less_than_nothing(connection: Any):
    await take(connection, (12 * HOUR, 1000), (timedelta(0), 400))

    assert await growth(connection) == pytest.approx(-1200)


async def test_samples_older_than_a_week_do_not_count_and_are_forgotten(connection: Any):
    await take(connection, (30 * DAY, 0), (7 * DAY, 0), (6 * DAY, 600), (timedelta(0), 1200))

    assert await growth(connection) == pytest.approx(100)
    assert await connection.fetchval("select count(*) from space_samples") == 3


async def test_two_servers_that_sample_at_once_keep_one(connection: Any):
    await take(connection, (DAY, 100), (DAY, 300))

    assert await connection.fetchval("select count(*) from space_samples") == 1


# Leaves ahead


async def lead_at(connection: Any, now: datetime) -> dict[str, float]:
    return leaves.lead_seconds(await leaves.all_leaves(connection), now=now)


async def test_the_lead_is_the_end_of_the_last_leaf(connection: Any):
    end = max(
        leaf.span.end
        for leaf in await leaves.all_leaves(connection)
        if leaf.span and leaf.table == "chunks"
    )

    lead = await lead_at(connection, end - HOUR)

    assert lead["chunks"] == pytest.approx(3600)
    assert set(lead) == {"chunks", "feed"}


async def test_without_leaves_there_is_no_lead(db: Database):
    async with db.connection() as connection:
        assert await lead_at(connection, NOW) == {"chunks": 0, "feed": 0}


async def test_past_leaves_give_no_lead(connection: Any):
    later = NOW + 30 * DAY

    assert await lead_at(connection, later) == {"chunks": 0, "feed": 0}


# All of it


async def test_a_look_reads_only_and_a_sample_remembers_the_total(db_with_partitions: Database):
    account = SpaceAccount(db_with_partitions)

    seen = await account.look()
    async with db_with_partitions.connection() as connection:
        after_the_look = await connection.fetchval("select count(*) from space_samples")
        sampled = await account.sample()
        kept = await connection.fetchval("select bytes from space_samples")

    assert (after_the_look, kept) == (0, sampled.total_bytes)
    assert seen.growth_bytes_per_day is None
    assert seen.free_bytes is None or seen.free_bytes > 0
    assert seen.total_bytes == sum(one.bytes for one in seen.tables)


async def test_a_look_shows_each_leaf_and_of_a_bucket_what_lives_in_it(
    db_with_partitions: Database, connection: Any, workspace_id: WorkspaceId
):
    """Whatever was acknowledged counts as live until it is deleted, for its bytes have to stay."""
    leaf = await make_partition(connection, CHUNKS)
    acked, *_ = await make_old(connection, workspace_id, 4, data=os.urandom(200_000))
    await uploads.acknowledge(connection, workspace_id, acked, now=NOW)
    await connection.execute("delete from uploads where ctid = (select max(ctid) from uploads)")

    seen = (await SpaceAccount(db_with_partitions).look()).leaves

    largest = seen[0]
    assert (largest.name, largest.live_bytes) == (leaf, 3 * 200_000)
    assert largest.dead_bytes == largest.bytes - 3 * 200_000 > 200_000
    assert {one.name for one in seen} == {
        *await partition_names(connection, CHUNKS),
        *await partition_names(connection, FEED),
    }
    assert {one.live_bytes for one in seen if one.name.startswith("feed")} == {None}


async def test_a_look_does_not_wait_for_a_leaf_that_somebody_has_locked(
    account: SpaceAccount, connection: Any, connections: Any
):
    leaf = await make_partition(connection, CHUNKS)
    async with locked(await connections(), leaf, "access exclusive"), asyncio.timeout(2):
        seen = await account.look()

    assert leaf not in {one.name for one in seen.leaves}
    assert {"chunks", "feed", "uploads"} <= {one.name for one in seen.tables}


async def test_a_look_does_not_wait_for_a_leaf_that_is_being_taken_away(
    db_with_partitions: Database, connection: Any, connections: Any
):
    """Who finishes a detach waits for all that began before; it must not wait for us for ever."""
    finisher, reader = await connections(), await connections()
    leaf = await make_partition(connection, CHUNKS)
    await connection.execute("set lock_timeout = 50")
    async with locked(reader, "only chunks"):
        with pytest.raises(asyncpg.LockNotAvailableError):
            await retention.detach(connection, "chunks", leaf)
        finishing = asyncio.create_task(retention.finish_detaching(finisher, "chunks", leaf))
        await until_blocked(connection, finisher)

        async with asyncio.timeout(5):
            seen = await SpaceAccount(db_with_partitions).look()
    await finishing

    assert leaf not in {one.name for one in seen.leaves}
