"""A watcher that cannot go on pauses: it does not read large rows again and again."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias
from uuid import uuid4

import pytest
from factories import make_feed, make_workspace
from sweeps import utc_now
from waiting import until

from restante.database.listener import Listener
from restante.database.pool import Database
from restante.feed import store
from restante.feed.batches import WatchPolicy
from restante.feed.readers import Places
from restante.feed.rules import NewActivity
from restante.feed.service import Feed
from restante.feed.wakeups import Wakeups
from restante.feed.watch import Watch, watching
from restante.feed.watch_all import WatchAll, watching_all
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

LARGE = NewActivity("test", "large", b'"%b"' % (b"x" * 100_000))
ALL_BYTES = 256 * 1024 * 1024  # of all large events in a process
SMALL = NewActivity("test", "small", b"{}")

Reads: TypeAlias = list[int]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """How many rows each read of a feed has found."""
    found, original = Reads(), store.rows_after

    async def counted(*args: Any) -> Any:
        rows = await original(*args)
        found.append(len(rows))
        return rows

    monkeypatch.setattr(store, "rows_after", counted)
    return found


@pytest.fixture
def feed(db_with_partitions: Database) -> Feed:
    return make_feed(db_with_partitions, Wakeups(db_with_partitions, Listener("")))


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


class CountedPlaces(Places):
    """Counts how often a place was asked for."""

    asked = 0

    @contextmanager
    def place(self, workspace_id: WorkspaceId, size: int) -> Iterator[None]:
        self.asked += 1
        with super().place(workspace_id, size):
            yield


ONE_OR_ALL = pytest.mark.parametrize("way", ["one", "all"])


@ONE_OR_ALL
async def test_a_watcher_without_a_place_does_not_read_again_because_feeds_grow(
    db_with_partitions: Database, feed: Feed, workspace_id: WorkspaceId, reads: Reads, way: str
):
    """Over all workspaces each commit of the server wakes it."""
    with feed.large_events.place(WorkspaceId(uuid4()), ALL_BYTES):
        async with begun(way, feed, db_with_partitions, workspace_id, retry_seconds=3600) as watch:
            next_rows = asyncio.create_task(watch.batch())
            await feed.append(workspace_id, LARGE, now=utc_now())
            await until(lambda: asyncio.sleep(0, reads == [1]))
            for _ in range(5):
                await feed.append(workspace_id, SMALL, now=utc_now())
            feed.wakeups.stop()

            assert await next_rows is None

    assert reads == [1]


@ONE_OR_ALL
async def test_rows_that_found_no_place_are_read_again_when_they_have_one(
    db_with_partitions: Database, feed: Feed, workspace_id: WorkspaceId, reads: Reads, way: str
):
    feed.large_events = places = CountedPlaces(8)
    async with begun(way, feed, db_with_partitions, workspace_id, retry_seconds=0) as watch:
        with places.place(WorkspaceId(uuid4()), ALL_BYTES):
            next_rows = asyncio.create_task(watch.batch())
            await feed.append(workspace_id, LARGE, now=utc_now())
            await until(lambda: asyncio.sleep(0, places.asked > 5))
            assert reads == [1]
            await feed.append(workspace_id, SMALL, now=utc_now())

        assert len(await next_rows or ()) == 2
        assert places.taken == 1
    assert places.taken == 0
    assert reads == [1, 2]
