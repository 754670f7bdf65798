"""
Snapshots, server's side: a table as it is, page by page, with the versions that the log knows.

A snapshot begins at a position of the log, which is pinned.  Pages are read later, each as one
statement of its own, so a record may be newer than that position.  What changes meanwhile is in
the log after it, and versions say which is newer.  First come the keys that were deleted, then the
records in the order of their keys, and then the taker asks for the keys that it alone has.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec
from msgspec import Raw

from restante.database import driver_errors, sql
from restante.database.pool import Connection, Database, Row, Tx
from restante.errors import BadRequest, SnapshotGone, TableBusy, TableNotTracked
from restante.oplog import positions, tables, ulids
from restante.oplog.peers import Peer
from restante.oplog.positions import Position
from restante.oplog.serving import readers
from restante.oplog.serving.encoding import record_for_us
from restante.oplog.tables import Column, TrackedTable
from restante.wire import oplog as wire

queries = sql.load("restante.oplog.snapshots", "snapshot")

# A taker that is silent for longer must begin again.
PIN_LASTS = timedelta(minutes=15)

MAX_RECORDS = 1000
MAX_BYTES = 8 * 1024 * 1024
MAX_SCANNED_KEYS = 5000
MAX_ASKED_KEYS = 1000

_WITH_LENGTH = ("text", "character varying", "bytea")
_LOWEST_HASH = -(2**63)


async def begin(
    db: Database, peer: Peer, request: wire.SnapshotRequest, *, now: datetime
) -> wire.SnapshotStart:
    """
    Pin the log at its horizon; a snapshot of the table that the peer had begun is forgotten.

    Raises TableNotTracked if there is no such table for this peer, and TableBusy.
    """
    async with db.transaction() as tx:
        table = await _visible(tx, peer, request.table)
        if table.state == "paused":
            raise TableBusy(f"Capture of {table.name} is paused here; try again later.")
        row = await tx.fetchrow(queries.begin, peer.id, table.id)
        assert row is not None  # noqa: S101 - it always has one
        if row["has_old_prepared"]:
            raise TableBusy("A transaction that was prepared before the restart is still open.")
        at = Position(row["era"], row["xmin"], ulids.LOWEST, 0)
        start = str(at)
        await tx.execute(queries.pin, peer.id, table.id, start, now + PIN_LASTS)
        await readers.note_shown(tx, peer.id, table.id)
        await readers.note_served(tx, peer.id, at)  # it confirms this when it is complete
        cursor = positions.parsed(row["cursor_on_you"] or "")
        return wire.SnapshotStart(
            start=start,
            host=await tables.own_host(tx),
            columns=[column.name for column in table.columns],
            cursor_on_you=str(cursor) if cursor else None,
            unlogged=str(table.unlogged) if table.unlogged else "",
        )


async def page(
    db: Database, peer: Peer, request: wire.SnapshotPageRequest, *, now: datetime
) -> wire.SnapshotPage:
    """
    The next deletes or records.

    Raises SnapshotGone if it must begin again, TableNotTracked, and BadRequest.
    """
    async with _reading(db, peer, request.table, request.start, now=now) as reading:
        read = deletes_of if request.phase == "deletes" else _records
        entries, following = await read(reading.tx, reading.table, request.after)
    return wire.SnapshotPage(entries, reading.floor, reading.floor_origin, following)


async def missing(
    db: Database, peer: Peer, request: wire.SnapshotKeysRequest, *, now: datetime
) -> wire.SnapshotPage:
    """Those of the taker's keys that have no record here; raises as `page` does."""
    if len(request.keys) > MAX_ASKED_KEYS:
        raise BadRequest(f"Ask for at most {MAX_ASKED_KEYS} keys.")
    keys = msgspec.json.encode(request.keys).decode()
    async with _reading(db, peer, request.table, request.start, now=now) as reading:
        rows = await reading.tx.fetch(_missing_of(reading.table), keys)
    entries = [_entry(row, request.keys[int(row["at"]) - 1]) for row in rows]
    return wire.SnapshotPage(entries, reading.floor, reading.floor_origin)


@dataclass(slots=True)
class _Reading:
    """A table while a page of it is read, and its floor afterwards."""

    tx: Tx
    table: TrackedTable
    start: Position
    floor: str = ""
    floor_origin: str = ""

    async def end(self) -> None:
        """
        Read how far the log was trimmed.

        It comes after the page: an op that was dropped before the page was read is below this
        floor.  Raises SnapshotGone if the log after the start is no longer whole.
        """
        row = await self.tx.fetchrow(queries.marks, self.table.id)
        if row is None or row["state"] != "tracked" or row["trimmed"] > str(self.start):
            raise _gone(self.table)
        self.floor, self.floor_origin = ulids.text_of(row["floor"]), row["floor_origin"]


@asynccontextmanager
async def _reading(
    db: Database, peer: Peer, name: str, start: str, *, now: datetime
) -> AsyncIterator[_Reading]:
    """Renew the pin, then read; raises SnapshotGone if there is none."""
    async with db.connection() as connection:
        table = await _visible(connection, peer, name)
        position = positions.parsed(start)
        era = await connection.fetchval(
            queries.renew, peer.id, table.id, start, now, now + PIN_LASTS
        )
    # In another era the database may have been restored, and what was served never have been.
    if position is None or position.era != era:
        raise _gone(table)
    try:
        async with db.transaction(readonly=True) as tx:
            await make_canonical(tx, table)
            reading = _Reading(tx, table, position)
            yield reading
            await reading.end()
    except driver_errors.BAD_VALUE as error:
        raise BadRequest(f"A key does not fit the table: {driver_errors.reason(error)}.") from error


