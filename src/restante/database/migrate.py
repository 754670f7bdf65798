"""
Applies the files in `migrations/`, in order, each exactly once.

One process does it at a time, under an advisory lock on a connection of its own; the others wait
and then find nothing left to do.  `rules` decides what is due and which release may run.
"""

import asyncio
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.resources import files

import asyncpg

from restante.database import locks, rules, sessions, sql
from restante.database.pool import SCHEMA, Connection, dedicated, reason
from restante.database.rules import BOTH_PHASES, Migration, Phase, Record, SchemaState
from restante.errors import MigrationFailed

queries = sql.load("restante.database")

_LOCK_WAIT_SECONDS = 120
_STATEMENT_SECONDS = 3600
_STATUS_SECONDS = 10
_LOCK_TRIES = 20


def shipped() -> list[Migration]:
    """The migrations of this release."""
    folder = files("restante.database").joinpath("migrations")
    found = [
        rules.parse(f.name, f.read_text()) for f in folder.iterdir() if f.name.endswith(".sql")
    ]
    return sorted(found, key=lambda migration: migration.number)


async def schema_state(connection: Connection) -> SchemaState:
    """What the database has recorded; an empty database has recorded nothing."""
    if not await connection.fetchval(queries.is_prepared):
        return rules.EMPTY
    rows = await connection.fetch(queries.applied)
    return SchemaState(
        applied={row["number"]: Record(**row) for row in rows},
        oldest_code=await connection.fetchval(queries.oldest_code),
    )


async def apply(
    dsn: str, migrations: Sequence[Migration], *, phases: Collection[Phase]
) -> list[Migration]:
    """
    Bring the database up to date and return what was run now.

    Raises CodeTooOld if a newer release has left this one behind, PoolerUnusable, and
    MigrationFailed if a file fails; what came before it stays applied, and the next try goes on
    from there.
    """
    await sessions.is_pooled(dsn)
    async with (
        dedicated(dsn, statement_timeout_seconds=_STATEMENT_SECONDS) as connection,
        locks.held(connection, "migrations", wait_seconds=_LOCK_WAIT_SECONDS),
    ):
        await _prepare(connection)
        found = await schema_state(connection)
        rules.check_compatible(migrations, found)
        todo = rules.due(migrations, found, phases)
        for migration in todo:
            await _run_with_retries(connection, migration)
        return todo


async def _prepare(connection: Connection) -> None:
    """Create the tables that record migrations; owning the schema is the only right needed."""
    try:
        if not await connection.fetchval(queries.has_schema):
            await connection.execute(queries.create_schema)
        await connection.execute(queries.prepare)
        await _check_schema(connection)
    except asyncpg.InsufficientPrivilegeError as error:
        raise MigrationFailed(
            f"The database user may not create its tables: {reason(error)}. Grant it CREATE on the "
            f"database, or create the schema {SCHEMA} and make that user its owner."
        ) from error


async def _check_schema(connection: Connection) -> None:
    """The files name their tables without a schema; those must not be created in another one."""
    found = await connection.fetchval(queries.current_schema)
    if found != SCHEMA:
        raise MigrationFailed(
            f"New tables would be created in the schema {found}, not in {SCHEMA}: something in "
            "between changes the search_path. Connect to the database without it."
        )


async def _run_with_retries(connection: Connection, migration: Migration) -> None:
    """Run one file; a lock timeout is retried with jitter."""
    for attempt in range(1, _LOCK_TRIES + 1):
        try:
            await _run(connection, migration)
        except asyncpg.LockNotAvailableError as error:
            if attempt == _LOCK_TRIES:
                raise MigrationFailed(
                    f"Migration {migration} could not get its lock in {attempt} tries: "
                    f"{reason(error)}. End the long transaction that holds it."
                ) from error
            await asyncio.sleep(random.uniform(0.2, 0.6))  # noqa: S311 - jitter
        except asyncpg.PostgresError as error:
            raise MigrationFailed(f"Migration {migration} failed: {reason(error)}.") from error
        else:
            return


async def _run(connection: Connection, migration: Migration) -> None:
    if migration.in_transaction:
        async with connection.transaction():
            await connection.execute(migration.sql)
            await _record(connection, migration)
        return
    await _drop_invalid_indexes(connection, migration)
    await connection.execute(migration.sql)
    async with connection.transaction():
        await _record(connection, migration)


async def _record(connection: Connection, migration: Migration) -> None:
    await connection.execute(queries.record, migration.number, migration.name, migration.checksum)
    if migration.oldest_code is not None:
        await connection.execute(queries.raise_oldest_code, migration.oldest_code)


async def _drop_invalid_indexes(connection: Connection, migration: Migration) -> None:
    for row in await connection.fetch(queries.invalid_indexes):
        if row["name"] in migration.sql:
            await connection.execute(f"drop index concurrently {sql.quoted(row['name'])}")


@dataclass(frozen=True, slots=True)
class MigrationStatus:
    """One migration and whether it has run."""

    migration: str
    state: str


async def run(dsn: str, *, pre_only: bool) -> list[MigrationStatus]:
    """Run what is due; returns what was run."""
    phases = {Phase.PRE} if pre_only else BOTH_PHASES
    ran = await apply(dsn, shipped(), phases=phases)
    return [MigrationStatus(str(migration), "ran now") for migration in ran]


async def status(dsn: str) -> list[MigrationStatus]:
    """Every migration that this release or the database knows.  Reads only."""
    async with dedicated(dsn, statement_timeout_seconds=_STATUS_SECONDS) as connection:
        return statuses(shipped(), await schema_state(connection))


def statuses(migrations: Sequence[Migration], found: SchemaState) -> list[MigrationStatus]:
    """The state of each migration in words, in order of the numbers."""
    known = {m.number: MigrationStatus(str(m), _state(m, found)) for m in migrations}
    for number, record in found.applied.items():
        unknown = MigrationStatus(f"{number:04} {record.name}", "ran, by a newer release")
        known.setdefault(number, unknown)
    return [known[number] for number in sorted(known)]


def _state(migration: Migration, found: SchemaState) -> str:
    if migration.number in found.applied:
        return "ran"
    if rules.due([migration], found, {Phase.PRE}):
        return "pending: `restante serve` or `restante migrate` runs it"
    return "pending: run `restante migrate` after the older release has stopped"
