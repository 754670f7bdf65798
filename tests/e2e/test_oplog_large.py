"""One op with a million keys, read by a real server from a node of the older protocol."""

import asyncio
import random
from pathlib import Path

import pytest
import soak
from oplog.clusters import running_cluster
from oplog.old_peer import OldPeer
from oplog.oracle import Nodes
from oplog.served_nodes import Node
from processes import peak_kib

pytestmark = [pytest.mark.anyio, pytest.mark.soak, pytest.mark.timeout(900), soak.only_long]

KEYS = 1_000_000
# The body has 47 MB; its records are kept as they came, and turned into rows piece by piece.
MOST_MIB = 500


async def test_a_million_keys_in_one_op_take_a_bounded_amount_of_memory(place: Path):
    with (
        running_cluster(place / "shared") as cluster,
        Nodes(place, random.Random(0), cluster=cluster) as nodes,
        OldPeer() as old,
    ):
        (node,) = await nodes.start(0)
        before = peak_kib(node.server.pid)
        old.write(*({"id": f"key{n}", "body": "x", "size": n} for n in range(KEYS)))
        node.admin({"url": old.address})

        async with asyncio.timeout(600):
            while await records(node) < KEYS:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(1)

        grown = (peak_kib(node.server.pid) - before) // 1024
        print(f"{KEYS} keys in one op: {grown} MiB more", flush=True)
        assert grown < MOST_MIB


async def records(node: Node) -> int:
    connection = await node.connect()
    try:
        return await connection.fetchval("select applied from restante.op_peers")
    finally:
        await connection.close()
