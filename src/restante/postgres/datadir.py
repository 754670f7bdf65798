"""
The data directory: where it is by default, how it is made, and who owns it right now.

Nothing that existed before is ever chmod-ed; only what we make gets a mode from us.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from restante.errors import DataDirectoryInUse, DataDirectoryUnusable

SYSTEM_DIRECTORY = Path("/var/lib/restante")


@dataclass(frozen=True, slots=True)
class DataDirectory:
    """Holds one embedded Postgres, the admin token, and the lock that says who owns them."""

    path: Path

    @classmethod
    def default(cls) -> Path:
        """Say where it is when nobody chose: the system's for root, otherwise the user's own."""
        if os.geteuid() == 0:
            return SYSTEM_DIRECTORY
        data_home = os.environ.get("XDG_DATA_HOME", "")
        # The XDG specification says that a relative path is to be ignored.
        base = Path(data_home) if data_home.startswith("/") else Path.home() / ".local/share"
        return base / "restante"

    @classmethod
    def open(cls, path: Path) -> "DataDirectory":
        """Make the directory if it is missing, and see that we may write in it."""
        try:
            path = path.expanduser().resolve()
            make_directories(path)
            _check_writable(path)
        except (OSError, RuntimeError) as error:
            raise DataDirectoryUnusable(
                f"The data directory {path} cannot be used: {_reason(error)}."
                " Choose another with --data-dir."
            ) from error
        return cls(path)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Own the directory for as long as the context lasts; a crash gives it up as well."""
        with self._lock_file() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataDirectoryInUse(
                    f"Another Restante{_owner(file)} is using {self.path}."
                    " Stop it, or choose another --data-dir."
                ) from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def _lock_file(self) -> IO[str]:
        try:
            handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DataDirectoryUnusable(
                f"The lock in the data directory {self.path} cannot be opened: {_reason(error)}."
            ) from error
        return os.fdopen(handle, "r+")


def make_directories(path: Path) -> None:
    """
    Make the path and what is missing above it, and set the mode of only those that were made.

    As root others may pass through, so that Postgres's account reaches its own directory inside,
    but may not look around.
    """
    mode = 0o711 if os.geteuid() == 0 else 0o700
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        each.chmod(mode)


def _check_writable(path: Path) -> None:
    if not path.is_dir():
        raise NotADirectoryError(None, "it is not a directory")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(None, "this user may not write in it")


def _owner(file: IO[str]) -> str:
    with suppress(OSError, ValueError):
        return f" (process {int(file.read(32))})"
    return ""


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
