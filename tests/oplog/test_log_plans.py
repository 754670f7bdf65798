"""
The statements that read the log visit a few pages of each partition, whatever the statistics say.

They are planned once, for all positions: so a plan that scans or sorts would do so for every page.
"""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from database.test_plans import Recorder, pages_visited
from oplog.logs import ORIGIN

from restante.database.sessions import SetUp, driver_options
from restante.oplog.positions import Position
from restante.oplog.serving import log
from restante.oplog.serving.log import Horizon, Limits, Log

pytestmark = pytest.mark.anyio

TABLES, PARTITIONS = 4, 5
OPS_PER_PARTITION = 1000
# The way down three indexes, and a few rows; a scan of a single partition visits 50.
PAGES_PER_PARTITION = 12
ROWS_READ = 20
MOMENTS = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 4)]


async def no_statistics(_connection: Any) -> None:
    """As in a partition that autovacuum has not seen yet."""


async def of_empty_tables(connection: Any) -> None:
    await connection.execute("vacuum analyze")


async def fill(connection: Any) -> None:
    """Ops of several tables, each spread over all partitions of its table."""
    await connection.execute(
        """
        insert into ops (table_id, arrived_at, era, xid, ulid, n, origin, action, key_hash, key,
                         data)
        select op % $1 + 1, '2026-01-01 00:00:00+00'::timestamptz + day * interval '1 day', 1, op,
               op_ulid(op << 15, '0123456789abcdef'), 0, 1, 'u', op % 100, '[' || op % 100 || ']',
               '{"id": 1, "text": "some text, so that a page has not too many of them"}'
          from generate_series(0, $2::int * $3::int * $1::int - 1) as op,
               lateral (select op / ($2 * $1)) as t (day)
        """,
        TABLES,
        OPS_PER_PARTITION,
        PARTITIONS,
    )


@pytest.fixture(params=[no_statistics, of_empty_tables], ids=lambda one: one.__name__)
async def connection(request: pytest.FixtureRequest, dsn: str) -> Any:
    connection = await asyncpg.connect(dsn, **driver_options(30))
    await SetUp(30, is_pooled=False)(connection)
    await connection.execute("insert into op_hosts (host) values ($1)", ORIGIN)
    for table in range(1, TABLES + 1):
        await connection.execute(
            "insert into op_tables (name, schema_name, table_name, key_columns, state, changed_at)"
            " values ($1, 'public', $1, '{id}', 'tracked', now())",
            f"t{table}",
        )
        await connection.execute(
            f"create table ops_{table} partition of ops for values in ({table})"
            " partition by range (arrived_at)"
        )
        for day in range(1, PARTITIONS + 1):
            await connection.execute(
                f"create table ops_{table}_{day} partition of ops_{table}"
                f" for values from ('2026-01-{day:02} 00:00:00+00')"
                f" to ('2026-01-{day + 1:02} 00:00:00+00') with (autovacuum_enabled = off)"
            )
    await request.param(connection)
    await fill(connection)
    yield connection
    await connection.close()


async def statements(connection: Any, visible: int) -> list[tuple[str, tuple[object, ...]]]:
    """Every statement that serves pages, with its arguments, as it is sent."""
    recorder: Any = Recorder(connection)
    below = Horizon(2, 0)
    tables = (await log.logged_tables(connection))[:visible]
    read = Log(recorder, tables, below)
    row = await connection.fetchrow(
        "select era, xid, ulid, n from ops where xid = $1",
        TABLES * PARTITIONS * OPS_PER_PARTITION // 2,
    )
    middle = Position(row["era"], row["xid"], row["ulid"], row["n"])
    end = Position(2, 0, UUID(int=0), 0)
    limits = Limits(ops=ROWS_READ, bytes=10_000)
    for at in (middle, end):
        await read.window(at, limit=ROWS_READ, max_bytes=10_000)
        await read.end(at, limits)
    after = (await read.window(middle, limit=ROWS_READ, max_bytes=10_000))[-1].position
    await read.outdated(middle, after, UUID(int=2**128 - 1))
    await read.op_end(middle.ulid, limits)
    await read.op_start(middle, after)
    await read.previous(middle)
    await read.lowest_ulid()
    for moment in (*MOMENTS, datetime.now(UTC)):
        await read.first_arrival(moment)
    await log.head(recorder, below)
    return recorder.calls


async def test_who_lacks_what_arrived_since_a_moment_begins_right_there(connection: Any):
    """With few statements, however long the log is."""
    recorder: Any = Recorder(connection)
    read = Log(recorder, await log.logged_tables(connection), Horizon(2, 0))
    per_day = TABLES * OPS_PER_PARTITION

    found = [await read.first_arrival(moment) for moment in MOMENTS]

    # The last one before midnight, because a transaction may take some time.
    assert [one.xid for one in found if one] == [0, per_day - 1, 3 * per_day - 1]
    assert await read.first_arrival(datetime.now(UTC)) is None
    assert len(recorder.calls) <= 4 * (3 + (PARTITIONS * per_day).bit_length())


@pytest.mark.parametrize("visible", [TABLES, 1])
async def test_a_page_costs_the_same_wherever_it_begins(
    connection: Any, visible: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(log, "_MEASURED_FIRST", ROWS_READ)
    sent = await statements(connection, visible)
    await connection.execute("set plan_cache_mode = force_generic_plan")

    visited = [(await pages_visited(connection, query, args), query) for query, args in sent]

    most = TABLES * PARTITIONS * PAGES_PER_PARTITION
    # For each record that may be outdated, the partitions of its table are searched.
    most_outdated = most + ROWS_READ * PARTITIONS * PAGES_PER_PARTITION
    for pages, query in visited:
        assert pages <= (most_outdated if "as newer" in query else most), query
