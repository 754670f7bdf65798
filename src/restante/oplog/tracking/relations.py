"""
The application's tables as the catalogue describes them, and our triggers on them.

A tracked table is recognised by its triggers, so it is found although it was renamed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from restante.database import partitions, spans, sql
from restante.database.partitions import Partition, PartitionState
from restante.database.pool import SCHEMA, Connection, Tx
from restante.errors import BadRequest, TableNotTracked
from restante.oplog import tables
from restante.oplog.applying import conflicts
from restante.oplog.positions import Position
from restante.oplog.tables import LEAST_LEAD, OPS, TrackedTable
from restante.oplog.tracking import triggers
from restante.oplog.tracking.trackable import Facts
from restante.retention import upkeep
from restante.text import printable

queries = sql.load("restante.oplog.tracking", "relations")

# Who waits for the lock blocks every writer behind it.
_LOCK_TIMEOUT = "3s"
_BACKGROUND_LOCK_TIMEOUT = "50ms"
# Below Postgres's deadlock_timeout: in a deadlock it is we who give up.
_REMOVAL_LOCK_TIMEOUT = "300ms"


@dataclass(frozen=True, slots=True)
class Part:
    """A tracked table or one of its partitions, and our triggers on it."""

    relation: str
    is_part: bool  # False of a partition that was detached
    triggers: int
    enabled: int

    @property
    def is_captured(self) -> bool:
        return self.triggers == self.enabled == len(triggers.NAMES)


async def parsed(connection: Connection, text: str) -> tuple[str, str]:
    """Schema and name of a table as an operator writes it; without a schema it is in `public`."""
    parts = None
    if "\0" not in text:
        parts = await connection.fetchval(queries.parsed_name, text)
    match parts:
        case [name]:
            return "public", name
        case [schema, name]:
            return schema, name
        case _:
            raise BadRequest(
                f"{printable(text)} is not the name of a table, or of a schema and a table. "
                "Quote special names as in SQL."
            )


async def facts_named(connection: Connection, schema: str, name: str) -> Facts:
    """Raises TableNotTracked if there is none of that name."""
    row = await connection.fetchrow(queries.facts, schema, name, None)
    if row is None:
        found = await connection.fetch(queries.schemas_with, name)
        raise TableNotTracked(
            f"There is no table {printable(schema)}.{printable(name)} in the database of "
            f"Restante. {_hint([one['schema_name'] for one in found])}"
        )
    return Facts(**dict(row))


def _hint(schemas: Sequence[str]) -> str:
    """Where else there is a table of that name."""
    if others := [printable(one) for one in schemas if one != SCHEMA]:
        return f"There is one in {', '.join(others)}: write the schema before its name."
    if schemas:
        return (
            f"There is one in the schema {SCHEMA}, which is Restante's own, and where psql as its "
            "user creates tables if no schema is written: keep yours in another, such as public."
        )
    return "Names are read as in SQL: quote capital letters."


async def facts_of(connection: Connection, table: TrackedTable) -> Facts | None:
    """The table that has our triggers, whatever its name is now; else the one of that name."""
    oid = await connection.fetchval(queries.captured_relation, triggers.function_name(table.id))
    row = await connection.fetchrow(
        queries.facts,
        None if oid else table.schema_name,
        None if oid else table.table_name,
        oid,
    )
    return Facts(**dict(row)) if row else None


async def find(connection: Connection, text: str) -> TrackedTable:
    """The tracked table that an operator means: the name that peers use, or the table's own."""
    row = None
    if "\0" not in text:
        row = await connection.fetchrow(queries.name_of, text, None, None)
    if row is None:
        row = await connection.fetchrow(queries.name_of, text, *await parsed(connection, text))
    table = await tables.find(connection, row["name"]) if row else None
    if table is None:
        raise TableNotTracked(
            f"{printable(text)} is not tracked; `restante oplog tables` lists what is."
        )
    return table


async def is_tracked(connection: Connection, facts: Facts) -> bool:
    """Whether it is tracked or paused."""
    return await connection.fetchval(queries.is_tracked, facts.schema_name, facts.table_name)


async def is_populated(connection: Connection, facts: Facts) -> bool:
    """Whether it has records."""
    return await connection.fetchval(f"select exists (table {facts.relation})")


async def lock(tx: Tx, relation: str) -> None:
    """Let no one write to a table, its partitions included; raises TableBusy."""
    await tx.execute(queries.set_lock_timeout, _LOCK_TIMEOUT)
    await tx.execute(f"lock table {relation} in share row exclusive mode")


async def hold(tx: Tx, table: TrackedTable) -> tables.State | None:
    """
    Let no one else begin, end or follow the capture of a table, without waiting for long.

    Whether it is captured now; None if it is not tracked any more.
    """
    await tx.execute(queries.set_lock_timeout, _BACKGROUND_LOCK_TIMEOUT)
    return await tx.fetchval(queries.hold, table.id)


async def lock_if_free(tx: Tx, part: Part) -> None:
    """Lock as its triggers need it, without a wait that writers notice; raises TableBusy."""
    await tx.execute(queries.set_lock_timeout, _BACKGROUND_LOCK_TIMEOUT)
    mode = "share row exclusive" if part.is_part else "access exclusive"
    await tx.execute(f"lock table {part.relation} in {mode} mode")


