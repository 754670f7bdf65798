"""
Cursors on third nodes, taken over from the node that this one was compared with.

That is safe under these conditions.  The reference has applied what it has read of the third node's
log, or has something newer of each record, and has passed both on in its own log.  This node has
read that log to the end, which the reference looked up after its cursors.  So whatever lies before
the cursor of the reference has been here, with its version, and was passed on to those who read
from this node.  It does not hold for tables and hosts that the reference does not take from the
third node or that this node does not take from the reference, and not for ops that are parked
there: then the cursor stays as it is.

Our cursor on the reference itself is never moved.  A record that is equal by chance has no version
here, and nobody who reads from this node would hear of it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from restante.database import sql
from restante.database.pool import Connection, Row
from restante.oplog import cursors, peers, positions
from restante.oplog.peers import Peer
from restante.oplog.verifying import digests
from restante.wire.oplog_reset import CursorOn, CursorsAnswer, SeededCursor

queries = sql.load("restante.oplog.resetting", "reset")


@dataclass(frozen=True, slots=True)
class OwnCursor:
    """Our cursor on a third node, and what we take from it."""

    peer_id: int
    host: str
    cursor: str
    tables: frozenset[str]
    takes_snapshot: bool


async def tell(connection: Connection, asking: Peer, hosts: Sequence[str]) -> CursorsAnswer:
    """
    How far this node has read: the asking one, and those of the named nodes that are its peers.

    What it wrote until then is up to the head, which is read last.
    """
    rows = await connection.fetch(queries.cursors)
    named = set(hosts) - {asking.host}
    cursor_on_you = await peers.read_from(connection, asking.id)
    found = await digests.comparable(connection, asking.tables)
    return CursorsAnswer(
        cursors=[_told(row, asking) for row in rows if row["host"] in named],
        cursor_on_you=cursor_on_you,
        head=await digests.head(connection, found),
    )


def _told(row: Row, asking: Peer) -> CursorOn:
    return CursorOn(
        host=row["host"],
        cursor=row["read_to"],
        tables=[name for name in row["reads"] if asking.may_see(name)],
        takes_any_host=row["relays"] is None,
        has_parked=row["has_parked"],
    )


async def own_cursors(connection: Connection, hosts: Collection[str]) -> list[OwnCursor]:
    """Our cursors on these nodes, without those that speak the older protocol."""
    return [
        OwnCursor(
            row["id"],
            row["host"],
            row["cursor"],
            frozenset(row["may_see"]),
            row["takes_snapshot"],
        )
        for row in await connection.fetch(queries.cursors)
        if row["host"] in hosts
    ]


def seeded(
    own: OwnCursor, told: CursorOn, reference: Peer, equal: Collection[str], *, now: datetime
) -> SeededCursor | None:
    """What becomes of our cursor; None if it is as far as that of the reference."""
    theirs = cursors.loaded(told.cursor, now=now).position or positions.START
    ours = cursors.loaded(own.cursor, now=now).position or positions.START
    if theirs <= ours:
        return None
    why_not = _why_not(own, told, reference, equal)
    after = own.cursor if why_not else str(theirs)
    return SeededCursor(host=own.host, before=own.cursor, after=after, why_not=why_not)


def _why_not(own: OwnCursor, told: CursorOn, reference: Peer, equal: Collection[str]) -> str:
    if own.takes_snapshot:
        return "a snapshot is being taken from it"
    if others := own.tables.difference(set(told.tables).intersection(equal)):
        return f"{reference.host} does not read {', '.join(sorted(others))} from it, or not equal"
    if reference.relays is not None or not told.takes_any_host:
        return f"{reference.host} may not pass on everything"
    if told.has_parked:
        return f"{reference.host} has parked ops of it"
    return ""


async def seed(
    connection: Connection, own: OwnCursor, wanted: SeededCursor, *, now: datetime
) -> bool:
    """Set a cursor; False if somebody has moved it meanwhile."""
    done = await connection.fetchval(queries.seed, own.peer_id, wanted.after, wanted.before, now)
    return bool(done)
