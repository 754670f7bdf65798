"""What the subjects add to the space account: uploads by state, workspaces, lags, silent ones."""

from typing import Any

import pytest
from factories import HOUR, NOW, Content, make_message, make_upload, make_workspace
from sweeps import make_subjects

from restante.database.pool import Database
from restante.delivery import buckets, store as uploads
from restante.feed import store as feed
from restante.ids import WorkspaceId
from restante.retention.space import SpaceAccount
from restante.wire import LagView, PinView, SpaceView, UploadStates

pytestmark = pytest.mark.anyio

# What was not fetched since NOW is silent by then.
LATER = NOW + 2 * HOUR


@pytest.fixture
def account(db: Database) -> SpaceAccount:
    return SpaceAccount(db, make_subjects())


async def make_states(connection: Any, workspace_id: WorkspaceId, counts: UploadStates) -> None:
    async def make(**other: Any) -> Any:
        return await make_upload(connection, workspace_id, Content(bytes(10)), **other)

    for _ in range(counts.never_fetched):
        await make()
    for _ in range(counts.fetched):
        await uploads.mark_fetched(connection, workspace_id, await make(), now=NOW)
    for _ in range(counts.acked):
        await uploads.acknowledge(connection, workspace_id, await make(), now=NOW)
    for _ in range(counts.expired):
        await make(expires_at=NOW)


def silent_in(seen: SpaceView) -> list[PinView]:
    return [pin for pin in seen.pins if pin.who.startswith("workspace ")]


async def test_live_bytes_are_those_of_the_files_that_exist(
    account: SpaceAccount, connection: Any, workspace_id: WorkspaceId
):
    empty = await account.look(now=NOW)
    for size in (10, 200):
        await make_upload(connection, workspace_id, Content(bytes(size)))

    seen = await account.look(now=NOW)

    assert (empty.live_bytes, seen.live_bytes) == (0, 210)


async def test_uploads_are_counted_by_state(
    account: SpaceAccount, connection: Any, workspace_id: WorkspaceId
):
    await make_states(connection, workspace_id, UploadStates(4, 3, 2, 1))

    assert (await account.look(now=NOW)).uploads == UploadStates(4, 3, 2, 1)


async def test_workspaces_that_hold_most_bytes_come_first_acknowledged_ones_included(
    account: SpaceAccount, connection: Any, workspace_id: WorkspaceId
):
    """Acknowledged files are in no quota, and fill the disk until they are swept."""
    other, idle = await make_workspace(connection), await make_workspace(connection)
    await make_states(connection, workspace_id, UploadStates(1, 1, 5, 0))
    await make_states(connection, other, UploadStates(2, 0, 0, 1))

    found = (await account.look(now=NOW)).workspaces

    assert [
        (one.workspace_id, one.uploads, one.waiting_bytes, one.held_bytes) for one in found
    ] == [
        (workspace_id, UploadStates(1, 1, 5, 0), 20, 70),
        (other, UploadStates(2, 0, 0, 1), 30, 30),
    ]
    assert found[0].waiting_since == NOW
    assert idle not in {one.workspace_id for one in found}


async def test_a_workspace_that_has_acknowledged_everything_has_nothing_waiting(
    account: SpaceAccount, connection: Any, workspace_id: WorkspaceId
):
    await make_states(connection, workspace_id, UploadStates(0, 0, 2, 0))

    (found,) = (await account.look(now=NOW)).workspaces

    assert (found.waiting_bytes, found.waiting_since) == (0, None)


async def test_the_lists_of_workspaces_are_bounded(account: SpaceAccount, connection: Any):
    """Promise 5: a page and its labels stay bounded, however many workspaces there are."""
    for _ in range(25):
        await make_upload(connection, await make_workspace(connection))

    seen = await account.look(now=LATER)

    assert (len(seen.workspaces), len(seen.lags)) == (20, 20)
    assert 0 < len(silent_in(seen)) < 25


async def test_lags_are_unacknowledged_rows_most_first(
    account: SpaceAccount, connection: Any, workspace_id: WorkspaceId
):
    other, done = await make_workspace(connection), await make_workspace(connection)
    for each, rows, acked in ((workspace_id, 3, 1), (other, 4, 0), (done, 2, 2)):
        for _ in range(rows):
            await feed.append(connection, each, make_message(), now=NOW)
        await feed.acknowledge(connection, each, acked)

    assert (await account.look(now=NOW)).lags == [LagView(other, 4), LagView(workspace_id, 2)]


async def test_removed_workspaces_are_not_active(
    account: SpaceAccount, connection: Any, workspace_id: WorkspaceId
):
    await make_workspace(connection)
    await connection.execute("update workspaces set status = 'removed' where id = $1", workspace_id)

    assert (await account.look(now=NOW)).workspaces_active == 1


async def test_workspaces_that_do_not_fetch_are_named_those_with_most_bytes_first(
    account: SpaceAccount, connection: Any
):
    """A new file has an hour; what was fetched or acknowledged does not count."""
    sizes = (10, 60, 20, 50, 40, 30)
    ids = [await make_workspace(connection) for _ in sizes]
    for workspace_id, size in zip(ids, sizes, strict=True):
        await make_upload(connection, workspace_id, Content(bytes(size)))
        await make_upload(connection, workspace_id, Content(bytes(999)), now=LATER)
    fetched = await make_upload(connection, ids[0], Content(bytes(998)))
    await uploads.mark_fetched(connection, ids[0], fetched, now=NOW)
    acked = await make_upload(connection, ids[2], Content(bytes(997)))
    await uploads.acknowledge(connection, ids[2], acked, now=NOW)

    silent = silent_in(await account.look(now=LATER))

    assert [pin.bytes for pin in silent] == [60, 50, 40, 30, 20]
    assert silent[0].who == f"workspace {ids[1]}"
    assert silent[0].what == "1 files that it does not fetch"
    assert silent[0].seconds == 2 * 3600


async def test_uploads_are_counted_in_one_scan_of_the_table(
    connection: Any, workspace_id: WorkspaceId
):
    """Every server does it every five minutes, and the table may have millions of rows."""
    await make_upload(connection, workspace_id)
    explained = await connection.fetchval(
        f"explain (format json) {buckets.queries.upload_totals}", NOW, [NOW], 20, 5
    )

    assert explained.count('"Relation Name": "uploads"') == 1
