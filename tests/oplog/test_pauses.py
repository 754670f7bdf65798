"""What peers are told after a pause, in which records changed without ops."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from oplog.direct import SERVER, TAKER, Direct, Node, clock, new_node, take, until_taken

from restante.oplog import ulids
from restante.oplog.tracking import capture

pytestmark = pytest.mark.anyio


@pytest.fixture
async def nodes(cluster: str) -> AsyncIterator[tuple[Node, Node]]:
    """A server and a taker that have read each other, both with an empty table."""
    async with (
        new_node(cluster, SERVER, TAKER) as server,
        new_node(cluster, TAKER, SERVER) as taker,
    ):
        for one in (server, taker):
            await one.sql.execute("update restante.op_peers set protocol = 'restante'")
            await one.sql.execute("insert into notes values ('first')")
        await server.has_read(await taker.head())
        await taker.has_read(await server.head())
        yield server, taker


async def pause(node: Node, statement: str) -> None:
    """Change something without ops."""
    await capture.pause(node.db, "notes", now=clock())
    await node.sql.execute(statement)
    await capture.resume(node.db, "notes", host=None, now=clock())


async def conflicts(node: Node) -> list[Any]:
    rows = await node.sql.fetch(
        "select key, kept ->> 'body', lost ->> 'body' from restante.op_conflicts order by id"
    )
    return [tuple(row) for row in rows]


async def test_what_waited_when_a_pause_ended_is_read_again(nodes: tuple[Node, Node]):
    """Its cursor says that it has read the record: others would take it for deleted."""
    server, taker = nodes
    await taker.sql.execute("insert into notes values ('waits', 'body')")
    await server.has_read(await taker.head())
    await server.sql.execute(
        "insert into restante.op_parked (peer_id, table_name, ulid, origin, action, key, data,"
        " data_hash, reason, sentence, parked_at, tried_at)"
        " select id, 'notes', $1, host, 'c', '[\"waits\"]', '{\"id\": \"waits\"}', 1, 'future', '',"
        " now(), now() from restante.op_peers",
        ulids.lowest_at(clock()),
    )
    await pause(server, "select")

    await take(server, taker)
    await until_taken(server, Direct(taker))

    assert [row[0] for row in await taker.rows()] == ["first", "waits"]
    assert await server.rows() == await taker.rows()


@pytest.mark.parametrize("has_read", [False, True])
async def test_a_record_that_returns_and_may_have_been_deleted_in_a_pause_is_reported(
    nodes: tuple[Node, Node], *, has_read: bool
):
    """Unless the taker has read the server after the pause, and then made the record."""
    server, taker = nodes
    await server.sql.execute("insert into notes values ('a', 'theirs')")
    if not has_read:
        await taker.sql.execute("insert into notes values ('a', 'ours')")
    await pause(server, "delete from notes where id = 'a'")
    if has_read:
        await taker.has_read((await server.table()).unlogged)
        await taker.sql.execute("insert into notes values ('a', 'ours')")
        await server.sql.execute("insert into notes values ('later')")
        await server.drop_log()

    await take(server, taker)

    assert ("a", "ours", None) in await taker.rows()
    assert await conflicts(taker) == ([] if has_read else [('["a"]', "ours", None)])
