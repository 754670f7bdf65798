"""Reading a feed by seq: rows without a hole, or an error that says which rows are kept."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from factories import make_feed, make_message, make_workspace
from sweeps import make_old_feed, make_sweep
from waiting import until

from restante.database.pool import Database
from restante.errors import CursorGone
from restante.feed import store
from restante.feed.service import Feed, Query
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio


@dataclass(frozen=True, slots=True)
class OldFeed:
    """A feed with five rows; the first three are in a partition that is due."""

    feed: Feed
    workspace_id: WorkspaceId
    partition: str

    async def seqs_after(self, seq: int) -> list[int]:
        page = await self.feed.read(self.workspace_id, Query(since_seq=seq))
        return [row.seq for row in page.rows]


@pytest.fixture
async def old(db_with_partitions: Database, connections: Any) -> OldFeed:
    connection = await connections()
    workspace_id = await make_workspace(connection)
    feed = make_feed(db_with_partitions)
    for _ in range(5):
        await feed.append(workspace_id, make_message(), now=datetime.now(UTC))
    partition = await make_old_feed(connection, workspace_id, up_to=3)
    return OldFeed(feed, workspace_id, partition)


async def test_a_reader_that_missed_a_trim_can_start_over_where_the_error_says(
    old: OldFeed, db: Database
):
    assert await old.seqs_after(2) == [3, 4, 5]
    await make_sweep(db).run(now=datetime.now(UTC))

    with pytest.raises(CursorGone, match="start over with since_seq=3") as gone:
        await old.seqs_after(2)

    assert gone.value.facts == {"lowest_seq": 4, "latest_seq": 5}
    assert await old.seqs_after(3) == [4, 5]


@asynccontextmanager
async def exclusively(connection: Any, table: str) -> AsyncIterator[None]:
    """Lock a table against readers until the end, then commit."""
    async with connection.transaction():
        await connection.execute(f"lock table {table} in access exclusive mode")
        yield


async def until_waiting_for(watcher: Any, table: str) -> None:
    """Wait until some session waits for a lock on the table."""
    await until(
        lambda: watcher.fetchval(
            "select exists (select from pg_locks where not granted"
            " and relation = $1::text::regclass"
            " and database = (select oid from pg_database where datname = current_database()))",
            table,
        )
    )


async def trim(connection: Any, partition: str) -> None:
    """What the last step of a sweep does, in the transaction that is open."""
    await store.trim(connection, partition)
    await connection.execute(f"drop table {partition}")


async def test_a_page_is_refused_if_its_rows_are_trimmed_before_they_are_read(
    old: OldFeed, connections: Any
):
    """The marks said that every row is there; then the partition goes, and then rows are read."""
    sweeper, watcher = await connections(), await connections()
    async with exclusively(sweeper, "feed"):
        reading = asyncio.create_task(old.seqs_after(1))
        await until_waiting_for(watcher, "feed")
        await trim(sweeper, old.partition)

    with pytest.raises(CursorGone):
        await reading


async def test_a_page_is_refused_if_its_rows_are_trimmed_after_they_were_read(
    old: OldFeed, connections: Any
):
    """The next page would begin after a hole that nobody noticed."""
    first, sweeper, watcher = [await connections() for _ in range(3)]
    async with exclusively(first, "feed"):
        reading = asyncio.create_task(old.seqs_after(1))
        await until_waiting_for(watcher, "feed")
        transaction = sweeper.transaction()
        await transaction.start()
        await sweeper.execute("lock table feeds in access exclusive mode")
    await until_waiting_for(watcher, "feeds")
    await trim(sweeper, old.partition)
    await transaction.commit()

    with pytest.raises(CursorGone):
        await reading


async def test_a_seq_above_the_newest_is_refused_at_once_and_not_waited_for(old: OldFeed):
    """It is from before a restore from a backup; the rows up to it would be skipped."""
    async with asyncio.timeout(30):
        with pytest.raises(CursorGone) as gone:
            await old.feed.read(old.workspace_id, Query(since_seq=6, wait_seconds=60))

    assert gone.value.facts == {"lowest_seq": 1, "latest_seq": 5}


async def test_a_follower_from_before_a_restore_is_refused(old: OldFeed):
    """A watcher would otherwise see nothing until the feed has grown past its position."""
    with pytest.raises(CursorGone):
        await old.seqs_after(6)
