"""
Reads the log in the order of arrival, below the horizon.

Transactions commit in any order.  So a page ends below the oldest one that is still in flight: what
is above it waits until all before it is there.  All of this runs in READ COMMITTED, one statement
after the other: the page first, and then the marks of what was dropped.  DROP TABLE ignores
snapshots, and marks that are read first could confirm a page that has lost its beginning.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import msgspec

from restante.database import sql
from restante.database.pool import Connection, Database, Row
from restante.oplog.positions import START, Position

queries = sql.load("restante.oplog.serving", "log")

# What the JSON around the records takes, at most: names of 255 characters, a position, commas.
OP_BYTES = 800
RECORD_BYTES = 8

# Most pages are small, and a large one should not take many statements.
_MEASURED_FIRST = 1000
_MEASURED_AT_ONCE = 16_000


@dataclass(frozen=True, slots=True)
class Horizon:
    """Everything before this transaction has arrived."""

    era: int
    xid: int

    def is_above(self, position: Position) -> bool:
        """Whether the position is one of a record that can be read."""
        return (position.era, position.xid) < (self.era, self.xid)


@dataclass(frozen=True, slots=True)
class Clock:
    """Whether something is new: the hybrid clock, and the oldest transaction in flight."""

    clock: int
    oldest_xid: int


@dataclass(frozen=True, slots=True)
class LoggedTable:
    """A table, and what was ever dropped from its log."""

    id: int
    name: str
    key_map: Mapping[str, str]
    floor: UUID
    trimmed: str  # the last position, as text; empty: nothing
    taken_snapshot: bool


@dataclass(frozen=True, slots=True)
class Record:
    """One logged record."""

    table_id: int
    position: Position
    host: str
    action: str
    approximate: bool
    size: int
    data: str | None  # JSON; None if it did not fit

    @property
    def op(self) -> tuple[object, ...]:
        """What it has in common with the other records of its op."""
        at = self.position
        return at.era, at.xid, at.ulid, self.table_id, self.host, self.action, self.approximate


@dataclass(frozen=True, slots=True)
class Head:
    """The last record of the log."""

    position: Position
    is_approximate: bool
    has_first: bool  # the first record of its op arrived with it


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a page can be."""

    ops: int = 10_000
    bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class End:
    """Where a page ends, and whether there is more after it."""

    position: Position
    is_cut: bool


@asynccontextmanager
async def reading(db: Database) -> AsyncIterator[Connection]:
    """
    A connection for the statements of this module.

    Each of them is planned once: planning for a hundred partitions takes longer than reading.
    """
    async with db.transaction() as tx:
        await tx.execute(queries.plan_once)
        yield tx


async def horizon(connection: Connection) -> Horizon:
    """Up to where the log is complete."""
    row = await connection.fetchrow(queries.horizon)
    assert row is not None  # noqa: S101 - it has no table that could be empty
    at = Horizon(row["era"], row["xid"])
    if row["prepared"] is None:
        return at
    era = await connection.fetchval(queries.era_at, row["prepared"])
    return at if era is None else Horizon(min(at.era, era), at.xid)


async def clock(connection: Connection) -> Clock:
    """A cheap look, for those who wait for something new."""
    row = await connection.fetchrow(queries.clock)
    assert row is not None  # noqa: S101 - a sequence has one row
    return Clock(**dict(row))


async def new_xid(connection: Connection) -> int:
    """The id of a new transaction, which has ended then."""
    return await connection.fetchval(queries.new_xid)


async def head(connection: Connection, below: Horizon) -> Head | None:
    """The last record below the horizon, of any table."""
    row = await connection.fetchrow(queries.last_before, below.era, below.xid)
    return None if row is None else Head(_position(row), row["approximate"], row["has_first"])


async def logged_tables(connection: Connection) -> list[LoggedTable]:
    """Every table that has a log, by name."""
    return [
        LoggedTable(
            row["id"],
            row["name"],
            msgspec.json.decode(row["key_map"], type=dict[str, str]),
            row["floor"],
            row["trimmed"],
            row["taken_snapshot"],
        )
        for row in await connection.fetch(queries.marks)
    ]


