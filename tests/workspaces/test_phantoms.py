"""Workspaces that are busy on paper: reset once, and only if they have been silent."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import structlog
from factories import DAY, make_message, make_workspace, until_blocked
from restante.workspaces.phantom_store import Reset
from sweeps import make_partition, put_back_rows

from restante.database.partitions import FEED
from restante.database.pool import Database, Tx
from restante.feed import store as feed
from restante.ids import WorkspaceId
from restante.workspaces import phantom_store as phantoms
from restante.workspaces import store as workspaces
from restante.workspaces.phantoms import Phantoms

pytestmark = pytest.mark.anyio

STALE = timedelta(minutes=10)


@pytest.fixture
async def connection(db_with_partitions: Database, connections: Any) -> Any:
    return await connections()


async def make_busy(connection: Any, tasks: int = 3, task: str = "digging") -> WorkspaceId:
    workspace_id = await make_workspace(connection)
    await workspaces.heartbeat(connection, workspace_id, tasks, task)
    return workspace_id


async def tasks_of(connection: Any, workspace_id: WorkspaceId) -> tuple[int, str]:
    row = await connection.fetchrow(
        "select active_tasks, current_task from workspaces where id = $1", workspace_id
    )
    return tuple(row)


async def reset(connection: Tx) -> list[Reset]:
    return await phantoms.reset(connection, silent_since=datetime.now(UTC) - STALE)


async def append(connection: Tx, workspace_id: WorkspaceId, ago: timedelta) -> None:
    """A row of that age, in the leaf that is there for its time."""
    await feed.append(connection, workspace_id, make_message(), now=datetime.now(UTC))
    await put_back_rows(connection, workspace_id, ago, up_to=1)


async def test_busy_and_silent_is_reset(connection: Any):
    workspace_id = await make_busy(connection)

    found = await reset(connection)

    assert found == [Reset(workspace_id, 3, "digging")]
    assert await tasks_of(connection, workspace_id) == (0, "")
    assert await reset(connection) == []


@pytest.mark.parametrize(
    ("ago", "is_reset"),
    [
        (timedelta(0), False),
        (STALE - timedelta(minutes=1), False),
        (STALE + timedelta(minutes=1), True),
        (DAY, True),
    ],
)
async def test_a_recent_row_in_the_feed_shows_that_it_is_there(
    connection: Any, ago: timedelta, is_reset: bool
):
    now = datetime.now(UTC)
    covered = now.replace(minute=0, second=0, microsecond=0) - 2 * DAY
    await make_partition(
        connection, FEED, covered, now.replace(minute=0, second=0, microsecond=0) - covered
    )
    workspace_id = await make_busy(connection)
    await append(connection, workspace_id, ago)

    assert len(await reset(connection)) == is_reset


async def test_others_are_left_alone(connection: Any):
    """Removed ones, idle ones, and those who are busy and heard of."""
    removed, idle, heard = [await make_busy(connection, tasks) for tasks in (2, 0, 4)]
    await connection.execute("update workspaces set status = 'removed' where id = $1", removed)
    await append(connection, heard, timedelta(0))
    before = [await tasks_of(connection, each) for each in (removed, idle, heard)]

    assert await reset(connection) == []

    assert before == [await tasks_of(connection, each) for each in (removed, idle, heard)]


async def test_a_row_in_somebody_elses_feed_does_not_count(connection: Any):
    silent, heard = await make_busy(connection), await make_busy(connection)
    await append(connection, heard, timedelta(0))

    assert [one.workspace_id for one in await reset(connection)] == [silent]


async def test_a_heartbeat_that_is_committing_is_neither_waited_for_nor_undone(
    connection: Any, connections: Any
):
    client = await connections()
    workspace_id = await make_busy(connection, 1)
    beating = client.transaction()
    await beating.start()
    await workspaces.heartbeat(client, workspace_id, 7, "again")

    async with asyncio.timeout(5):
        found = await reset(connection)
    await beating.commit()

    assert found == []
    assert await tasks_of(connection, workspace_id) == (7, "again")


async def test_a_heartbeat_that_comes_after_the_reset_stays(connection: Any, connections: Any):
    """It waits for the reset to commit, and is not lost."""
    client, watcher = await connections(), await connections()
    workspace_id = await make_busy(connection, 1)
    resetting = connection.transaction()
    await resetting.start()
    await reset(connection)
    beating = asyncio.create_task(workspaces.heartbeat(client, workspace_id, 7, "again"))
    await until_blocked(watcher, client)

    await resetting.commit()
    await beating

    assert await tasks_of(connection, workspace_id) == (7, "again")


async def test_many_passes_at_once_reset_count_and_log_each_once(
    db_with_partitions: Database, connection: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(phantoms, "BATCH", 3)
    busy = {str(await make_busy(connection)) for _ in range(10)}
    counted: list[float] = []
    passes = [
        Phantoms(db_with_partitions, stale=STALE, count=counted.append).reset() for _ in range(4)
    ]

    with structlog.testing.capture_logs() as logged:
        await asyncio.gather(*passes)

    assert sum(counted) == 10
    assert {line["event"] for line in logged} == {"phantom_busy_reset"}
    assert sorted(line["workspace"] for line in logged) == sorted(busy)
    assert {line["active_tasks"] for line in logged} == {3}
