"""Brings in what was refused of a peer before: tables, and ops of hosts that it may pass on."""

from collections.abc import Sequence
from datetime import datetime

from restante.database import sql
from restante.database.pool import Connection
from restante.oplog.cursors import Cursor
from restante.oplog.peers import Peer
from restante.oplog.pulling import notes
from restante.oplog.snapshots import progress
from restante.oplog.tables import TrackedTable

queries = sql.load("restante.oplog.pulling", "pull")


async def join(
    connection: Connection,
    peer: Peer,
    cursor: Cursor,
    here: Sequence[TrackedTable],
    *,
    now: datetime,
) -> bool:
    """
    Bring in tables that were not tracked here, or not allowed, when the peer was first read.

    Their earlier ops were refused.  One of our nodes gives a snapshot; any other is read again.
    So were ops of hosts that it might not speak for, and those may be of any table.
    """
    row = await connection.fetchrow(queries.joined_tables, peer.id)
    if row is None:
        return False
    joined: list[int] | None = row["joined_tables"]
    ids = sorted(table.id for table in here)
    relays = None if peer.relays is None else sorted(peer.relays)
    if joined == ids and row["joined_relays"] == relays:
        return False
    if joined is not None and _is_widened(row["joined_relays"], peer.relays):
        await _read_again(connection, peer, cursor, here, now=now)
        await connection.execute(queries.join_tables, peer.id, ids, relays)
        return True
    new = [table for table in here if table.id not in (joined or [])]
    await connection.execute(queries.join_tables, peer.id, ids, relays)
    if joined is None or not new:
        return False
    if cursor.position:
        await progress.want(connection, peer, new, is_for_gap=False, is_new=True, now=now)
    elif cursor.ulid:
        names = ", ".join(table.name for table in new)
        await notes.drop_cursor(
            connection, peer, f"Its log is read again because of new tables: {names}.", now=now
        )
    return True


async def _read_again(
    connection: Connection,
    peer: Peer,
    cursor: Cursor,
    here: Sequence[TrackedTable],
    *,
    now: datetime,
) -> None:
    """Read all of a peer again, because it may now pass on what was refused."""
    if cursor.position:
        await connection.execute(queries.restart_snapshots, peer.id)
        await progress.want(connection, peer, here, is_for_gap=False, now=now)
    elif cursor.ulid:
        await notes.drop_cursor(
            connection,
            peer,
            "Its log is read again because it may pass on ops of more hosts.",
            now=now,
        )


def _is_widened(before: Sequence[str] | None, now: frozenset[str] | None) -> bool:
    """Whether a peer may speak for more hosts than before; None: for all."""
    return before is not None and (now is None or not now.issubset(before))
