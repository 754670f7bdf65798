"""
The data directory: its default place, its creation, and the lock that one process holds.

An existing directory is never chmod-ed; only those that we create get a mode.
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
    """Holds the embedded Postgres, the admin token, and the lock of the process that owns it."""

    path: Path

    @classmethod
    def default(cls) -> Path:
        """The default place: /var/lib/restante for root, else the user's data home."""
        if os.geteuid() == 0:
            return SYSTEM_DIRECTORY
        data_home = os.environ.get("XDG_DATA_HOME", "")
        # The XDG specification says to ignore a relative path.
        base = Path(data_home) if data_home.startswith("/") else _home() / ".local/share"
        return base / "restante"

    @classmethod
    def open(cls, path: Path) -> "DataDirectory":
        """Create the directory if it is missing, and check that we can write to it."""
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
        """Lock the directory while the context lasts; a crash releases the lock too."""
        lock = self._open_lock()
        try:
            self._acquire(lock)
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

    def _acquire(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataDirectoryInUse(
                f"Another Restante{_owner(lock)} is using {self.path}."
                " Stop it, or choose another --data-dir."
            ) from None
        # The pid is only for the message above, so a full disk may prevent it.
        with suppress(OSError):
            os.pwrite(lock, f"{os.getpid():<10}\n".encode(), 0)


def make_directories(path: Path) -> None:
    """
    Create the directory and its missing parents; set the mode only of those created.

    As root, other accounts get the x bit alone: the Postgres account must reach its own directory
    inside, and nobody may list it.
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
            "This user has no home directory for the data. Choose a directory with --data-dir."
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