async def make_canonical(tx: Tx, table: TrackedTable) -> None:
    """Let the values of a table have one text form only, for this transaction."""
    path = ", ".join(map(sql.quoted, dict.fromkeys([table.schema_name, "public", "pg_temp"])))
    await tx.execute(queries.canonical, path)


def _gone(table: TrackedTable) -> SnapshotGone:
    return SnapshotGone(f"The snapshot of {table.name} is no longer kept; begin it again.")


async def _visible(connection: Connection, peer: Peer, name: str) -> TrackedTable:
    table = await tables.find(connection, name) if peer.may_see(name) else None
    if table is None or table.is_missing:
        raise TableNotTracked("There is no such table for this peer.")
    return table


async def deletes_of(
    tx: Tx, table: TrackedTable, after: str
) -> tuple[list[wire.SnapshotEntry], str | None]:
    """The keys whose newest op is a delete, and where to go on; raises BadRequest."""
    statement = queries.deletes_page.format(log=table.log)
    key_hash, key = _deletes_after(after)
    rows = await tx.fetch(statement, key_hash, key, MAX_SCANNED_KEYS)
    entries = [_entry(row, Raw(row["data"].encode())) for row in rows if row["is_delete"]]
    if len(rows) < MAX_SCANNED_KEYS:
        return entries, None
    return entries, msgspec.json.encode([rows[-1]["key_hash"], rows[-1]["key"]]).decode()


def _deletes_after(after: str) -> tuple[int, str]:
    if not after:
        return _LOWEST_HASH, ""
    try:
        return msgspec.json.decode(after, type=tuple[int, str])
    except msgspec.DecodeError as error:
        raise BadRequest("after is wrong: send back what `next` was.") from error


async def _records(
    tx: Tx, table: TrackedTable, after: str
) -> tuple[list[wire.SnapshotEntry], str | None]:
    rows: Sequence[Any] = await tx.fetch(
        _records_page(table, is_first=not after), after or None, MAX_RECORDS, MAX_BYTES
    )
    rows = sorted(rows, key=lambda row: row["at"])
    entries = [_entry(row, Raw(record_for_us(row["data"]))) for row in rows]
    # A page may be cut short by its bytes, so only an empty one is the last.
    return entries, rows[-1]["key"] if rows else None


def _entry(row: Row, data: Raw) -> wire.SnapshotEntry:
    if row["ulid"] is None:
        return wire.SnapshotEntry(data)
    version = ulids.text_of(row["ulid"]), row["n"], row["host"]
    return wire.SnapshotEntry(data, *version, row["approximate"], row["is_delete"])


def above(table: TrackedTable, *, is_first: bool) -> str:
    """The condition for the records beyond the key that is the first parameter."""
    if is_first:
        return "$1::text is null"
    bounds = ", ".join(
        queries.bound.format(key=sql.quoted(name), relation=table.relation)
        for name in table.key_columns
    )
    return f"({keys_of(table)}) > ({bounds})"


def key_object(table: TrackedTable) -> str:
    """The arguments of json_build_object for the key of a record."""
    return ", ".join(f"{_literal(name)}, t.{sql.quoted(name)}" for name in table.key_columns)


def newest(table: TrackedTable, alias: str) -> str:
    """A subquery for the newest op of the key of a row."""
    values = ", ".join(f"{alias}.{sql.quoted(name)}" for name in table.key_columns)
    return queries.newest.format(log=table.log, values=values)


def keys_of(table: TrackedTable) -> str:
    """The key columns of `t`, to order by: a bare name would mean a column of the result first."""
    return _of("t", [sql.quoted(name) for name in table.key_columns])


def _records_page(table: TrackedTable, *, is_first: bool) -> str:
    keys = [(f"t.{sql.quoted(name)}", f"k{n}") for n, name in enumerate(table.key_columns)]
    return queries.records_page.format(
        keys=keys_of(table),
        renamed=", ".join(new for _, new in keys),
        keys_renamed=", ".join(f"{key} as {new}" for key, new in keys),
        same=" and ".join(f"{key} = sized.{new}" for key, new in keys),
        sizes=" + ".join(map(_size, table.columns)),
        relation=table.relation,
        above=above(table, is_first=is_first),
        names_and_keys=key_object(table),
        newest=newest(table, "t"),
    )


def _size(column: Column) -> str:
    """
    How long a value is as JSON, about.

    The length of texts and bytes is known without reading them, also if they are compressed.
    """
    value = f"t.{sql.quoted(column.name)}"
    if column.type in _WITH_LENGTH:
        return f"coalesce(2 * octet_length({value}), 1)"
    short = f"pg_column_size({value})"
    return (
        f"coalesce(case when {short} < 2000 then {short} else octet_length({value}::text) end, 1)"
    )


def _missing_of(table: TrackedTable) -> str:
    keys = [sql.quoted(name) for name in table.key_columns]
    return queries.missing_of.format(
        relation=table.relation,
        same=" and ".join(f"t.{key} = k.{key}" for key in keys),
        first_key=keys[0],
        newest_of_k=newest(table, "k"),
    )


def _of(alias: str, keys: Sequence[str]) -> str:
    return ", ".join(f"{alias}.{key}" for key in keys)


def _literal(text: str) -> str:
    """A column's name as a string; the backslash must not escape anything."""
    quoted = text.replace("'", "''").replace("\\", "\\\\")
    return f"E'{quoted}'"
