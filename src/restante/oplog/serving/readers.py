"""What each peer has read of our log: what it was served, and what it has confirmed."""

from collections import OrderedDict
from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

from restante.database import sql
from restante.database.pool import Connection
from restante.oplog import positions
from restante.oplog.peers import Reader
from restante.oplog.positions import Position
from restante.oplog.serving.log import Limits

queries = sql.load("restante.oplog.serving", "readers")

# A reader asks for one page after another, so it is seldom behind the last one.
_PAGE_ENDS = 32
_MAX_NETWORKS = 1000

# A peer that has taken a snapshot is not evicted again while it reads what was written meanwhile.
SPARED = timedelta(hours=1)

_Reading = tuple[int | None, Limits, UUID]


class OpenEnds:
    """
    Where pages of readers without a token ended, if no op has the ULID that they know.

    They are kept here, and by network, because anybody can use the name of a peer: what is read
    without a token must not change what a peer is sent.  One that is lost costs a repetition.
    """

    def __init__(self) -> None:
        self._by_network: OrderedDict[str, OrderedDict[_Reading, Position]] = OrderedDict()

    def find(self, reader: Reader, limits: Limits, ulid: UUID) -> Position | None:
        """Where the page ended after which the reader knows this ULID as the last one."""
        ends = self._by_network.get(reader.network)
        return ends.get(_reading(reader, limits, ulid)) if ends else None

    def note(self, reader: Reader, limits: Limits, ulid: UUID, position: Position) -> None:
        """Where a page ends; how much of an op it has depends on its limits and tables."""
        ends = self._by_network.setdefault(reader.network, OrderedDict())
        self._by_network.move_to_end(reader.network)
        key = _reading(reader, limits, ulid)
        ends[key] = position
        ends.move_to_end(key)
        if len(ends) > _PAGE_ENDS:
            ends.popitem(last=False)
        if len(self._by_network) > _MAX_NETWORKS:
            self._by_network.popitem(last=False)


def _reading(reader: Reader, limits: Limits, ulid: UUID) -> _Reading:
    return None if reader.peer is None else reader.peer.id, limits, ulid


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


async def note_shown(connection: Connection, peer_id: int, table_id: int | None) -> None:
    """A peer begins to read a table that it could not see before, or all of them."""
    await connection.execute(queries.note_shown, peer_id, table_id)


async def end_snapshots(connection: Connection, peer_id: int, *, now: datetime) -> None:
    """
    Release the pins of a peer that reads the log again.

    It has everything up to the position at which its first snapshot began.
    """
    await connection.execute(queries.end_snapshots, peer_id, now + SPARED)
