"""What must hold for nodes in the end: equal tables, and every op is accounted for."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from oplog.oracle import Nodes
from oplog.served_nodes import GONE, Key, Node, Op, State, Version

from restante.oplog import ulids


async def are_equal(nodes: Iterable[Node]) -> bool:
    """Whether all tables are the same, and nobody is taking a snapshot."""
    try:
        every = [await node.rows() for node in nodes]
        is_same = all(rows == every[0] for rows in every)
        return is_same and not any([await _is_taking_snapshots(node) for node in nodes])
    except GONE:
        return False


async def _is_taking_snapshots(node: Node) -> bool:
    connection = await node.connect()
    try:
        return await connection.fetchval("select exists (select from restante.op_snapshots)")
    finally:
        await connection.close()


async def until_equal(nodes: Sequence[Node], seconds: float = 60) -> None:
    """Wait until all tables are equal; says how they differ if that does not happen."""
    try:
        async with asyncio.timeout(seconds):
            while not await are_equal(nodes):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(await _how_they_differ(nodes)) from None


async def _how_they_differ(nodes: Sequence[Node]) -> str:
    lines: list[str] = []
    states = {node.name: await node.state() for node in nodes}
    keys = sorted({key for state in states.values() for key in state.rows})
    for key in keys:
        found = {name: state.rows.get(key) for name, state in states.items()}
        if any(record != found[nodes[0].name] for record in found.values()):
            newest = {name: state.newest.get(key) for name, state in states.items()}
            lines.append(f"{key}: {found}\n    {newest}")
    for node in nodes:
        connection = await node.connect()
        peers = await connection.fetch(
            "select host, cursor, failure, gaps, applied, superseded, parked, refused "
            "from restante.op_peers"
        )
        snapshots = await connection.fetch("select * from restante.op_snapshots")
        await connection.close()
        lines += [f"{node.name} {dict(peer)}" for peer in peers]
        lines += [f"{node.name} takes {dict(one)}" for one in snapshots]
        lines.append(f"{node.name} said {node.server.said[-1500:]}")
    return "\n".join(lines)


async def until_accounted(
    nodes: Sequence[Node], foreign: Iterable[Any] = (), seconds: float = 60
) -> None:
    """
    Wait until all tables are equal and stay so, and every op is accounted for.

    `foreign` are ops of a node that is not one of ours, as it sends them to the first of these.
    """
    await until_equal(nodes, seconds)
    more = [op for sent in foreign for op in _as_logged(sent)]
    found = await unaccounted(nodes, more)
    for _ in range(100):
        if not found:
            break
        await asyncio.sleep(0.2)
        found = await unaccounted(nodes, more)
    assert not found, "\n".join(found[:10])
    await until_equal(nodes, seconds)


async def until_counted(nodes: Nodes, seconds: float = 60) -> None:
    """Wait until every record of every log was counted by each of its readers, and only once."""
    try:
        async with asyncio.timeout(seconds):
            while await nodes.counted() != await nodes.logged():  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.1)
    except TimeoutError:
        counts = f"counted {await nodes.counted()}\nlogged {await nodes.logged()}"
        raise AssertionError(f"{counts}\n{await _how_they_differ(nodes.every)}") from None


def _as_logged(sent: Any) -> list[Op]:
    ulid = ulids.parsed(sent["ulid"])
    version = Version(str(ulid), sent["host"])
    is_delete = sent["action"] == "delete"
    return [
        Op(Key(sent["table"], record["id"]), version, is_delete, False, record)
        for record in sent["data"]
    ]


async def unaccounted(nodes: Sequence[Node], foreign: Sequence[Op] = ()) -> list[str]:
    """Sentences about ops and committed values of which a node knows nothing."""
    states = {node.name: await node.state() for node in nodes}
    # What the first node drops at the end of a pause, nobody else hears of.
    floors = states[nodes[0].name].floors
    foreign = [op for op in foreign if op.version.ulid > floors[op.key.table]]
    found: list[str] = []
    logged = (op for state in states.values() for op in state.ops)
    every = {(op.key, op.version): op for op in (*foreign, *logged)}
    for name, state in states.items():
        newest, own = state.newest, {(op.key, op.version) for op in state.ops}
        found += [
            f"{name} does not account for {op}"
            for op in every.values()
            if not state.accounts_for(op, newest, own)
        ]
        found += _table_differs_from_log(name, state, newest)
    for node in nodes:
        if not node.has_dropped:
            kept = {op.data.get("body") for op in states[node.name].ops}
            found += [f"{node.name} lost {value}" for value in node.acked if value not in kept]
    return found


def _table_differs_from_log(name: str, state: State, newest: dict[Key, Op]) -> list[str]:
    """The newest op of a key is its record."""
    return [
        f"{name} has {state.rows.get(key)}, and the newest op is {op}"
        for key, op in newest.items()
        if state.rows.get(key) != (None if op.is_delete else op.data)
    ]
