"""
The leaves of the partitioned tables: list them, create them ahead.

A new leaf is built apart and then attached, which takes no lock that a writer would notice.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from restante.database import spans as rules
from restante.database import sql
from restante.database.pool import Database, Row, Tx
from restante.database.spans import Span
from restante.retention.rules import Leaf, LeafState

queries = sql.load("restante.database")

_BOUNDS = re.compile(r"FROM \('(?P<start>[^']+)'\) TO \('(?P<end>[^']+)'\)")


@dataclass(frozen=True, slots=True)
class Table:
    """A table that is partitioned by time, and how time is written in its key."""

    name: str
    key: Callable[[datetime], str]
    moment: Callable[[str], datetime]
    options: str = ""


def _uuid_floor(moment: datetime) -> str:
    return str(UUID(int=int(moment.timestamp() * 1000) << 80))


def _uuid_moment(key: str) -> datetime:
    return datetime.fromtimestamp((UUID(key).int >> 80) / 1000, UTC)


CHUNKS = Table(
    "chunks",
    key=datetime.isoformat,
    moment=datetime.fromisoformat,
    # A bucket is written once and dropped whole: there is never anything to vacuum.
    options="with (autovacuum_enabled = off, toast.autovacuum_enabled = off)",
)
FEED = Table("feed", key=_uuid_floor, moment=_uuid_moment)
TABLES = {table.name: table for table in (CHUNKS, FEED)}


async def all_leaves(connection: Tx) -> list[Leaf]:
    """Every leaf and leftover, without sizes and contents.  Waits for nobody's lock."""
    return [_leaf(row) for row in await connection.fetch(queries.leaves)]


def _leaf(row: Row) -> Leaf:
    table = TABLES[row["table_name"]]
    span = _span_of(table, row["bounds"]) if row["bounds"] else None
    return Leaf(table.name, row["name"], LeafState(row["state"]), bytes=0, span=span)


async def spans_of(connection: Tx, table: Table) -> list[Span]:
    """The stretches of time that have a leaf."""
    found = await all_leaves(connection)
    return [leaf.span for leaf in found if leaf.table == table.name and leaf.span]


def lead_seconds(found: Sequence[Leaf], *, now: datetime) -> dict[str, float]:
    """How far ahead of the clock each partitioned table has leaves."""
    lead = dict.fromkeys(TABLES, 0.0)
    for leaf in found:
        if leaf.span:
            lead[leaf.table] = max(lead[leaf.table], (leaf.span.end - now).total_seconds())
    return lead


def _span_of(table: Table, bounds: str) -> Span:
    """The stretch of time in a leaf's bounds as Postgres prints them."""
    found = _BOUNDS.search(bounds)
    assert found is not None  # noqa: S101 - we have made no other leaves
    return Span(table.moment(found["start"]), table.moment(found["end"]))


async def create_ahead(
    db: Database, table: Table, *, now: datetime, width: timedelta, lead: timedelta
) -> list[Span]:
    """Create the leaves that the lead asks for; servers that do it at once take turns."""
    async with db.transaction() as tx:
        await tx.execute(queries.take_turns, table.name)
        await tx.execute(queries.give_up_early)
        wanted = rules.missing(await spans_of(tx, table), now=now, width=width, lead=lead)
        for span in wanted:
            await create(tx, table, span)
    return wanted


async def create(tx: Tx, table: Table, span: Span) -> None:
    """Build a leaf apart and attach it."""
    parent = sql.quoted(table.name)
    leaf = sql.quoted(f"{table.name}_{span.start:%Y%m%d_%H%M%S}")
    await tx.execute(f"create table {leaf} (like {parent} including all) {table.options}")
    await tx.execute(
        f"alter table {parent} attach partition {leaf} "
        f"for values from ('{table.key(span.start)}') to ('{table.key(span.end)}')"
    )
