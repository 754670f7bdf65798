"""
Nodes of the op log as real processes: after any faults their tables are equal, and every op is
accounted for.

In `make test` the nodes have databases on one Postgres, which starts in a second; in `make soak`
each server runs its own.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import soak
from oplog.accounts import until_accounted, until_counted
from oplog.faults import KINDS, Faults
from oplog.old_peer import OldPeer
from oplog.oracle import Nodes, made
from oplog.served_nodes import Node, Op
from oplog.writers import writing

pytestmark = [pytest.mark.anyio, pytest.mark.soak, pytest.mark.timeout(300)]

# Ten minutes apart, and none so far ahead that its ops are parked.
OFFSETS = (-315, 0, 285)
SECONDS = soak.seconds(5, long=15)


@pytest.fixture
def nodes(place: Path) -> Iterator[Nodes]:
    with made(place, random.Random(0), is_shared=not soak.is_long()) as nodes:
        yield nodes


async def harmed(nodes: Nodes, some: list[Node], seconds: float, kinds: Sequence[str]) -> list[str]:
    """Applications write to all nodes while these are harmed; then everything works again."""
    faults = Faults(nodes, some, kinds)
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
        with (
            run as chance,
            made(place / str(run.seed), chance, is_shared=not soak.is_long()) as nodes,
            OldPeer() as old,
        ):
            topology = chance.choice(["mesh", "chain", "ring"])
            three = await nodes.start(*OFFSETS)
            nodes.connect(three, topology)
            await writing(three, chance, 1)
            await until_counted(nodes)
            three[0].admin({"url": old.address})
            may_pause = chance.random() < 0.5

            exchanging = asyncio.create_task(
                old.exchange(three[0].url, random.Random(chance.random()))
            )
            kinds = [*KINDS, "pause"] if may_pause else KINDS
            done = await harmed(nodes, three, SECONDS, kinds)

            print(topology, ", ".join(done), flush=True)
            old.is_reading = False
            await exchanging
            await until_accounted(three, old.ops.values())
            await until_read(old, three[0], has_gaps=may_pause)


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
async def test_a_chain_loses_its_relay_and_gets_another_node(nodes: Nodes):
    """A joins C directly, which knows nothing of how far it had read; D joins while both write."""
    first, relay, last = await nodes.start(*OFFSETS)
    nodes.connect([first, relay, last], "chain")
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
    nodes.connect(four, "ring")

    await writing(four, nodes.chance, 1.5)

    await until_accounted(four)
