"""
Starts and ends the capture of a table's changes.

Each step is one transaction that locks the table against writers, so that every change is either
before it or after it.  Readers are blocked by `untrack` alone, for a moment.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from restante.database.pool import Connection, Database
from restante.errors import BadRequest, TableBusy, TableUntrackable
from restante.oplog import tables
from restante.oplog.tables import TrackedTable
from restante.oplog.tracking import clock, leftovers, own_limits, relations, trackable, triggers
from restante.oplog.tracking.own_limits import OwnLimits
from restante.oplog.tracking.trackable import Facts
from restante.text import printable

_MAX_NAME = 255
_REMOVAL_TRIES = 7
_REMOVAL_PAUSE_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Wanted:
    """How an operator wants a table to be tracked."""

    table: str  # as in SQL
    name: str | None = None  # what peers call it
    key_map: Mapping[str, str] = field(default_factory=dict[str, str])  # name in JSON: column
    forced: bool = False  # although its keys come from a sequence, or its owner is another role
    limits: OwnLimits = field(default_factory=OwnLimits)


@dataclass(frozen=True, slots=True)
class Started:
    """A table that is tracked from now on."""

    table: TrackedTable
    warnings: Sequence[str]


async def track(db: Database, wanted: Wanted, *, host: str | None, now: datetime) -> Started:
    """
    Log every change of a table from now on.

    Records that it has already reach peers by a snapshot, and those of peers that we follow come
    the same way.  `host` is the name of this node; None
    keeps the one it has.  Raises TableUntrackable with the reason and the way out, TableNotTracked
    if there is no such table, and TableBusy if it cannot be locked.
    """
    async with db.transaction() as tx:
        schema, name = await relations.parsed(tx, wanted.table)
        facts = await relations.facts_named(tx, schema, name)
        _check(facts, forced=wanted.forced)
        await relations.lock(tx, facts.relation)
        facts = await relations.facts_named(tx, schema, name)
        _check(facts, forced=wanted.forced)
        if await relations.is_tracked(tx, facts):
            raise TableUntrackable(f"{printable(facts.shown)} is tracked already.")
        wire_name = await _free_name(tx, facts, wanted)
        host = await tables.identify(tx, host)
        await clock.restart_if_unused(tx)
        width = await own_limits.width(tx, wanted.limits)
        table_id = await relations.add(
            tx, facts, wire_name, dict(wanted.key_map), width=width, now=now
        )
        await own_limits.store(tx, table_id, wanted.limits)
        await relations.install(tx, table_id, facts)
        has_records = await relations.is_populated(tx, facts)
        await relations.mark_now(tx, table_id, host, has_records=has_records)
        table = await tables.find(tx, wire_name)
        assert table is not None  # noqa: S101 - it was added above
        _check_key_map(table)
        await relations.want_snapshots(tx, table, now=now)
    return Started(table, trackable.warnings(facts))


async def set_limits(db: Database, text: str, limits: OwnLimits) -> TrackedTable:
    """Change how long ops of a tracked table are kept; raises TableNotTracked."""
    async with db.transaction() as tx:
        table = await relations.find(tx, text)
        await own_limits.store(tx, table.id, limits)
    return table


async def untrack(db: Database, text: str) -> TrackedTable:
    """
    Log no more changes of a table, and drop its log; the table itself stays as it is.

    If a transaction stays open that has used the op log, a later pass drops the log.
    """
    table = await _uncaptured(db, text)
    with suppress(TableBusy):
        await leftovers.drop(db)
    return table


async def _uncaptured(db: Database, text: str) -> TrackedTable:
    """End the capture.  Tried often and never for long, so that no one waits long behind us."""
    for _ in range(_REMOVAL_TRIES):
        with suppress(TableBusy):
            return await _uncaptured_if_free(db, text)
        await asyncio.sleep(_REMOVAL_PAUSE_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
    return await _uncaptured_if_free(db, text)


async def _uncaptured_if_free(db: Database, text: str) -> TrackedTable:
    async with db.transaction() as tx:
        table = await relations.find(tx, text)
        await relations.hold(tx, table)
        if facts := await relations.facts_of(tx, table):
            await relations.lock_for_removal(tx, facts.relation)
            for part in await relations.parts(tx, facts.oid, table.id):
                await relations.lock_for_removal(tx, part.relation)
                await relations.execute(tx, triggers.removal(part.relation))
        await relations.remove(tx, table)
    return table


async def pause(db: Database, text: str, *, now: datetime) -> TrackedTable:
    """
    Log no changes of a table until `resume`, for a bulk load or a TRUNCATE.

    Nothing happens to one that is paused.
    """
    async with db.transaction() as tx:
        table = await relations.find(tx, text)
        facts = await _existing(tx, table)
        await relations.lock(tx, facts.relation)
        for part in await relations.parts(tx, facts.oid, table.id):
            if part.triggers == len(triggers.NAMES):
                await tx.execute(triggers.switch(part.relation, "disable"))
        await relations.set_state(tx, table, "paused", now=now)
    return table


async def resume(db: Database, text: str, *, host: str | None, now: datetime) -> TrackedTable:
    """
    Log changes again.

    What was logged before is dropped and its disk space is free, because records may have changed
    under those versions.  Peers take a snapshot.  Raises BadRequest if the table is not paused.
    """
    async with db.transaction() as tx:
        table = await relations.find(tx, text)
        await relations.lock(tx, (await _existing(tx, table)).relation)
        table, facts = await relations.find(tx, text), await _existing(tx, table)
        if table.state != "paused":
            raise BadRequest(f"{printable(table.name)} is not paused.")
        _check(facts, forced=True)
        await relations.install(tx, table.id, facts)
        await relations.empty_log(tx, table)
        host = await tables.identify(tx, host)
        await relations.mark_now(tx, table.id, host, has_records=True)
        await relations.begin_again(tx, table, now=now)
        await relations.set_state(tx, table, "tracked", now=now)
    return table


def _check(facts: Facts, *, forced: bool) -> None:
    if reason := trackable.refusal(facts, forced=forced):
        raise TableUntrackable(printable(reason))


async def _existing(connection: Connection, table: TrackedTable) -> Facts:
    facts = await relations.facts_of(connection, table)
    if facts is None:
        raise TableUntrackable(printable(trackable.gone(table)))
    return facts


async def _free_name(connection: Connection, facts: Facts, wanted: Wanted) -> str:
    name = wanted.name
    if name is None:
        name = facts.table_name if facts.schema_name == "public" else facts.shown
    if not name or len(name) > _MAX_NAME or not name.isprintable():
        raise BadRequest(f"A name has 1 to {_MAX_NAME} printable characters; choose one with --as.")
    if await tables.find(connection, name):
        raise TableUntrackable(
            f"Another table is tracked as {printable(name)}; choose another name with --as."
        )
    return name


def _check_key_map(table: TrackedTable) -> None:
    """Each name in JSON stands for a column of its own."""
    columns = {column.name for column in table.columns}
    unknown = sorted({*table.key_map.values()} - columns)
    if unknown:
        raise BadRequest(
            f"There is no column {printable(unknown[0])} in {printable(table.table_name)}; "
            "a key map is written name_in_json=column."
        )
    if len({*table.key_map.values()}) < len(table.key_map):
        raise BadRequest("Two names of the key map stand for the same column.")
