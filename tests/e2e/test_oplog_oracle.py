"""
Nodes of the op log as real processes: after any faults their tables are equal, and every op is
accounted for.

In `make test` the nodes have databases on one Postgres, which starts in a second; in `make soak`
each server runs its own.
"""

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import soak
from oplog.accounts import until_accounted, until_counted
from oplog.clusters import running_cluster
from oplog.old_peer import OldPeer
from oplog.oracle import Nodes
from oplog.served_nodes import Node, Op
from oplog.writers import KEYS, Writer
from processes import restante

from restante.oplog.trimming.limits import Limits, Policy
from restante.oplog.trimming.log_subject import OpLog
from restante.retention.subjects import Subjects
from restante.retention.sweep import Sweep

pytestmark = [pytest.mark.anyio, pytest.mark.soak, pytest.mark.timeout(300)]

# Ten minutes apart, and none so far ahead that its ops are parked.
OFFSETS = (-315, 0, 285)
SECONDS = soak.seconds(5, long=15)
KINDS = ("cut", "storm", "push", "kill", "backend", "postmaster")


@contextmanager
def made(place: Path, chance: random.Random) -> Iterator[Nodes]:
    """Nodes with databases on one Postgres; in `make soak` each has its own."""
    place.mkdir(mode=0o711, exist_ok=True)
    if soak.is_long():
        with Nodes(place, chance) as nodes:
            yield nodes
    else:
        with (
            running_cluster(place / "shared") as cluster,
            Nodes(place, chance, cluster=cluster) as nodes,
        ):
            yield nodes


@pytest.fixture
def nodes(place: Path) -> Iterator[Nodes]:
    with made(place, random.Random(0)) as nodes:
        yield nodes


async def writing(
    nodes: Sequence[Node],
    chance: random.Random,
    seconds: float,
    *,
    until: "asyncio.Task[Any] | None" = None,
) -> None:
    """Let applications write to all nodes for a while, and until a task has ended."""
    writers = [Writer(node, random.Random(chance.random())) for node in nodes for _ in range(2)]
    async with asyncio.TaskGroup() as group:
        for writer in writers:
            group.create_task(writer.run())
        await asyncio.sleep(seconds)
        if until:
            await until
        for writer in writers:
            writer.is_writing = False


class Faults:
    """Does harm to some nodes, one thing after the other."""

    def __init__(self, nodes: Nodes, harmed: Sequence[Node], more: Sequence[str] = ()) -> None:
        self.done: list[str] = []
        self._nodes = nodes
        self._harmed = harmed
        self._kinds = [*KINDS, *more]

    async def cause(self, seconds: float) -> None:
        """Everything once, in any order, and more until the time is over."""
        chance = self._nodes.chance
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + seconds
        for kind in chance.sample(self._kinds, len(self._kinds)):
            await self._one(kind, chance.choice(self._harmed))
        while loop.time() < ends_at:
            await self._one(chance.choice(self._kinds), chance.choice(self._harmed))

    async def _one(self, kind: str, node: Node) -> None:
        chance = self._nodes.chance
        self.done.append(f"{kind} {node.name}")
        match kind:
            case "cut":
                await self._nodes.cut_some(chance.uniform(0.1, 1.5))
            case "storm":
                await self._nodes.storm(chance.uniform(0.1, 1))
            case "push":
                await self._nodes.push_again()
            case "pause":
                await paused(node, chance)
            case "trim":
                self.done[-1] += f" {', '.join(await trimmed(node, chance))}"
            case _:
                await self._kill(node, kind)

    async def _kill(self, node: Node, kind: str) -> None:
        match kind:
            case "kill":
                await asyncio.to_thread(node.kill)
            case "backend":
                await asyncio.to_thread(node.kill_backend, self._nodes.chance)
            case _:
                await asyncio.to_thread(node.kill_postmaster)
        await asyncio.to_thread(node.until_ready)


async def paused(node: Node, chance: random.Random) -> None:
    """A bulk load that is not logged; peers take a snapshot afterwards."""
    await node.pause()
    connection = await node.connect()
    await connection.execute(
        "insert into notes select 'k' || lpad(i::text, 2, '0'), 'bulk ' || $1, i "
        "from generate_series($2::int, $2 + 9) as i on conflict (id) do nothing",
        node.name,
        chance.randrange(30),
    )
    await connection.execute("delete from notes where id = $1", chance.choice(KEYS))
    await connection.close()
    await node.resume()


# Some ops go when all have read them; some go whatever anybody has read.
LIMITS = (
    Limits(Policy(retention=timedelta(seconds=1)), timedelta(0)),
    Limits(Policy(cap_age=timedelta(seconds=1)), timedelta(0)),
    Limits(Policy(cap_bytes=1), timedelta(0)),
    Limits(margin=timedelta(0), dormant_after=timedelta(seconds=0.2)),
)


async def trimmed(node: Node, chance: random.Random) -> list[str]:
    """Drop what some limit says; returns the steps that were done."""
    node.has_dropped = True
    async with node.database() as db:
        sweep = Sweep(db, Subjects(OpLog(chance.choice(LIMITS))), budget_seconds=10)
        report = await sweep.run(now=await sweep.now())
    return [step.why for step in report.done]


async def harmed(
    nodes: Nodes, some: list[Node], seconds: float, more: Sequence[str] = ()
) -> list[str]:
    """Applications write to all nodes while these are harmed; then everything works again."""
    faults = Faults(nodes, some, more)
    causing = asyncio.create_task(faults.cause(seconds))
    await writing(nodes.every, nodes.chance, seconds, until=causing)
    nodes.calm()
    for node in nodes.every:
        await asyncio.to_thread(node.until_ready)
    return faults.done


