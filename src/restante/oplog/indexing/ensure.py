"""
Gives every partition of the op log its indexes: what a run would do, and the run.

One run at a time, under an advisory lock of the session that also builds.  However a run ends, the
next one goes on from the catalogue: a build that was cut off leaves an INVALID index, which is
replaced.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from restante.database import locks, sql
from restante.database.pool import Connection, Database
from restante.errors import DiskLow
from restante.oplog.indexing import catalogue, plan
from restante.oplog.indexing.plan import Optional, Step, Wanted
from restante.oplog.indexing.run import FreeBytes, Report, Run, Watcher
from restante.text import shown_bytes

queries = sql.load("restante.oplog.indexing", "catalogue")

LOCK = "oplog-indexes"


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a run would do, and whether there is room for it."""

    steps: Sequence[Step]
    estimated_bytes: int
    needed_bytes: int
    free_bytes: int | None  # None: unknown
    shortage: str  # why it is refused, if it is


async def outlook(db: Database, wanted: Wanted, *, free_bytes: FreeBytes) -> Outlook:
    """What a run would do now.  Reads only."""
    async with db.connection() as connection:
        steps = plan.planned(await catalogue.read(connection), wanted)
    estimated, free = plan.bytes_for(steps), free_bytes()
    return Outlook(steps, estimated, plan.needed(estimated), free, _shortage(estimated, free))


def _shortage(estimated: int, free: int | None) -> str:
    needed = plan.needed(estimated)
    if not estimated or (free is not None and free >= needed):
        return ""
    takes = f"The indexes take about {shown_bytes(estimated)} while they are built"
    if free is None:
        return (
            f"{takes}. How much is free cannot be seen from here: the database is on another "
            "machine, or its role may not know where its files are. Make sure that "
            f"{shown_bytes(needed)} are free, and use --force."
        )
    return (
        f"{takes}. {shown_bytes(needed)} must be free for that, and {shown_bytes(free)} are. Free "
        "some space, or name only some of the tables. With --force it is tried all the same."
    )


async def ensure(  # noqa: PLR0913 - each argument is one fact, named by its caller
    db: Database,
    wanted: Wanted,
    *,
    free_bytes: FreeBytes,
    force: bool,
    stop: asyncio.Event,
    watcher: Watcher,
) -> Report:
    """
    Build and attach what is missing, until `stop` is set.

    Raises DiskLow, before anything is changed, if there is too little room and it is not forced.
    """
    async with _only_run(db) as sessions:
        if isinstance(sessions, Report):
            return sessions
        expected = await outlook(db, wanted, free_bytes=free_bytes)
        if expected.shortage and not force:
            raise DiskLow(expected.shortage)
        run = Run(*sessions, stop, watcher, None if force else free_bytes)
        return await run.ensure(wanted)


async def drop(
    db: Database,
    name: Optional,
    logs: tuple[str, ...] | None,
    *,
    stop: asyncio.Event,
    watcher: Watcher,
) -> Report:
    """Drop an optional index; the second time there is nothing to drop."""
    async with _only_run(db) as sessions:
        if isinstance(sessions, Report):
            return sessions
        return await Run(*sessions, stop, watcher, None).drop(name, logs)


@asynccontextmanager
async def _only_run(
    db: Database,
) -> AsyncIterator[tuple[Connection, Connection, int] | Report]:
    """The session that builds, the one that watches it, and its process; or who was faster."""
    async with (
        db.session() as session,
        db.connection() as observer,
        locks.held_if_free(session, LOCK) as is_held,
    ):
        if not is_held:
            holder = await observer.fetchrow(queries.lock_holder, LOCK)
            who = catalogue.named(holder) if holder else "another process"
            yield Report("busy", notes=[f"Another run is active: {who}. Nothing was done."])
            return
        await session.execute("set statement_timeout = 0")
        yield session, observer, await session.fetchval(queries.pid)
