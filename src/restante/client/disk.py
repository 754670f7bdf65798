"""
Received files on disk: written to a partial file, synced, then linked to their final name.

All access goes through the descriptor of a directory that was opened without following links.  So
no name that a server invents reaches outside of it, and no existing file is replaced.
"""

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

from restante.client.disk_room import Promise
from restante.errors import FolderFull, FolderInUse, FolderUnusable

_READ_BYTES = 1024 * 1024
_WRITE_BEHIND_BYTES = 4 * 1024 * 1024
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


@contextmanager
def disk_errors(what: Path) -> Iterator[None]:
    """Translate an OSError into FolderFull or FolderUnusable."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise FolderFull(f"There is no space left for {what}: free some space.") from error
        raise FolderUnusable(f"{what} cannot be used: {error.strerror or error}.") from error


class Directory:
    """An open directory."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def open(cls, root: Path, *below: str) -> Self:
        """
        Open a directory below the root and create what is missing, with mode 0700.

        The root may be a link, because its owner chose it; below it no link is followed.
        """
        path = root
        with disk_errors(path):
            root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for name in below:
            path = path / name
            descriptor = _open_below(descriptor, name, path)
        return cls(path.absolute(), descriptor)

    @classmethod
    def existing(cls, path: Path) -> Self:
        """Open a directory that its owner chose, which may be a link; it is not created."""
        with disk_errors(path):
            return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """The names of its entries."""
        with disk_errors(self.path):
            return os.listdir(self.descriptor)  # noqa: PTH208 - a path could be followed

    def has(self, name: str) -> bool:
        """Whether the name exists, even as a dangling link."""
        with disk_errors(self.path / name), suppress(FileNotFoundError):
            os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            return True
        return False

    def has_file(self, name: str, size: int) -> bool:
        """Whether the name is a regular file of this size."""
        with disk_errors(self.path / name), suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            return stat.S_ISREG(found.st_mode) and found.st_size == size
        return False

    def has_one_name(self, name: str) -> bool:
        """Whether the file exists, without a second hard link in any directory."""
        with disk_errors(self.path / name), suppress(FileNotFoundError):
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_nlink == 1
        return False

    @property
    def max_name_bytes(self) -> int:
        """The longest name that the filesystem takes."""
        with disk_errors(self.path):
            return os.fpathconf(self.descriptor, "PC_NAME_MAX")

    def remove(self, name: str) -> None:
        """Remove a file; does nothing if it does not exist."""
        with disk_errors(self.path / name), suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def replace(self, old: str, new: str) -> None:
        """Rename a file; one that has the new name is replaced, and a link is not followed."""
        with disk_errors(self.path / new):
            os.replace(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def refuse_links(self, *names: str) -> None:
        """
        Raise FolderUnusable for a name that exists and is not a regular file.

        For files that a library opens by their path.  Nobody else can write to the directory, so
        what is checked here stays true.
        """
        with disk_errors(self.path):
            if os.fstat(self.descriptor).st_mode & _WRITABLE_BY_OTHERS:
                os.fchmod(self.descriptor, 0o700)
        for name in names:
            with disk_errors(self.path / name), suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode):
                    raise FolderUnusable(f"{self.path / name} is not a regular file: remove it.")

    def sync(self) -> None:
        """Make the names in the directory durable."""
        with disk_errors(self.path):
            os.fsync(self.descriptor)

    def partial(self, name: str) -> "Partial":
        """Open a partial file with the bytes of earlier attempts; raises FolderInUse."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with disk_errors(self.path / name):
            descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        try:
            is_locked = self._lock_partial(name, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if is_locked:
            return Partial(self, name, descriptor)
        os.close(descriptor)
        return self.partial(name)

    def _lock_partial(self, name: str, descriptor: int) -> bool:
        """
        Lock the file; False if it has been placed or removed meanwhile.

        Writing to a placed file would change the file that its owner has.
        """
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FolderUnusable(f"{self.path / name} is not a regular file: remove it.")
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

    def remove_stale_partials(self, names: Iterable[str], *, written_before: float) -> None:
        """Remove partial files last written before this time, unless a process has them open."""
        for name in names:
            with suppress(OSError):
                self._remove_stale_partial(name, written_before)

    def _remove_stale_partial(self, name: str, written_before: float) -> None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self.descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.fstat(descriptor)
            named = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            is_stale = stat.S_ISREG(ours.st_mode) and ours.st_mtime < written_before
            if is_stale and os.path.samestat(ours, named):
                os.unlink(name, dir_fd=self.descriptor)
        finally:
            os.close(descriptor)

    def place(self, partial: str, into: "Directory", name: str) -> Path:
        """
        Give a received file its final name; raises FolderUnusable if the name exists.

        After a crash in between, the file has both names.  `has_one_name` then shows that it was
        placed, even if it has been moved since.
        """
        path = into.path / name
        with disk_errors(path):
            self.link(partial, into, name)
            into.sync()
        self.remove(partial)
        return path

    def link(self, partial: str, into: "Directory", name: str) -> None:
        """
        Give a file a second name; raises OSError, such as FileExistsError.

        Filesystems without hard links can only check for the name and then rename.  The lock keeps
        another process of ours from doing the same between the two.
        """
        here, there = self.descriptor, into.descriptor
        try:
            os.link(partial, name, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with into.locked():
                if into.has(name):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
                os.rename(partial, name, src_dir_fd=here, dst_dir_fd=there)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against other processes of ours, where the filesystem can."""
        with suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)


