"""
Disk space that is kept back beside the cluster, to be given up when the disk is full.

Even deleting writes, so Postgres on a full disk can free nothing by itself.  The ballast is in
pieces: another program that fills the disk gets one at a time.  The last one is for Postgres to
start with and for the sweep: whatever else is written, those two can free space.  Any process of
the same user may remove a piece; the server creates it again when there is room.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from restante.postgres import placement
from restante.postgres.datadir import DataDirectory

log = structlog.stdlib.get_logger(__name__)

PIECES = 4
# On a small disk the ballast is smaller: at most one part in so many.
LARGEST_PART = 16
# A segment of WAL; the end of a recovery may need a new one.
NEEDED_TO_START = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Ballast:
    """The files `ballast.0`, `ballast.1`, … in one directory; `size` is that of all of them."""

    home: Path
    size: int

    @classmethod
    def beside(cls, directory: DataDirectory, size: int) -> "Ballast":
        """The ballast of the cluster of this data directory, which must exist."""
        return cls(placement.existing_home(directory) or directory.path, size)

    @property
    def piece_bytes(self) -> int:
        disk = os.statvfs(self.home)
        return min(self.size, disk.f_blocks * disk.f_frsize // LARGEST_PART) // PIECES

    @property
    def free_bytes(self) -> int:
        """What Postgres's account can still use; root's own blocks do not count."""
        disk = os.statvfs(self.home)
        return disk.f_bavail * disk.f_frsize

    def in_place(self) -> int:
        """The bytes that can still be given up."""
        return sum(_bytes_of(piece) for piece in self._pieces())

    def make_room(self, needed: int, *, keep_last: bool = False) -> bool:
        """Remove pieces until so much is free; False if there are not enough of them."""
        while self.free_bytes < needed:
            if keep_last and self._count() <= 1:
                return False
            if not self.release():
                return False
        return True

    def release(self) -> bool:
        """Remove one piece; False if there is none."""
        for piece in self._pieces():
            if size := _bytes_of(piece):
                piece.unlink(missing_ok=True)
                log.warning("ballast_released", bytes=size, left=self.in_place())
                return True
        return False

    def is_complete(self) -> bool:
        wanted = self.piece_bytes
        return all(_bytes_of(piece) == wanted for piece in self._pieces())

    def refill(self) -> None:
        """
        Create one piece that is missing, or has another size than it should.

        Raises OSError, and leaves nothing of it, if there is no room.
        """
        wanted = self.piece_bytes
        for piece in self._pieces():
            if _bytes_of(piece) != wanted:
                piece.unlink(missing_ok=True)
                if wanted:
                    _create(piece, wanted)
                return

    def _count(self) -> int:
        return sum(1 for piece in self._pieces() if _bytes_of(piece))

    def _pieces(self) -> Iterator[Path]:
        return (self.home / f"ballast.{number}" for number in range(PIECES))


def _bytes_of(piece: Path) -> int:
    try:
        return piece.stat().st_size
    except FileNotFoundError:
        return 0


def _create(piece: Path, size: int) -> None:
    handle = os.open(piece, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        else:
            os.write(handle, bytes(size))
    except OSError:
        piece.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
