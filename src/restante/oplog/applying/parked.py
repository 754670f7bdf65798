"""
Ops that could not be applied: list them, try them again, discard them.

They are tried again when there is reason to hope: an op of the future when its time has come, one
with a missing foreign key when the table it refers to has changed, others after a growing pause.
An op below the floor is applied only when the operator says so, because nobody knows whether it
still holds.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
import structlog
from msgspec import Raw

from restante.database import driver_errors, sql
from restante.database.pool import SCHEMA, Connection, Database, Row, Tx
from restante.errors import StatementTimedOut, TableBusy, TooManyHosts
from restante.oplog import rules, tables, ulids
from restante.oplog.applying import boundary, records
from restante.oplog.applying.boundary import Refusal
from restante.oplog.applying.incoming import Context, Head, Record
from restante.oplog.applying.merge import merge
from restante.oplog.applying.pieces import ACTION_NAMES
from restante.oplog.applying.records import KeysTaken
from restante.oplog.rules import Channel, Version
from restante.oplog.tables import TrackedTable

log = structlog.get_logger()

queries = sql.load("restante.oplog.applying", "parked")

# At once, in one transaction if all goes well.
BATCH = 500


class ParkedOp(msgspec.Struct):
    """One record that waits, as the operator sees it."""

    id: int
    table: str
    reason: str
    sentence: str
    action: str
    key: str | None  # None if it cannot be computed
    data: Raw
    ulid: str
    host: str
    peer: str | None  # None if it was removed
    parked_at: datetime
    tried_at: datetime
    tries: int


class Retried(msgspec.Struct):
    """What became of parked records that were tried again."""

    applied: int = 0
    superseded: int = 0
    still_parked: int = 0


async def listed(
    connection: Connection,
    *,
    table: str | None = None,
    reason: str | None = None,
    after: int = 0,
    limit: int = 100,
) -> list[ParkedOp]:
    """What is parked, oldest first; `after` is the id of the last one seen."""
    rows = await connection.fetch(queries.listed, table, reason, after, limit)
    return [
        ParkedOp(
            row["id"],
            row["table_name"],
            row["reason"],
            row["sentence"],
            ACTION_NAMES[row["action"].decode()],
            row["key"],
            Raw(row["data"].encode()),
            ulids.text_of(row["ulid"]),
            row["origin"],
            row["peer"],
            row["parked_at"],
            row["tried_at"],
            row["tries"],
        )
        for row in rows
    ]


async def count(connection: Connection) -> dict[str, int]:
    """How many are parked, by reason."""
    return {row["reason"]: row["count"] for row in await connection.fetch(queries.count)}


async def unknown(connection: Connection, ids: Sequence[int]) -> list[int]:
    """Those of the numbers under which nothing is parked."""
    known = {row["id"] for row in await connection.fetch(queries.known, list(ids))}
    return sorted(set(ids) - known)


async def discard(connection: Connection, ids: Sequence[int] | None) -> int:
    """Forget these, or all; returns how many there were."""
    return await connection.fetchval(queries.discard, None if ids is None else list(ids))


async def retry(db: Database, ids: Sequence[int] | None, *, now: datetime) -> Retried:
    """Try these again, or all; those whose time has not come stay."""
    result, after = Retried(), 0
    while True:
        async with db.connection() as connection:
            chosen = None if ids is None else list(ids)
            rows = await connection.fetch(queries.chosen, chosen, after, BATCH)
        if not rows:
            return result
        after = rows[-1]["id"]
        await _Retry(db, now, result).all_of(rows)


async def retry_due(db: Database, *, now: datetime) -> Retried:
    """One pass over those for which there is reason to hope."""
    result = Retried()
    latest = ulids.lowest_at(now + rules.CLOCK_SKEW)
    async with db.connection() as connection:
        rows = await connection.fetch(queries.due, now, latest, BATCH)
    if rows:
        await _Retry(db, now, result).all_of(rows)
        log.info("parked_ops_retried", **msgspec.structs.asdict(result))
    return result


class _OpsDropped(Exception):
    """Nobody knows whether a newer op of the record came and went since the row was read."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A parked record that can be merged."""

    id: int
    peer_id: int
    record: Record