def read_below(root: Path, *names: str) -> bytes | None:
    """Read a file below the root without following links; None if it does not exist."""
    *directories, last = names
    with ExitStack() as opened, suppress(FileNotFoundError):
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, descriptor)
        for name in directories:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=descriptor)
            opened.callback(os.close, descriptor)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(last, flags, dir_fd=descriptor), "rb") as file:
            return file.read(_READ_BYTES)
    return None


def _open_below(descriptor: int, name: str, path: Path) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with disk_errors(path):
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=descriptor)
            return os.open(name, flags, dir_fd=descriptor)
    finally:
        os.close(descriptor)


class Partial:
    """A file that is being received, locked against other processes until it is closed."""

    def __init__(self, directory: Directory, name: str, descriptor: int) -> None:
        self.path = directory.path / name
        self._directory = directory
        self._name = name
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self._hash = hashlib.sha256()
        self._is_hashed = False  # whether the hash includes the bytes of earlier attempts
        self._flushed_bytes = 0
        self._promise = Promise(os.fstat(descriptor).st_dev)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        """Close the file; after an error, remove it if there is nothing to resume."""
        try:
            if error is not None and not self.size:
                with suppress(FolderUnusable):
                    self._directory.remove(self._name)
        finally:
            self._promise.end()
            os.close(self._descriptor)

    @property
    def sha256(self) -> bytes:
        """The hash of everything up to `size`; valid after a `truncate`."""
        return self._hash.digest()

    def check_room(self, size: int) -> None:
        """Raise NoRoomForFile if the disk has less space than the rest of the file needs."""
        self._promise.claim(size - self.size, self._disk(), self.path)

    def _disk(self) -> os.statvfs_result:
        with disk_errors(self.path):
            return os.fstatvfs(self._descriptor)

    def truncate(self, size: int) -> None:
        """Keep only the first bytes, and hash them."""
        if self._is_hashed and size == self.size:
            return
        with disk_errors(self.path):
            os.ftruncate(self._descriptor, size)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            self.size = self._flushed_bytes = size
            self._hash = hashlib.sha256()
            while piece := os.read(self._descriptor, _READ_BYTES):
                self._hash.update(piece)
        self._is_hashed = True

    def write(self, piece: bytes) -> None:
        """Append."""
        was_hashed, self._is_hashed = self._is_hashed, False  # a failed write may leave some bytes
        with disk_errors(self.path):
            view = memoryview(piece)
            while view:
                view = view[os.write(self._descriptor, view) :]
        self._hash.update(piece)
        self.size += len(piece)
        self._is_hashed = was_hashed
        self._promise.written(len(piece))
        if self.size - self._flushed_bytes >= _WRITE_BEHIND_BYTES:
            self._start_flush()
            self._promise.check_reserve(self._disk(), self.path)

    def _start_flush(self) -> None:
        """Start writing to the disk now, so that `sync` has less to wait for."""
        if hasattr(os, "posix_fadvise"):
            unflushed = self.size - self._flushed_bytes
            with suppress(OSError):
                os.posix_fadvise(
                    self._descriptor, self._flushed_bytes, unflushed, os.POSIX_FADV_DONTNEED
                )
        self._flushed_bytes = self.size

    def sync(self) -> None:
        """Make the contents durable."""
        with disk_errors(self.path):
            os.fsync(self._descriptor)
