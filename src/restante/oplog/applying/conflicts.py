"""
Conflicts: changes that lost against one that they had not seen.  The last ones are kept.

Versions say which of two changes is newer, not whether the newer one was made with the other in
sight.  That is known in three cases, and these count:

- `unseen`: an incoming change is older than a change of our own, and is not in our log.  Had it
  been here when ours was made, it would be in the log.  What decides is the first op of the key
  above it: if somebody else made that one, it is theirs to notice.  Below the floor nothing is
  said, because the log may have had the change before.  This is exact, and each pair of
  concurrent changes of two nodes that read each other is noticed by the node whose change wins.
- `overwritten`: a change of our own is overwritten by one from a node that had not read it, by its
  cursor on us.  So the node whose change is lost knows as well.  It may have read the change by
  another way, through a third node; then one too many is counted.
- `approximate`: a change met a version that came from a snapshot, which says only that the record
  is not newer.

Two deletes, and two changes with the same result, are no conflict.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import msgspec

from restante.database import sql
from restante.database.pool import Connection, Tx
from restante.oplog import ulids
from restante.oplog.rules import Version

queries = sql.load("restante.oplog.applying", "conflicts")

# The oldest go first.
MAX_KEPT = 10_000
# Larger records are not kept with a conflict: ten thousand of them would fill a disk.
MAX_DATA_BYTES = 64 * 1024
# What is stored as the data of a delete; SQL's null stands for data that is not kept.
_DELETED = "null"

Reason = Literal["unseen", "overwritten", "approximate"]


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two versions of a record; a deleted one has no data."""

    key: str
    reason: Reason
    kept: Version
    kept_data: str | None
    lost: Version
    lost_data: str | None


class Listed(msgspec.Struct):
    """
    A conflict as the operator sees it.

    A version without data is a delete, or else it was too large to keep, or is from a time when
    nothing was logged.
    """

    id: int
    noticed_at: datetime
    table: str
    key: str
    reason: str
    kept_ulid: str
    kept_host: str
    kept: msgspec.Raw | None
    kept_is_delete: bool
    lost_ulid: str
    lost_host: str
    lost: msgspec.Raw | None
    lost_is_delete: bool


async def add(tx: Tx, table: str, found: Sequence[Conflict], *, now: datetime) -> int:
    """Keep these conflicts; returns how many of them are new."""
    if not found:
        return 0
    return await tx.fetchval(
        queries.add,
        table,
        now,
        [one.key for one in found],
        [one.reason for one in found],
        [one.kept.ulid for one in found],
        [one.kept.origin for one in found],
        [_bounded(one.kept_data) for one in found],
        [one.lost.ulid for one in found],
        [one.lost.origin for one in found],
        [_bounded(one.lost_data) for one in found],
        MAX_KEPT,
    )


def _bounded(data: str | None) -> str | None:
    if data is None:
        return _DELETED
    return None if len(data.encode()) > MAX_DATA_BYTES else data


async def listed(
    connection: Connection, *, table: str | None = None, before: int | None = None, limit: int
) -> list[Listed]:
    """The conflicts that are kept, newest first; `before` is the id of the last one seen."""
    return [
        Listed(
            row["id"],
            row["noticed_at"],
            row["table_name"],
            row["key"],
            row["reason"],
            ulids.text_of(row["kept_ulid"]),
            row["kept_origin"],
            _raw(row["kept"]),
            row["kept"] == _DELETED,
            ulids.text_of(row["lost_ulid"]),
            row["lost_origin"],
            _raw(row["lost"]),
            row["lost"] == _DELETED,
        )
        for row in await connection.fetch(queries.listed, table, before, limit)
    ]


def _raw(data: str | None) -> msgspec.Raw | None:
    return None if data is None or data == _DELETED else msgspec.Raw(data.encode())
