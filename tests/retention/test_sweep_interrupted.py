"""
A pass that ends in the middle of a step: the next pass finds where it stopped, and finishes.

A lock of another session makes the pass wait in the step; then its session is terminated, as when
its process is killed.
"""

from typing import Any

import pytest
from factories import make_parts
from sweeps import (
    CHUNKS,
    PAST,
    Stop,
    Tally,
    actions,
    content_of,
    end_who_waits_for,
    expire,
    make_old,
    make_partition,
    make_sweep,
    partition_names,
    state_of,
    stopped_pass,
    stops,
    utc_now,
)

from restante.database.pool import Database
from restante.delivery.subject import DROP_BUCKET
from restante.errors import DatabaseUnavailable
from restante.ids import WorkspaceId
from restante.retention.rules import DROP_DETACHED, FINISH_DETACH

pytestmark = pytest.mark.anyio

BUCKET = f"chunks_{PAST:%Y%m%d_%H%M%S}"
STOPS = stops(CHUNKS, BUCKET)
CONTENT = bytes(range(256)) * 64


@pytest.fixture
async def db(db: Database) -> Database:
    """One bucket with a past range, and one for the current time."""
    async with db.connection() as connection:
        await make_partition(connection, CHUNKS)
    return db


@pytest.mark.parametrize(
    ("step", "last_action"),
    [
        ("seal", DROP_BUCKET),
        ("detach", DROP_BUCKET),
        ("half detached", FINISH_DETACH),
        ("drop", DROP_DETACHED),
    ],
)
async def test_a_bucket_is_removed_by_the_pass_after_an_interrupted_one(
    *,
    db: Database,
    connection: Any,
    workspace_id: WorkspaceId,
    connections: Any,
    step: str,
    last_action: str,
):
    """Two files are live.  They are moved first, and can be fetched after each step."""
    parts, tally = make_parts(db), Tally()
    live = await make_old(connection, workspace_id, 2, data=CONTENT)
    await expire(connection, *await make_old(connection, workspace_id, 20))
    stop = STOPS[step]
    async with stopped_pass(stop, make_sweep(db), tally, connections, BUCKET) as (passing, holder):
        found = await state_of(connection, BUCKET)
        await end_who_waits_for(holder)
        with pytest.raises(DatabaseUnavailable):
            await passing
        between = [await content_of(parts, workspace_id, file_id) for file_id in live]

    report = await make_sweep(db).run(now=utc_now())

    assert (found, tally.failed, tally.rows["expired"]) == (stop.state, 1, 20)
    assert (actions(report), report.postponed) == ([last_action], [])
    assert await state_of(connection, BUCKET) == "gone"
    assert between == [CONTENT] * 2
    assert [await content_of(parts, workspace_id, file_id) for file_id in live] == between
    assert await connection.fetchval("select count(*) from chunks") == 2


async def test_files_that_an_interrupted_pass_did_not_move_are_moved_by_the_next(
    db: Database, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """One commit copies a file and points to the copy: it is found in one of the two buckets."""
    parts, tally = make_parts(db), Tally()
    live = await make_old(connection, workspace_id, 2, data=CONTENT)
    await expire(connection, *await make_old(connection, workspace_id, 20))
    stop = Stop("lock table only chunks in share mode", "attached")
    async with stopped_pass(stop, make_sweep(db), tally, connections, BUCKET) as (passing, holder):
        found = await state_of(connection, BUCKET)
        await end_who_waits_for(holder)
        with pytest.raises(DatabaseUnavailable):
            await passing
        between = [await content_of(parts, workspace_id, file_id) for file_id in live]

    await make_sweep(db).run(now=utc_now())

    assert (found, tally.failed) == (stop.state, 1)
    assert between == [CONTENT] * 2
    assert [await content_of(parts, workspace_id, file_id) for file_id in live] == between
    assert BUCKET not in await partition_names(connection, CHUNKS)
