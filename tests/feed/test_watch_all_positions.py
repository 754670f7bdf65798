"""What a watch of all feeds keeps: positions of active feeds, and a horizon for all others."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from factories import make_feed, make_message, make_workspace
from hypothesis import given, strategies as st

from restante import wire
from restante.database.listener import Listener
from restante.database.pool import Database
from restante.errors import BadRequest, CursorGone, StatementTimedOut
from restante.feed import horizon, store
from restante.feed.batches import WatchPolicy
from restante.feed.horizon import Horizon
from restante.feed.wakeups import Wakeups
from restante.feed.watch_all import WatchAll, event_id, horizon_of, watching_all
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

MOST_ROUNDS = 200


@given(
    st.builds(
        Horizon,
        st.integers(3, 2**62),
        st.datetimes(datetime(2020, 1, 1), datetime(2200, 1, 1)).map(  # noqa: DTZ001
            lambda one: one.replace(microsecond=0, tzinfo=UTC)
        ),
    )
)
def test_the_id_of_an_event_has_the_horizon(horizon: Horizon):
    assert horizon_of(event_id(horizon)) == horizon


@given(st.text())
def test_any_other_text_is_no_id(text: str):
    try:
        found = horizon_of(text)
    except BadRequest:
        return
    assert isinstance(found, Horizon)


class Follower:
    """A watch of all feeds without a server."""

    def __init__(self, db: Database, wakeups: Wakeups, watch: WatchAll) -> None:
        self.db = db
        self.wakeups = wakeups
        self.watch = watch

    async def next(self) -> list[tuple[UUID, int]]:
        """The rows of the next batch; empty if there are none for now."""
        events = await self.watch.batch()
        assert events is not None
        return [
            (one.workspace_id, one.payload.seq) for one in events if isinstance(one, wire.Event)
        ]

    async def search(self) -> list[tuple[UUID, int]]:
        self.wakeups._wake_everyone()
        return await self.next()


@asynccontextmanager
async def following(
    db: Database, *, after: Horizon | None = None, **chosen: Any
) -> AsyncIterator[Follower]:
    wakeups = Wakeups(db, Listener(""))
    feed = make_feed(db, wakeups)
    standard = WatchPolicy(heartbeat_seconds=0, search_seconds=3600, retry_seconds=0)
    policy = replace(standard, **chosen)
    async with watching_all(feed, db, after=after, policy=policy) as watch:
        yield Follower(db, wakeups, watch)


async def write(connection: Any, workspace_id: WorkspaceId) -> None:
    assert await store.append(connection, workspace_id, make_message(), now=datetime.now(UTC))


async def test_nothing_is_kept_for_workspaces_that_are_quiet(
    db_with_partitions: Database, connections: Callable[[], Any]
):
    connection = await connections()
    many = [await make_workspace(connection) for _ in range(20)]
    async with following(db_with_partitions) as follower:
        for workspace_id in many:
            await write(connection, workspace_id)
        first = await follower.search()
        while batch := await follower.next():
            first += batch
        assert sorted(first) == sorted((one, 1) for one in many)
        assert len(follower.watch._positions) == 20

        assert await follower.search() == []
        assert await follower.search() == []
        assert follower.watch._positions == {}

        await write(connection, many[0])
        follower.wakeups.grew(many[0])
        assert await follower.next() == [(many[0], 2)]
        assert len(follower.watch._positions) == 1


async def test_positions_are_bounded_between_two_searches(
    db_with_partitions: Database, connections: Callable[[], Any]
):
    connection = await connections()
    many = [await make_workspace(connection) for _ in range(5)]
    async with following(db_with_partitions, max_positions=2) as follower:
        for workspace_id in many:
            await write(connection, workspace_id)
            follower.wakeups.grew(workspace_id)
            await follower.next()

        with pytest.raises(CursorGone, match="watch single ones"):
            await follower.next()


async def test_a_position_is_kept_until_its_rows_are_sent(
    db_with_partitions: Database, connections: Callable[[], Any]
):
    """However many searches come before its turn."""
    connection = await connections()
    many = [await make_workspace(connection) for _ in range(5)]
    async with following(db_with_partitions) as follower:
        for workspace_id in many:
            await write(connection, workspace_id)
        seen = await follower.search()
        for _ in many[1:]:
            seen += await follower.search()

        assert sorted(seen) == sorted((one, 1) for one in many)
        assert await follower.search() == []


@pytest.mark.parametrize("is_searched", [True, False])
async def test_a_transaction_that_was_open_before_is_seen_when_it_commits(
    db_with_partitions: Database, connections: Callable[[], Any], *, is_searched: bool
):
    """An application may write in a savepoint; its transaction commits long after its id."""
    open_one, connection = await connections(), await connections()
    slow, quick = await make_workspace(connection), await make_workspace(connection)
    transaction = open_one.transaction()
    await transaction.start()
    async with open_one.transaction():
        await write(open_one, slow)
    await write(connection, quick)  # its id is higher
    async with following(db_with_partitions) as follower:
        await write(connection, quick)
        for _ in range(3):
            follower.wakeups.grew(slow)
            assert await follower.search() in ([], [(quick, 2)])
        await transaction.commit()

        if is_searched:
            assert await follower.search() == [(slow, 1)]
        else:
            follower.wakeups.grew(slow)
            assert await follower.next() == [(slow, 1)]
        assert await follower.search() == []


async def test_rows_from_before_are_not_sent_because_a_transaction_is_open(
    db_with_partitions: Database, connections: Callable[[], Any]
):
    old, connection = await connections(), await connections()
    workspace_id = await make_workspace(connection)
    async with old.transaction():
        await old.execute("select pg_current_xact_id()")
        await write(connection, workspace_id)
        async with following(db_with_partitions) as follower:
            await write(connection, workspace_id)
            follower.wakeups.grew(workspace_id)

            assert await follower.next() == [(workspace_id, 2)]
            for _ in range(3):
                assert await follower.search() == []
            await write(connection, workspace_id)
            assert await follower.search() == [(workspace_id, 3)]


@pytest.mark.parametrize(
    ("module", "failing"),
    [
        (horizon, "current"),
        (horizon, "changed_since"),
        (horizon, "seen_seqs"),
        (store, "rows_after"),
    ],
)
async def test_a_failed_look_is_made_again(
    db_with_partitions: Database,
    connections: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    failing: str,
):
    connection = await connections()
    workspace_id = await make_workspace(connection)
    original, failures = getattr(module, failing), [StatementTimedOut("too slow")]

    async def fail_once(*args: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return await original(*args, **named)

    async with following(db_with_partitions) as follower:
        monkeypatch.setattr(module, failing, fail_once)
        await write(connection, workspace_id)

        assert await follower.search() == []
        assert not failures
        assert await follower.next() == [(workspace_id, 1)]
        assert await follower.search() == []


async def test_a_database_from_before_ends_it(
    db_with_partitions: Database, connections: Callable[[], Any]
):
    """After a restore, ids of transactions begin anew."""
    async with following(db_with_partitions) as follower:
        follower.watch._horizon = Horizon(2**40, datetime.now(UTC))

        with pytest.raises(CursorGone, match="restored"):
            await follower.search()


async def test_the_id_to_resume_after_waits_for_what_was_not_sent(
    db_with_partitions: Database, connections: Callable[[], Any]
):
    connection = await connections()
    many = [await make_workspace(connection) for _ in range(3)]
    async with following(db_with_partitions) as follower:
        began = follower.watch.last_id
        for workspace_id in many:
            await write(connection, workspace_id)
        assert len(await follower.search()) == 1
        assert follower.watch.last_id == began
        assert len(await follower.next()) == 1
        assert len(await follower.next()) == 1
        assert follower.watch.last_id == began

        assert await follower.next() == []
        assert follower.watch.last_id != began


@pytest.mark.parametrize("rows_per_page", [1, 2])
async def test_the_id_to_resume_after_moves_on_while_feeds_never_stop_growing(
    db_with_partitions: Database, connections: Callable[[], Any], rows_per_page: int
):
    """
    Also if they grow faster than they are read; a watcher that resumes there misses nothing.

    A transaction of another test, in another database, may hold the horizon up for a while.
    """
    connection = await connections()
    many = [await make_workspace(connection) for _ in range(2)]
    seen = set[tuple[UUID, int]]()
    ids = list[int]()
    async with following(db_with_partitions, page_rows=rows_per_page) as follower:
        while len(ids) < 12 or (len(set(ids)) <= 2 and len(ids) < MOST_ROUNDS):
            for workspace_id in many:
                await write(connection, workspace_id)
                follower.wakeups.grew(workspace_id)
            sent = await follower.search()
            ids.append(horizon_of(follower.watch.last_id).xid)
            seen.update(sent)
            await asyncio.sleep(0 if len(ids) < 12 else 0.1)
        resumed = horizon_of(follower.watch.last_id)

    assert len(set(ids)) > 2
    assert ids == sorted(ids)
    async with following(db_with_partitions, after=resumed) as follower:
        while sent := await follower.next():
            seen.update(sent)
    assert seen == {(one, seq) for one in many for seq in range(1, len(ids) + 1)}
