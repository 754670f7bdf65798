"""
What operators and their limits do to the logs of nodes, while everything else goes on: logs are
trimmed and reset, nodes are compared, parked ops are tried again, and peers are evicted.

Each of these may be interrupted by a crash; the next one then finds what it has left.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from oplog.oracle import Nodes
from oplog.served_nodes import GONE, Node

from restante.database import partitions
from restante.database.pool import Database
from restante.database.spans import Span
from restante.errors import RestanteError
from restante.oplog import peers
from restante.oplog.applying import parked
from restante.oplog.peers import Peer
from restante.oplog.remote import Remote
from restante.oplog.resetting.act import Reset
from restante.oplog.resetting.plan import Planner, Wanted
from restante.oplog.tables import OPS
from restante.oplog.trimming.limits import Limits, Policy
from restante.oplog.trimming.log_subject import OpLog
from restante.oplog.verifying import comparison
from restante.oplog.verifying.comparison import Here, Progress
from restante.oplog.verifying.verify import There, verify
from restante.retention.subjects import Subjects
from restante.retention.sweep import Sweep
from restante.wire.oplog_digests import VerifyReport

SECOND = timedelta(seconds=1)
RETENTION = Limits(Policy(retention=SECOND), timedelta(0))
DORMANT = Limits(margin=timedelta(0), dormant_after=SECOND / 2)
CAP_AGE = Limits(Policy(cap_age=2 * SECOND), timedelta(0))
CAP_BYTES = Limits(Policy(cap_bytes=400_000), timedelta(0))
NOTHING_FITS = Limits(Policy(cap_bytes=1), timedelta(0))
# Those that ask the peers come more often: after an eviction they find less.
LIMITS = (RETENTION, RETENTION, RETENTION, DORMANT, DORMANT, CAP_AGE, CAP_BYTES)

# Of partitions, one after the other: soon over, or long enough to be cut.
WIDTHS = (1, 1, 2, 2, 12)
NARROW_SECONDS = 120

# Somebody may have read everything just before it is evicted.
_TRIES = 10

_INTERRUPTED = (*GONE, RestanteError, TimeoutError)


async def narrow_partitions(node: Node, table: str, chance: random.Random) -> None:
    """Instead of those of days: many that soon are over, and some that are worth being cut."""
    async with node.database() as db, db.transaction() as tx:
        number = await tx.fetchval("select id from op_tables where name = $1", table)
        parent, start = f"ops_{number}", datetime.now(UTC).replace(microsecond=0) - 2 * SECOND
        end = start + NARROW_SECONDS * SECOND
        for one in await partitions.partitions_of(tx, [OPS]):
            if one.parent == parent:
                await tx.execute(f"drop table restante.{one.name}")
        while start < end:
            span = Span(start, start + chance.choice(WIDTHS) * SECOND)
            await partitions.create(tx, OPS, span, parent=parent)
            start = span.end
        span = Span(start, start + timedelta(days=60))
        await partitions.create(tx, OPS, span, parent=parent)


class Operators:
    """Does one thing after the other, to one node after the other."""

    def __init__(self, nodes: Nodes, chance: random.Random) -> None:
        self.counts = Counter[str]()
        self._nodes = nodes
        self._chance = chance

    async def work(self, until: "asyncio.Task[Any]") -> None:
        """Everything once, in any order, and more until a task has ended."""
        kinds: list[Callable[[Node], Awaitable[None]]] = [
            *[self.trim] * 6,
            *[self.reset] * 3,
            self.compare,
            self.retry,
            self.evict,
        ]
        left = self._chance.sample(kinds, len(kinds))
        while left and not until.done():
            kind = left.pop()
            if not await self._tried(kind):
                left.insert(0, kind)
        while not until.done():
            await self._tried(self._chance.choice(kinds))
        for _ in range(_TRIES):
            if (await counted(self._nodes.every))["evictions"]:
                return
            await self._tried(self.evict)

    async def _tried(self, kind: Callable[[Node], Awaitable[None]]) -> bool:
        """Whether it was not interrupted."""
        try:
            await kind(self._chance.choice(self._nodes.every))
        except _INTERRUPTED as error:
            self.counts[f"{kind.__name__} interrupted by {type(error).__name__}"] += 1
            return False
        finally:
            await asyncio.sleep(self._chance.uniform(0, 0.3))
        return True

    async def trim(self, node: Node, limits: Limits | None = None) -> None:
        """Drop what some limit says."""
        node.has_dropped = True
        async with node.database() as db:
            chosen = limits or self._chance.choice(LIMITS)
            sweep = Sweep(db, Subjects(OpLog(chosen)), budget_seconds=10)
            report = await sweep.run(now=await sweep.now())
            async with db.connection() as connection:
                found = await partitions.partitions_of(connection, [OPS])
        left = {one.name for one in found}
        for step in report.done:
            emptied = "emptied" if step.partition in left else "dropped"
            self.counts[f"{step.action} ({emptied})"] += 1

    async def reset(self, node: Node) -> None:
        """Empty the log of one table or of all, unless something is in the way."""
        tables = self._chance.choice([(), *[(name,) for name in node.tables]])
        wanted = Wanted(tables, evicts=self._chance.random() < 0.5, wait_seconds=3)
        refusals = await self._reset(node, wanted)
        self.counts["refused reset"] += bool(refusals)

    async def reset_for_sure(self, node: Node) -> None:
        """As an operator does who waits until nothing is in the way, and discards what is."""
        refusals: Sequence[str] = ["not tried"]
        for _ in range(4):
            async with node.database() as db, db.connection() as connection:
                waiting = await parked.listed(connection, reason="below_floor")
                await parked.discard(connection, [one.id for one in waiting])
            refusals = await self._reset(node, Wanted(evicts=True, wait_seconds=20))
            if not refusals:
                return
        pytest.fail("\n".join(refusals))

    async def _reset(self, node: Node, wanted: Wanted) -> Sequence[str]:
        node.has_dropped = True
        async with self._peer_of(node) as (db, remote, peer):
            plan = await Planner(db, remote, peer, wanted, _clock).plan()
            if not plan.refusals:
                report = await Reset(db, plan, _clock).run()
                self.counts["reset" if report.partitions else "reset of nothing"] += 1
            return plan.refusals

    async def compare(self, node: Node) -> None:
        async with self._peer_of(node) as (db, remote, peer):
            report = await compared(db, remote, peer, wait_seconds=1)
        for table in report.tables:
            self.counts[f"compared: {table.outcome}"] += 1

    async def retry(self, node: Node) -> None:
        async with node.database() as db:
            retried = await parked.retry(db, None, now=_clock())
        self.counts["retried ops"] += retried.applied + retried.superseded

    async def evict(self, node: Node) -> None:
        """Cut a node off, and drop on another one what it has not read."""
        reader, server = self._chance.choice(list(self._nodes.proxies))
        serving = next(one for one in self._nodes.every if one.name == server)
        proxy = self._nodes.proxies[reader, server]
        await asyncio.to_thread(proxy.cut)
        try:
            await asyncio.sleep(self._chance.uniform(0.3, 1.5))
            await self.trim(serving, NOTHING_FITS)
        finally:
            await asyncio.to_thread(proxy.restore)

    @asynccontextmanager
    async def _peer_of(self, node: Node) -> AsyncIterator[tuple[Database, Remote, Peer]]:
        links = [link for link in self._nodes.proxies if link[0] == node.name]
        address = self._nodes.proxies[self._chance.choice(links)].address
        async with asking(node, address) as found:
            yield found


@asynccontextmanager
async def asking(node: Node, address: str) -> AsyncIterator[tuple[Database, Remote, Peer]]:
    """What a command of a node needs that asks one of its peers."""
    async with node.database() as db, Remote.opened(own_host=node.url, clock=_clock) as remote:
        async with db.connection() as connection:
            peer = await peers.find(connection, address)
        assert peer is not None
        yield db, remote, peer


async def compared(
    db: Database, remote: Remote, peer: Peer, *, wait_seconds: float
) -> VerifyReport:
    """The comparison of a node with one of its peers."""
    return await verify(
        Here(db, peer.id, peer.tables),
        There(remote, peer),
        peer.host,
        limits=comparison.Limits(wait_seconds=wait_seconds),
        progress=Progress(),
    )


async def counted(nodes: Sequence[Node]) -> Counter[str]:
    """What the nodes have counted of their peers."""
    total = Counter[str]()
    for node in nodes:
        connection = await node.connect()
        for row in await connection.fetch("select * from restante.op_peers"):
            for name in ("evictions", "gaps", "parked", "conflicts"):
                total[name] += row[name]
        await connection.close()
    return total


def _clock() -> datetime:
    return datetime.now(UTC)