@pytest.mark.timeout(0 if soak.is_long() else 300)
async def test_nodes_become_equal_whatever_happens_to_them(place: Path):
    """
    Kills, cut links, lost answers, repeated pushes, clocks ten minutes apart, snapshots.

    Before that, each record of a peer's log is counted exactly once.  A fourth node speaks only the
    older protocol, and reads from the first one.
    """
    for run in soak.runs(1):
        with run as chance, made(place / str(run.seed), chance) as nodes, OldPeer() as old:
            topology = chance.choice(["mesh", "chain", "ring"])
            three = await nodes.start(*OFFSETS)
            connect(nodes, three, topology)
            await writing(three, chance, 1)
            await until_counted(nodes)
            three[0].admin({"url": old.address})
            may_pause = chance.random() < 0.5

            exchanging = asyncio.create_task(
                exchange(old, three[0], random.Random(chance.random()))
            )
            done = await harmed(nodes, three, SECONDS, ["pause"] if may_pause else [])

            print(topology, ", ".join(done), flush=True)
            old.is_reading = False
            await exchanging
            await until_accounted(three, old.ops.values())
            await until_read(old, three[0], has_gaps=may_pause)


async def exchange(old: OldPeer, node: Node, chance: random.Random) -> None:
    """The old node reads, and writes records that are its own, until it is told to stop."""
    for number in itertools.takewhile(lambda _: old.is_reading, itertools.count()):
        old.write({"id": f"old{number % 7}", "body": f"old-{number}", "size": number})
        if chance.random() < 0.2:
            old.write({"id": f"old{chance.randrange(7)}"}, action="delete")
        await asyncio.to_thread(old.pull, node.url)
        await asyncio.sleep(chance.uniform(0, 0.3))


async def until_read(old: OldPeer, node: Node, *, has_gaps: bool) -> None:
    """The old node gets every change that is in the log, unless it was told of a gap."""
    missed = await unread(old, node)
    for _ in range(50):
        if not missed or (has_gaps and old.gaps):
            return
        await asyncio.to_thread(old.pull, node.url)
        await asyncio.sleep(0.2)
        missed = await unread(old, node)
    pytest.fail(f"after {old.cursors} it has not read {missed}; {old.failures[-3:]}")


async def unread(old: OldPeer, node: Node) -> list[Op]:
    """Not by its ULID: a record of an op whose other records lost has one of its own."""
    read = {(op["action"] == "delete", str(data)) for op in old.ops.values() for data in op["data"]}
    return [op for op in (await node.state()).ops if (op.is_delete, str(op.data)) not in read]


@soak.only_long
@pytest.mark.timeout(0)
async def test_nodes_become_equal_while_their_logs_are_trimmed_and_reset(place: Path):
    """
    The same with retention, caps and dormant cleanup, any of which may evict a node.

    In the end one log is reset, and the nodes go on.
    """
    for run in soak.runs(1):
        with run as chance, made(place / str(run.seed), chance) as nodes, OldPeer() as old:
            topology = chance.choice(["mesh", "chain", "ring"])
            three = await nodes.start(*OFFSETS)
            connect(nodes, three, topology)
            three[0].admin({"url": old.address})
            exchanging = asyncio.create_task(
                exchange(old, three[0], random.Random(chance.random()))
            )
            done = await harmed(nodes, three, SECONDS, ["trim"] * 4)

            print(topology, ", ".join(done), flush=True)
            old.is_reading = False
            await exchanging
            await until_accounted(three, old.ops.values())
            await reset(nodes, three[1], three[0])
            await writing(three, chance, 1)
            await until_accounted(three)


async def reset(nodes: Nodes, node: Node, reference: Node) -> None:
    """Empty the log of a node that has the same records as another one."""
    address = nodes.proxies[node.name, reference.name].address
    words = ("oplog", "reset", "--from", address, "--evict", "--yes", "--database-url", node.dsn)
    outcome = await asyncio.to_thread(restante, *words, seconds=120, RESTANTE_SELF_URL=node.url)
    assert outcome.code == 0, outcome
    connection = await node.connect()
    assert await connection.fetchval("select count(*) from restante.ops") == 0
    await connection.close()


@soak.only_long
async def test_a_chain_loses_its_relay_and_gets_another_node(nodes: Nodes):
    """A joins C directly, which knows nothing of how far it had read; D joins while both write."""
    first, relay, last = await nodes.start(*OFFSETS)
    connect(nodes, [first, relay, last], "chain")
    await writing([first, relay, last], nodes.chance, 1.5)
    await until_accounted([first, relay, last])

    nodes.unlink(first, relay)
    nodes.unlink(relay, last)
    nodes.link(first, last)
    (new,) = await nodes.start(0)
    joining = asyncio.create_task(asyncio.to_thread(nodes.link, new, first))
    await writing([first, last], nodes.chance, 1.5, until=joining)

    await until_accounted([first, last, new])


@soak.only_long
async def test_a_ring_of_four_becomes_equal(nodes: Nodes):
    """Each op goes round both ways, and comes back to where it was made."""
    four = await nodes.start(*OFFSETS, 0)
    connect(nodes, four, "ring")

    await writing(four, nodes.chance, 1.5)

    await until_accounted(four)


def connect(nodes: Nodes, some: Sequence[Node], topology: str) -> None:
    if topology == "mesh":
        nodes.mesh(some)
        return
    for one, other in itertools.pairwise(some):
        nodes.link(one, other)
    if topology == "ring":
        nodes.link(some[-1], some[0])