async def lock_for_removal(tx: Tx, relation: str) -> None:
    """
    Let no one read or write a table, its partitions included; raises TableBusy soon.

    At once in the mode that DROP TRIGGER needs: to ask for more later would be a deadlock.
    """
    await tx.execute(queries.set_lock_timeout, _REMOVAL_LOCK_TIMEOUT)
    await tx.execute(f"lock table {relation} in access exclusive mode")


async def parts(connection: Connection, oid: int, table_id: int) -> list[Part]:
    """The table itself, its partitions, and partitions that it had."""
    rows = await connection.fetch(
        queries.partitions, oid, triggers.function_name(table_id), list(triggers.NAMES)
    )
    return [Part(*row) for row in rows]


async def add(  # noqa: PLR0913 - each argument is one fact, named by its caller
    tx: Tx,
    facts: Facts,
    name: str,
    key_map: dict[str, str],
    *,
    width: timedelta,
    now: datetime,
) -> int:
    """Note a table as tracked, and create its part of the log; its number."""
    table_id = await tx.fetchval(
        queries.add_table,
        name,
        facts.schema_name,
        facts.table_name,
        facts.key_columns,
        facts.key_numbers,
        msgspec.json.encode(key_map).decode(),
        facts.shape,
        now,
    )
    log = sql.quoted(f"ops_{table_id}")
    # Attaching takes no lock that a writer or reader of another table notices.
    await tx.execute(f"create table {log} (like ops including all) partition by range (arrived_at)")
    await tx.execute(f"alter table ops attach partition {log} for values in ({table_id:d})")
    lead = upkeep.lead_of(width, LEAST_LEAD)
    for span in spans.missing([], now=now, width=width, lead=lead):
        await partitions.create(tx, OPS, span, parent=f"ops_{table_id}")
    return table_id


async def install(tx: Tx, table_id: int, facts: Facts) -> None:
    """Create or replace the function and all triggers of a table, and enable them."""
    await create_function(tx, table_id, facts)
    for part in await parts(tx, facts.oid, table_id):
        if part.is_part:
            await execute(tx, triggers.install(table_id, part.relation))


async def create_function(tx: Tx, table_id: int, facts: Facts) -> None:
    """Create or replace the function that the triggers call, for the columns as they are now."""
    await tx.execute(triggers.function(table_id, facts))
    name = triggers.function_name(table_id)
    await tx.execute(f"revoke all on function {name} from public")
    await tx.execute(
        queries.set_shape,
        table_id,
        facts.schema_name,
        facts.table_name,
        facts.key_columns or (),
        facts.key_numbers,
        facts.shape,
    )


async def execute(tx: Tx, statements: Iterable[str]) -> None:
    """Execute one after the other."""
    for statement in statements:
        await tx.execute(statement)


async def mark_now(tx: Tx, table_id: int, host: str, *, has_records: bool) -> None:
    """
    Note that what happened to a table so far may have no op.

    Floor and trimmed mark are put above it; one that is new and empty has its whole history in
    the log, and needs none.
    """
    row = await tx.fetchrow(queries.now)
    assert row is not None  # noqa: S101 - it always has one
    position = str(Position(row["era"], row["xid"], row["ulid"], 0))
    await tx.execute(queries.set_unlogged, table_id, position)
    if has_records:
        await tx.execute(queries.set_marks, table_id, row["ulid"], host, position)


async def want_snapshots(tx: Tx, table: TrackedTable, *, now: datetime) -> None:
    """Take the table from every peer whose log was read without it."""
    await tx.execute(queries.want_snapshots, table.id, table.name, now)


async def installed(connection: Connection, table: TrackedTable) -> tuple[Sequence[int], int]:
    """The columns of the key by number, and the shape, for which the triggers were made."""
    row = await connection.fetchrow(queries.installed, table.id)
    return (row["key_numbers"], row["shape"]) if row else ((), 0)


async def set_state(tx: Tx, table: TrackedTable, state: tables.State, *, now: datetime) -> None:
    """Note whether its changes are captured."""
    await tx.execute(queries.set_state, table.id, state, now)


async def begin_again(tx: Tx, table: TrackedTable, *, now: datetime) -> None:
    """
    What waits to be applied to a table and is older than its floor goes to the conflict log.

    The peers have it, and believe that we have read it: the table is taken from them again.  A
    snapshot that is being taken begins again.  Noted deletes stay: whoever looks at them waits for
    our locks, so we must not wait for theirs, and without a log they do nothing.
    """
    reported = await tx.fetchval(
        queries.report_older_parked, table.id, now, conflicts.MAX_DATA_BYTES
    )
    await tx.execute(queries.restart_snapshots, table.id)
    if reported:
        await want_snapshots(tx, table, now=now)


async def empty_log(tx: Tx, table: TrackedTable) -> None:
    """Drop everything that was logged, and give its disk space back."""
    await tx.execute(f"truncate {sql.quoted(table.log)}")


async def leftover_logs(connection: Connection) -> list[Partition]:
    """The logs of tables that are not tracked any more."""
    return [
        Partition(OPS.name, row["name"], PartitionState(row["state"]), None, OPS.name)
        for row in await connection.fetch(queries.leftover_logs)
    ]


async def remove(tx: Tx, table: TrackedTable) -> None:
    """Forget a table, but not its log; its triggers are gone already."""
    await tx.execute(f"drop function if exists {triggers.function_name(table.id)}")
    await tx.execute(queries.forget_parked, table.name)
    await tx.execute(queries.forget_unsettled, table.id)
    await tx.execute(queries.forget_snapshots, table.id)
    await tx.execute(queries.remove_table, table.id)
