"""Removed workspaces are deleted by the sweep once nothing that was sent to them is kept."""

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from factories import DAY, ROOMY, make_message, make_reservation, make_upload, make_workspace
from sweeps import Tally, expire, make_old_feed, make_sweep, utc_now

from restante.database.pool import Database
from restante.delivery import quotas
from restante.feed import store as feed
from restante.ids import WorkspaceId
from restante.retention.sweep import Sweep
from restante.workspaces import store as workspaces
from restante.workspaces.subject import RemovedWorkspaces

pytestmark = pytest.mark.anyio

RETENTION = timedelta(days=30)


@pytest.fixture
def sweep(db_with_partitions: Database) -> Sweep:
    return make_sweep(db_with_partitions, feed_retention=RETENTION)


@pytest.fixture
async def connection(db_with_partitions: Database, connections: Any) -> Any:
    return await connections()


@pytest.fixture
async def removed(connection: Any) -> WorkspaceId:
    """A workspace that was removed longer ago than the retention."""
    workspace_id = await make_workspace(connection)
    await remove(connection, workspace_id, ago=RETENTION + DAY)
    return workspace_id


async def remove(connection: Any, workspace_id: WorkspaceId, *, ago: timedelta) -> None:
    assert await workspaces.remove(connection, workspace_id)
    await connection.execute(
        "update workspaces set last_seen_at = $2 where id = $1", workspace_id, utc_now() - ago
    )


async def exists(connection: Any, workspace_id: WorkspaceId) -> tuple[bool, bool]:
    """Whether the workspace exists, and the counters of its feed."""
    row = await connection.fetchrow(
        "select exists (select from workspaces where id = $1),"
        " exists (select from feeds where workspace_id = $1)",
        workspace_id,
    )
    return tuple(row)


async def test_a_removed_workspace_is_deleted_with_the_counters_of_its_feed(
    sweep: Sweep, connection: Any, removed: WorkspaceId
):
    active, tally = await make_workspace(connection), Tally()

    report = await sweep.run_observed(tally, now=utc_now())

    assert [(step.action, step.rows) for step in report.done] == [(RemovedWorkspaces.action, 1)]
    assert tally.rows == Counter(workspaces=1)
    assert await exists(connection, removed) == (False, False)
    assert await exists(connection, active) == (True, True)


async def test_a_removed_workspace_is_kept_during_the_retention(sweep: Sweep, connection: Any):
    """It may register again with the same id."""
    recent = await make_workspace(connection)
    await remove(connection, recent, ago=RETENTION - DAY)

    report = await sweep.run(now=utc_now())

    assert report.done == []
    assert await exists(connection, recent) == (True, True)


@pytest.mark.parametrize("kept", ["file", "row", "reservation"])
async def test_a_removed_workspace_is_kept_while_anything_that_was_sent_to_it_is(
    sweep: Sweep, connection: Any, removed: WorkspaceId, kept: str
):
    """A workspace that registers again still gets what was sent to it."""
    if kept == "file":
        await make_upload(connection, removed)
        await connection.execute("update feeds set trimmed_seq = last_seq")
    elif kept == "row":
        await feed.append(connection, removed, make_message(), now=utc_now())
    else:
        await quotas.reserve(connection, make_reservation(removed), ROOMY)

    report = await sweep.run(now=utc_now())

    assert report.done == []
    assert await exists(connection, removed) == (True, True)


async def test_a_removed_workspace_is_deleted_after_its_last_file_and_row(
    sweep: Sweep, connection: Any, removed: WorkspaceId
):
    """The file is deleted and the feed is trimmed by one pass, the workspace by the next."""
    file_id = await make_upload(connection, removed, now=utc_now())
    await expire(connection, file_id)
    await make_old_feed(connection, removed, days=60, up_to=1)

    first, second = [await sweep.run(now=utc_now()) for _ in range(2)]

    assert [step.subject for step in first.done] == ["uploads", "feed"]
    assert [step.subject for step in second.done] == ["removed workspaces"]
    assert await exists(connection, removed) == (False, False)


async def test_a_workspace_that_is_registering_again_is_skipped(
    sweep: Sweep, connection: Any, removed: WorkspaceId, connections: Any
):
    """It holds a lock on its row; the sweep does not wait for it."""
    returning = await connections()
    async with returning.transaction():
        await returning.execute("select from workspaces where id = $1 for update", removed)

        report = await sweep.run(now=utc_now())

    assert report.deleted["workspaces"] == 0
    assert await exists(connection, removed) == (True, True)
