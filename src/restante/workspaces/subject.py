"""Bounds the workspaces: removed ones are deleted once nothing that was sent to them is kept."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from restante.database.partitions import Partition
from restante.database.pool import Connection
from restante.retention.subjects import Account, RowSubject
from restante.workspaces import store

_COUNTED = 10_000


class RemovedWorkspaces(RowSubject):
    """Workspaces that were removed, with the counters of their feeds."""

    name = "removed workspaces"
    tables = ("workspaces", "feeds")
    action = "delete workspaces"
    outcomes = ("workspaces",)

    def __init__(self, *, retention: timedelta) -> None:
        self._retention = retention

    async def count_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        before = now - self._retention
        due = await store.count_forgettable(connection, seen_before=before, limit=_COUNTED)
        return {"workspaces": due}

    async def delete_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        before = now - self._retention
        deleted = await store.delete_forgettable(
            connection, seen_before=before, limit=self.batch_size
        )
        return {"workspaces": deleted}

    async def account(
        self, connection: Connection, found: Sequence[Partition], *, now: datetime
    ) -> Account:
        return Account(fields={"workspaces_active": await store.count_active(connection)})
