"""A clock of the log that was far ahead goes back when nothing depends on it any more."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from oplog.captured import log_of, track

from restante.database.pool import Database
from restante.oplog import status, ulids
from restante.oplog.tracking import capture

pytestmark = pytest.mark.anyio

AHEAD = timedelta(days=300)


@pytest.fixture
async def writer(db: Database, connections: Any) -> Any:
    """A connection of the application; `pages` is tracked, and the clock of the log far ahead."""
    connection = await connections()
    await connection.execute("set search_path = public")
    for name in ("pages", "parts"):
        await connection.execute(f"create table {name} (id text primary key)")
    await track(db)
    ahead = datetime.now(UTC) + AHEAD
    tick = ulids.tick_above(ulids.lowest_at(ahead))
    await connection.execute("select restante.op_tick(1, $1)", tick)
    await connection.execute("select setval('restante.op_era', $1)", int(ahead.timestamp() * 1e6))
    return connection


async def days_ahead(db: Database) -> int:
    seen = await status.look(db, now=datetime.now(UTC))
    return round(seen.clock_ahead_seconds / 86_400)


async def test_it_starts_again_with_the_first_table_that_is_tracked(db: Database, writer: Any):
    """Untracked and tracked again, all tables have versions that peers take."""
    before = await days_ahead(db)
    await capture.untrack(db, "pages")

    await track(db)

    await writer.execute("insert into pages values ('a')")
    (op,) = await log_of(writer)
    era = await writer.fetchval("select restante.op_current_era()")
    soon = datetime.now(UTC) + timedelta(minutes=1)
    assert (before, await days_ahead(db)) == (AHEAD.days, 0)
    assert ulids.moment_of(op.ulid) < soon
    assert era < soon.timestamp() * 1e6


async def test_it_does_not_go_back_while_a_table_has_a_log(db: Database, writer: Any):
    await track(db, "parts")

    assert await days_ahead(db) == AHEAD.days
