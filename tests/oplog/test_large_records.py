"""A record of 10 MB travels like any other: captured, by the log, and by a snapshot."""

from pathlib import Path

import pytest
from oplog.meshes import join, mesh
from waiting import until

pytestmark = pytest.mark.anyio

LENGTH = 10 * 1024 * 1024
IS_THERE = f"select count(*) = 1 from notes where length(body) = {LENGTH}"


async def test_a_record_of_ten_megabytes_reaches_a_reader_and_a_node_that_joins(
    cluster: str, tmp_path: Path
):
    """The second node also passes it on."""
    async with mesh(cluster, tmp_path, 3) as (a, b, c):
        await join(a, b)
        await a.sql.execute("insert into notes values ('large', rpad('\"', $1, 'text '))", LENGTH)
        await until(lambda: b.sql.fetchval(IS_THERE))
        await b.sql.execute("update restante.op_tables set taken_snapshot = true")

        await join(b, c)

        await until(lambda: c.sql.fetchval(IS_THERE))
        assert await c.rows() == await a.rows()
        peer = await c.peer(b)
        assert (peer["parked"], peer["refused"]) == (0, 0)
