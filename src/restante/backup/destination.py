"""
Where a backup is written: a file that appears when it is complete, or standard output.

Until then it has another name in the same directory.  What fails, a full disk and Ctrl-C included,
removes it again.
"""

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from restante.errors import BackupFailed
from restante.text import shown_bytes

STANDARD_STREAM = Path("-")


@dataclass(slots=True)
class Destination:
    """An open file; `keep_free` bytes of its disk are left to others."""

    file: IO[bytes]
    directory: Path | None  # None: standard output
    keep_free: int

    def write(self, data: bytes) -> None:
        """Raises BackupFailed if the disk is full."""
        try:
            if self.directory and _free(self.directory) - len(data) < self.keep_free:
                raise BackupFailed(self._no_room())
            self.file.write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise BackupFailed(f"The backup cannot be written: {error.strerror}.") from error

    def _no_room(self) -> str:
        if not self.keep_free:
            return f"There is no space left in {self.directory}. Nothing of the backup was kept."
        return (
            f"The backup would leave less than {shown_bytes(self.keep_free)} free in "
            f"{self.directory}, on the disk of the database itself, which needs them. Nothing of "
            "the backup was kept. Write it to another disk."
        )


@contextmanager
def opened(path: Path, *, overwrite: bool, cluster: Path, reserve: int) -> Iterator[Destination]:
    """
    Yield what takes the backup; publish it at the end of the context.

    On the disk of the `cluster`, the `reserve` stays free: a backup must not stop the server.
    """
    if path == STANDARD_STREAM:
        yield Destination(_standard_output(), None, 0)
        sys.stdout.buffer.flush()
        return
    path = _place(path)
    _check_free(path, overwrite=overwrite)
    descriptor, name = _draft(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            is_same_disk = os.fstat(descriptor).st_dev == cluster.stat().st_dev
            yield Destination(file, path.parent, reserve if is_same_disk else 0)
            _sync(file)
        _check_free(path, overwrite=overwrite)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _standard_output() -> IO[bytes]:
    if str(getattr(sys.stdout, "name", "")) == os.devnull:  # in place of what the caller has closed
        raise BackupFailed("Standard output is closed: name a file.")
    if sys.stdout.isatty():
        raise BackupFailed("A backup is not text: send it to a file, or to another program.")
    return sys.stdout.buffer


def _place(path: Path) -> Path:
    """Where links lead: the file at their end is written, and they stay."""
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise BackupFailed(f"{path} cannot be written: {error}.") from error


def _check_free(path: Path, *, overwrite: bool) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise BackupFailed(f"{path} cannot be written: {error.strerror}.") from error
    if stat.S_ISDIR(mode):
        raise BackupFailed(f"{path} is a directory. Name a file in it, such as {path}/backup.tar.")
    if not stat.S_ISREG(mode):
        raise BackupFailed(
            f"{path} is not a file. To write to it, send the backup there: - > {path}"
        )
    if not overwrite:
        raise BackupFailed(f"{path} exists. Choose another name, or replace it with --overwrite.")


def _draft(path: Path) -> tuple[int, str]:
    """A new file with mode 0600 beside the one that is wanted."""
    try:
        return tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".partial", dir=path.parent)
    except OSError as error:
        raise BackupFailed(f"No file can be created in {path.parent}: {error.strerror}.") from error


def _free(directory: Path) -> int:
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize


def _sync(file: IO[bytes]) -> None:
    try:
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise BackupFailed(f"The backup cannot be written: {error.strerror}.") from error


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
