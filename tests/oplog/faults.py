"""Harm that is done to nodes, one thing after the other."""

import asyncio
import random
from collections.abc import Sequence

from oplog.oracle import Nodes
from oplog.served_nodes import Node
from oplog.writers import KEYS

KINDS = ("cut", "storm", "push", "kill", "backend", "postmaster")


class Faults:
    """Does harm to some nodes, one thing after the other."""

    def __init__(
        self,
        nodes: Nodes,
        harmed: Sequence[Node],
        kinds: Sequence[str] = KINDS,
        *,
        longest_rest_seconds: float = 0,
    ) -> None:
        self.done: list[str] = []
        self._nodes = nodes
        self._harmed = harmed
        self._kinds = kinds
        self._longest_rest_seconds = longest_rest_seconds

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
        await asyncio.sleep(chance.uniform(0, self._longest_rest_seconds))
        match kind:
            case "cut":
                await self._nodes.cut_some(chance.uniform(0.1, 1.5))
            case "storm":
                await self._nodes.storm(chance.uniform(0.1, 1))
            case "push":
                await self._nodes.push_again()
            case "pause":
                await paused(node, chance)
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
