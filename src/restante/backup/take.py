"""
Takes a backup of a database that is in use.

Everything is read in one snapshot.  All tables are locked first, in the weakest mode: a partition
that is truncated or dropped between the snapshot and the lock would be read as empty.  pg_dump
reads in the same snapshot; the bytes of files are copied beside it, in binary, because pg_dump
would write each byte as two characters.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from restante import __version__
from restante.backup import archive, programs, rules
from restante.backup.archive import Pieces, Writer
from restante.backup.destination import Destination
from restante.backup.rules import About
from restante.database import driver_errors, migrate, sql
from restante.database.pool import SCHEMA, Connection, Row, dedicated
from restante.database.sessions import Session
from restante.errors import BackupFailed, DatabaseRefused, TableBusy

queries = sql.load("restante.backup")

# A large backup to a slow disk; the snapshot must not end before.
_LONGEST_SECONDS = 7 * 86_400
_LOCK_TRIES = 5

Progress = Callable[[int, int], None]  # bytes read so far, and about how many there are


@dataclass(frozen=True, slots=True)
class Taken:
    """What was written."""

    about: About
    bytes: int


async def take(
    dsn: str,
    destination: Destination,
    *,
    bin_dir: Path,
    admin_token: str | None,
    on_progress: Progress,
) -> Taken:
    """Write a backup of the database as it is now."""
    async with _snapshot(dsn) as (session, snapshot):
        about = await _about(session, admin_token)
        writer = Writer(destination.write, taken_at=about.taken_at)
        writer.about(about)
        database_bytes = await session.fetchval(queries.database_bytes)
        meter = Meter(on_progress, database_bytes + about.file_bytes)
        database = writer.part(archive.DATABASE)
        await programs.read_from(_pg_dump(bin_dir, dsn, snapshot), meter.counting(database))
        database.close()
        meter.at_least(database_bytes)
        await _copy_chunks(session, writer, meter)
        writer.end()
    return Taken(about, writer.bytes)


class Meter:
    """Counts what goes through it."""

    def __init__(self, on_progress: Progress, total: int) -> None:
        self._on_progress = on_progress
        self._total = total
        self._done = 0

    def counting(self, pieces: Pieces) -> Callable[[bytes], None]:
        def write(data: bytes) -> None:
            pieces.write(data)
            self.at_least(self._done + len(data))

        return write

    def at_least(self, done: int) -> None:
        self._done = max(self._done, done)
        self._on_progress(min(self._done, self._total), self._total)


@asynccontextmanager
async def _snapshot(dsn: str) -> AsyncIterator[tuple[Session, str]]:
    """A transaction that has locked all tables and then taken a snapshot for others to use."""
    async with dedicated(dsn, statement_timeout_seconds=_LONGEST_SECONDS) as session:
        await session.execute(queries.limit_lock_waits)
        await _lock_tables(session)
        yield session, await session.fetchval(queries.export_snapshot)


async def _lock_tables(session: Session) -> None:
    """Begin a transaction with all tables locked; again, if one goes before it is locked."""
    for attempt in range(1, _LOCK_TRIES + 1):
        tables = await session.fetch(queries.tables)
        await session.execute(queries.begin)
        try:
            await _lock(session, tables)
        except (TableBusy, DatabaseRefused) as error:
            await session.execute(queries.rollback)
            if attempt == _LOCK_TRIES:
                raise BackupFailed(
                    f"Not all tables could be locked for reading. {error} Try again when "
                    "migrations and the like have ended."
                ) from error
        else:
            return


async def _lock(connection: Connection, tables: Sequence[Row]) -> None:
    """Without a query before it: the snapshot must be younger than the locks."""
    names = [
        f"{sql.quoted(table['schema_name'])}.{sql.quoted(table['table_name'])}" for table in tables
    ]
    if not names:
        return
    with driver_errors.refusal_named(), driver_errors.translated():
        await connection.execute(f"lock table {', '.join(names)} in access share mode")


async def _about(connection: Connection, admin_token: str | None) -> About:
    state = await migrate.schema_state(connection)
    if not state.applied:
        raise BackupFailed("There is nothing to back up: no server has run on this database yet.")
    counts = await connection.fetchrow(queries.counts)
    assert counts is not None  # noqa: S101 - an aggregate has a row
    return About(
        format=rules.FORMAT,
        restante=__version__,
        postgres=connection.get_server_version().major,
        migrations=sorted(state.applied.values(), key=lambda record: record.number),
        oldest_code=state.oldest_code,
        roles=[row["rolname"] for row in await connection.fetch(queries.other_roles)],
        admin_token=admin_token,
        **counts,
    )


def _pg_dump(bin_dir: Path, dsn: str, snapshot: str) -> list[str | Path]:
    return [
        programs.program(bin_dir, "pg_dump"),
        "--format=custom",
        "--compress=1",
        "--no-password",
        f"--snapshot={snapshot}",
        "--lock-wait-timeout=10s",
        f"--exclude-table-data={SCHEMA}.chunks*",
        f"--dbname={dsn}",
    ]


async def _copy_chunks(session: Session, writer: Writer, meter: Meter) -> None:
    files = writer.part(archive.FILES)
    write = meter.counting(files)

    async def take_in(data: bytes) -> None:
        write(data)

    await session.copy_from_query(queries.chunks_of_uploads, output=take_in, format="binary")
    files.close()
