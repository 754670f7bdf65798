"""Filters that let little pass: rows are found however far they are, and scans take turns."""

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from factories import make_feed, make_message, make_workspace
from waiting import until

from restante.database.pool import Database
from restante.errors import TooManyAtOnce
from restante.feed import readers, service, store
from restante.feed.readers import ReadTurns
from restante.feed.rules import ROWS_PER_LOOK, Filter, Query
from restante.feed.service import Feed
from restante.feed.store import Extent
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

RARE = Filter(activity_type="rare")
MANY = ROWS_PER_LOOK * 2 + 10


@pytest.fixture
async def connection(connections: Any) -> Any:
    return await connections()


@pytest.fixture
async def workspace_id(db_with_partitions: Database, connection: Any) -> WorkspaceId:
    """A feed of many rows; the first, the last and one between are rare."""
    workspace_id = await make_workspace(connection)
    await connection.execute(
        "insert into feed (id, workspace_id, seq, activity_type, status, created_at)"
        " select (lpad(to_hex((extract(epoch from $3::timestamptz) * 1000)::bigint), 12, '0')"
        "         || lpad(to_hex(n), 20, '0'))::uuid, $1, n,"
        "        case when n in (1, 5, $2) then 'rare' else 'common' end, 'ok', $3"
        "   from generate_series(1, $2::bigint) as n",
        workspace_id,
        MANY,
        datetime.now(UTC),
    )
    await connection.execute("update feeds set last_seq = $1", MANY)
    return workspace_id


@pytest.fixture
def feed(db_with_partitions: Database) -> Feed:
    return make_feed(db_with_partitions)


async def seqs(feed: Feed, workspace_id: WorkspaceId, **query: Any) -> list[int]:
    page = await feed.read(workspace_id, Query(**query))
    return [row.seq for row in page.rows]


def recorded_extents(monkeypatch: pytest.MonkeyPatch) -> list[Extent]:
    """Which rows are looked at from now on."""
    extents, read = list[Extent](), store._rows

    async def recorded(*args: Any) -> Any:
        extents.append(args[-1])
        return await read(*args)

    monkeypatch.setattr(store, "_rows", recorded)
    return extents


async def test_a_row_is_found_behind_many_that_the_filter_stops(
    feed: Feed, workspace_id: WorkspaceId
):
    assert await seqs(feed, workspace_id, since_seq=0, wanted=RARE) == [1, 5]
    assert await seqs(feed, workspace_id, since_seq=5, wanted=RARE) == [MANY]
    assert await seqs(feed, workspace_id, since_seq=MANY, wanted=RARE) == []
    assert await seqs(feed, workspace_id, wanted=RARE) == [MANY, 5, 1]
    assert await seqs(feed, workspace_id, wanted=RARE, limit=2) == [MANY, 5]


async def test_an_empty_page_says_how_far_the_feed_was_searched(
    feed: Feed, workspace_id: WorkspaceId
):
    """A reader goes on from there, and the rows are not searched again."""
    page = await feed.read(workspace_id, Query(since_seq=5, wanted=Filter(activity_type="none")))

    assert (page.rows, page.read_seq, page.has_more) == ([], MANY, False)


@pytest.mark.parametrize("query", [{}, {"since_seq": 0}])
async def test_rows_of_the_last_hours_are_found_behind_old_ones(
    feed: Feed, workspace_id: WorkspaceId, connection: Any, query: dict[str, int]
):
    """Old rows are skipped by the primary key; all of these were made within one millisecond."""
    now = datetime.now(UTC)
    recent = Filter(not_before=now - timedelta(minutes=5))
    nothing = Filter(not_before=now + timedelta(hours=3))

    assert len(await seqs(feed, workspace_id, wanted=recent, limit=500, **query)) == 500
    assert await seqs(feed, workspace_id, wanted=nothing, **query) == []


@pytest.mark.parametrize("query", [{}, {"since_seq": 6}])
async def test_a_waiting_reader_looks_at_each_row_once(
    feed: Feed, workspace_id: WorkspaceId, monkeypatch: pytest.MonkeyPatch, query: dict[str, Any]
):
    """Each wake-up would search the whole feed again otherwise."""
    extents = recorded_extents(monkeypatch)
    wanted = Filter(activity_type="none yet")
    waiting = asyncio.create_task(
        feed.read(workspace_id, Query(wanted=wanted, wait_seconds=60, **query))
    )
    await until(lambda: len(extents) == 2)  # a first look, and the rest

    await feed.append(workspace_id, make_message(), now=datetime.now(UTC))
    await until(lambda: len(extents) == 3)
    waiting.cancel()

    assert extents[2].after_seq == MANY


NONE = Filter(activity_type="none")


@pytest.fixture
def small_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ROWS_PER_LOOK", 100)
    monkeypatch.setattr(service, "ROWS_PER_SCAN", 500)


