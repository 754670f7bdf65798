"""A small filesystem of its own, and another program that fills it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

MIB = 1024 * 1024


@contextmanager
def small_disk(place: Path, mebibytes: int) -> Iterator[Path]:
    """Mount a filesystem of this size; skips the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small filesystem")
    disk = place / "disk"
    disk.mkdir()
    options = f"size={mebibytes}m,mode=0711"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small filesystem: {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def free_bytes(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


class OtherProgram:
    """Writes to the same disk until nothing is left."""

    def __init__(self, disk: Path) -> None:
        self._file = disk / "somebody-else"

    def take(self, size: int) -> None:
        """Take so much, or what there is."""
        with self._file.open("ab", buffering=0) as file, suppress(OSError):
            while size > 0:
                size -= file.write(bytes(min(size, 64 * 1024)))

    def take_all(self) -> None:
        self.take(1 << 60)

    def leave(self) -> None:
        self._file.unlink(missing_ok=True)
