"""Space accounting: what there is, what holds it, and when the disk is full."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from restante.database import partitions as leaves
from restante.database.pool import Database, Tx
from restante.retention import space_store as space
from restante.retention.account import LeafSpace, Space, TableSpace
from restante.retention.rules import Leaf, LeafState
from restante.retention.space_store import Relation


class SpaceAccount:
    """Looks at the tables; the disk is looked at where it is this machine's."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def look(self) -> Space:
        """The whole picture.  Reads only, each table once."""
        now = datetime.now(UTC)
        async with self._db.transaction(readonly=True) as tx:
            found = await leaves.all_leaves(tx)
            buckets = _buckets(found)
            relations = await space.relations(tx)
            uploads = await space.uploads(tx, [start for start, _ in buckets], now=now)
            live = {name: uploads.live_bytes.get(n, 0) for n, (_, name) in enumerate(buckets, 1)}
            return Space(
                tables=_tables(relations, found),
                leaves=_leaves(relations, found, live),
                live_bytes=uploads.bytes,
                states=uploads.states,
                workspaces_active=await space.workspaces_active(tx),
                workspaces=uploads.workspaces,
                lags=await space.lags(tx),
                pins=[*await space.pins(tx), *uploads.silent],
                lead_seconds=leaves.lead_seconds(found, now=now),
                growth_bytes_per_day=await space.growth_bytes_per_day(tx, now=now),
                free_bytes=await _free_bytes(tx),
            )

    async def sample(self) -> Space:
        """Look, and remember the total to see it grow."""
        seen = await self.look()
        async with self._db.connection() as connection:
            await space.take_sample(connection, seen.total_bytes, now=datetime.now(UTC))
        return seen


def _buckets(found: Sequence[Leaf]) -> list[tuple[datetime, str]]:
    """The beginnings and names of the buckets that take or have files, oldest first."""
    return sorted(
        (leaf.span.start, leaf.name)
        for leaf in found
        if leaf.table == leaves.CHUNKS.name and leaf.span
    )


def _tables(relations: Sequence[Relation], found: Sequence[Leaf]) -> list[TableSpace]:
    """Every table, the largest first; leaves and what is left over of them are part of theirs."""
    table_of = {leaf.name: leaf.table for leaf in found}
    parts: dict[str, list[Relation]] = {}
    for relation in relations:
        parts.setdefault(table_of.get(relation.name, relation.name), []).append(relation)
    count = Counter(leaf.table for leaf in found if leaf.state is not LeafState.DETACHED)
    tables = [
        TableSpace(
            name,
            bytes=sum(part.bytes or 0 for part in its),
            dead_rows=sum(part.dead_rows for part in its),
            leaves=count[name],
        )
        for name, its in parts.items()
    ]
    return sorted(tables, key=lambda table: (-table.bytes, table.name))


def _leaves(
    relations: Sequence[Relation], found: Sequence[Leaf], live: Mapping[str, int]
) -> list[LeafSpace]:
    """Every leaf, the largest first, but for those that somebody is taking away just now."""
    names = {leaf.name for leaf in found if leaf.state is not LeafState.DETACHING}
    measured = [
        LeafSpace(relation.name, relation.bytes, live.get(relation.name))
        for relation in relations
        if relation.name in names and relation.bytes is not None
    ]
    return sorted(measured, key=lambda leaf: (-leaf.bytes, leaf.name))


async def _free_bytes(tx: Tx) -> int | None:
    """The free space of the database's disk, if its directory is one that we can see."""
    directory = await space.data_directory(tx)
    try:
        disk = os.statvfs(directory) if directory else None
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize if disk else None
