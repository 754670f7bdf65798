"""Bounds what the op log keeps beside the log itself."""

from collections.abc import Mapping
from datetime import datetime, timedelta

from restante.database import sql
from restante.database.pool import Connection
from restante.oplog.applying import conflicts
from restante.retention.subjects import RowSubject

queries = sql.load("restante.oplog", "subject")

KEPT = timedelta(days=30)
_DUE_COUNTED = 10_000


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
