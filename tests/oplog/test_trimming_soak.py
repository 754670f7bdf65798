"""Writers, late commits, readers and drops, all at once: no op is missing without a signal."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, cast

import asyncpg
import pytest
import soak
from oplog.nodes import make_peer
from oplog.trimmed import make_pages, sweep_of

from restante.database import partitions
from restante.database.pool import Database, Tx
from restante.database.spans import Span
from restante.oplog import ulids
from restante.oplog.peers import Reader
from restante.oplog.positions import START, Position
from restante.oplog.serving import log, serve
from restante.oplog.serving.log import Limits as PageLimits
from restante.oplog.serving.readers import OpenEnds
from restante.oplog.serving.serve import Ask, LogChanged
from restante.oplog.tables import OPS
from restante.oplog.trimming.limits import Limits, Policy

pytestmark = [pytest.mark.anyio, pytest.mark.soak]

SECOND = timedelta(seconds=1)
WIDTH = 3 * SECOND
LIMITS = Limits(Policy(retention=SECOND, cap_age=4 * SECOND), margin=timedelta(0))


@dataclass
class Run:
    """What was committed, and what each reader has got or was told to be gone."""

    db: Database
    chance: Random
    until: float
    committed: set[int] = field(default_factory=set[int])
    counts: Counter[str] = field(default_factory=Counter[str])

    @property
    def is_over(self) -> bool:
        return asyncio.get_running_loop().time() > self.until

    async def write(self, dsn: str, *, latest_seconds: float) -> None:
        """Transactions, some of which stay open for a while."""
        connection = await asyncpg.connect(dsn)
        while not self.is_over:
            try:
                async with connection.transaction():
                    key = self.chance.randrange(500)
                    await connection.execute(
                        "insert into public.pages values ($1, 'x') on conflict (id)"
                        " do update set text = pages.text || 'x'",
                        key,
                    )
                    xid = await connection.fetchval("select pg_current_xact_id()::text::bigint")
                    await asyncio.sleep(self.chance.random() * latest_seconds)
                self.committed.add(xid)
            except (asyncpg.CheckViolationError, asyncpg.DeadlockDetectedError):
                self.counts["refused writes"] += 1  # its partition was sealed meanwhile
            await asyncio.sleep(0)
        await connection.close()

    async def sweep(self) -> None:
        sweep = sweep_of(self.db, LIMITS)
        while not self.is_over:
            report = await sweep.run(now=await sweep.now())
            self.counts.update(step.action for step in report.done if step.partition)
            self.counts["postponed"] += len(report.postponed)
            await asyncio.sleep(0.1)


@dataclass
class Follower:
    """Reads the log as a peer does; after a gap it goes on from the end, as after a snapshot."""

    run: Run
    reader: Reader
    pause_seconds: float
    at: Position = START
    got: set[int] = field(default_factory=set[int])
    excused: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # xids

    async def follow(self) -> None:
        while not self.run.is_over:
            await self.read()
            await asyncio.sleep(self.pause_seconds)

    async def read(self) -> bool:
        """One page; whether there was nothing in it."""
        limits = PageLimits(ops=300)
        ask = Ask(position=str(self.at), is_ours=True, head=str(START), limits=limits)
        db, now = self.run.db, datetime.now(UTC)
        page = await serve.read(db, self.reader, ask, OpenEnds(), now=now)
        if page.gap_tables:
            await self._jump()
            return False
        found = {one.position.xid for one in page.records}
        try:
            async for records in serve.rest(db, page):
                found |= {one.position.xid for one in records if one.data is not None}
        except LogChanged:
            self.run.counts["pages cut off"] += 1
            return False
        await serve.note_served(db, self.reader, ask, page, OpenEnds())
        self.got |= found
        self.at = page.scanned.position
        return not found

    async def _jump(self) -> None:
        self.run.counts["gaps"] += 1
        async with self.run.db.connection() as connection:
            below = await log.horizon(connection)
        to = Position(below.era, below.xid, ulids.LOWEST, 0)
        if to > self.at:
            self.excused.append((self.at.xid, to.xid))
            self.at = to

    def missing(self, committed: set[int]) -> set[int]:
        return {
            xid
            for xid in committed - self.got
            if not any(start <= xid < end for start, end in self.excused)
        }


async def narrow_partitions(connection: Any, table_id: int, seconds: float) -> None:
    """Instead of those of a day: many that soon are over."""
    parent, now = f"ops_{table_id}", datetime.now(UTC).replace(microsecond=0)
    async with connection.transaction():
        for one in await partitions.partitions_of(connection, [OPS]):
            await connection.execute(f"drop table restante.{one.name}")
        for number in range(-1, int(seconds / WIDTH.total_seconds()) + 40):
            start = now + number * WIDTH
            span = Span(start, start + WIDTH)
            await partitions.create(cast("Tx", connection), OPS, span, parent=parent)


async def test_no_op_is_missing_without_a_signal(db: Database, dsn: str, connections: Any):
    """However fast it is read, and whatever is dropped meanwhile."""
    seconds = soak.seconds(6, long=180)
    with soak.one_run() as chance:
        connection = await connections()
        await narrow_partitions(connection, await make_pages(db), seconds)
        run = Run(db, chance, asyncio.get_running_loop().time() + seconds)
        peers = [await make_peer(db, f"https://{name}.example") for name in ("fast", "slow")]
        # They have written nothing, and all of it is read.
        await connection.execute("update op_peers set cursor = $1", str(START))
        fast, slow = (
            Follower(run, Reader(peer, True), pause)
            for peer, pause in zip(peers, (0.02, 5.0), strict=True)
        )

        async with asyncio.TaskGroup() as tasks:
            for latest in (0.0, 0.01, 0.5, 3.0):
                tasks.create_task(run.write(dsn, latest_seconds=latest))
            tasks.create_task(run.sweep())
            tasks.create_task(fast.follow())
            tasks.create_task(slow.follow())
        for one in (fast, slow):
            while not await one.read():
                pass

        print(f"{len(run.committed)} commits, {dict(run.counts)}", flush=True)
        assert fast.missing(run.committed) == slow.missing(run.committed) == set()
        assert len(fast.got) > 0
