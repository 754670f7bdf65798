"""The partitions of the op log and their indexes, as the catalogue has them now."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from restante.database import sql
from restante.database.pool import Connection, Row
from restante.oplog.tables import OPS

queries = sql.load("restante.oplog.indexing", "catalogue")

_OPTIONS = re.compile(r" WITH \([^)]*\)")


@dataclass(frozen=True, slots=True)
class Table:
    """The log, the log of one table, or a partition of that."""

    name: str
    parent: str | None
    is_partitioned: bool
    bytes: int = 0  # without indexes and TOAST
    rows: float = -1  # of `pages`, when it was last vacuumed or analysed; -1: never
    pages: int = 0
    is_sealed: bool = False  # about to be dropped
    built_by: int | None = None  # the process that builds an index of it now, not ours


@dataclass(frozen=True, slots=True)
class Index:
    """One index; `definition` is what follows USING."""

    name: str
    table: str
    parent: str | None
    is_valid: bool
    is_unique: bool
    definition: str

    @property
    def shape(self) -> tuple[str, bool]:
        """What must be equal for an index to be attached to another."""
        return shape_of(self.definition), self.is_unique


def shape_of(definition: str) -> str:
    """The definition without storage parameters."""
    return _OPTIONS.sub("", definition)


@dataclass(frozen=True, slots=True)
class Tree:
    """All of it."""

    tables: Mapping[str, Table]
    indexes: Sequence[Index]
    widths: Mapping[str, int] = field(default_factory=dict[str, int])  # of columns, in bytes

    def partitions_of(self, table: str) -> list[Table]:
        return [one for one in self.tables.values() if one.parent == table]

    def indexes_of(self, table: str) -> list[Index]:
        return [one for one in self.indexes if one.table == table]

    def attached(self, table: str, parent: str) -> Index | None:
        """The index of a partition that belongs to this index of its parent."""
        return next((one for one in self.indexes_of(table) if one.parent == parent), None)


async def read(connection: Connection) -> Tree:
    """Read all of it; a few statements."""
    tables = [_table(row) for row in await connection.fetch(queries.tables, OPS.name)]
    indexes = await connection.fetch(queries.indexes, [table.name for table in tables])
    widths = await connection.fetch(queries.column_widths, OPS.name)
    return Tree(
        {table.name: table for table in tables},
        [Index(*row) for row in indexes if row["definition"]],  # None: dropped meanwhile
        {row["name"]: row["bytes"] for row in widths},
    )


def _table(row: Row) -> Table:
    return Table(
        row["name"],
        row["parent"],
        row["is_partitioned"],
        row["bytes"],
        row["rows"],
        row["pages"],
        row["is_sealed"],
        row["built_by"],
    )


def named(row: Row) -> str:
    """A process, as a sentence names it."""
    since = row["seconds"]
    open_for = "" if since is None else f", in a transaction for {since:.0f} s"
    return f"process {row['pid']} ({row['who']}{open_for})"
