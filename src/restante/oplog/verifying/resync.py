"""
`oplog resync`: repairs one table from a peer, by a snapshot of it, and says what it could not.

Newer changes of this node stay, as in every snapshot.  The server that pulls from the peer takes
the snapshot; if none runs, the command does.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from restante.database import sql
from restante.database.pool import Database, Row
from restante.errors import BadRequest, PeerUnreachable, TableNotTracked
from restante.oplog import peers, tables, ulids
from restante.oplog.peers import Peer
from restante.oplog.remote import Remote
from restante.oplog.snapshots import progress
from restante.oplog.snapshots.taking import Taker
from restante.oplog.tables import TrackedTable
from restante.oplog.verifying.comparison import Here, Limits, Progress
from restante.oplog.verifying.verify import There, verify
from restante.wire.oplog_digests import KeyDifference, ResyncReport, UnrepairedKey

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

    async def run(self, name: str, limits: Limits) -> ResyncReport:
        """
        Take the snapshot to its end, and compare the tables after it.

        Raises TableNotTracked, BadRequest if the peer may not see the table, and PeerUnreachable if
        there is no progress: what was done stays, and the next attempt goes on.
        """
        refused = await self._refused()
        table = await self._taken(name)
        report = await verify(
            Here(self.db, self.peer.id, self.peer.tables),
            There(self.remote, self.peer),
            self.peer.host,
            only=[name],
            limits=limits,
            progress=Progress(),
        )
        (compared,) = report.tables
        return ResyncReport(
            peer=self.peer.host,
            table=name,
            status="complete" if compared.outcome == "equal" else "incomplete",
            keys=await self._explained(table, compared.keys),
            more_ranges=compared.more_ranges,
            refused=await self._refused() - refused,
            reason=compared.reason,
        )

    async def _taken(self, name: str) -> TrackedTable:
        async with self.db.connection() as connection:
            table = await tables.find(connection, name)
            if table is None or table.is_missing:
                raise TableNotTracked(f"{name} is not tracked by this node.")
            if not self.peer.may_see(name):
                raise BadRequest(f"{self.peer.host} does not share {name} with this node.")
            await progress.want(
                connection, self.peer, [table], is_for_gap=False, is_repair=True, now=self.clock()
            )
        async with self.db.session() as session:
            if await peers.may_pull(session, self.peer.id):
                await self._take(table)
                return table
        await self._watch(table)
        return table

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

    async def _refused(self) -> int:
        """How many records of the peer were refused up to now."""
        async with self.db.connection() as connection:
            return await connection.fetchval(queries.refused, self.peer.id)

    async def _explained(
        self, table: TrackedTable, keys: Sequence[KeyDifference]
    ) -> list[UnrepairedKey]:
        """What this node knows of records that differ although a snapshot was taken."""
        texts = [one.key for one in keys]
        async with self.db.connection() as connection:
            rows = await connection.fetch(
                queries.known_of_keys, table.id, table.name, texts, list(table.key_columns)
            )
        return [
            UnrepairedKey(one.key, one.what, _sentence(row))
            for one, row in zip(keys, rows, strict=True)
        ]

    async def _why(self) -> str:
        async with self.db.connection() as connection:
            failure = await connection.fetchval(queries.failure, self.peer.id)
        return failure or (
            f"There was no progress for {self.patience_seconds:g} s. The snapshot goes on when the "
            "server that pulls from this peer can."
        )


def _sentence(row: Row) -> str:
    """Why a record may differ."""
    if row["parked"] is not None:
        return f"A change of it is parked here: {row['parked']}"
    if row["ulid"] is None:
        return "This node has no change of it in its log."
    made_at = ulids.moment_of(row["ulid"])
    return (
        f"The newest change that this node has was made at {made_at:%Y-%m-%d %H:%M:%S} UTC by "
        f"{row['host']}. If the peer lacks it, it was not read or could not be applied there."
    )
