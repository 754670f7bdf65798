"""All feeds together are bounded: messages are refused, and what nobody needs is trimmed early."""

import asyncio
import random
from datetime import timedelta
from typing import Any

import pytest
from callers import ADMIN, Part, ask, registered
from factories import DAY, HOUR, NOW, make_feed, make_message, make_workspace
from hypothesis import given, strategies as st
from sites import SiteFactory
from sweeps import (
    FEED,
    actions,
    make_partition,
    make_subjects,
    make_sweep,
    put_back_rows,
    state_of,
    utc_now,
)

from restante.database.pool import Database
from restante.errors import ServerFull
from restante.feed import rules, store
from restante.feed.subject import DELETE_ROWS, TRIM_EARLY
from restante.feed.total import FeedTotal, TotalLimit
from restante.ids import WorkspaceId
from restante.retention.space import SpaceAccount
from restante.retention.sweep import Sweep
from restante.workspaces import store as workspaces

pytestmark = pytest.mark.anyio

MESSAGE = {
    "jsonrpc": "2.0",
    "method": "message/send",
    "params": {"message": {"content": "x" * 850}},
}
GIB = 1024**3


# The limit ---------------------------------------------------------------------------------------


@given(st.none() | st.integers(1, 2**50), st.none() | st.integers(0, 2**50))
def test_the_limit_is_the_chosen_one_or_a_part_of_the_disk(chosen: int | None, disk: int | None):
    found = rules.max_total_bytes(chosen, disk_bytes=disk)

    if chosen is not None:
        assert found == chosen
    elif disk is None:
        assert found == 16 * GIB
    else:
        assert found == min(disk // 4, 16 * GIB)


async def test_messages_are_refused_and_files_are_not(run_site: SiteFactory):
    """Feeds of many workspaces cannot fill the disk, nor keep anybody from receiving files."""
    async with run_site(server_max_feed_bytes=10_000) as site:
        receivers = [await registered(site) for _ in range(4)]
        answers = [await one.message(MESSAGE, to=one) for one in receivers for _ in range(3)]
        path = f"/workspaces/{receivers[0].id}/a2a"
        from_operator = await ask(site, "POST", path, json=MESSAGE, headers=ADMIN)
        file = await receivers[0].upload(Part())
        status = await ask(site, "GET", "/admin/status", headers=ADMIN)

    assert [answer.status for answer in answers] == [200] * 7 + [507] * 5
    assert (from_operator.status, file.status) == (507, 200)
    refused = answers[-1]
    assert refused.json == {
        "error": "This server has no room for more messages at the moment.",
        "code": "server_full",
        "retry_after_seconds": 60,
    }
    assert status.json["max_feed_bytes"] == 10_000
    assert status.json["feed_bytes"] > 9_000


async def test_concurrent_messages_of_one_process_never_exceed_the_limit(
    db: Database, connection: Any
):
    feeds = [await make_workspace(connection) for _ in range(10)]
    feed = make_feed(db, max_total_bytes=5000)
    feed.total.fresh_seconds = 0

    async def append(workspace_id: WorkspaceId) -> None:
        await feed.append(workspace_id, make_message(), now=NOW)

    outcomes = await asyncio.gather(*map(append, feeds * 5), return_exceptions=True)

    assert {type(one) for one in outcomes if one} == {ServerFull}
    assert 4000 < await store.total_bytes(connection) <= 5000


async def test_what_another_process_has_appended_counts(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    ours, theirs = make_feed(db, max_total_bytes=1000), make_feed(db, max_total_bytes=1000)
    ours.total.fresh_seconds = 0
    await ours.append(workspace_id, make_message(), now=NOW)
    await theirs.append(workspace_id, make_message(), now=NOW)

    with pytest.raises(ServerFull):
        await ours.append(workspace_id, make_message("x" * 500), now=NOW)


async def test_what_is_not_committed_when_the_sum_is_read_counts(db: Database):
    total = FeedTotal(db, TotalLimit(100))
    total.fresh_seconds = 0

    async with total.adding(60):
        with pytest.raises(ServerFull):
            async with total.adding(50):
                pass


# Rows that nobody needs --------------------------------------------------------------------------


@pytest.fixture
def sweep(db_with_partitions: Database) -> Sweep:
    return crowded_sweep(db_with_partitions)


@pytest.fixture
async def connection(db_with_partitions: Database, connections: Any) -> Any:
    return await connections()


@pytest.fixture
async def workspace_id(connection: Any) -> WorkspaceId:
    return await make_workspace(connection)


def crowded_sweep(db: Database, max_bytes: int = 1) -> Sweep:
    """Of a server whose feeds may not hold more than that."""
    return make_sweep(db, feed_limit=TotalLimit(max_bytes))


async def fill(connection: Any, workspace_id: WorkspaceId, rows: int = 5) -> None:
    """Rows of two hours ago; the first partition of the tests begins before that."""
    for number in range(rows):
        message = make_message(str(number))
        await store.append(connection, workspace_id, message, now=utc_now())
    await connection.execute(
        "update feed set created_at = created_at - interval '2 hours' where workspace_id = $1",
        workspace_id,
    )


async def kept(connection: Any, workspace_id: WorkspaceId) -> list[int]:
    rows = await connection.fetch(
        "select seq from feed where workspace_id = $1 order by seq", workspace_id
    )
    return [row["seq"] for row in rows]


async def counted_exactly(connection: Any) -> bool:
    """Whether every feed counts the rows that it has."""
    return await connection.fetchval(
        "select bool_and(feed_bytes = kept and unacked_bytes = unacked) from feeds, lateral ("
        "    select coalesce(sum(bytes), 0) as kept,"
        "           coalesce(sum(bytes) filter (where seq > settled_seq), 0) as unacked"
        "      from feed where feed.workspace_id = feeds.workspace_id) as found"
    )


async def test_only_old_and_acknowledged_rows_are_deleted(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    await fill(connection, workspace_id, rows=5)
    await store.append(connection, workspace_id, make_message(), now=utc_now())
    silent = await make_workspace(connection)
    await fill(connection, silent)
    await store.acknowledge(connection, workspace_id, 6)
    await store.acknowledge(connection, silent, 2)

    report = await sweep.run(now=utc_now())

    assert actions(report) == [DELETE_ROWS]
    assert report.deleted["feed_rows"] == 7
    assert await kept(connection, workspace_id) == [6]
    assert await kept(connection, silent) == [3, 4, 5]
    marks = await store.marks(connection, silent)
    assert marks is not None
    assert marks.trimmed_seq == 2
    assert await counted_exactly(connection)


@pytest.mark.parametrize(("removed_for", "left"), [(2 * HOUR, 0), (timedelta(0), 5)])
async def test_all_rows_of_a_removed_workspace_are_deleted_after_an_hour(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, removed_for: timedelta, left: int
):
    """It may register again, so it has as much time as a reader that starts over."""
    await fill(connection, workspace_id)
    await workspaces.remove(connection, workspace_id)
    await connection.execute(
        "update workspaces set last_seen_at = last_seen_at - $1::interval", removed_for
    )

    await sweep.run(now=utc_now())

    assert len(await kept(connection, workspace_id)) == left
    assert await counted_exactly(connection)


async def test_the_largest_feed_is_trimmed_until_enough_is_free(
    db_with_partitions: Database,
    connection: Any,
    workspace_id: WorkspaceId,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(store, "_ROWS_PER_DELETION", 1)
    small = await make_workspace(connection)
    await fill(connection, workspace_id, rows=10)
    await fill(connection, small, rows=4)
    for one in (workspace_id, small):
        await store.acknowledge(connection, one, 99)
    total = await store.total_bytes(connection)

    await crowded_sweep(db_with_partitions, max_bytes=total).run(now=utc_now())

    assert await kept(connection, small) == [1, 2, 3, 4]
    assert await kept(connection, workspace_id) == [5, 6, 7, 8, 9, 10]


async def test_nothing_is_deleted_while_there_is_room(
    db_with_partitions: Database, connection: Any, workspace_id: WorkspaceId
):
    await fill(connection, workspace_id)
    await store.acknowledge(connection, workspace_id, 5)
    total = await store.total_bytes(connection)

    report = await crowded_sweep(db_with_partitions, max_bytes=2 * total).run(now=utc_now())

    assert (report.done, await kept(connection, workspace_id)) == ([], [1, 2, 3, 4, 5])


# Partitions that nobody needs --------------------------------------------------------------------


@pytest.fixture
async def partition(connection: Any, workspace_id: WorkspaceId) -> str:
    """A partition that ended yesterday, with three of five large rows."""
    start = (utc_now() - 2 * DAY).replace(minute=0, second=0, microsecond=0)
    name = await make_partition(connection, FEED, start, DAY)
    for _ in range(5):
        message = make_message(random.randbytes(500_000).hex())
        await store.append(connection, workspace_id, message, now=utc_now())
    ago = utc_now() - start - HOUR
    await put_back_rows(connection, workspace_id, ago, up_to=3)
    return name


async def test_a_partition_whose_rows_are_acknowledged_is_dropped_while_space_is_short(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, partition: str
):
    """Its bytes go back to the filesystem, long before the retention is over."""
    await store.acknowledge(connection, workspace_id, 3)
    planned = await sweep.plan(now=utc_now())

    report = await sweep.run(now=utc_now())

    assert TRIM_EARLY in [step.action for step in planned.steps]
    assert TRIM_EARLY in actions(report)
    assert await state_of(connection, partition) == "gone"
    assert await kept(connection, workspace_id) == [4, 5]
    assert await counted_exactly(connection)


async def test_a_partition_with_unacknowledged_rows_stays_and_is_named(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, partition: str
):
    await store.acknowledge(connection, workspace_id, 2)

    plan = await sweep.plan(now=utc_now())
    await sweep.run(now=utc_now())

    (held,) = (one for one in plan.held if one.partition == partition)
    assert (held.subject, held.workspace_id) == ("feed", workspace_id)
    assert "1 workspaces have not acknowledged rows in it" in held.why
    assert await state_of(connection, partition) == "attached"
    assert await kept(connection, workspace_id) == [3, 4, 5]


async def test_while_there_is_room_the_plan_names_the_retention(
    db_with_partitions: Database, connection: Any, workspace_id: WorkspaceId, partition: str
):
    await store.acknowledge(connection, workspace_id, 5)

    plan = await crowded_sweep(db_with_partitions, max_bytes=GIB).plan(now=utc_now())

    (held,) = (one for one in plan.held if one.partition == partition)
    assert plan.steps == []
    assert held.why.startswith("feed rows are kept for 30 days, these until")
    assert held.until is not None


async def test_the_plan_names_the_partition_in_use(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    """Nothing of it can go yet, and it may be what fills the disk."""
    for _ in range(2):
        message = make_message(random.randbytes(500_000).hex())
        await store.append(connection, workspace_id, message, now=utc_now())
    in_use = await connection.fetchval("select tableoid::regclass::text from feed limit 1")

    plan = await sweep.plan(now=utc_now())

    assert [(held.partition, held.subject) for held in plan.held] == [(in_use, "feed")]
    assert plan.held[0].why.startswith("feed rows are kept for 30 days")


@pytest.mark.parametrize("max_bytes", [1, GIB])
async def test_the_status_names_large_partitions_and_the_largest_feed_while_space_is_short(
    db_with_partitions: Database,
    connection: Any,
    workspace_id: WorkspaceId,
    partition: str,
    max_bytes: int,
):
    subjects = make_subjects(feed_limit=TotalLimit(max_bytes))

    space = await SpaceAccount(db_with_partitions, subjects).look(now=utc_now())

    named = [pin.who for pin in space.pins if str(workspace_id) in pin.what]
    assert (f"partition {partition}" in named) == (max_bytes == 1)
    assert space.max_feed_bytes == max_bytes
    assert space.feed_bytes > 2_000_000
