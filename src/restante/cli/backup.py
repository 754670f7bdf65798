"""`restante backup` and `restante restore`: the embedded database as one file."""

import asyncio
import os
import signal
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter

from restante.cli.flags import DATABASE, flags_for, settings_from
from restante.cli.output import Console, shown_bytes
from restante.cli.words import STANDARD_INPUT
from restante.errors import BackupFailed
from restante.settings import Settings
from restante.text import MAX_QUOTED, number_of_files, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restante.backup.archive import Reader
    from restante.backup.rules import About
    from restante.backup.take import Taken

    BackupFlags = Any
    RestoreFlags = Any
else:
    BackupFlags = flags_for("BackupFlags", DATABASE)
    RestoreFlags = flags_for("RestoreFlags", DATABASE)

_GUIDE = 'docs/operations.md, "Backups"'


def register(app: App, group: Group) -> None:
    """Add the commands."""
    app.command(backup, group=group)
    app.command(restore, group=group)


def _no_flag(_type: object, file: Path) -> None:
    """A mistyped flag must not become the name of a file."""
    if str(file) != STANDARD_INPUT and str(file).startswith("-"):
        raise ValueError(f"{file} is not a flag of this command; a file of that name is ./{file}")


File = Annotated[Path, Parameter(allow_leading_hyphen=True, validator=_no_flag)]


def backup(
    file: File,
    /,
    *,
    overwrite: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    flags: Annotated[BackupFlags | None, Parameter(name="*")] = None,
) -> None:
    """
    Write the embedded database into one file, while the server runs or not.

    The file has everything as it is at one moment: workspaces, feeds, files that wait, the op log,
    tracked tables, and the admin token. Keep it as safe as the data directory.

    Example: restante backup /mnt/backups/restante-monday.tar

    Parameters
    ----------
    file
        The file to write; - for standard output. It appears when it is complete.
    overwrite
        Replace the file if it exists.
    """
    settings = settings_from(flags)
    if settings.database_url:
        raise BackupFailed(
            "The database is your own Postgres (RESTANTE_DATABASE_URL), and its own tools make "
            "the better backup: `pg_dump --format=custom --file=FILE URL`, with a pg_dump that is "
            f"not older than the server. For point-in-time recovery see {_GUIDE}."
        )
    started = time.monotonic()
    taken = asyncio.run(_take(file, settings, overwrite=overwrite))
    seconds = time.monotonic() - started
    report = sys.stderr if str(file) == STANDARD_INPUT else sys.stdout
    print(f"Backed up {_contents(taken.about)} in {seconds:.1f} s.", file=report)
    print(f"The backup has {shown_bytes(taken.bytes)}.", file=report)


async def _take(file: Path, settings: Settings, *, overwrite: bool) -> "Taken":
    from restante.backup import destination, source
    from restante.backup.take import take
    from restante.server import parts

    _begin(settings)
    directory = parts.data_directory(settings)
    async with source.opened(directory, **_postgres(settings)) as found:
        reserve = found.reserve(settings.disk_reserve_bytes)
        with (
            destination.opened(
                file, overwrite=overwrite, cluster=found.cluster, reserve=reserve
            ) as opened,
            Console(stderr=True).status("backing up") as line,
        ):
            return await take(
                found.dsn,
                opened,
                bin_dir=found.bin_dir,
                admin_token=found.token,
                on_progress=lambda done, total: line.update(
                    f"backing up: {shown_bytes(done)} of about {shown_bytes(total)}"
                ),
            )


def restore(
    file: File,
    /,
    *,
    check: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    flags: Annotated[RestoreFlags | None, Parameter(name="*")] = None,
) -> None:
    """
    Create the database of an empty data directory from a backup.

    Everything is restored or nothing: a restore that fails or is killed leaves no database. It
    replaces none either; stop the server and move its data directory away first.

    Example: restante restore /mnt/backups/restante-monday.tar --data-dir ./restored

    Parameters
    ----------
    file
        What `restante backup` has written; - for standard input.
    check
        Only read the file, and say whether it is complete and undamaged.
    """
    settings = settings_from(flags)
    started = time.monotonic()
    if check:
        about = _checked(file)
        print(f"The backup is complete: {_contents(about)}.\n{_origin(about)}")
        return
    if settings.database_url:
        raise BackupFailed(
            "The database is your own Postgres (RESTANTE_DATABASE_URL): restore a dump with "
            "`pg_restore --exit-on-error --dbname=URL FILE`, into an empty database. To use a "
            f"backup of an embedded database there, see {_GUIDE}."
        )
    directory, about = asyncio.run(_restore(file, settings))
    print(f"Restored {_contents(about)} in {time.monotonic() - started:.1f} s.\n{_origin(about)}")
    print(f"Start it: restante serve --data-dir {directory}")


async def _restore(file: Path, settings: Settings) -> "tuple[Path, About]":
    from restante.backup.restore import restore
    from restante.server import parts

    _begin(settings)
    with _opened(file, "restoring") as reader:
        directory = parts.data_directory(settings)
        return directory.path, await restore(reader, directory, **_postgres(settings))


def _checked(file: Path) -> "About":
    from restante.backup.restore import check

    with _opened(file, "checking") as reader:
        return check(reader)


@contextmanager
def _opened(file: Path, doing: str) -> "Iterator[Reader]":
    """The backup in this file, or on standard input; a live line says how much was read."""
    from restante.backup.archive import Reader

    with ExitStack() as stack:
        stream, size = _stream(file, stack)
        of = f" of {shown_bytes(size)}" if size else ""
        line = stack.enter_context(Console(stderr=True).status(doing))
        yield Reader(stream, on_read=lambda done: line.update(f"{doing}: {shown_bytes(done)}{of}"))


def _stream(file: Path, stack: ExitStack) -> tuple[IO[bytes], int | None]:
    if str(file) == STANDARD_INPUT:
        if sys.stdin.isatty():
            raise BackupFailed("There is no backup on standard input: name its file.")
        return sys.stdin.buffer, None
    try:
        stream = stack.enter_context(file.expanduser().open("rb"))
        return stream, os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise BackupFailed(f"{file} cannot be read: {error.strerror}.") from error


def _begin(settings: Settings) -> None:
    """Log errors only; end on SIGTERM and SIGHUP as on Ctrl-C, so that no half file is left."""
    from restante.server import logs

    logs.configure(settings.log_format, "error")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.getsignal(signal.SIGINT))


def _postgres(settings: Settings) -> dict[str, Any]:
    bin_dir = Path(settings.postgres_bin) if settings.postgres_bin else None
    return {"bin_dir": bin_dir, "account": settings.postgres_account}


def _contents(about: "About") -> str:
    workspaces = "1 workspace" if about.workspaces == 1 else f"{about.workspaces} workspaces"
    return f"{workspaces} and {number_of_files(about.files)} ({shown_bytes(about.file_bytes)})"


def _origin(about: "About") -> str:
    release = printable(about.restante, max_length=MAX_QUOTED)
    return f"It was taken {about.taken_at:%Y-%m-%d %H:%M:%S} UTC by Restante {release}."
