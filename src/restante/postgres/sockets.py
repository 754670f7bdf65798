"""The directory of the Unix socket: private, and with a path short enough for the kernel."""

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
# The kernel's limit for a socket path is 107 bytes on Linux and 103 on macOS.
MAX_SOCKET_PATH_BYTES = 103


def dsn(sockets: Path) -> str:
    return f"postgresql://restante@/restante?host={quote(str(sockets))}&port={PORT}"


def socket_directory(home: Path, account: Account) -> Path:
    """Create the socket directory beside the cluster, or elsewhere if that path is too long."""
    directory = home / "socket"
    if not _fits(directory):
        parent = _short_parent()
        make_directories(parent)
        _check_owned(parent, os.geteuid())
        directory = parent / short_hash(str(home))
    return _owned_directory(directory, account)


def _short_parent() -> Path:
    if os.geteuid() == 0:
        return Path("/run/restante")
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    if runtime.is_dir() and _fits(runtime / "restante" / short_hash("")):
        return runtime / "restante"
    # Anybody can create this first, so check its owner before using it.
    return Path(f"/tmp/restante-{os.geteuid()}")  # noqa: S108


def _fits(directory: Path) -> bool:
    # A comma separates hosts in a DSN.
    return len(os.fsencode(directory / SOCKET)) <= MAX_SOCKET_PATH_BYTES and "," not in str(
        directory
    )


def _owned_directory(path: Path, account: Account) -> Path:
    try:
        path.mkdir(mode=0o700)
        account.take_ownership(path)
    except FileExistsError:
        _check_owned(path, account.uid)
    return path


def _check_owned(path: Path, uid: int) -> None:
    found = path.lstat()
    writable_by_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or writable_by_others:
        raise PostgresUnusable(
            f"{path} is not a directory that belongs to user id {uid} alone, as the Postgres socket"
            " requires. Remove it; Restante creates it again."
        )
