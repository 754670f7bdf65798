"""
Space on a disk for files that are being received.

A reserve stays free for other programs, and two files of this process are not promised the same
space.  What other processes write is not known: so the reserve is checked again as a file grows.
"""

import os
from dataclasses import dataclass
from threading import Lock

from restante.errors import NoRoomForFile

_RESERVE_PERCENT = 5
_MAX_RESERVE_BYTES = 1024**3

_lock = Lock()
_promises = set["Promise"]()


@dataclass(eq=False, slots=True)
class Promise:
    """The bytes that are still to be written of one file."""

    device: int
    missing_bytes: int = 0

    def claim(self, missing_bytes: int, disk: os.statvfs_result, path: object) -> None:
        """Take this much, instead of before; raises NoRoomForFile if less is free."""
        with _lock:
            others = sum(
                other.missing_bytes
                for other in _promises
                if other is not self and other.device == self.device
            )
            free = max(_usable_bytes(disk) - others, 0)
            # Some network filesystems report no sizes.
            if disk.f_blocks and missing_bytes > free:
                raise _no_room(path, missing_bytes, free)
            self.missing_bytes = missing_bytes
            _promises.add(self)

    def written(self, size: int) -> None:
        """Record that this much of the file is on the disk now."""
        self.missing_bytes = max(self.missing_bytes - size, 0)

    def check_reserve(self, disk: os.statvfs_result, path: object) -> None:
        """Raise NoRoomForFile if others have taken the space, so that the reserve is in use."""
        if disk.f_blocks and _usable_bytes(disk) < 0:
            raise _no_room(path, self.missing_bytes, 0)

    def end(self) -> None:
        """Give back what was not written.  Idempotent."""
        with _lock:
            _promises.discard(self)


def _usable_bytes(disk: os.statvfs_result) -> int:
    """What is free beyond the reserve; negative if the reserve is in use."""
    total = disk.f_blocks * disk.f_frsize
    reserve = min(total * _RESERVE_PERCENT // 100, _MAX_RESERVE_BYTES)
    return disk.f_bavail * disk.f_frsize - reserve


def _no_room(path: object, needed: int, free: int) -> NoRoomForFile:
    return NoRoomForFile(
        f"There is no space left for {path}: it needs {needed} bytes, and {free} are free beyond "
        "the reserve and what other files need; free some space.",
        needed=needed,
        free=free,
    )
