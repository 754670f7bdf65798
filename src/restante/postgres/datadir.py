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
        base = Path(data_home) if data_home.startswith("/") else _home() / ".local/share"
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
        lock = self._open_lock()
        try:
            self._take(lock)
            yield
        finally:
            os.close(lock)

    def _open_lock(self) -> int:
        try:
            return os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DataDirectoryUnusable(
                f"The lock in the data directory {self.path} cannot be opened: {_reason(error)}."
            ) from error

    def _take(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataDirectoryInUse(
                f"Another Restante{_owner(lock)} is using {self.path}."
                " Stop it, or choose another --data-dir."
            ) from None
        # The number is only for the sentence above; on a full disk it may be missing.
        with suppress(OSError):
            os.pwrite(lock, f"{os.getpid():<10}\n".encode(), 0)


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


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise DataDirectoryUnusable(
            "This user has no home directory for the data. Choose a place with --data-dir."
        ) from None


def _check_writable(path: Path) -> None:
    if not path.is_dir():
        raise NotADirectoryError(None, "it is not a directory")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(None, "this user may not write in it")


def _owner(lock: int) -> str:
    with suppress(OSError, ValueError):
        return f" (process {int(os.pread(lock, 32, 0))})"
    return ""


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
