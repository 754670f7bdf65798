"""What the decisions about the log depend on, as the tables have it now."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import structlog

from restante.database import sql
from restante.database.partitions import Partition
from restante.database.pool import Connection, Row
from restante.oplog import positions, ulids
from restante.oplog.peers import is_same_node
from restante.oplog.positions import Position
from restante.oplog.tables import OPS
from restante.oplog.trimming.gate import Hold, Mark, Piece, Pin, TableLog
from restante.oplog.trimming.limits import Limits, Policy

log = structlog.get_logger()

queries = sql.load("restante.oplog.trimming", "picture")

_limits = msgspec.json.Decoder(Limits)

# A snapshot that we take and that has stood still for longer holds nothing back.
_STANDS_STILL = timedelta(hours=1)

# The clock has jumped, or no server ran, if nobody has noted the time for so long.
_JUMP = timedelta(hours=1)
# After that nothing ages for as long: peers must have the time to come back, and an operator the
# time to set the clock right.
_WAIT = timedelta(hours=1)

# Each probe locks a partition with its indexes until the statement ends, and locks are few.
_PROBED_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Log:
    """A table's log, with what is not needed to decide about it."""

    table_id: int
    parent: str
    floor: UUID
    dropped_ops: int
    dropped_bytes: int
    dropped_at: datetime | None
    decided: TableLog


@dataclass(frozen=True, slots=True)
class Picture:
    """All logs and all peers, at one moment."""

    logs: Sequence[Log]
    marks: Sequence[Mark]
    now: datetime  # ops and absences are as old as they are by this clock

    def of_parent(self, parent: str | None) -> Log | None:
        return next((log for log in self.logs if log.parent == parent), None)


async def save_limits(connection: Connection, limits: Limits) -> None:
    """Save the limits of this server, for commands that run beside it."""
    await connection.execute(queries.save_limits, msgspec.json.encode(limits).decode())


async def saved_limits(connection: Connection) -> Limits:
    """The limits of the server that started last; no limits if none has."""
    saved = await connection.fetchval(queries.saved_limits)
    try:
        return _limits.decode(saved or "{}")
    except msgspec.ValidationError:  # of a later release
        return Limits()


async def look(
    connection: Connection, found: Sequence[Partition], limits: Limits, *, now: datetime
) -> Picture:
    """Look at these partitions of the log, their tables and the peers; nothing is scanned."""
    ours = [one for one in found if one.table == OPS.name and one.span and one.span.start <= now]
    pieces = await _pieces(connection, [one for one in ours if not one.is_locked])
    obstacles = {one.parent: hold for one in found if (hold := _obstacle(one))}
    pins = await connection.fetch(queries.pins, now)
    taking = await connection.fetch(queries.taking, now - _STANDS_STILL)
    logs = [
        _log(row, limits, pieces.get(row["parent"], []), obstacles.get(row["parent"]))
        for row in await connection.fetch(queries.tables)
    ]
    by_table = {row["table_id"]: row["host"] for row in taking}
    return Picture(
        [_with_interest(log, pins, by_table.get(log.table_id)) for log in logs],
        await marks(connection),
        await _aged(connection, now=now),
    )


def _obstacle(one: Partition) -> Hold | None:
    """Why a partition keeps the others of its table as well."""
    if one.table != OPS.name or not one.is_attached:
        return None
    if one.is_locked:
        # What is in it may be older, and older ops go first.
        return Hold(one.name, "is locked by another session", "locked", is_final=True)
    if one.span is None:
        why = "is a default partition, with which Postgres removes no other: detach it"
        return Hold(one.name, why, "default_partition", is_final=True)
    return None


async def note_time(connection: Connection, *, now: datetime) -> None:
    """A server is alive now; noted every minute, so that a jump of the clock is noticed."""
    if await connection.fetchval(queries.note_time, now, _JUMP, _WAIT):
        log.warning("clock_jumped", to=now.isoformat(), ops_age_again_in=str(_WAIT))


async def _aged(connection: Connection, *, now: datetime) -> datetime:
    """The time; for a while after a jump of the clock, or after no server ran, the one before."""
    row = await connection.fetchrow(queries.noted_time)
    if row is None or row["alive_at"] is None:
        return now
    if now > row["alive_at"] + _JUMP:
        return row["alive_at"]
    if row["jumped_at"] is not None and now < row["jumped_at"] + _WAIT:
        return min(now, row["jumped_from"])
    return now


