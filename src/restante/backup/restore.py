"""
Restores a backup into a data directory that has no database yet: all of it, or nothing.

A new cluster is filled under another name, in the place of the later one.  It gets its own name
when everything was loaded and checked.  What a killed restore leaves is removed by the next start.
"""

import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from restante.backup import archive, programs, rules
from restante.backup.archive import Reader
from restante.backup.rules import About
from restante.database import driver_errors, migrate, sql
from restante.database.pool import SCHEMA, Connection, dedicated
from restante.database.sessions import Session
from restante.errors import BackupFailed, BackupUnusable
from restante.postgres import DataDirectory, EmbeddedPostgres, cluster, placement
from restante.postgres.account import choose_account
from restante.postgres.binaries import Binaries, choose_binaries
from restante.server import admin_token

queries = sql.load("restante.backup")

_LONGEST_SECONDS = 7 * 86_400
CHUNK_COLUMNS = ("bucket", "workspace_id", "file_id", "seq", "bytes")  # as the backup has them


def check(reader: Reader) -> About:
    """Read a backup to its end and restore nothing; raises BackupUnusable."""
    about = reader.about()
    for part in (archive.DATABASE, archive.FILES):
        for _ in reader.part(part):
            pass
    reader.end()
    return about


async def restore(
    reader: Reader,
    directory: DataDirectory,
    *,
    bin_dir: Path | None = None,
    account: str | None = None,
) -> About:
    """Create the database of this directory from a backup; raises BackupUnusable, BackupFailed."""
    with directory.claim():
        _check_empty(directory)
        binaries = choose_binaries(bin_dir, major=None)
        about = reader.about()
        rules.check_restorable(about, migrate.shipped(), postgres=binaries.major)
        _check_token(directory, about)
        home = placement.new_home(directory, choose_account(account, owner=None))
        with _draft_in(home) as draft:
            async with _postgres(draft, bin_dir=bin_dir, account=account) as dsn:
                await _load(reader, about, dsn, binaries)
            if about.admin_token:
                admin_token.put(directory.path, about.admin_token)
            cluster.publish(draft.path / placement.CLUSTER, home)
    return about


def _check_empty(directory: DataDirectory) -> None:
    home = placement.existing_home(directory)
    if home:
        raise BackupFailed(
            f"{directory.path} has a database already, and a restore replaces nothing. Choose an "
            "empty --data-dir; or stop the server, move that directory away, and try again."
        )


def _check_token(directory: DataDirectory, about: About) -> None:
    """A restore that was killed at the right moment has left the same token."""
    file = directory.path / admin_token.FILE_NAME
    if about.admin_token and file.exists() and file.read_text().strip() != about.admin_token:
        raise BackupFailed(
            f"{file} is not the admin token of the backup. Remove it, and try again."
        )


@contextmanager
def _draft_in(home: Path) -> Iterator[DataDirectory]:
    """A directory for the new cluster until it is complete; the next start would remove it too."""
    cluster.remove_drafts(home)
    draft = DataDirectory.open(home / f"{cluster.DRAFT}{secrets.token_hex(4)}")
    try:
        yield draft
    finally:
        shutil.rmtree(draft.path, ignore_errors=True)


@asynccontextmanager
async def _postgres(
    draft: DataDirectory, *, bin_dir: Path | None, account: str | None
) -> AsyncIterator[str]:
    """A new, empty cluster that runs meanwhile; yields its DSN."""
    postgres = EmbeddedPostgres(draft, bin_dir=bin_dir, account=account)
    try:
        await postgres.start()
        yield postgres.dsn
    finally:
        await postgres.stop()
    shutil.rmtree(postgres.sockets, ignore_errors=True)  # they may be outside of the draft


async def _load(reader: Reader, about: About, dsn: str, binaries: Binaries) -> None:
    """Fill the database, and compare it with what the backup says."""
    with driver_errors.refusal_named():
        async with dedicated(dsn, statement_timeout_seconds=_LONGEST_SECONDS) as connection:
            for role in about.roles:
                await connection.execute(f"create role {sql.quoted(role)}")
            await programs.write_to(_pg_restore(binaries, dsn), reader.part(archive.DATABASE))
            await _load_chunks(connection, reader)
            reader.end()
            await _check_complete(connection, about)
            await connection.execute(queries.analyze)
            await connection.execute(queries.checkpoint)


def _pg_restore(binaries: Binaries, dsn: str) -> list[str | Path]:
    restore = programs.program(binaries.bin_dir, "pg_restore")
    return [restore, "--exit-on-error", "--no-password", f"--dbname={dsn}"]


async def _load_chunks(session: Session, reader: Reader) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in reader.part(archive.FILES):
            yield piece

    await session.execute(queries.load_without_triggers)
    await session.copy_to_table(
        "chunks", schema_name=SCHEMA, columns=CHUNK_COLUMNS, source=pieces(), format="binary"
    )


async def _check_complete(connection: Connection, about: About) -> None:
    counts = await connection.fetchrow(queries.counts)
    incomplete = await connection.fetchval(queries.incomplete_uploads)
    found = counts and (counts["files"], counts["file_bytes"])
    if incomplete or found != (about.files, about.file_bytes):
        raise BackupUnusable(
            f"The backup says that it has {about.files} files with {about.file_bytes} bytes, and "
            f"they are not all there: {incomplete} of those that were loaded are not complete."
        )
