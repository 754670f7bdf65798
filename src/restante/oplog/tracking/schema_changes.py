"""
Follows changes of the schema of tracked tables: new partitions, columns and names.

Until then changes are captured all the same, only more slowly; except what is written directly to a
new partition.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from restante.database.pool import Connection, Database, Tx
from restante.errors import RestanteError
from restante.oplog import tables
from restante.oplog.tables import TrackedTable
from restante.oplog.tracking import leftovers, relations, trackable, triggers
from restante.oplog.tracking.relations import Part
from restante.oplog.tracking.trackable import Facts

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Finding:
    """What was noticed about the capture of a table."""

    table: str
    sentence: str
    is_problem: bool = True  # False: there is nothing to do about it


async def problems(connection: Connection) -> list[Finding]:
    """What the operator must mend; changes nothing."""
    found: list[Finding] = []
    for table in await tables.all_tables(connection):
        facts = await relations.facts_of(connection, table)
        sentence = await _problem(connection, table, facts) if facts else trackable.gone(table)
        if sentence:
            found.append(Finding(table.name, sentence))
    return found


class Watch:
    """Follows changes of the tracked tables, and logs each thing that it finds once."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._known: frozenset[Finding] = frozenset()

    async def look(self) -> None:
        """One pass."""
        found = frozenset(await refresh(self._db))
        for one in found - self._known:
            say = log.warning if one.is_problem else log.info
            say("oplog_table", table=one.table, text=one.sentence)
        self._known = found


async def refresh(db: Database) -> list[Finding]:
    """Follow what has changed; returns what was done, and all problems."""
    async with db.connection() as connection:
        tracked = await tables.all_tables(connection)
    done: list[Finding] = []
    for table in tracked:
        try:
            done += await _refresh(db, table)
        except RestanteError as error:  # such as a lock; the next pass tries again
            done.append(Finding(table.name, str(error)))
    with suppress(RestanteError):
        await leftovers.drop(db)
    async with db.connection() as connection:
        return [*done, *await problems(connection)]


async def _refresh(db: Database, table: TrackedTable) -> list[Finding]:
    async with db.connection() as connection:
        facts = await relations.facts_of(connection, table)
        if facts is None or await _key_problem(connection, table, facts):
            return []
        has_changed = await _has_changed(connection, table, facts)
        stale = await _stale_parts(connection, table, facts)
    done = await _refresh_function(db, table) if has_changed else []
    for part in stale:
        done += await _refresh_part(db, table, facts, part)
    return done


async def _refresh_function(db: Database, table: TrackedTable) -> list[Finding]:
    """Without a lock on the table: a function that was made for other columns is only slower."""
    async with db.transaction() as tx:
        if await relations.hold(tx, table) is None:
            return []
        facts = await relations.facts_of(tx, table)
        if facts is None or await _key_problem(tx, table, facts):
            return []
        await relations.create_function(tx, table.id, facts)
        return _renamed(table, facts)


def _renamed(table: TrackedTable, facts: Facts) -> list[Finding]:
    if (facts.schema_name, facts.table_name) == (table.schema_name, table.table_name):
        return []
    sentence = f"The table is called {facts.shown} now, and stays tracked as {table.name}."
    return [Finding(table.name, sentence, is_problem=False)]


async def _refresh_part(
    db: Database, table: TrackedTable, facts: Facts, part: Part
) -> list[Finding]:
    async with db.transaction() as tx:
        state = await relations.hold(tx, table)
        await relations.lock_if_free(tx, part)
        if state != table.state or part not in await _stale_parts(tx, table, facts):
            return []  # it has changed again
        return [await _refreshed_part(tx, table, part)]


async def _refreshed_part(tx: Tx, table: TrackedTable, part: Part) -> Finding:
    if not part.is_part:
        await relations.execute(tx, triggers.removal(part.relation))
        sentence = (
            f"{part.relation} is no partition of the table any more, and peers still have its "
            "records. Run `restante oplog pause` and `restante oplog resume`: then they take a "
            "snapshot."
        )
        return Finding(table.name, sentence)
    await relations.execute(tx, triggers.install(table.id, part.relation))
    sentence = f"Changes of the partition {part.relation} are captured from now on."
    return Finding(table.name, sentence, is_problem=False)


async def _has_changed(connection: Connection, table: TrackedTable, facts: Facts) -> bool:
    """Whether the triggers were made for other columns or names."""
    known = (table.schema_name, table.table_name, table.key_columns)
    if known != (facts.schema_name, facts.table_name, tuple(facts.key_columns or ())):
        return True
    numbers, shape = await relations.installed(connection, table)
    return (shape, list(numbers)) != (facts.shape, list(facts.key_numbers))


async def _stale_parts(connection: Connection, table: TrackedTable, facts: Facts) -> list[Part]:
    """New partitions without triggers, and those with triggers that are none any more."""
    found = await relations.parts(connection, facts.oid, table.id)
    if not any(part.triggers for part in found):
        return []
    return [
        part
        for part in found
        if not part.is_part or (not part.triggers and table.state == "tracked")
    ]


async def _problem(connection: Connection, table: TrackedTable, facts: Facts) -> str | None:
    if sentence := await _key_problem(connection, table, facts):
        return sentence
    if table.state == "paused":
        return None
    found = await relations.parts(connection, facts.oid, table.id)
    silent = [part.relation for part in found if part.is_part and not part.is_captured]
    if not silent:
        return None
    return (
        f"Triggers of the op log on {_some(silent)} are missing or disabled, so changes may "
        "have been missed. Run `restante oplog pause` and `restante oplog resume`: then peers take "
        "a snapshot."
    )


async def _key_problem(connection: Connection, table: TrackedTable, facts: Facts) -> str | None:
    numbers, _ = await relations.installed(connection, table)
    return trackable.key_problem(table, facts, numbers)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