@pytest.mark.usefixtures("small_scans")
async def test_a_reader_by_seq_gets_an_empty_page_after_so_many_rows_and_goes_on(
    feed: Feed, workspace_id: WorkspaceId
):
    """Also if it is ready to wait: a search of millions of rows would time out every time."""
    query = Query(since_seq=5, wanted=RARE, wait_seconds=60)
    pages = [await feed.read(workspace_id, query)]
    while not pages[-1].rows:
        query = Query(since_seq=pages[-1].read_seq, wanted=RARE)
        pages.append(await feed.read(workspace_id, query))

    assert [page.read_seq for page in pages[:2]] == [605, 1205]
    assert [row.seq for row in pages[-1].rows] == [MANY]


@pytest.mark.usefixtures("small_scans")
async def test_the_search_of_a_reader_by_id_or_without_a_cursor_goes_on_in_slices(
    feed: Feed, workspace_id: WorkspaceId, connection: Any
):
    """Their next request would begin at the same row again."""
    fifth = await connection.fetchval("select id from feed where seq = 5")
    after_fifth = await seqs(feed, workspace_id, since_id=fifth, wanted=RARE)
    await connection.execute("update feed set activity_type = 'common' where seq = $1", MANY)

    assert after_fifth == [MANY]
    assert await seqs(feed, workspace_id, wanted=RARE) == [5, 1]


@pytest.mark.usefixtures("small_scans")
@pytest.mark.parametrize("has_cursor", [True, False])
async def test_a_search_in_slices_ends_after_a_while(
    feed: Feed,
    workspace_id: WorkspaceId,
    connection: Any,
    monkeypatch: pytest.MonkeyPatch,
    has_cursor: bool,
):
    monkeypatch.setattr(service, "SCAN_SECONDS", 0.0)
    extents = recorded_extents(monkeypatch)
    first = await connection.fetchval("select id from feed where seq = 1")
    query = Query(wanted=NONE)
    if has_cursor:
        query = Query(since_id=first, wanted=NONE, wait_seconds=60)

    page = await feed.read(workspace_id, query)

    assert page.rows == []
    assert [extent.up_to_seq - extent.after_seq for extent in extents] == [100, 500]


async def test_a_page_that_is_full_of_bytes_is_not_searched_for_again(
    feed: Feed, workspace_id: WorkspaceId, monkeypatch: pytest.MonkeyPatch, connection: Any
):
    """The newest rows are as many as they can be."""
    await connection.execute("update feed set bytes = 1000 where seq > $1", MANY - 10)
    extents = recorded_extents(monkeypatch)

    found = await seqs(feed, workspace_id, wanted=Filter(activity_type="common"), max_bytes=2500)

    assert found == [MANY - 1, MANY - 2]
    assert len(extents) == 1


async def test_who_gets_no_turn_in_time_is_told_when_to_try_again(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(readers, "_LONGEST_QUEUE_SECONDS", 0.01)
    scans = ReadTurns("search rows")
    async with AsyncExitStack() as running:
        for number in range(4):
            await running.enter_async_context(scans.turn(WorkspaceId(UUID(int=number))))
        with pytest.raises(TooManyAtOnce) as refused:
            async with scans.turn(WorkspaceId(UUID(int=9))):
                pass

    assert refused.value.facts["retry_after_seconds"] == 2
    assert not scans._locks
    async with scans.turn(WorkspaceId(UUID(int=9))):
        pass


async def test_one_scan_of_a_workspace_runs_at_a_time_and_a_few_of_all():
    scans, running, most = ReadTurns("search rows"), list[WorkspaceId](), list[int]()
    ids = [WorkspaceId(UUID(int=number)) for number in range(10)]

    async def scan(workspace_id: WorkspaceId) -> None:
        async with scans.turn(workspace_id):
            assert workspace_id not in running
            running.append(workspace_id)
            most.append(len(running))
            await asyncio.sleep(0)
            running.remove(workspace_id)

    await asyncio.gather(*(scan(workspace_id) for workspace_id in ids * 5))

    assert max(most) == 4
    assert not scans._locks


async def test_a_workspace_with_too_many_scans_is_refused_and_others_are_not():
    scans, crowded, other = (
        ReadTurns("search rows"),
        WorkspaceId(UUID(int=1)),
        WorkspaceId(UUID(int=2)),
    )

    async def scan() -> None:
        async with scans.turn(crowded):
            await asyncio.Event().wait()

    queued = [asyncio.create_task(scan()) for _ in range(100)]
    await asyncio.sleep(0)

    with pytest.raises(TooManyAtOnce):
        async with scans.turn(crowded):
            pass
    async with scans.turn(other):
        pass
    for task in queued:
        task.cancel()
    await asyncio.gather(*queued, return_exceptions=True)
    assert not scans._locks
