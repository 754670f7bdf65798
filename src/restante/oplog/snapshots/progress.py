"""
Which snapshots are wanted from a peer, and how far each of them is.

The progress of a page is part of the page's transaction.
"""

from collections.abc import Iterable
from datetime import datetime
from graphlib import CycleError, TopologicalSorter

from restante.database import sql
from restante.database.pool import Connection, Row, Tx
from restante.errors import SnapshotGone
from restante.oplog import positions
from restante.oplog.applying import records
from restante.oplog.peers import Peer
from restante.oplog.positions import Position
from restante.oplog.snapshots.taking_entries import Snapshot, Taking
from restante.oplog.snapshots.taking_page import Taken
from restante.oplog.tables import TrackedTable
from restante.wire import oplog as wire

queries = sql.load("restante.oplog.snapshots", "progress")


async def want(  # noqa: PLR0913 - what is wanted, and why
    connection: Connection,
    peer: Peer,
    wanted: Iterable[TrackedTable],
    *,
    is_for_gap: bool,
    is_repair: bool = False,
    is_new: bool = False,
    now: datetime,
) -> None:
    """
    Take snapshots of these tables before anything else is read from the peer.

    They are new if nothing of them was read from it before.
    """
    ids = [table.id for table in wanted]
    await connection.execute(queries.want, peer.id, ids, is_for_gap, now, is_repair, is_new)


async def pending_tables(connection: Connection, peer: Peer) -> set[int]:
    """The tables of which a snapshot is wanted from the peer, and not complete."""
    return {row["table_id"] for row in await connection.fetch(queries.pending, peer.id)}


async def pending(connection: Connection, peer: Peer) -> list[Snapshot]:
    """What is wanted from the peer; tables that others refer to come first."""
    rows = await connection.fetch(queries.pending, peer.id)
    if not rows:
        return []
    found = {row["table_id"]: _snapshot(row) for row in rows}
    graph: dict[int, set[int]] = {table_id: set() for table_id in found}
    for row in await connection.fetch(queries.references):
        if row["child"] in found and row["parent"] in found:
            graph[row["child"]].add(row["parent"])
    try:
        return [found[table_id] for table_id in TopologicalSorter(graph).static_order()]
    except CycleError:
        return list(found.values())


def _snapshot(row: Row) -> Snapshot:
    return Snapshot(
        row["peer_id"],
        row["table_id"],
        row["phase"],
        row["is_for_gap"],
        row["after"],
        row["start"],
        row["host"],
        frozenset(row["columns"]),
        row["floor"],
        row["floor_origin"],
        positions.parsed(row["server_cursor"] or ""),
        row["records"],
        row["begun"],
        row["is_repair"],
        row["has_unlogged"],
    )


async def begin(  # noqa: PLR0913 - what the server has said, checked
    connection: Connection,
    one: Snapshot,
    started: wire.SnapshotStart,
    *,
    host: str,
    cursor: Position | None,
    now: datetime,
) -> None:
    """The server has begun it; what it says was checked.  `cursor` is how far it has read us."""
    unlogged = positions.parsed(started.unlogged)
    await connection.execute(
        queries.began,
        one.peer_id,
        one.table_id,
        started.start,
        host,
        started.columns,
        str(cursor) if cursor else None,
        now,
        str(unlogged) if unlogged else "",
    )


async def restart(connection: Connection, one: Snapshot, *, now: datetime) -> None:
    """It begins again from nothing."""
    await connection.execute(queries.restart, one.peer_id, one.table_id, now)


async def forget(connection: Connection, one: Snapshot) -> None:
    """It is not wanted any more."""
    await connection.execute(queries.forget, one.peer_id, one.table_id)


async def settle(connection: Connection, peer: Peer, *, now: datetime) -> str | None:
    """Forget what is complete; returns from where the log is read on."""
    return await connection.fetchval(queries.settle, peer.id, now)


async def count(tx: Tx, one: Snapshot, taken: Taken) -> None:
    """Add what became of a page to what is known of the peer."""
    if taken != Taken():
        await tx.execute(
            queries.count,
            one.peer_id,
            taken.applied,
            taken.parked,
            taken.refused,
            taken.conflicts,
        )


async def note(
    tx: Tx, taking: Taking, one: Snapshot, entries: int, following: tuple[str, str]
) -> None:
    """What follows the page; raises SnapshotGone if it was aborted here, or begun by another."""
    phase, after = following
    told = taking.progress
    if phase == "done":
        await _adopt_floor(tx, told)
    moved = await tx.fetchval(
        queries.progressed,
        one.peer_id,
        one.table_id,
        one.start,
        one.phase,
        one.after,
        phase,
        after,
        entries,
        taking.now,
        told.floor,
        told.floor_origin,
    )
    if not moved:
        raise SnapshotGone(f"The snapshot of {taking.table.name} was begun again here.")


async def _adopt_floor(tx: Tx, one: Snapshot) -> None:
    """What the server has dropped is unknown here too, and our clock is above it."""
    await tx.execute(queries.adopt_floor, one.table_id, one.floor, one.floor_origin)
    await records.raise_clock(tx, one.floor)
