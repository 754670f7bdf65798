"""What each peer has read of our log: what it was served, and what it has confirmed."""

from collections.abc import Sequence
from datetime import datetime

from restante.database import sql
from restante.database.pool import Connection
from restante.oplog import positions
from restante.oplog.positions import Position

queries = sql.load("restante.oplog.serving", "readers")

# A reader asks for one page after another, so it is seldom behind the last one.
_PAGE_ENDS = 32


async def page_end(connection: Connection, peer_id: int, ulid: str) -> Position | None:
    """Where the page ended after which the peer knows this ULID as the last one."""
    kept: list[str] | None = await connection.fetchval(queries.page_ends, peer_id)
    for entry in kept or ():
        known, _, position = entry.partition(" ")
        if known == ulid:
            return positions.parsed(position)
    return None


async def note_confirmed(
    connection: Connection,
    peer_id: int,
    position: Position | None,
    *,
    head: str | None,
    now: datetime,
) -> None:
    """
    A peer has everything up to a position, as far as it was served to it; None: it has nothing.

    `head` is the end of its own log.
    """
    text = "" if position is None else str(position)
    await connection.execute(queries.note_confirmed, peer_id, text, now, head)


async def note_served(connection: Connection, peer_id: int, position: Position) -> None:
    """A peer is sent everything up to a position; must be called before it can confirm it."""
    await connection.execute(queries.note_served, peer_id, str(position))


async def note_page_ends(
    connection: Connection, peer_id: int, ends: Sequence[tuple[str, Position]]
) -> None:
    """Which ULIDs a reader without positions may send next, and where each of them is."""
    entries = [f"{ulid} {position}" for ulid, position in ends]
    await connection.execute(queries.note_page_ends, peer_id, entries, _PAGE_ENDS)


async def end_snapshots(connection: Connection, peer_id: int) -> None:
    """
    Release the pins of a peer that reads the log again.

    It has everything up to the position at which its first snapshot began.
    """
    await connection.execute(queries.end_snapshots, peer_id)
