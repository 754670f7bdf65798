"""Nodes that read each other in a ring, and a chain that loses its relay."""

from itertools import pairwise
from pathlib import Path

import pytest
from oplog.meshes import Member, converge, join, mesh
from waiting import until

from restante.oplog import peers

pytestmark = pytest.mark.anyio

WRITE = "insert into notes select $1 || n, $1 from generate_series(1, 20) as n"


async def forget(node: Member, other: Member) -> None:
    async with node.db.connection() as connection:
        await peers.remove(connection, other.url)


async def all_counted(nodes: list[Member]) -> bool:
    """Whether every node has decided about each record in the log of every peer, once."""
    for node in nodes:
        for other in nodes:
            if peer := await node.peer(other):
                counted = peer["applied"] + peer["superseded"] + peer["parked"] + peer["refused"]
                if counted != await other.sql.fetchval("select count(*) from restante.ops"):
                    return False
    return True


async def test_in_a_ring_each_change_goes_round_both_ways_and_is_applied_once(
    cluster: str, tmp_path: Path
):
    async with mesh(cluster, tmp_path, 4) as nodes:
        for one, other in [*pairwise(nodes), (nodes[-1], nodes[0])]:
            await join(one, other)

        for number, node in enumerate(nodes):
            await node.sql.execute(WRITE, f"n{number}-")
        await nodes[0].sql.execute("update notes set body = 'changed' where id = 'n0-1'")
        await nodes[2].sql.execute("delete from notes where id = 'n2-1'")

        rows = await converge(*nodes)
        await until(lambda: all_counted(nodes))
        assert len(rows) == 79
        assert ("n0-1", "changed", None) in rows
        twice = "select key, ulid from restante.ops group by key, ulid having count(*) > 1"
        assert [await one.sql.fetch(twice) for one in nodes] == [[]] * 4


async def test_a_chain_loses_its_relay_and_nothing_else(cluster: str, tmp_path: Path):
    """The ends then read each other, and neither knows how far it had read by way of the relay."""
    async with mesh(cluster, tmp_path, 3) as (a, relay, c):
        await join(a, relay)
        await join(relay, c)
        await a.sql.execute(WRITE, "a")
        await c.sql.execute(WRITE, "c")
        await converge(a, relay, c)

        await a.sql.execute("delete from notes where id = 'c1'")
        for end in (a, c):
            await forget(end, relay)
            await forget(relay, end)
        await relay.stop()
        await c.sql.execute("update notes set body = 'later' where id in ('c1', 'c2')")
        await join(a, c)

        rows = await converge(a, c)
        assert {row[0] for row in rows} >= {"c1", "c2"}
        assert [row[1] for row in rows if row[0] in {"c1", "c2"}] == ["later", "later"]
        assert len(rows) == 40
