"""Asks the peers how far we are behind them, and whether their tables have the same columns."""

import asyncio
from collections.abc import Sequence
from datetime import datetime

import structlog

from restante.database.pool import Database
from restante.errors import PeerUnreachable, RestanteError
from restante.oplog import peers, status
from restante.oplog.peers import Peer
from restante.oplog.remote import Remote
from restante.oplog.verifying.comparison import Here
from restante.oplog.verifying.verify import There, schema_differences
from restante.wire.oplog_digests import NodeDescription
from restante.wire.oplog_status import Lag

log = structlog.get_logger()

_AT_ONCE = 4
_SECONDS = 20.0
_MAX_NAMED = 20


async def look_at_peers(db: Database, remote: Remote, *, now: datetime) -> None:
    """Look at each peer that is one of our own nodes; one that does not answer is passed over."""
    async with db.connection() as connection:
        ours = [peer for peer in await peers.all_peers(connection) if peer.protocol == "restante"]
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(peer: Peer) -> None:
        async with turns:
            await _look(db, remote, peer, now=now)

    await asyncio.gather(*(one(peer) for peer in ours))


async def _look(db: Database, remote: Remote, peer: Peer, *, now: datetime) -> None:
    try:
        async with asyncio.timeout(_SECONDS):
            here = await Here(db, peer.id, peer.tables).describe()
            there = await There(remote, peer).describe()
    except (PeerUnreachable, TimeoutError):
        return  # the loop that pulls from it says so
    except RestanteError as error:
        log.warning("peer_look_failed", peer=peer.host, code=error.code, reason=str(error))
        return
    found = differences(here, there)
    async with db.connection() as connection:
        await status.note_look(connection, peer.id, there.waiting or Lag(), found, now=now)


def differences(here: NodeDescription, there: NodeDescription) -> list[str]:
    """How the columns of the tables that both have differ; a bounded number of sentences."""
    theirs = {table.name: table for table in there.tables}
    found = [
        f"{mine.name}: {sentence}"
        for mine in here.tables
        if (other := theirs.get(mine.name))
        for sentence in _of_keys(mine.key_columns, other.key_columns)
        + schema_differences(mine, other)
    ]
    more = len(found) - _MAX_NAMED
    return found[:_MAX_NAMED] + ([f"And {more} more differences."] if more > 0 else [])


def _of_keys(here: Sequence[str], there: Sequence[str]) -> list[str]:
    if list(here) == list(there):
        return []
    return [f"The primary key is ({', '.join(here)}) here and ({', '.join(there)}) there."]
