"""Reading a feed by seq: rows without a hole, or the reader is told which are kept."""

import asyncio
from typing import Any

import pytest
from factories import make_message, make_parts, make_workspace
from sweeps import make_old_feed, make_sweep

from restante.database.pool import Database
from restante.errors import CursorGone
from restante.feed import store as feed
from restante.feed.service import Feed, Query
from restante.ids import WorkspaceId
from restante.retention.sweep import Sweeping

pytestmark = pytest.mark.anyio


@pytest.fixture
def reader(db_with_partitions: Database) -> Feed:
    return Feed(db_with_partitions, make_parts(db_with_partitions).wakeups)


@pytest.fixture
def sweeping(db: Database) -> Sweeping:
    return make_sweep(db)


@pytest.fixture
async def workspace_id(reader: Feed, connections: Any) -> WorkspaceId:
    """Five rows, of which the next sweep trims the first three."""
    connection = await connections()
    workspace_id = await make_workspace(connection)
    for _ in range(5):
        await reader.append(workspace_id, make_message())
    await make_old_feed(connection, workspace_id, up_to=3)
    return workspace_id


async def seqs_after(reader: Feed, workspace_id: WorkspaceId, seq: int) -> list[int]:
    page = await reader.read(workspace_id, Query(since_seq=seq))
    return [row.seq for row in page.rows]


async def test_a_reader_that_is_told_of_a_trim_starts_over_at_its_end(
    reader: Feed, sweeping: Sweeping, workspace_id: WorkspaceId
):
    assert await seqs_after(reader, workspace_id, 2) == [3, 4, 5]
    await sweeping.sweep()

    with pytest.raises(CursorGone, match="start over with since_seq=3") as told:
        await seqs_after(reader, workspace_id, 2)

    assert told.value.facts == {"lowest_seq": 4, "latest_seq": 5}
    assert await seqs_after(reader, workspace_id, 3) == [4, 5]


@pytest.mark.parametrize("trimmed_first", [True, False])
async def test_a_page_that_a_trim_overtakes_is_not_given(
    reader: Feed,
    sweeping: Sweeping,
    workspace_id: WorkspaceId,
    monkeypatch: pytest.MonkeyPatch,
    trimmed_first: bool,
):
    """By the marks all is there; then the leaf goes, before or after the rows are read."""
    rows_after = feed.rows_after

    async def overtaken(*arguments: Any) -> Any:
        before = [] if trimmed_first else await rows_after(*arguments)
        await sweeping.sweep()
        return before or await rows_after(*arguments)

    monkeypatch.setattr(feed, "rows_after", overtaken)

    with pytest.raises(CursorGone):
        await seqs_after(reader, workspace_id, 1)


async def test_a_seq_that_was_never_given_is_told_at_once_and_not_waited_for(
    reader: Feed, workspace_id: WorkspaceId
):
    """After a restore from a backup, the rows up to it would be stepped over."""
    async with asyncio.timeout(5):
        with pytest.raises(CursorGone) as told:
            await reader.read(workspace_id, Query(since_seq=6, wait_seconds=60))

    assert told.value.facts == {"lowest_seq": 1, "latest_seq": 5}


async def test_a_follower_from_before_a_restore_is_told(reader: Feed, workspace_id: WorkspaceId):
    """Whoever watches would otherwise see nothing until the feed has grown past its place."""
    with pytest.raises(CursorGone):
        await reader.rows_after(workspace_id, 6, 10)
