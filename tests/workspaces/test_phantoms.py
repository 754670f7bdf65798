"""Workspaces that report tasks but are silent in their feed are reset, once."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import structlog
from factories import DAY, ROWS_FROM, make_message, make_workspace, until_blocked
from sweeps import make_partition, put_back_rows

from restante.database.pool import Connection, Database
from restante.feed import store as feed
from restante.feed.subject import FEED
from restante.ids import WorkspaceId
from restante.workspaces import store as workspaces
from restante.workspaces.phantoms import reset_phantoms
from restante.workspaces.store import Reset

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


async def reset(connection: Connection) -> list[Reset]:
    return await workspaces.reset_silent(connection, silent_since=datetime.now(UTC) - STALE)


async def append(connection: Connection, workspace_id: WorkspaceId, ago: timedelta) -> None:
    """A row of that age; the partition for its time exists."""
    await feed.append(connection, workspace_id, make_message(), now=datetime.now(UTC))
    await put_back_rows(connection, workspace_id, ago, up_to=1)


async def test_a_busy_and_silent_workspace_is_reset_once(connection: Any):
    workspace_id = await make_busy(connection)

    found = await reset(connection)

    assert found == [Reset(workspace_id, 3)]
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
async def test_a_workspace_with_a_recent_row_in_its_feed_is_not_reset(
    connection: Any, ago: timedelta, is_reset: bool
):
    await make_partition(connection, FEED, ROWS_FROM - 2 * DAY, 2 * DAY)
    workspace_id = await make_busy(connection)
    await append(connection, workspace_id, ago)

    assert len(await reset(connection)) == is_reset


async def test_removed_and_idle_workspaces_and_those_with_rows_are_not_reset(connection: Any):
    removed, idle, active = [await make_busy(connection, tasks) for tasks in (2, 0, 4)]
    await connection.execute("update workspaces set status = 'removed' where id = $1", removed)
    await append(connection, active, timedelta(0))
    before = [await tasks_of(connection, each) for each in (removed, idle, active)]

    assert await reset(connection) == []

    assert before == [await tasks_of(connection, each) for each in (removed, idle, active)]


async def test_rows_in_the_feed_of_another_workspace_do_not_count(connection: Any):
    silent, active = await make_busy(connection), await make_busy(connection)
    await append(connection, active, timedelta(0))

    assert [one.workspace_id for one in await reset(connection)] == [silent]


async def test_a_heartbeat_that_is_committing_is_neither_waited_for_nor_undone(
    connection: Any, connections: Any
):
    client = await connections()
    workspace_id = await make_busy(connection, 1)
    beating = client.transaction()
    await beating.start()
    await workspaces.heartbeat(client, workspace_id, 7, "again")

    await connection.execute("set lock_timeout = '1s'")
    found = await reset(connection)
    await beating.commit()

    assert found == []
    assert await tasks_of(connection, workspace_id) == (7, "again")


async def test_a_heartbeat_after_the_reset_is_kept(connection: Any, connections: Any):
    """It waits for the commit of the reset."""
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


async def test_concurrent_passes_reset_count_and_log_each_workspace_once(
    db_with_partitions: Database, connection: Any
):
    """More workspaces than one batch, and several servers."""
    busy = await make_many_busy(connection, 2 * workspaces.RESET_BATCH + 1)
    counted: list[float] = []

    with structlog.testing.capture_logs() as logged:
        await asyncio.gather(
            *(
                reset_phantoms(
                    db_with_partitions, now=datetime.now(UTC), stale=STALE, count=counted.append
                )
                for _ in range(4)
            )
        )

    assert sum(counted) == len(busy)
    assert {line["event"] for line in logged} == {"phantom_busy_reset"}
    assert sorted(line["workspace"] for line in logged) == busy
    assert {line["active_tasks"] for line in logged} == {3}


async def make_many_busy(connection: Any, count: int) -> list[str]:
    """Busy workspaces; their ids in order."""
    rows = await connection.fetch(
        "insert into workspaces (id, name, delivery_mode, agent_card, inbound_secret, active_tasks)"
        " select gen_random_uuid(), '', 'poll', '{}', '', 3 from generate_series(1, $1)"
        " returning id",
        count,
    )
    return sorted(str(row["id"]) for row in rows)
