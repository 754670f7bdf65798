"""Space accounting: what there is, what holds it, and when the disk is full."""

import os
from datetime import UTC, datetime

from restante.core.retention import LeafState
from restante.core.space import LeafSpace, Space
from restante.store import retention, space
from restante.store.database import Database, Tx

_COUNTED_PER_BUCKET = 10_000


class SpaceAccount:
    """Looks at the tables; the disk is looked at where it is this machine's."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def look(self) -> Space:
        """The whole picture.  Reads only."""
        now = datetime.now(UTC)
        async with self._db.transaction(readonly=True) as tx:
            return Space(
                tables=await space.tables(tx),
                leaves=await _leaves(tx, now),
                live_bytes=await space.live_bytes(tx),
                states=await space.states(tx, now=now),
                workspaces_active=await space.workspaces_active(tx),
                workspaces=await space.workspaces(tx, now=now),
                lags=await space.lags(tx),
                pins=await space.pins(tx, now=now),
                lead_seconds=await space.lead_seconds(tx, now=now),
                growth_bytes_per_day=await space.growth_bytes_per_day(tx, now=now),
                free_bytes=await _free_bytes(tx),
            )

    async def sample(self) -> Space:
        """Look, and remember the total to see it grow."""
        seen = await self.look()
        async with self._db.connection() as connection:
            await space.take_sample(connection, seen.total_bytes, now=datetime.now(UTC))
        return seen


async def _leaves(tx: Tx, now: datetime) -> list[LeafSpace]:
    """
    Every leaf, the largest first; what lives in a bucket is counted as far as is cheap.

    One that is being detached is not measured: whoever finishes that waits for us to end.
    """
    there = [
        leaf for leaf in await retention.all_leaves(tx) if leaf.state is not LeafState.DETACHING
    ]
    found = await retention.with_sizes(tx, there)
    buckets = [leaf for leaf in found if leaf.table == "chunks" and leaf.span]
    long_ago = datetime.fromtimestamp(0, UTC)
    counted = {
        leaf.name: leaf.live.bytes if leaf.live.counted else None
        for leaf in await retention.with_contents(
            tx, buckets, acked_before=long_ago, now=now, limit=_COUNTED_PER_BUCKET
        )
    }
    leaves = [LeafSpace(leaf.name, leaf.bytes, counted.get(leaf.name)) for leaf in found]
    return sorted(leaves, key=lambda leaf: (-leaf.bytes, leaf.name))


async def _free_bytes(tx: Tx) -> int | None:
    """The free space of the database's disk, if its directory is one that we can see."""
    directory = await space.data_directory(tx)
    try:
        disk = os.statvfs(directory) if directory else None
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize if disk else None
