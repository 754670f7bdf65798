"""A running server follows changes of the schema of tracked tables by itself."""

from typing import Any

import pytest
from oplog.captured import changes_of, track
from structlog.testing import capture_logs

from restante.database.pool import Database
from restante.oplog.tracking.schema_changes import Watch

pytestmark = pytest.mark.anyio

PAGES = "create table public.pages (id text, n int, primary key (id, n)) partition by range (n)"
FIRST = "create table public.pages_1 partition of public.pages for values from (0) to (10)"
SECOND = "create table public.pages_2 partition of public.pages for values from (10) to (20)"


async def test_a_new_partition_is_captured_and_said_once(db: Database, connections: Any):
    """Programs may write straight to a partition."""
    writer = await connections()
    await writer.execute(f"{PAGES}; {FIRST}")
    await track(db)
    watch = Watch(db)
    await watch.look()
    await writer.execute(SECOND)

    with capture_logs() as said:
        await watch.look()
        await watch.look()
    await writer.execute("insert into public.pages_2 values ('a', 11)")

    assert await changes_of(writer) == [("c", {"id": "a", "n": 11})]
    assert [entry["event"] for entry in said] == ["oplog_table"]
