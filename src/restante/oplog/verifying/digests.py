"""
Digests of the records of tracked tables, by ranges of keys; reads only.

A digest is the same on two nodes whose records are equal in the given columns, whatever the order
of the columns and the settings of the session.  Each statement is a transaction of its own.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from restante.database import driver_errors, sql
from restante.database.pool import Connection, Database, Tx
from restante.errors import BadRequest
from restante.oplog import tables
from restante.oplog.positions import Position
from restante.oplog.tables import TrackedTable
from restante.wire.oplog_digests import (
    ColumnDescription,
    DigestRequest,
    KeyOrder,
    KeyRange,
    RangeDigest,
    RecordDigest,
    RecordsRequest,
    TableDescription,
)

queries = sql.load("restante.oplog.verifying", "digests")

# A range has this many records where it was cut, and may have many more on the other node.
MAX_ROWS_PER_RANGE = 20_000


async def describe(connection: Connection, table: TrackedTable) -> TableDescription:
    """What another node must know before it compares."""
    place = table.schema_name, table.table_name
    return TableDescription(
        name=table.name,
        state=table.state,
        columns=[ColumnDescription(c.name, c.type, c.is_generated) for c in table.columns],
        key_columns=list(table.key_columns),
        order=await connection.fetchval(queries.key_orders, *place, list(table.key_columns)),
        rows=await connection.fetchval(queries.estimated_rows, *place),
    )


async def head(connection: Connection, of: Sequence[TrackedTable]) -> str:
    """
    The last position in the log of these tables, or of what was dropped; empty if there is none.

    Whoever has not read what was dropped gets it by a snapshot.  The mark is read last, so it has
    what went before the log was looked at.
    """
    ids = [table.id for table in of]
    row = await connection.fetchrow(queries.head, ids)
    trimmed = await connection.fetchval(queries.trimmed, ids) or ""
    return max(str(Position(*row)) if row else "", trimmed)


async def cut(  # noqa: PLR0913 - where, and how much
    db: Database, table: TrackedTable, order: KeyOrder, after: str | None, *, rows: int, each: int
) -> list[str]:
    """The last keys of consecutive ranges of `each` records, within the next `rows` records."""
    shape = _Shape(table, table.key_columns, order)
    renamed = [f"k{n}" for n in range(len(table.key_columns))]
    statement = queries.cut.format(
        renamed=", ".join(renamed),
        renamed_order=_ordered(", ".join(renamed), order),
        keys_renamed=", ".join(
            f"t.{name} as {new}" for name, new in zip(shape.key_columns, renamed, strict=True)
        ),
        order=shape.order,
        relation=table.relation,
        above=shape.above("$1::text") if after is not None else "$1::text is null",
    )
    async with _reading(db, order) as tx:
        return [row["key"] for row in await tx.fetch(statement, after, rows, each)]


async def ranges(db: Database, table: TrackedTable, asked: DigestRequest) -> list[RangeDigest]:
    """The digest of each range; raises BadRequest for columns and keys that do not fit."""
    shape = _Shape(table, asked.columns, asked.order)
    async with _reading(db, asked.order) as tx:
        if asked.order == "text":
            return await _ranges_by_text(tx, shape, asked.ranges)
        found: dict[KeyRange, RangeDigest] = {}
        for is_open in ((False, False), (True, False), (False, True), (True, True)):
            alike = [
                one for one in asked.ranges if (one.after is None, one.through is None) == is_open
            ]
            if alike:
                found |= await _ranges_by_index(tx, shape, alike)
    return [found[one] for one in asked.ranges]


async def _ranges_by_index(
    tx: Tx, shape: "_Shape", alike: Sequence[KeyRange]
) -> dict[KeyRange, RangeDigest]:
    """Of ranges that are open at the same ends."""
    bounds, inside = list[str](), list[str]()
    for name, operator, is_closed in (
        ("after", ">", alike[0].after is not None),
        ("through", "<=", alike[0].through is not None),
    ):
        if is_closed:
            bounds.append(
                f"cross join lateral json_to_record({shape.members(f'asked.{name}')}) "
                f"as {name}_key ({shape.types})"
            )
            inside.append(shape.compared(operator, f"{name}_key"))
    statement = queries.ranges_by_index.format(
        bounds=" ".join(bounds),
        hash=shape.hash,
        relation=shape.table.relation,
        inside=" and ".join(inside) or "true",
    )
    rows = await tx.fetch(
        statement,
        [one.after for one in alike],
        [one.through for one in alike],
        MAX_ROWS_PER_RANGE + 1,
    )
    return {
        one: RangeDigest(row["rows"], str(row["digest"]), row["rows"] > MAX_ROWS_PER_RANGE)
        for one, row in zip(alike, rows, strict=True)
    }


async def _ranges_by_text(tx: Tx, shape: "_Shape", asked: Sequence[KeyRange]) -> list[RangeDigest]:
    """An edge is just above a key: nothing sorts between a text and the text with a 1 byte."""
    edges = sorted({edge for one in asked for edge in (one.after, one.through) if edge is not None})
    statement = queries.ranges_by_text.format(
        key=shape.key, hash=shape.hash, relation=shape.table.relation
    )
    rows = await tx.fetch(statement, [f"{edge}\x01" for edge in edges])
    found = {row["edges"]: (row["rows"], row["digest"]) for row in rows}
    return [_between(found, edges, one) for one in asked]


def _between(
    found: dict[int, tuple[int, int]], edges: Sequence[str], asked: KeyRange
) -> RangeDigest:
    first = 0 if asked.after is None else edges.index(asked.after) + 1
    last = len(edges) if asked.through is None else edges.index(asked.through)
    rows = digest = 0
    for number in range(first, last + 1):
        some, hashed = found.get(number, (0, 0))
        rows, digest = rows + some, digest ^ hashed
    return RangeDigest(rows, str(digest))


async def records(db: Database, table: TrackedTable, asked: RecordsRequest) -> list[RecordDigest]:
    """The keys and hashes of the records of a range, in order, or of those with the given keys."""
    shape = _Shape(table, asked.columns, asked.order)
    async with _reading(db, "index" if asked.keys is not None else asked.order) as tx:
        rows = (
            await _records_of(tx, shape, asked.range or KeyRange(), asked.limit)
            if asked.keys is None
            else await tx.fetch(_by_key(shape), asked.keys)
        )
    return [RecordDigest(row["key"], str(row["digest"])) for row in rows]


async def _records_of(tx: Tx, shape: "_Shape", asked: KeyRange, limit: int) -> Sequence[Any]:
    inside = [
        shape.above("$1::text") if asked.after is not None else "$1::text is null",
        shape.above("$2::text", "<=") if asked.through is not None else "$2::text is null",
    ]
    statement = queries.records.format(
        key=shape.key,
        hash=shape.hash,
        relation=shape.table.relation,
        inside=" and ".join(inside),
        order=shape.order,
    )
    return await tx.fetch(statement, asked.after, asked.through, limit)


def _by_key(shape: "_Shape") -> str:
    return queries.records_by_key.format(
        hash=shape.hash,
        members=shape.members("asked.key"),
        types=shape.types,
        relation=shape.table.relation,
        same=shape.compared("=", "bound"),
    )


@asynccontextmanager
async def _reading(db: Database, order: KeyOrder) -> AsyncIterator[Tx]:
    """A short transaction in which texts are canonical; a key that cannot be one is refused."""
    try:
        async with db.transaction(readonly=True) as tx:
            await tx.execute(queries.canonical, "off" if order == "index" else "on")
            yield tx
    except driver_errors.BAD_VALUE as error:
        raise BadRequest(f"A key does not fit the table: {driver_errors.reason(error)}.") from error


@dataclass(frozen=True)
class _Shape:
    """The expressions for one table, some of its columns, and an order of its keys."""

    table: TrackedTable
    columns: Sequence[str]
    by: KeyOrder

    def __post_init__(self) -> None:
        unknown = set(self.columns) - {column.name for column in self.table.columns}
        if unknown:
            raise BadRequest(f"{self.table.name} has no column {sorted(unknown)[0]}.")

    @property
    def key_columns(self) -> list[str]:
        return [sql.quoted(name) for name in self.table.key_columns]

    @property
    def _key_values(self) -> str:
        return ", ".join(f"t.{name}" for name in self.key_columns)

    @property
    def key(self) -> str:
        """The key as it is in the log."""
        return _array(self._key_values)

    @property
    def hash(self) -> str:
        """
        Of the columns in the order of their names, each with a number of its own.

        Mixed once more at the end: digests of ranges are XORed, and would not show that two records
        have exchanged their values.  The text of a whole row takes four times as long.
        """
        each = " # ".join(
            f'coalesce(hashtextextended(t.{sql.quoted(name)}::text collate "C", {n}), {n})'
            for n, name in enumerate(sorted(self.columns), 1)
        )
        return f"hashint8extended({each}, 0)"

    @property
    def order(self) -> str:
        return _ordered(self._key_values, self.by)

    @property
    def _key_types(self) -> list[str]:
        types = {column.name: column.type for column in self.table.columns}
        return [types[name] for name in self.table.key_columns]

    @property
    def types(self) -> str:
        """What `json_to_record` makes of `members`."""
        return ", ".join(f"k{n} {name}" for n, name in enumerate(self._key_types))

    def members(self, key: str) -> str:
        each = ", ".join(f"'k{n}', ({key}::json) -> {n}" for n in range(len(self._key_types)))
        return f"json_build_object({each})"

    def above(self, key: str, operator: str = ">") -> str:
        """The records beyond a parameter, found by the index; a subquery is evaluated once."""
        if self.by == "text":
            return f'{self.key} collate "C" {operator} {key}'
        bounds = ", ".join(
            f"(select k{n} from json_to_record({self.members(key)}) as bound ({self.types}))"  # noqa: S608 - all quoted
            for n in range(len(self._key_types))
        )
        return f"({self._key_values}) {operator} ({bounds})"

    def compared(self, operator: str, bound: str) -> str:
        values = ", ".join(f"{bound}.k{n}" for n in range(len(self._key_types)))
        return f"({self._key_values}) {operator} ({values})"


def _array(values: str) -> str:
    return f"json_build_array({values})::text"


def _ordered(values: str, by: KeyOrder) -> str:
    return values if by == "index" else f'{_array(values)} collate "C"'


async def comparable(connection: Connection, names: frozenset[str] | None) -> list[TrackedTable]:
    """The tables with these names that exist; None: all."""
    return [
        table
        for table in await tables.all_tables(connection)
        if not table.is_missing and (names is None or table.name in names)
    ]
