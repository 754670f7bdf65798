"""
Applies the files in `migrations/`, in order, each exactly once.

One process does it at a time, under an advisory lock on a connection of its own; the others wait
and then find nothing left to do.  What is due, and who may run, is decided in `core.migrations`.
"""

import asyncio
import random
from collections.abc import Collection, Sequence
from importlib.resources import files

import asyncpg

from restante.database import locks, rules, sql
from restante.database.pool import SCHEMA, Tx, dedicated, reason
from restante.database.rules import Migration, Phase, Record, Standing
from restante.errors import MigrationFailed

queries = sql.load("restante.database")

_LOCK_WAIT_SECONDS = 120
_STATEMENT_SECONDS = 3600
_LOCK_TRIES = 20


def shipped() -> list[Migration]:
    """The migrations of this release."""
    folder = files("restante.database").joinpath("migrations")
    found = [
        rules.parse(f.name, f.read_text()) for f in folder.iterdir() if f.name.endswith(".sql")
    ]
    return sorted(found, key=lambda migration: migration.number)


async def standing(connection: Tx) -> Standing:
    """What the database has recorded; an untouched database has recorded nothing."""
    if not await connection.fetchval(queries.is_prepared):
        return rules.EMPTY
    rows = await connection.fetch(queries.applied)
    return Standing(
        applied={row["number"]: Record(**row) for row in rows},
        oldest_code=await connection.fetchval(queries.oldest_code),
    )


async def apply(
    dsn: str, migrations: Sequence[Migration], *, phases: Collection[Phase]
) -> list[Migration]:
    """
    Bring the database up to date and return what was run now.

    Raises CodeTooOld if a newer release has left this one behind, MigrationFailed if a file fails;
    what came before it stays applied, and the next try goes on from there.
    """
    async with (
        dedicated(dsn, statement_timeout_seconds=_STATEMENT_SECONDS) as connection,
        locks.held(connection, "migrations", wait_seconds=_LOCK_WAIT_SECONDS),
    ):
        await _prepare(connection)
        found = await standing(connection)
        rules.check_compatible(migrations, found)
        todo = rules.due(migrations, found, phases)
        for migration in todo:
            await _run_patiently(connection, migration)
        return todo


async def _prepare(connection: Tx) -> None:
    """Make what the migrations remember themselves in; who owns the schema needs no other right."""
    try:
        if not await connection.fetchval(queries.has_schema):
            await connection.execute(queries.create_schema)
        await connection.execute(queries.prepare)
    except asyncpg.InsufficientPrivilegeError as error:
        raise MigrationFailed(
            f"The database user may not make its tables: {reason(error)}. Let it create a schema, "
            f"or make the schema {SCHEMA} and let it own that."
        ) from error


async def _run_patiently(connection: Tx, migration: Migration) -> None:
    """Run one file; a table that is busy is left alone for a moment and tried again."""
    for attempt in range(1, _LOCK_TRIES + 1):
        try:
            await _run(connection, migration)
        except asyncpg.LockNotAvailableError as error:
            if attempt == _LOCK_TRIES:
                raise MigrationFailed(
                    f"Migration {migration} could not get its lock in {attempt} tries: "
                    f"{reason(error)}. End the long transaction that is in its way."
                ) from error
            await asyncio.sleep(random.uniform(0.2, 0.6))  # noqa: S311 - jitter
        except asyncpg.PostgresError as error:
            raise MigrationFailed(f"Migration {migration} failed: {reason(error)}.") from error
        else:
            return


async def _run(connection: Tx, migration: Migration) -> None:
    if migration.in_transaction:
        async with connection.transaction():
            await connection.execute(migration.sql)
            await _record(connection, migration)
        return
    await _drop_invalid_indexes(connection, migration)
    await connection.execute(migration.sql)
    async with connection.transaction():
        await _record(connection, migration)


async def _record(connection: Tx, migration: Migration) -> None:
    await connection.execute(queries.record, migration.number, migration.name, migration.checksum)
    if migration.oldest_code is not None:
        await connection.execute(queries.raise_oldest_code, migration.oldest_code)


async def _drop_invalid_indexes(connection: Tx, migration: Migration) -> None:
    for row in await connection.fetch(queries.invalid_indexes):
        if row["name"] in migration.sql:
            await connection.execute(f"drop index concurrently {sql.quoted(row['name'])}")
