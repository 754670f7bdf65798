"""
Old partitions of the feed are trimmed: a reader gets every row, or an error, never a hole.

Rows are made old by data.  Locks of another session stop a pass in each of its steps.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from factories import DAY, make_feed, make_message, make_workspace, rows_after
from sweeps import (
    FEED,
    Stop,
    Tally,
    actions,
    end_who_waits_for,
    is_waited_for,
    locked,
    make_old_feed,
    make_sweep,
    reasons,
    size_of,
    state_of,
    stopped_pass,
    stops,
    utc_now,
)
from waiting import until

from restante.database.partitions import Partition, PartitionState
from restante.database.pool import Connection, Database, transaction
from restante.database.spans import Span
from restante.errors import CursorGone, DatabaseUnavailable
from restante.feed import store
from restante.feed.rules import EVERYTHING
from restante.feed.service import Feed, Query
from restante.feed.subject import TRIM, FeedPartitions
from restante.feed.total import TotalLimit
from restante.ids import WorkspaceId
from restante.retention.rules import FINISH_DETACH
from restante.retention.sweep import Sweep
from restante.wire import HeldSpace

pytestmark = pytest.mark.anyio

RETENTION = timedelta(days=30)
MOMENT = timedelta(microseconds=1)


@pytest.fixture
def feed(db_with_partitions: Database) -> Feed:
    return make_feed(db_with_partitions)


@pytest.fixture
def sweep(db_with_partitions: Database) -> Sweep:
    return make_sweep(db_with_partitions, feed_retention=RETENTION)


@pytest.fixture
async def connection(db_with_partitions: Database, connections: Any) -> Any:
    return await connections()


@pytest.fixture
async def workspace_id(connection: Any) -> WorkspaceId:
    return await make_workspace(connection)


@pytest.fixture
async def partition(connection: Any, workspace_id: WorkspaceId) -> str:
    """A partition with the first three of five rows; it is older than the retention."""
    for number in range(1, 6):
        await store.append(connection, workspace_id, make_message(str(number)), now=utc_now())
    return await make_old_feed(connection, workspace_id, up_to=3)


@pytest.fixture
async def ids(partition: str, connection: Any, workspace_id: WorkspaceId) -> list[Any]:
    """The ids of the five rows, in the order of their seqs."""
    rows = (await store.rows_after(connection, workspace_id, EVERYTHING, rows_after(0))).rows
    return [row.id for row in rows]


async def seqs_after(feed: Feed, workspace_id: WorkspaceId, row_id: Any) -> list[int]:
    page = await feed.read(workspace_id, Query(since_id=row_id))
    return [row.seq for row in page.rows]


async def trimmed_seq(connection: Any, workspace_id: WorkspaceId) -> int:
    marks = await store.marks(connection, workspace_id)
    assert marks
    return marks.trimmed_seq


# The decision ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("later", "goes"), [(-MOMENT, True), (0 * MOMENT, True), (MOMENT, False)])
def test_a_partition_is_trimmed_when_its_last_moment_is_as_old_as_the_retention(
    later: timedelta, goes: bool
):
    """The end of a range is the first moment that is not in it."""
    now = datetime(2026, 3, 29, 12, 30, tzinfo=UTC)
    end = now - RETENTION + later
    span = Span(end - DAY, end)
    partition = Partition("feed", "feed_1", PartitionState.ATTACHED, span, "feed", 100)

    decided = FeedPartitions(retention=RETENTION, limit=TotalLimit()).decide(
        partition, None, now=now
    )

    assert not isinstance(decided, HeldSpace)
    assert [(step.action, step.bytes) for step in decided] == ([(TRIM, 100)] if goes else [])


# What readers see --------------------------------------------------------------------------------


async def test_a_trim_raises_the_mark_and_drops_the_rows(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, partition: str
):
    size = await size_of(connection, partition)

    report = await sweep.run(now=utc_now())

    assert (actions(report), report.bytes_back) == ([TRIM], size)
    assert await state_of(connection, partition) == "gone"
    marks = await store.marks(connection, workspace_id)
    assert marks
    assert (marks.last_seq, marks.trimmed_seq) == (5, 3)
    rows = (await store.rows_after(connection, workspace_id, EVERYTHING, rows_after(0))).rows
    assert [row.seq for row in rows] == [4, 5]


async def test_a_cursor_below_the_mark_is_gone_and_one_above_goes_on(
    sweep: Sweep, feed: Feed, workspace_id: WorkspaceId, ids: list[Any]
):
    await sweep.run(now=utc_now())

    for gone in ids[:3]:
        with pytest.raises(CursorGone):
            await feed.read(workspace_id, Query(since_id=gone))
    assert await seqs_after(feed, workspace_id, ids[3]) == [5]


async def test_a_follower_by_seq_goes_on_at_the_mark_and_not_below(
    sweep: Sweep, feed: Feed, workspace_id: WorkspaceId, partition: str
):
    await sweep.run(now=utc_now())

    with pytest.raises(CursorGone):
        await feed.read(workspace_id, Query(since_seq=2))
    at_the_mark = await feed.read(workspace_id, Query(since_seq=3))
    assert [row.seq for row in at_the_mark.rows] == [4, 5]


async def test_marks_are_raised_for_every_workspace_in_the_partition_and_no_other(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, partition: str
):
    """A thousand workspaces with two rows each: more than fit into one batch."""
    silent = await make_workspace(connection)
    await connection.execute(
        "with others as ("
        "    insert into feeds (workspace_id, last_seq)"
        "    select gen_random_uuid(), 9 from generate_series(1, 1100) returning workspace_id"
        ") insert into feed (id, workspace_id, seq, activity_type, status, created_at)"
        " select id, others.workspace_id, seq, activity_type, status, created_at"
        "   from feed, others where feed.workspace_id = $1 and seq <= 2",
        workspace_id,
    )

    await sweep.run(now=utc_now())

    rows = await connection.fetch("select workspace_id, trimmed_seq from feeds")
    trimmed = {row["workspace_id"]: row["trimmed_seq"] for row in rows}
    assert (trimmed.pop(workspace_id), trimmed.pop(silent)) == (3, 0)
    assert list(trimmed.values()) == [2] * 1100


async def test_a_large_feed_is_trimmed_in_steps_between_which_rows_are_appended(
    connection: Any,
    workspace_id: WorkspaceId,
    partition: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """One sum over all of its rows would keep senders waiting, and could time out every time."""
    monkeypatch.setattr(store, "_ROWS_PER_TRIM", 1)
    monkeypatch.setattr(store, "_ROWS_PER_TRIM_OF_ONE", 1)
    marks, trim = list[int](), store._trim

    async def recorded(*args: Any) -> Any:
        left = await trim(*args)
        marks.append(await trimmed_seq(connection, workspace_id))
        await store.append(connection, workspace_id, make_message(), now=utc_now())
        return left

    monkeypatch.setattr(store, "_trim", recorded)

    await store.trim(connection, partition)

    counted = await connection.fetchrow(
        "select feed_bytes, (select sum(bytes) from feed where seq > trimmed_seq) from feeds"
    )
    assert marks == [1, 2, 3]
    assert counted[0] == counted[1] > 0


# Each step ---------------------------------------------------------------------------------------

# For each step: which cursors are refused while the pass waits in it, and the mark by then.
STEPS = {
    "seal": (set[int](), 0),
    "trim": (set[int](), 0),
    "detach": ({1, 2}, 3),
    "half detached": ({1, 2, 3}, 3),
    "drop": ({1, 2, 3}, 3),
}


def stop_in(step: str, partition: str) -> Stop:
    if step == "trim":
        return Stop("select from feeds for update", "sealed")
    return stops(FEED, partition)[step]


@pytest.mark.parametrize("step", STEPS)
async def test_a_reader_during_a_trim_gets_all_rows_or_an_error(
    *,
    sweep: Sweep,
    feed: Feed,
    connection: Any,
    workspace_id: WorkspaceId,
    partition: str,
    ids: list[Any],
    connections: Any,
    step: str,
):
    """Promise 3, in each step of a trim."""
    stop, (refused, mark) = stop_in(step, partition), STEPS[step]
    async with stopped_pass(stop, sweep, Tally(), connections, partition) as (passing, _):
        found = await state_of(connection, partition)
        seen_mark = await trimmed_seq(connection, workspace_id)
        pages = {
            seq: await page_or_none(feed, workspace_id, row_id)
            for seq, row_id in enumerate(ids, start=1)
        }
    await passing

    assert (found, seen_mark) == (stop.state, mark)
    assert pages == {
        seq: None if seq in refused else list(range(seq + 1, 6)) for seq in range(1, 6)
    }


async def page_or_none(feed: Feed, workspace_id: WorkspaceId, row_id: Any) -> list[int] | None:
    try:
        return await seqs_after(feed, workspace_id, row_id)
    except CursorGone:
        return None


@pytest.mark.parametrize("step", STEPS)
async def test_an_interrupted_trim_is_finished_by_the_next_pass(
    *,
    sweep: Sweep,
    connection: Any,
    workspace_id: WorkspaceId,
    partition: str,
    connections: Any,
    step: str,
):
    """The session of the pass is terminated in the step, as when its process is killed."""
    stop, tally = stop_in(step, partition), Tally()
    async with stopped_pass(stop, sweep, tally, connections, partition) as (passing, holder):
        found = await state_of(connection, partition)
        await end_who_waits_for(holder)
        with pytest.raises(DatabaseUnavailable):
            await passing

    report = await sweep.run(now=utc_now())

    assert (found, tally.failed, report.postponed) == (stop.state, 1, [])
    assert await state_of(connection, partition) == "gone"
    assert await trimmed_seq(connection, workspace_id) == 3


# Readers and a trim at once ----------------------------------------------------------------------


class Interleaved(Database):
    """The same pool, with something that happens right before or after one of its statements."""

    def __init__(
        self,
        db: Database,
        statement: str,
        *,
        before: Callable[[], Awaitable[object]] | None = None,
        after: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        super().__init__(db._pool, acquire_timeout_seconds=5)
        self.statement = statement
        self.before = before
        self.after = after

    @asynccontextmanager
    async def connection(self, *, wait_seconds: float | None = None) -> AsyncIterator[Connection]:
        async with super().connection(wait_seconds=wait_seconds) as connection:
            yield cast("Connection", _InterleavedConnection(connection, self))


class _InterleavedConnection:
    def __init__(self, connection: Connection, chosen: Interleaved) -> None:
        self._connection = connection
        self._chosen = chosen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def fetch(self, query: str, *args: object) -> Any:
        if query != self._chosen.statement:
            return await self._connection.fetch(query, *args)
        if self._chosen.before:
            await self._chosen.before()
        rows = await self._connection.fetch(query, *args)
        if self._chosen.after:
            await self._chosen.after()
        return rows


async def test_a_page_is_refused_if_a_trim_comes_between_its_cursor_and_its_rows(
    db_with_partitions: Database, sweep: Sweep, workspace_id: WorkspaceId, ids: list[Any]
):
    """The cursor is found, then the partition is dropped, then the rows are read."""
    db = Interleaved(
        db_with_partitions, store.queries.rows_after, before=lambda: sweep.run(now=utc_now())
    )
    feed = make_feed(db)

    with pytest.raises(CursorGone):
        await feed.read(workspace_id, Query(since_id=ids[0]))


async def test_a_page_that_was_read_before_a_trim_is_whole_or_refused(
    db_with_partitions: Database, sweep: Sweep, workspace_id: WorkspaceId, ids: list[Any]
):
    """The rows are read, then the marks rise: an error too many, but never a hole."""
    db = Interleaved(
        db_with_partitions, store.queries.rows_after, after=lambda: sweep.run(now=utc_now())
    )
    feed = make_feed(db)

    with pytest.raises(CursorGone):
        await feed.read(workspace_id, Query(since_id=ids[1]))
    assert await seqs_after(feed, workspace_id, ids[3]) == [5]


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_page_is_refused_if_its_rows_are_deleted_to_make_room(
    db_with_partitions: Database,
    connection: Any,
    workspace_id: WorkspaceId,
    ids: list[Any],
    moment: str,
):
    """Right before or after the rows are read: the marks are read last, and tell."""
    await store.acknowledge(connection, workspace_id, 3)

    async def delete() -> None:
        async with transaction(connection) as tx:
            await store.lock(tx, workspace_id)
            assert await store.trim_oldest(tx, workspace_id, stored_before=utc_now()) == 3

    db = Interleaved(db_with_partitions, store.queries.rows_after, **{moment: delete})
    feed = make_feed(db)

    with pytest.raises(CursorGone):
        await feed.read(workspace_id, Query(since_id=ids[0]))
    db.before = db.after = None
    assert await seqs_after(feed, workspace_id, ids[3]) == [5]


async def test_readers_of_a_partition_do_not_wait_behind_its_seal(
    *,
    sweep: Sweep,
    feed: Feed,
    connection: Any,
    workspace_id: WorkspaceId,
    ids: list[Any],
    partition: str,
    connections: Any,
):
    """A vacuum of the partition blocks the seal; the seal blocks no reader behind it."""
    holder = await connections()
    async with locked(holder, partition, "share update exclusive"):
        passing = asyncio.create_task(sweep.run(now=utc_now()))
        await until(lambda: is_waited_for(holder))
        seqs = await seqs_after(feed, workspace_id, ids[0])
        still_waiting = await is_waited_for(holder)
        report = await passing

    assert seqs == [2, 3, 4, 5]
    assert still_waiting
    assert "holds a lock" in reasons(report)[TRIM]
    assert await state_of(connection, partition) == "attached"


async def test_a_long_read_of_a_partition_blocks_neither_its_seal_nor_other_readers(
    *,
    sweep: Sweep,
    feed: Feed,
    connection: Any,
    workspace_id: WorkspaceId,
    ids: list[Any],
    partition: str,
    connections: Any,
):
    """The detach waits for it; by then no new reader needs the partition."""
    holder = await connections()
    async with locked(holder, partition):
        passing = asyncio.create_task(sweep.run(now=utc_now()))
        await until(lambda: is_waited_for(holder))
        seqs = await seqs_after(feed, workspace_id, ids[3])
        still_waiting = await is_waited_for(holder)
        report = await passing
        found = await state_of(connection, partition)

    afterwards = await sweep.run(now=utc_now())

    assert (seqs, still_waiting, found) == ([5], True, "detaching")
    assert "holds a lock" in reasons(report)[TRIM]
    assert actions(afterwards) == [FINISH_DETACH]
    assert await state_of(connection, partition) == "gone"
