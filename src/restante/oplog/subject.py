"""
Bounds the op log, and what waits beside it.

Nothing is dropped from the log itself yet: the plan names what it keeps.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from restante.database import sql
from restante.database.partitions import Partition
from restante.database.pool import Connection
from restante.oplog.applying import conflicts
from restante.oplog.tables import LOG_WIDTH, OPS
from restante.retention.subjects import PartitionSubject, RowSubject, Work
from restante.wire import HeldSpace, PlanStep

queries = sql.load("restante.oplog", "subject")

KEPT = timedelta(days=30)
_DUE_COUNTED = 10_000
# Smaller partitions are not worth a line.
_NAMED_FROM_BYTES = 1024 * 1024


class ParkedOps(RowSubject):
    """
    Changes of peers that could not be applied.

    Nobody forgets them while their table is tracked: what bounds them is that no more are accepted.
    """

    name = "parked ops"
    tables = ("op_parked",)
    action = "discard parked ops"
    outcomes = ("parked_ops",)

    async def count_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        return {"parked_ops": await connection.fetchval(queries.count_parked, _DUE_COUNTED)}

    async def delete_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        return {"parked_ops": await connection.fetchval(queries.delete_parked, self.batch_size)}


class OldConflicts(RowSubject):
    """The log of changes that lost against one they had not seen."""

    name = "conflicts"
    tables = ("op_conflicts",)
    action = "delete conflicts"
    outcomes = ("conflicts",)

    async def count_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        due = await connection.fetchval(
            queries.count_conflicts, now - KEPT, conflicts.MAX_KEPT, _DUE_COUNTED
        )
        return {"conflicts": due}

    async def delete_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        deleted = await connection.fetchval(
            queries.delete_conflicts, now - KEPT, conflicts.MAX_KEPT, self.batch_size
        )
        return {"conflicts": deleted}


class EndedSnapshots(RowSubject):
    """Snapshots of removed peers and tables, and the pins of takers that did not come back."""

    name = "ended snapshots"
    tables = ("op_pins", "op_snapshots")
    action = "forget snapshots"
    outcomes = ("op_pins", "op_snapshots")

    async def count_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        row = await connection.fetchrow(queries.count_snapshots, now)
        return dict(row or {})

    async def delete_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        row = await connection.fetchrow(queries.delete_snapshots, now, self.batch_size)
        return dict(row or {})


class UnsettledDeletes(RowSubject):
    """
    Deletes of records that did not exist, until no transaction of that time is left.

    The loop that applies ops checks and removes them; this removes those of other tables.
    """

    name = "unsettled deletes"
    tables = ("op_unsettled",)
    action = "forget unsettled deletes"
    outcomes = ("unsettled_deletes",)

    async def count_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        due = await connection.fetchval(queries.count_unsettled, _DUE_COUNTED)
        return {"unsettled_deletes": due}

    async def delete_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        deleted = await connection.fetchval(queries.delete_unsettled, self.batch_size)
        return {"unsettled_deletes": deleted}


class OpLog(PartitionSubject[str]):
    """The ops of all tracked tables."""

    name = "ops"
    tables = ("ops", "op_clock_lock", "op_era_lock")  # the locks are always empty
    table = OPS
    width = LOG_WIDTH

    async def parents(self, connection: Connection) -> Sequence[str]:
        """One for each tracked table."""
        return [row["parent"] for row in await connection.fetch(queries.log_parents)]

    async def contents(
        self, connection: Connection, past: Sequence[Partition], *, now: datetime, closely: bool
    ) -> Mapping[str, str]:
        """The table whose ops a partition holds."""
        names = {row["parent"]: row["name"] for row in await connection.fetch(queries.log_parents)}
        return {one.name: names[one.parent] for one in past if one.parent in names}

    def decide(
        self, partition: Partition, contents: str | None, *, now: datetime
    ) -> Sequence[PlanStep] | HeldSpace:
        """Nothing is dropped; what takes much space is named."""
        if partition.bytes < _NAMED_FROM_BYTES:
            return []
        why = (
            f"changes of {contents or 'a table'} are kept; "
            "`restante oplog pause` and `resume` drop them, and peers take a snapshot"
        )
        return HeldSpace(partition.name, partition.bytes, why, subject=self.name)

    async def carry_out(self, step: PlanStep, partition: Partition, work: Work) -> str | None:
        """There are no steps."""
        return None

    def is_looked_at(self, partition: Partition, *, now: datetime) -> bool:
        """The one in use too: it is wide, and must be named if it keeps much."""
        return partition.span is None or partition.span.start <= now
