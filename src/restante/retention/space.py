"""The space account: what takes space, what keeps it, and when the disk is full."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from restante.database import partitions
from restante.database.partitions import Partition, PartitionState
from restante.database.pool import Connection, Database
from restante.retention import rules, store
from restante.retention.disk import Disk
from restante.retention.store import Relation
from restante.retention.subjects import Account, RowSubject, Subjects
from restante.retention.sweep import Sweep
from restante.wire import PartitionSpaceView, SpaceView, TableSpaceView

# Growth is measured over a week of samples.
_SAMPLES_KEPT = timedelta(days=8)


class SpaceAccount:
    """Looks at the tables, and at the disk if it is on this machine."""

    def __init__(self, db: Database, subjects: Subjects, disk: Disk | None = None) -> None:
        self._db = db
        self._subjects = subjects
        self._disk = disk or Disk(db)

    async def look(self, *, now: datetime) -> SpaceView:
        """The whole account, in a read-only transaction that reads each table once."""
        async with self._db.transaction(readonly=True) as tx:
            tables = self._subjects.partitioned_tables
            found = await partitions.partitions_of(tx, tables)
            accounts = [await one.account(tx, found, now=now) for one in self._subjects]
            growth = await store.growth_bytes_per_day(tx, now=now)
            by_table = await store.growth_by_table(tx, now=now)
            await self._disk.locate(tx)
            disk = self._disk.state()
            return SpaceView(
                **self._sizes(await store.relations(tx), found, accounts, by_table),
                pins=[*await store.pins(tx), *(pin for one in accounts for pin in one.pins)],
                lead_seconds=await self._subjects.lead_seconds(tx, found, now=now),
                growth_bytes_per_day=growth,
                free_bytes=disk.free_bytes,
                reserve_bytes=disk.reserve_bytes,
                is_disk_low=disk.is_low,
                days_until_full=rules.days_until_full(disk.free_bytes, growth),
                **{name: value for one in accounts for name, value in one.fields.items()},
            )

    async def sample(self, *, now: datetime) -> SpaceView:
        """Look, and record the total to measure growth."""
        seen = await self.look(now=now)
        async with self._db.connection() as connection:
            by_table = {table.name: table.bytes for table in seen.tables}
            await store.take_sample(connection, seen.total_bytes, by_table, now=now)
        return seen

    def _sizes(
        self,
        relations: Sequence[Relation],
        found: Sequence[Partition],
        accounts: Sequence[Account],
        growth: Mapping[str, float],
    ) -> Mapping[str, Any]:
        tables = self._tables(relations, found, growth)
        live = {name: size for one in accounts for name, size in one.live_bytes.items()}
        live_total = sum(one.live_total or 0 for one in accounts)
        telling = {
            table
            for subject, one in zip(self._subjects, accounts, strict=True)
            if one.live_total is not None
            for table in subject.tables
        }
        stored = sum(table.bytes for table in tables if table.name in telling)
        return {
            "tables": tables,
            "partitions": _partitions(relations, found, live),
            "total_bytes": sum(table.bytes for table in tables),
            "live_bytes": live_total,
            "dead_bytes": max(stored - live_total, 0),
        }

    def _tables(
        self,
        relations: Sequence[Relation],
        found: Sequence[Partition],
        growth: Mapping[str, float],
    ) -> list[TableSpaceView]:
        """Every table, the largest first; partitions and leftovers count as part of theirs."""
        table_of = {one.name: one.table for one in found}
        parts: dict[str, list[Relation]] = {
            table.name: [] for table in self._subjects.partitioned_tables
        }
        for relation in relations:
            parts.setdefault(table_of.get(relation.name, relation.name), []).append(relation)
        count = Counter(one.table for one in found if one.state is not PartitionState.DETACHED)
        tables = [
            TableSpaceView(
                name,
                bytes=sum(part.bytes or 0 for part in its),
                dead_rows=sum(part.dead_rows for part in its),
                partitions=count[name],
                subjects=self._subjects.of_table(name),
                growth_bytes_per_day=growth.get(name),
            )
            for name, its in parts.items()
        ]
        return sorted(tables, key=lambda table: (-table.bytes, table.name))


def _partitions(
    relations: Sequence[Relation], found: Sequence[Partition], live: Mapping[str, int]
) -> list[PartitionSpaceView]:
    """Every partition, the largest first, except for those that are just being removed."""
    names = {one.name for one in found if one.state is not PartitionState.DETACHING}
    measured = [
        PartitionSpaceView(
            relation.name,
            relation.bytes,
            live.get(relation.name),
            max(relation.bytes - live[relation.name], 0) if relation.name in live else None,
        )
        for relation in relations
        if relation.name in names and relation.bytes is not None
    ]
    return sorted(measured, key=lambda one: (-one.bytes, one.name))


async def status(space: SpaceAccount, sweep: Sweep) -> SpaceView:
    """The account and the plan of the next sweep, at one moment by the database's clock."""
    now = await sweep.now()
    seen, plan = await space.look(now=now), await sweep.plan(now=now)
    return msgspec.structs.replace(seen, plan=plan)


class SpaceSamples(RowSubject):
    """The samples that growth is measured with."""

    name = "samples"
    tables = ("space_samples",)
    action = "delete samples"
    outcomes = ("samples",)
    is_routine = True

    async def count_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        before = now - _SAMPLES_KEPT
        return {"samples": await store.count_samples(connection, taken_before=before)}

    async def delete_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        deleted = await store.delete_samples(
            connection, taken_before=now - _SAMPLES_KEPT, limit=self.batch_size
        )
        return {"samples": deleted}
