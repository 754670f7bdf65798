"""
`oplog resync`: repairs one table from a peer, by a snapshot of it.

Newer changes of this node stay, as in every snapshot.  The server that pulls from the peer takes
the snapshot; if none runs, the command does.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from restante.database import sql
from restante.database.pool import Database
from restante.errors import BadRequest, PeerUnreachable, TableNotTracked
from restante.oplog import peers, tables
from restante.oplog.peers import Peer
from restante.oplog.remote import Remote
from restante.oplog.snapshots import taking
from restante.oplog.snapshots.taking import Taker
from restante.oplog.tables import TrackedTable

queries = sql.load("restante.oplog.verifying", "resync")

_LOOK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Resync:
    """One table from one peer."""

    db: Database
    remote: Remote
    peer: Peer
    own_host: str
    clock: Callable[[], datetime]
    on_progress: Callable[[str, int], None]  # the phase, and the records so far
    patience_seconds: float = 60.0  # without progress

    async def run(self, name: str) -> None:
        """
        Take the snapshot to its end.

        Raises TableNotTracked, BadRequest if the peer may not see the table, and PeerUnreachable if
        there is no progress: what was done stays, and the next attempt goes on.
        """
        async with self.db.connection() as connection:
            table = await tables.find(connection, name)
            if table is None or table.is_missing:
                raise TableNotTracked(f"{name} is not tracked by this node.")
            if not self.peer.may_see(name):
                raise BadRequest(f"{self.peer.host} does not share {name} with this node.")
            await taking.want(
                connection, self.peer, [table], is_for_gap=False, is_repair=True, now=self.clock()
            )
        async with self.db.session() as session:
            if await peers.may_pull(session, self.peer.id):
                await self._take(table)
                return
        await self._watch(table)

    async def _take(self, table: TrackedTable) -> None:
        """Nobody pulls from the peer, and nobody begins to while we hold the lock."""
        taker = Taker(self.db, self.remote, self.own_host, self.clock)
        while await self._progress(table) is not None:
            await taker.advance(self.peer)

    async def _watch(self, table: TrackedTable) -> None:
        changed = time.monotonic()
        before: tuple[str, int] | None = None
        while (progress := await self._progress(table)) is not None:
            if progress != before:
                before, changed = progress, time.monotonic()
            if time.monotonic() - changed > self.patience_seconds:
                raise PeerUnreachable(await self._why())
            await asyncio.sleep(_LOOK_SECONDS)

    async def _progress(self, table: TrackedTable) -> tuple[str, int] | None:
        async with self.db.connection() as connection:
            row = await connection.fetchrow(queries.progress, self.peer.id, table.id)
        if row is None:
            return None
        self.on_progress(row["phase"], row["records"])
        return row["phase"], row["records"]

    async def _why(self) -> str:
        async with self.db.connection() as connection:
            failure = await connection.fetchval(queries.failure, self.peer.id)
        return failure or (
            f"There was no progress for {self.patience_seconds:g} s. The snapshot goes on when the "
            "server that pulls from this peer can."
        )
