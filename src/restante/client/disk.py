"""
Received files on disk: written apart, synced, and given their name in one step.

Everything goes through the descriptor of a directory that was opened without following a link, so
no name a server invents reaches outside of it, and no file is ever replaced.
"""

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from restante.errors import FolderFull, FolderInUse, FolderUnusable

_READ_BYTES = 1024 * 1024
_WRITE_BEHIND_BYTES = 4 * 1024 * 1024
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


@contextmanager
def disk_errors(what: Path) -> Iterator[None]:
    """What the system says about a disk, as a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise FolderFull(f"There is no room left for {what}: free some space.") from error
        raise FolderUnusable(f"{what} cannot be used: {error.strerror or error}.") from error


class Directory:
    """An open directory."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def open(cls, root: Path, *below: str) -> Self:
        """
        Open a directory below the root, making what is missing, for its owner only.

        The root may be reached through links, for its owner chose it; below it none is followed.
        """
        path = root
        with disk_errors(path):
            root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for name in below:
            path = path / name
            descriptor = _step_down(descriptor, name, path)
        return cls(path.absolute(), descriptor)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """What is in it."""
        with disk_errors(self.path):
            return os.listdir(self.descriptor)  # noqa: PTH208 - a path could be followed

    def has(self, name: str) -> bool:
        """Whether there is anything of this name, be it a link to nowhere."""
        with disk_errors(self.path / name), suppress(FileNotFoundError):
            os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            return True
        return False

    def has_other_name(self, name: str) -> bool:
        """Whether the file has another name too, wherever that is by now."""
        with disk_errors(self.path / name):
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_nlink > 1

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with disk_errors(self.path / name), suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Make names durable."""
        with disk_errors(self.path):
            os.fsync(self.descriptor)

    def partial(self, name: str) -> "Partial":
        """Open a file that is being received; what an earlier run left in it is still there."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with disk_errors(self.path / name):
            descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        try:
            is_collecting = self._is_collecting(name, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if is_collecting:
            return Partial(self.path / name, descriptor)
        os.close(descriptor)
        return self.partial(name)

    def _is_collecting(self, name: str, descriptor: int) -> bool:
        """
        Have the file for us alone, and see that it is not one that has arrived.

        What would be written to it then would change the file that somebody has.
        """
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FolderUnusable(f"{self.path / name} is not a plain file: remove it.")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderInUse(f"Another program is receiving {self.path / name}.") from error
        if self._is_placed(name, descriptor):
            self.remove(name)
            return False
        return True

    def _is_placed(self, name: str, descriptor: int) -> bool:
        ours = os.fstat(descriptor)
        try:
            named = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return ours.st_nlink > 1 or not os.path.samestat(ours, named)

    def place(self, partial: str, into: "Directory", name: str) -> Path:
        """
        Give a received file its name; raises FolderUnusable if there is anything of that name.

        After a crash in between it has both names; `has_other_name` tells that it was placed, even
        if it has been moved since.
        """
        path = into.path / name
        with disk_errors(path):
            self._link(partial, into, name)
            into.sync()
        self.remove(partial)
        return path

    def _link(self, partial: str, into: "Directory", name: str) -> None:
        here, there = self.descriptor, into.descriptor
        try:
            os.link(partial, name, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)
        except OSError as error:
            # Some filesystems know no links; a look and a rename is the best they can do.
            if error.errno not in _NO_LINKS or into.has(name):
                raise
            os.rename(partial, name, src_dir_fd=here, dst_dir_fd=there)


def _step_down(descriptor: int, name: str, path: Path) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with disk_errors(path):
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=descriptor)
            return os.open(name, flags, dir_fd=descriptor)
    finally:
        os.close(descriptor)


class Partial:
    """A file that is being received."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self._hash = hashlib.sha256()
        self._on_its_way = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    @property
    def sha256(self) -> bytes:
        """Of what is in it since it was last cut."""
        return self._hash.digest()

    def cut(self, size: int) -> None:
        """Keep only the beginning, and hash what is kept."""
        with disk_errors(self.path):
            os.ftruncate(self._descriptor, size)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            self.size = self._on_its_way = size
            self._hash = hashlib.sha256()
            while piece := os.read(self._descriptor, _READ_BYTES):
                self._hash.update(piece)

    def write(self, piece: bytes) -> None:
        """Append."""
        with disk_errors(self.path):
            view = memoryview(piece)
            while view:
                view = view[os.write(self._descriptor, view) :]
        self._hash.update(piece)
        self.size += len(piece)
        if self.size - self._on_its_way >= _WRITE_BEHIND_BYTES:
            self._write_behind()

    def _write_behind(self) -> None:
        """Let the disk begin, so that `sync` has little left to wait for."""
        if hasattr(os, "posix_fadvise"):
            fresh = self.size - self._on_its_way
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, self._on_its_way, fresh, os.POSIX_FADV_DONTNEED)
        self._on_its_way = self.size

    def sync(self) -> None:
        """Make the contents durable."""
        with disk_errors(self.path):
            os.fsync(self._descriptor)
