"""
Nodes whose logs are trimmed and reset while they are written to, harmed and compared.

Limits drop ops by age, by size and of dormant tables, whole partitions, parts of one and all that
is in use; peers are evicted and come back.  In the end the tables are equal, and no change is gone
without a newer one or a report.
"""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import soak
from oplog import operators, witness
from oplog.accounts import until_accounted, until_equal
from oplog.faults import KINDS, Faults
from oplog.old_peer import OldPeer
from oplog.operators import Operators
from oplog.oracle import Nodes, made
from oplog.served_nodes import Node
from oplog.writers import Writer

pytestmark = [pytest.mark.anyio, pytest.mark.soak, soak.only_long, pytest.mark.timeout(0)]

SECONDS = soak.seconds(8, long=8)
CALM_SECONDS = 8
# The first is busy, the second is written to now and then, so that it becomes dormant.
TABLES = ("notes", "labels")
# Ten minutes apart; or so far ahead that its ops are parked for some seconds.
OFFSETS = ((-315, 0, 285), (-5, 0, 303))
# A record of this size makes parts of the log that are worth being cut within seconds.
PADDING_BYTES = 1200


async def test_nodes_become_equal_while_their_logs_are_trimmed_and_reset(place: Path):
    """Whatever is dropped, and whoever is evicted by that."""
    for run in soak.runs(1):
        with (
            run as chance,
            made(
                place / str(run.seed), chance, is_shared=chance.random() < 0.75, tables=TABLES
            ) as nodes,
            OldPeer() as old,
        ):
            topology = chance.choice(["mesh", "chain", "ring"])
            three = await prepared(nodes, topology)
            if has_old := chance.random() < 0.3:
                three[0].admin({"url": old.address})
            exchanging = asyncio.create_task(
                old.exchange(three[0].url, random.Random(chance.random()))
            )
            chores = Operators(nodes, random.Random(chance.random()))

            faults = await harmed(nodes, chores)

            old.is_reading = False
            await exchanging
            await until_accounted(three, old.ops.values() if has_old else ())
            await until_explained(three)
            resetting = asyncio.create_task(chores.reset_for_sure(chance.choice(three)))
            # What a clock far ahead makes is parked, and then nothing can be reset.
            others = [node for node in three if node.clock_offset < 300]
            await written(others, chance, until=[resetting], is_busy=False)
            await until_accounted(three)
            chores.counts["reported losses"] += await until_explained(three)
            await show(run.seed, topology, faults, chores, three)


async def prepared(nodes: Nodes, topology: str) -> list[Node]:
    """Three nodes that know each other, with partitions that soon are over."""
    chance = nodes.chance
    three = await nodes.start(*chance.choice(OFFSETS))
    for node in three:
        await witness.watch(node)
        await operators.narrow_partitions(node, "notes", chance)
    nodes.connect(three, topology)
    if chance.random() < 0.5:
        await may_be_away(chance.choice(three), seconds=3)
    return three


async def may_be_away(node: Node, *, seconds: float) -> None:
    """Its peers are evicted by the next pass when they have not been seen for so long."""
    connection = await node.connect()
    await connection.execute(
        "update restante.op_peers set evict_after_days = $1::float8 / 86400", seconds
    )
    await connection.close()


async def harmed(nodes: Nodes, chores: Operators) -> list[str]:
    """Everything at once; after a while nobody does harm any more."""
    kinds = nodes.chance.sample(KINDS, 4)
    faults = Faults(nodes, nodes.every, kinds, longest_rest_seconds=2)

    async def cause() -> None:
        await faults.cause(SECONDS)
        nodes.calm()
        for node in nodes.every:
            await asyncio.to_thread(node.until_ready)
        await asyncio.sleep(CALM_SECONDS)

    causing = asyncio.create_task(cause())
    working = asyncio.create_task(chores.work(causing))
    await written(nodes.every, nodes.chance, until=[causing, working])
    return faults.done


async def written(
    nodes: Sequence[Node],
    chance: random.Random,
    *,
    until: Sequence["asyncio.Task[Any]"],
    is_busy: bool = True,
) -> None:
    """Applications write with short breaks, until these tasks have ended."""

    def own() -> random.Random:
        return random.Random(chance.random())

    writers = [Writer(node, own(), table="labels", longest_pause_seconds=4) for node in nodes]
    if is_busy:
        for node in nodes:
            writers += [Writer(node, own(), padding_bytes=PADDING_BYTES) for _ in range(2)]
    may_write, breaks = asyncio.Event(), own()
    may_write.set()
    async with asyncio.TaskGroup() as group:
        for writer in writers:
            group.create_task(writer.run(may_write))
        while not all(task.done() for task in until):
            await asyncio.sleep(breaks.uniform(0.5, 2))
            may_write.clear()
            await asyncio.sleep(breaks.uniform(0.1, 1.5))
            may_write.set()
        for writer in writers:
            writer.is_writing = False
    await asyncio.gather(*until)


async def until_explained(nodes: Sequence[Node]) -> int:
    """Wait until nothing is gone without a reason; how many records had one."""
    verdict = await witness.judged(nodes)
    for _ in range(20):
        if not verdict.sentences:
            return verdict.reported
        await asyncio.sleep(0.2)
        await until_equal(nodes)
        verdict = await witness.judged(nodes)
    pytest.fail("\n".join(verdict.sentences[:10]))


async def show(
    seed: int, topology: str, faults: Sequence[str], chores: Operators, nodes: Sequence[Node]
) -> None:
    """What has happened in a run; one in which nothing was dropped shows nothing."""
    found = [await witness.testimony(node) for node in nodes]
    dropped, counted = sum(its.dropped_ops for its in found), await operators.counted(nodes)
    print(
        f"seed {seed}, {topology}, {', '.join(faults)}\n{dict(chores.counts)}\n"
        f"{dropped} of {sum(its.ops for its in found)} ops dropped, {dict(counted)}",
        flush=True,
    )
    assert dropped > 0
    assert counted["evictions"] > 0
    assert chores.counts["reset"] > 0
