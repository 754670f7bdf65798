"""Nodes that pull each other's logs come to the same records."""

from pathlib import Path

import pytest
from oplog.meshes import converge, join, mesh, reads
from waiting import until

pytestmark = pytest.mark.anyio


async def test_two_nodes_that_read_each_other_have_the_same_records(cluster: str, tmp_path: Path):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await join(a, b)

        await a.sql.execute("insert into notes values ('a', 'from a', 1.10)")
        await b.sql.execute("insert into notes values ('b', 'from b', 2)")
        await until(lambda: converge(a, b))

        await b.sql.execute("update notes set body = 'changed at b' where id = 'a'")
        await a.sql.execute("delete from notes where id = 'b'")
        await until(
            lambda: a.sql.fetchval("select body = 'changed at b' from notes where id = 'a'")
        )
        rows = await converge(a, b)

        assert [row[:2] for row in rows] == [("a", "changed at b")]


async def test_what_a_node_has_read_from_one_it_passes_on_to_the_next(cluster: str, tmp_path: Path):
    """A chain: the ends know only the middle."""
    async with mesh(cluster, tmp_path, 3) as (a, b, c):
        await reads(b, a)
        await reads(c, b)

        await a.sql.execute(
            "insert into notes select n::text, 'x' from generate_series(1, 50) as n"
        )

        await until(lambda: c.sql.fetchval("select count(*) = 50 from notes"))
        assert await c.rows() == await a.rows()