def policy_of(row: Row | Mapping[str, Any], limits: Limits) -> Policy:
    """The policy of a table, with the default where it has none of its own."""
    return Policy(
        _days(row["retention_days"], limits.policy.retention),
        _days(row["cap_days"], limits.policy.cap_age),
        row["cap_bytes"] or None,
    )


def _log(row: Row, limits: Limits, pieces: Sequence[Piece], obstacle: Hold | None) -> Log:
    policy = policy_of(row, limits)
    last_at = max((one.last_at for one in pieces if one.last_at), default=None)
    log = TableLog(row["name"], policy, pieces, last_at=last_at, obstacle=obstacle)
    kept = ("floor", "dropped_ops", "dropped_bytes", "dropped_at")
    return Log(row["id"], row["parent"], *(row[name] for name in kept), decided=log)


def _days(chosen: float | None, default: timedelta | None) -> timedelta | None:
    """A table may have a limit of its own, or 0 for none."""
    if chosen is None:
        return default
    return timedelta(days=chosen) if chosen else None


def _with_interest(log: Log, pins: Sequence[Row], taking_from: str | None) -> Log:
    own = [
        Pin(row["host"], positions.parsed(row["position"]) or positions.START)
        for row in pins
        if row["table_id"] == log.table_id
    ]
    return replace(log, decided=replace(log.decided, pins=own, taking_from=taking_from))


async def _pieces(connection: Connection, found: Sequence[Partition]) -> dict[str, list[Piece]]:
    """The partitions with their ends, by parent, the oldest first."""
    ends = await ends_of(connection, [one.name for one in found])
    pieces = dict[str, list[Piece]]()
    for one in sorted(found, key=lambda one: str(one.span and one.span.start.isoformat())):
        row = ends.get(one.name)
        piece = Piece(one, _position(row), row["first_at"], row["last_at"]) if row else Piece(one)
        pieces.setdefault(one.parent or "", []).append(piece)
    return pieces


async def ends_of(connection: Connection, names: Sequence[str]) -> dict[str, Row]:
    """The first and the last op of these partitions; those that are empty are left out."""
    found = dict[str, Row]()
    for at in range(0, len(names), _PROBED_AT_ONCE):
        statement = " union all ".join(map(_probe, names[at : at + _PROBED_AT_ONCE]))
        found |= {row["name"]: row for row in await connection.fetch(statement)}
    return found


def _probe(name: str) -> str:
    quoted = name.replace("'", "''")
    return queries.ends.format(name=quoted, partition=sql.quoted(name))


def _position(row: Row) -> Position:
    return Position(row["era"], row["xid"], row["ulid"], row["n"])


async def marks(connection: Connection) -> list[Mark]:
    """The marks of all peers, this node itself left out however it is spelt."""
    own = await connection.fetchval(queries.own_host)
    rows = await connection.fetch(queries.peers)
    return [
        await _mark(connection, row)
        for row in rows
        if own is None or not is_same_node(row["host"], own)
    ]


async def _mark(connection: Connection, row: Row) -> Mark:
    reached_at = None
    if passed := positions.parsed(row["passed"]):
        values = passed.era, passed.xid, passed.ulid, passed.n
        reached_at = await connection.fetchval(queries.reached, *values)
    return Mark(
        row["host"],
        row["passed"],
        row["confirmed"],
        None if row["tables"] is None else frozenset(row["tables"]),
        reached_at,
        row["seen_at"],
        row["added_at"],
        None if row["evict_after_days"] is None else timedelta(days=row["evict_after_days"]),
        row["evicted_at"],
        row["spared_until"],
        row["failure"],
    )


async def policies(connection: Connection, limits: Limits) -> dict[str, Policy]:
    """The policy of each table, by the name of its log."""
    rows = await connection.fetch(queries.tables)
    return {row["parent"]: policy_of(row, limits) for row in rows}


async def estimated_rows(connection: Connection, names: Sequence[str]) -> dict[str, int]:
    """How many ops each partition has, about."""
    return {row["name"]: row["rows"] for row in await connection.fetch(queries.rows, names)}


def floor_moment(floor: UUID) -> datetime | None:
    """When the last op was made that was dropped; None if none ever was."""
    return None if floor == ulids.LOWEST else ulids.moment_of(floor)