@dataclass(frozen=True, slots=True)
class Log:
    """The log of some tables, up to a horizon."""

    connection: Connection
    tables: Sequence[LoggedTable]
    below: Horizon

    async def window(self, after: Position, *, limit: int, max_bytes: int) -> list[Record]:
        """
        The next records, with their data as long as that fits.

        Of those that did not fit only the first is there, without data.
        """
        if not self.tables:
            return []
        statement = self._visible(queries.window)
        rows = await self.connection.fetch(statement, *self._after(after), limit, max_bytes)
        return [_record(row) for row in rows]

    async def end(self, after: Position, limits: Limits) -> End | None:
        """
        Where a page that begins after a position ends; None if there is nothing for it.

        It has at least one record, and ends between two ULIDs unless it has a single one.
        """
        fitting: Position | None = None
        whole: Position | None = None
        left, records = limits, _MEASURED_FIRST
        while True:
            found = await self._measured(fitting or after, left, records)
            records = min(4 * records, _MEASURED_AT_ONCE)
            if found is None:
                return End(fitting, is_cut=False) if fitting else None
            if found.fitting is None:
                return End(whole or fitting or found.first, is_cut=found.is_more or bool(fitting))
            fitting, whole = found.fitting, found.whole or whole
            if found.is_cut:
                return End(whole or fitting, is_cut=True)
            if not found.is_more:
                return End(fitting, is_cut=False)
            left = Limits(left.ops - found.ops, left.bytes - found.bytes)

    async def outdated(self, after: Position, up_to: Position, floor: UUID) -> set[Position]:
        """The records of a part that are not the newest of their keys; only those up to a ULID."""
        rows = await self.connection.fetch(
            self._visible(queries.outdated), *_values(after), *_values(up_to), floor
        )
        return {_position(row) for row in rows}

    async def op_end(self, ulid: UUID, limits: Limits) -> Position | None:
        """
        Where a reader is that knows the ULID of the last op that it has; None if it is not here.

        An op that is larger than a page is served in parts, and only its first part has its ULID.
        """
        first = _found(
            await self.connection.fetchrow(
                queries.first_of_ulid, ulid, self.below.era, self.below.xid
            )
        )
        if first is None:
            return None
        n = await self.connection.fetchval(queries.last_of_ulid, first.era, first.xid, first.ulid)
        last = Position(first.era, first.xid, first.ulid, n)
        if first == last:
            return last
        part = await self.end(await self.previous(first), limits)
        return min(last, part.position) if part and part.position >= first else last

    async def op_start(self, after: Position, last: Position) -> tuple[int, bool]:
        """Where after a position the op of a record begins, and whether it is approximate."""
        row = await self.connection.fetchrow(
            self._visible(queries.op_start),
            *_values(after),
            last.era,
            last.xid,
            last.ulid,
            last.n,
        )
        return (last.n, False) if row is None else (row["n"], row["approximate"])

    async def first_arrival(self, moment: datetime) -> Position | None:
        """
        From where on records arrived then or later; None if the last one arrived before.

        Transactions are in the order in which they began to write, and so the place is found by
        halving: it is the last transaction that began before, or the first one of all.
        """
        head = await self._last_before(self.below.era, self.below.xid)
        if head is None or head["arrived_at"] < moment:
            return None
        # An era is named after the time at which it began.
        before = await self._last_before(round(moment.timestamp() * 1_000_000), 0)
        first = await self._first_from(0 if before is None else before["era"], 0)
        if first is None or first["arrived_at"] >= moment:
            return _found(first)
        era = first["era"]
        last = await self._last_before(era + 1, 0)
        end = self.below.xid if last is None else last["xid"] + 1
        while end - first["xid"] > 1:
            middle = (first["xid"] + end) // 2
            found = await self._first_from(era, middle)
            if found is None or found["era"] > era or found["arrived_at"] >= moment:
                end = middle
            else:
                first = found
        return _position(first)

    async def _first_from(self, era: int, xid: int) -> Row | None:
        below = self.below
        return await self.connection.fetchrow(queries.first_from, era, xid, below.era, below.xid)

    async def _last_before(self, era: int, xid: int) -> Row | None:
        at = min((era, xid), (self.below.era, self.below.xid))
        return await self.connection.fetchrow(queries.last_before, *at)

    async def previous(self, position: Position) -> Position:
        """The record before a position; the start if there is none."""
        found = await self.connection.fetchrow(queries.previous, *_values(position))
        return _found(found) or START

    async def lowest_ulid(self) -> UUID | None:
        """The lowest ULID that is kept."""
        if not self.tables:
            return None
        return await self.connection.fetchval(self._visible(queries.lowest_ulid))

    async def _measured(self, after: Position, limits: Limits, records: int) -> "_Measured | None":
        if not self.tables:
            return None
        rows = await self.connection.fetch(
            self._visible(queries.page_end),
            *self._after(after),
            records,
            limits.bytes,
            limits.ops,
            OP_BYTES,
            RECORD_BYTES,
        )
        return _measured({row["number"]: row for row in rows}, records) if rows else None

    def _visible(self, statement: str) -> str:
        """
        The statement for these tables.

        Their numbers are part of its text: an array as a parameter would not prune partitions.
        """
        return statement.replace("(visible)", f"({', '.join(str(one.id) for one in self.tables)})")

    def _after(self, position: Position) -> tuple[object, ...]:
        return (*_values(position), self.below.era, self.below.xid)


@dataclass(frozen=True, slots=True)
class _Measured:
    """How much of a part of the log fits into what is left of a page."""

    first: Position
    fitting: Position | None  # the last that fits
    whole: Position | None  # the last that fits and ends its ULID
    is_cut: bool  # something that was looked at does not fit
    is_more: bool
    bytes: int
    ops: int


def _measured(rows: Mapping[int, Row], records: int) -> _Measured:
    first = rows[1]
    looked_at, fitting, whole = first["looked_at"], first["fitting"], first["whole"]
    last = rows.get(fitting)
    return _Measured(
        _position(first),
        None if last is None else _position(last),
        None if whole is None else _position(rows[whole]),
        is_cut=(fitting or 0) < min(looked_at, records),
        is_more=looked_at > (fitting or 1),
        bytes=0 if last is None else last["bytes"],
        ops=0 if last is None else last["ops"],
    )


def _record(row: Row) -> Record:
    return Record(
        row["table_id"],
        _position(row),
        row["host"],
        row["action"],
        row["approximate"],
        row["size"],
        row["data"],
    )


def _found(row: Row | None) -> Position | None:
    return None if row is None else _position(row)


def _position(row: Row) -> Position:
    return Position(row["era"], row["xid"], row["ulid"], row["n"])


def _values(position: Position) -> tuple[int, int, UUID, int]:
    return position.era, position.xid, position.ulid, position.n