async def _host_number(connection: Connection, row: Row) -> int | str:
    """The number of the host that made the op, or why it has none."""
    try:
        return await tables.host_id(connection, row["origin"], peer_id=row["peer_id"])
    except TooManyHosts as error:
        return str(error)


@dataclass(slots=True)
class _Retry:
    """Tries a batch, and halves it until what fails is alone."""

    db: Database
    now: datetime
    result: Retried

    async def all_of(self, rows: Sequence[Row]) -> None:
        async with self.db.connection() as connection:
            own = await tables.own_name(connection)
            tracked = {one.name: one for one in await tables.all_tables(connection)}
            # Looked at after the marks: a newer op that comes later is in the log, or raises them.
            gone = await unknown(connection, [row["id"] for row in rows])
            rows = [row for row in rows if row["id"] not in gone]
            self.result.superseded += len(gone)
            numbers = {row["id"]: await _host_number(connection, row) for row in rows}
        waiting: list[_Waiting] = []
        for row in rows:
            number = numbers[row["id"]]
            table = tracked.get(row["table_name"])
            found = number if isinstance(number, str) else self._record(row, table, number)
            if isinstance(found, str):
                await self._fail([row["id"]], row["reason"], found)
            else:
                waiting.append(_Waiting(row["id"], row["peer_id"], found))
        context = Context(Channel.RETRY, None, own, self.now)
        todo = [waiting] if waiting else []
        while todo:
            some = todo.pop()
            todo += await self._try(some, context)

    def _record(self, row: Row, table: TrackedTable | None, number: int) -> Record | str:
        """The record, or why it cannot be tried."""
        if table is None or table.is_missing:
            return "The table is not tracked any more."
        if rules.is_ahead(row["ulid"], now=self.now):
            return row["sentence"]
        found = boundary.decoded(Raw(row["data"].encode()))
        if isinstance(found, Refusal):
            return row["sentence"]
        data, sent = found
        if (key := records.key_of(table, sent)) is None:
            return "The record lacks a column of the key."
        version = Version(row["ulid"], row["origin"])
        head = Head(row["id"], version, number, row["action"].decode(), row["approximate"])
        return Record(head, table, data, frozenset(sent), key)

    async def _try(self, some: list[_Waiting], context: Context) -> list[list[_Waiting]]:
        """Merge them in one transaction; returns what is left to do."""
        try:
            async with self.db.transaction() as tx:
                applied, superseded = await self._merged(tx, some, context)
        except _OpsDropped:
            self.result.still_parked += len(some)
            return []
        except KeysTaken:
            return await self._isolated(some, "other", "Another session inserts this record.")
        except (TableBusy, StatementTimedOut) as error:
            return await self._isolated(some, None, str(error))
        except driver_errors.FROM_THE_DRIVER as error:
            reason = driver_errors.record_fault(error, own_schema=SCHEMA)
            if reason is None:
                raise
            return await self._isolated(some, reason, driver_errors.full_reason(error))
        self.result.applied += applied
        self.result.superseded += superseded
        return []

    async def _merged(self, tx: Tx, some: list[_Waiting], context: Context) -> tuple[int, int]:
        merged = await merge(tx, [one.record for one in some], context)
        marks = {one.record.table.id: str(one.record.table.trimmed or "") for one in some}
        if await tx.fetchval(queries.has_dropped, list(marks), list(marks.values())):
            raise _OpsDropped
        await tx.fetchval(queries.remove, [one.id for one in some])
        applied = {record.head.index for record in merged.applied}
        peers = Counter(one.peer_id for one in some if one.id in applied)
        await tx.execute(queries.count_applied, list(peers), list(peers.values()))
        return len(applied), len(some) - len(applied)

    async def _isolated(
        self, some: list[_Waiting], reason: str | None, sentence: str
    ) -> list[list[_Waiting]]:
        if len(some) > 1:
            middle = len(some) // 2
            return [some[middle:], some[:middle]]
        await self._fail([some[0].id], reason, sentence)
        return []

    async def _fail(self, ids: list[int], reason: str | None, sentence: str) -> None:
        async with self.db.connection() as connection:
            await connection.execute(queries.failed, ids, reason, sentence, self.now)
        self.result.still_parked += len(ids)
