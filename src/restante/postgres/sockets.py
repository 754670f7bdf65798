"""The directory of Postgres's socket: private, and with a path short enough for the kernel."""

import os
import stat
from pathlib import Path
from urllib.parse import quote

from restante.errors import PostgresUnusable
from restante.postgres.account import Account
from restante.postgres.datadir import make_directories
from restante.postgres.placement import short_hash

PORT = 5432
SOCKET = f".s.PGSQL.{PORT}"
# Linux takes 107 bytes for the whole path of a socket, macOS 103.
LONGEST_SOCKET_PATH = 103


def dsn(sockets: Path) -> str:
    return f"postgresql://restante@/restante?host={quote(str(sockets))}&port={PORT}"


def socket_directory(home: Path, account: Account) -> Path:
    """Make the socket directory beside the cluster, or elsewhere if that path is no address."""
    directory = home / "socket"
    if not _fits(directory):
        place = _short_place()
        make_directories(place)
        _check_owned(place, os.geteuid())
        directory = place / short_hash(str(home))
    return _owned_directory(directory, account)


def _short_place() -> Path:
    if os.geteuid() == 0:
        return Path("/run/restante")
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    if runtime.is_dir() and _fits(runtime / "restante" / short_hash("")):
        return runtime / "restante"
    # Anybody can make this first, so its owner is checked before it is used.
    return Path(f"/tmp/restante-{os.geteuid()}")  # noqa: S108


def _fits(directory: Path) -> bool:
    # In a DSN a comma separates hosts.
    return len(os.fsencode(directory / SOCKET)) <= LONGEST_SOCKET_PATH and "," not in str(directory)


def _owned_directory(path: Path, account: Account) -> Path:
    try:
        path.mkdir(mode=0o700)
        account.give(path)
    except FileExistsError:
        _check_owned(path, account.uid)
    return path


def _check_owned(path: Path, uid: int) -> None:
    found = path.lstat()
    writable_by_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or writable_by_others:
        raise PostgresUnusable(
            f"{path} is not a directory that belongs to user id {uid} alone, and Postgres's socket"
            " is to go there. Remove it, and Restante makes its own."
        )
