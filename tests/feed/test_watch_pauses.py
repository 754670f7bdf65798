"""A watcher that cannot go on pauses: it does not read large rows again and again."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import pytest
from attacks import MIB
from factories import make_feed, make_workspace
from large_rows import taken
from sweeps import utc_now
from waiting import until

from restante.database.listener import Listener
from restante.database.pool import Database
from restante.feed import store
from restante.feed.batches import WatchPolicy
from restante.feed.rules import NewActivity
from restante.feed.service import Feed
from restante.feed.wakeups import Wakeups
from restante.feed.watch import Watch, watching
from restante.feed.watch_all import WatchAll, watching_all
from restante.http.body_room import BodyRoom
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

LARGE = NewActivity("test", "large", b'"%b"' % (b"x" * 100_000))
SMALL = NewActivity("test", "small", b"{}")

Reads: TypeAlias = list[int]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """How many rows each read of a feed has found."""
    found, original = Reads(), store.rows_after

    async def counted(*args: Any) -> Any:
        rows = await original(*args)
        found.append(len(rows.rows))
        return rows

    monkeypatch.setattr(store, "rows_after", counted)
    return found


@pytest.fixture
def feed(db_with_partitions: Database) -> Feed:
    made = make_feed(db_with_partitions, Wakeups(db_with_partitions, Listener("")))
    made.large_events = BodyRoom(MIB, longest_wait_seconds=0)
    return made


@pytest.fixture
async def workspace_id(feed: Feed, connections: Callable[[], Any]) -> WorkspaceId:
    return await make_workspace(await connections())


async def permitted() -> None:
    """The watcher keeps its permission."""


@asynccontextmanager
async def begun(
    way: str, feed: Feed, db: Database, workspace_id: WorkspaceId, *, retry_seconds: float
) -> AsyncIterator[Watch | WatchAll]:
    policy = WatchPolicy(search_seconds=3600, retry_seconds=retry_seconds)
    if way == "all":
        async with watching_all(feed, db, after=None, policy=policy) as watch:
            yield watch
        return
    async with watching(feed, workspace_id, after=None, check=permitted, policy=policy) as watch:
        yield watch


ONE_OR_ALL = pytest.mark.parametrize("way", ["one", "all"])


@ONE_OR_ALL
async def test_a_watcher_without_a_place_does_not_read_again_because_feeds_grow(
    db_with_partitions: Database,
    feed: Feed,
    workspace_id: WorkspaceId,
    reads: Reads,
    way: str,
):
    """Over all workspaces each commit of the server wakes it."""
    async with (
        taken(feed.large_events),
        begun(way, feed, db_with_partitions, workspace_id, retry_seconds=3600) as watch,
    ):
        next_rows = asyncio.create_task(watch.batch())
        await feed.append(workspace_id, LARGE, now=utc_now())
        await until(lambda: reads == [0])
        for _ in range(5):
            await feed.append(workspace_id, SMALL, now=utc_now())
        feed.wakeups.stop()

        assert await next_rows is None

    assert reads == [0]


@ONE_OR_ALL
async def test_large_rows_are_not_read_before_they_have_a_place(
    db_with_partitions: Database,
    feed: Feed,
    workspace_id: WorkspaceId,
    reads: Reads,
    way: str,
):
    room = feed.large_events
    async with begun(way, feed, db_with_partitions, workspace_id, retry_seconds=0) as watch:
        async with taken(room):
            next_rows = asyncio.create_task(watch.batch())
            await feed.append(workspace_id, LARGE, now=utc_now())
            await until(lambda: len(reads) > 5)
            assert not any(reads)

        assert len(await next_rows or ()) == 1
        assert room.free_bytes < MIB
    assert room.free_bytes == MIB
    assert reads[-2:] == [0, 1]
