"""
A VACUUM of a partition of the log is in the way of its removal.

One that somebody has begun, or that prevents a wraparound, does not give way: the pass says so, and
the next one finishes.  An ordinary autovacuum gives way.  Writers wait for neither.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import soak
from oplog.captured import log_of
from oplog.clusters import running_cluster
from oplog.trimmed import DAY, age, make_pages, make_wide, merge_past, now, sweep_of, write
from sweeps import partition_names
from waiting import until

from restante.database import migrate
from restante.database.pool import SCHEMA, Database
from restante.database.rules import BOTH_PHASES
from restante.oplog.tables import OPS

pytestmark = pytest.mark.anyio

# A pass waits for 150 ms at a time for a log that is in use.
WRITER_LOCK_TIMEOUT_MILLISECONDS = 500


async def make(db: Database, connection: Any, kind: str) -> tuple[str, int]:
    """A partition with pages enough for a slow VACUUM, and how many of its ops stay."""
    if kind == "cut":
        _, wide = await make_wide(db, connection)
        return wide, 102
    pages = await make_pages(db)
    await write(connection, *range(500), text="x" * 1000)
    old = await age(connection, pages, 20 * DAY)
    if kind == "emptied":
        old = await merge_past(connection, pages, days_ahead=2)
    return old, 0


@asynccontextmanager
async def vacuuming(connection: Any, watcher: Any, partition: str) -> AsyncIterator[None]:
    """A VACUUM that takes half a minute."""
    await connection.execute(
        "set application_name = 'a slow vacuum';"
        " set vacuum_cost_delay = 100; set vacuum_cost_limit = 1"
    )
    running = asyncio.create_task(connection.execute(f"vacuum {partition}"))
    await until(lambda: _is_vacuumed(watcher, partition))
    yield
    assert await _is_vacuumed(watcher, partition)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def _is_vacuumed(watcher: Any, partition: str) -> bool:
    return await watcher.fetchval(
        "select exists (select from pg_stat_progress_vacuum where relid = $1::text::regclass)",
        partition,
    )


@asynccontextmanager
async def keeps_writing(connection: Any) -> AsyncIterator[list[int]]:
    """One captured commit after the other; one that waits for long fails."""
    await connection.execute(f"set lock_timeout = {WRITER_LOCK_TIMEOUT_MILLISECONDS}")
    ended, written = asyncio.Event(), list[int]()

    async def keep_writing() -> None:
        while not ended.is_set():
            # Rolled back, so that all that is in the partition stays due.
            await connection.execute("begin; insert into public.pages values (-1); rollback")
            written.append(-1)

    writing = asyncio.create_task(keep_writing())
    try:
        yield written
    finally:
        ended.set()
        await writing


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("dropped", marks=(pytest.mark.soak, soak.only_long)),
        "emptied",
        pytest.param("cut", marks=(pytest.mark.soak, soak.only_long)),
    ],
)
async def test_a_vacuum_that_does_not_give_way_is_named_and_the_next_pass_finishes(
    db: Database, connections: Callable[[], Any], kind: str
):
    connection = await connections()
    partition, keeps = await make(db, connection, kind)
    async with (
        vacuuming(await connections(), connection, partition),
        keeps_writing(await connections()) as written,
    ):
        report = await sweep_of(db).run(now=now())
    afterwards = await sweep_of(db).run(now=now())

    (postponed,) = report.postponed
    assert postponed.step.partition == partition
    assert "holds a lock" in postponed.reason
    assert "(a slow vacuum) since" in postponed.reason
    assert len(written) > 1
    assert afterwards.postponed == []
    assert len(await log_of(connection)) == keeps


AUTOVACUUM = """
alter table {} set (autovacuum_vacuum_threshold = 0, autovacuum_vacuum_scale_factor = 0,
                    autovacuum_vacuum_cost_delay = 100, autovacuum_vacuum_cost_limit = 1)
"""


@pytest.mark.soak
@soak.only_long
async def test_an_autovacuum_gives_way(place: Path):
    """Postgres cancels it when somebody has waited for its lock for a second."""
    with running_cluster(place / "cluster") as cluster:
        cluster.execute("alter system set autovacuum_naptime = '1s'")
        cluster.execute("select pg_reload_conf()")
        dsn = cluster.new_database("restante")
        await migrate.apply(dsn, migrate.shipped(), phases=BOTH_PHASES)
        db = await Database.open(
            dsn, pool_size=4, acquire_timeout_seconds=5, statement_timeout_seconds=20
        )
        connection = await asyncpg.connect(dsn, server_settings={"search_path": SCHEMA})
        partition, _ = await make(db, connection, "dropped")
        await connection.execute(AUTOVACUUM.format(partition))
        await connection.execute(f"update {partition} set n = n + 1000")
        await until(lambda: _is_vacuumed(connection, partition), seconds=60)

        report = await sweep_of(db).run(now=now())

        assert report.postponed == []
        assert partition not in await partition_names(connection, OPS)
        await connection.close()
        await db.close()
