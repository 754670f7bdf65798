"""An acknowledged file is reopened while the sweep deletes it: one of the two wins, whole."""

import asyncio
from typing import Any

import pytest
from factories import (
    HOUR,
    NOW,
    ROOMY,
    Content,
    Counters,
    Parts,
    counters,
    make_upload,
    sweep_uploads,
)
from sweeps import is_waited_for
from waiting import until

from restante.delivery import store
from restante.errors import UploadGone
from restante.ids import FileId, WorkspaceId, new_activity_id

pytestmark = pytest.mark.anyio

CONTENT = Content(b"four")


@pytest.fixture
async def acked(connection: Any, workspace_id: WorkspaceId) -> FileId:
    file_id = await make_upload(connection, workspace_id, CONTENT)
    assert await store.acknowledge(connection, workspace_id, file_id, now=NOW)
    return file_id


async def test_a_reopening_that_is_not_committed_yet_wins_over_the_sweep(
    connection: Any, workspace_id: WorkspaceId, acked: FileId, connections: Any
):
    """The retention ends meanwhile.  The sweep does not wait; the file stays, unacknowledged."""
    client = await connections()
    found = await store.get_acked(connection, workspace_id, acked)
    assert found
    await connection.execute("set lock_timeout = '100ms'")
    reopening = client.transaction()
    await reopening.start()
    assert await store.reopen(
        client,
        found,
        row_id=new_activity_id(NOW),
        now=NOW,
        acked_since=NOW - HOUR,
        expires_at=NOW + 9 * HOUR,
        quota=ROOMY,
    )

    meanwhile = await sweep_uploads(connection, now=NOW + 2 * HOUR)
    await reopening.commit()
    afterwards = await sweep_uploads(connection, now=NOW + 2 * HOUR)

    assert (meanwhile, afterwards) == ({}, {})
    assert await counters(connection, workspace_id) == Counters(2, 4, 1)


async def test_a_reopening_during_the_sweep_finds_the_upload_gone(
    parts: Parts, connection: Any, workspace_id: WorkspaceId, acked: FileId, connections: Any
):
    sweeper = await connections()
    sweep = sweeper.transaction()
    await sweep.start()
    swept = await sweep_uploads(sweeper, now=NOW + 2 * HOUR)
    reopening = asyncio.create_task(parts.reopen(workspace_id, acked))
    await until(lambda: is_waited_for(sweeper))

    await sweep.commit()

    assert swept == {"acked": 1}
    with pytest.raises(UploadGone):
        await reopening
    assert await counters(connection, workspace_id) == Counters(1, 0, 0)


async def test_of_several_reopenings_at_once_one_takes_room_and_announces(
    parts: Parts, connection: Any, workspace_id: WorkspaceId, acked: FileId
):
    ended = await asyncio.gather(
        *(parts.reopen(workspace_id, acked) for _ in range(5)), return_exceptions=True
    )

    assert sum(not isinstance(one, Exception) for one in ended) == 1
    assert sum(isinstance(one, UploadGone) for one in ended) == 4
    assert await counters(connection, workspace_id) == Counters(2, 4, 1)
