"""
Where received files are put: the folder's own directory, or one that the user chose.

Both record a file before it gets its name, so that it appears once, whatever a crash interrupts.
They differ in the proof that it was placed.  In the folder's own directory a name has random
digits, so the name itself is the proof.  In a directory of the user, anybody may create a file of
that name.  There the partial file stays until the record says that the file was placed, and its
second hard link is the proof.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from restante.client.disk import Directory, Partial, disk_errors
from restante.client.fetching import WaitingFile
from restante.client.names import MAX_NAME_BYTES, free_name, local_name
from restante.client.progress import Progress, Received, State
from restante.errors import FolderUnusable
from restante.ids import FileId, as_uuid

HOME = ".molecule"

PARTIAL = ".part"
# By default no server keeps an upload longer.  Where one does, the file is fetched from the start.
_STALEPARTIAL_SECONDS = 7 * 24 * 3600
# Other programs may take a free name before we do; not for ever.
_MAX_TRIES = 100
# The filesystem does not take the name, although we think that any does.
_NAME_REFUSED = {errno.EINVAL, errno.EILSEQ, errno.ENAMETOOLONG}


def unique_name(name: str) -> str:
    """A file name that does not exist yet."""
    return f"{os.urandom(16).hex()}-{name}"


@dataclass(frozen=True, slots=True)
class ChatUploads:
    """The directory that the protocol names; partial files are elsewhere on its filesystem."""

    directory: Directory
    partials: Directory
    progress: Progress

    @property
    def path(self) -> Path:
        """Where files appear."""
        return self.directory.path

    def partial(self, file_id: FileId) -> Partial:
        """Open the partial file of an upload."""
        return self.partials.partial(f"{file_id}{PARTIAL}")

    def has(self, received: Received) -> bool:
        """Whether a received file still exists under its name."""
        return self.directory.has(received.name)

    def has_unchanged(self, received: Received, _size: int) -> bool:
        """Whether it is still there; nobody else uses such a name."""
        return self.has(received)

    def is_missing(self, file_id: FileId, received: Received, *, has_command: bool) -> bool:
        """Whether it was reopened, or its command moved it away and then failed."""
        if received.state is State.PLACING and has_command:
            return not self.has(received) and not self._is_unplaced(file_id)
        return received.state is State.ACKED

    def place(self, file: WaitingFile, received: Received | None) -> Received:
        """
        Give a file its recorded name, or a new one, unless an earlier run did.

        If neither the file nor its partial file exists, it was placed and moved away since.
        """
        if received is None:
            received = Received(unique_name(file.name), State.PLACING)
            self.progress.record(file.file_id, received)
        partial = f"{file.file_id}{PARTIAL}"
        if not self.has(received) and self._is_unplaced(file.file_id):
            self.partials.place(partial, self.directory, received.name)
        else:
            self.directory.sync()
            self.partials.remove(partial)
        return received

    def settle(self, file_id: FileId, received: Received, *, has_command: bool) -> Received:
        """Record that the command has succeeded, if there is one."""
        if not has_command or received.state is State.HANDLED:
            return received
        return self.progress.record(file_id, received.now(State.HANDLED))

    def _is_unplaced(self, file_id: FileId) -> bool:
        return self.partials.has_one_name(f"{file_id}{PARTIAL}")


@dataclass(frozen=True, slots=True)
class Into:
    """
    A directory that the user chose; files have the names that their senders gave them.

    It is opened for each step, because its owner may delete it and create it again.
    """

    path: Path
    progress: Progress

    @contextmanager
    def partial(self, file_id: FileId) -> Iterator[Partial]:
        """Open the partial file of an upload, a hidden file in the same directory."""
        with (
            Directory.existing(self.path) as directory,
            directory.partial(hidden_partial(file_id)) as partial,
        ):
            yield partial

    def has(self, received: Received) -> bool:
        """Whether there is a file with its name."""
        with suppress(FolderUnusable), Directory.existing(self.path) as directory:
            return directory.has(received.name)
        return False

    def has_unchanged(self, received: Received, size: int) -> bool:
        """Whether it is still there; another file may have got its name."""
        with suppress(FolderUnusable), Directory.existing(self.path) as directory:
            return directory.has_file(received.name, size)
        return False

    def is_missing(self, file_id: FileId, received: Received, *, has_command: bool) -> bool:
        """Whether there is no proof that it was placed, or its command needs it again."""
        if received.state is not State.PLACING:
            return received.state is State.ACKED
        partial = hidden_partial(file_id)
        with suppress(FolderUnusable), Directory.existing(self.path) as directory:
            is_proven = directory.has(partial) and not has_command
            # A filesystem without hard links has only the name.
            return not (is_proven or directory.has_one_name(partial) or self.has(received))
        return True

    def place(self, file: WaitingFile, received: Received | None) -> Received:
        """Give a file a name that is free, unless an earlier run did."""
        if received and received.state is not State.PLACING:
            return received
        partial = hidden_partial(file.file_id)
        with Directory.existing(self.path) as directory:
            if received is None or directory.has_one_name(partial):
                received = self._place(directory, partial, file)
            directory.sync()
        return received

    def _place(self, directory: Directory, partial: str, file: WaitingFile) -> Received:
        def placing(name: str) -> Received:
            return Received(name, State.PLACING, str(self.path))

        def record(name: str) -> None:
            self.progress.record(file.file_id, placing(name))

        return placing(place_freely(directory, partial, file, record))

    def settle(self, file_id: FileId, received: Received, *, has_command: bool) -> Received:  # noqa: ARG002
        """Record that the file was placed, and that its command has succeeded, if there is one."""
        if received.state is not State.HANDLED:
            received = self.progress.record(file_id, received.now(State.HANDLED))
        with suppress(FolderUnusable), Directory.existing(self.path) as directory:
            directory.remove(hidden_partial(file_id))
        return received


Place = ChatUploads | Into


def chosen_directory(path: Path) -> Path:
    """
    The absolute path of a directory for received files; created with mode 0700 if it is missing.

    Raises FolderUnusable if nothing can be received there.
    """
    path = path.absolute()
    if _is_not_text(path):
        # It appears in messages, as JSON.
        raise FolderUnusable(f"{path!r} cannot be used: its name is not UTF-8.")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(0o700)
        resolved = path.resolve()
    if HOME in {part.casefold() for part in resolved.parts}:
        # A file named like our database would be taken for it.
        raise FolderUnusable(f"{path} is inside of {HOME}, for our own files: use another.")
    with Directory.existing(path):
        if not os.access(path, os.W_OK | os.X_OK):
            raise FolderUnusable(f"{path} cannot be used: no permission to create files in it.")
    return path


def _is_not_text(path: Path) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in str(path))


def place_freely(
    directory: Directory,
    partial: str,
    file: WaitingFile,
    chosen: Callable[[str], object] = lambda _name: None,
) -> str:
    """
    Link a complete file to the first free form of its original name; returns that name.

    `chosen` is called with each name before it is tried.  The partial file keeps its name, unless
    the filesystem has no hard links.
    """
    max_bytes = min(directory.max_name_bytes, MAX_NAME_BYTES)
    wanted = local_name(file.original_name, max_bytes)
    for _ in range(_MAX_TRIES):
        name = free_name(wanted, directory.names(), max_bytes) or unique_name(file.name)
        chosen(name)
        try:
            directory.link(partial, directory, name)
        except FileExistsError:
            continue
        except OSError as error:
            plain = local_name(file.name, max_bytes)
            if error.errno in _NAME_REFUSED and wanted != plain:
                wanted = plain
                continue
            with disk_errors(directory.path / name):
                raise
        return name
    raise FolderUnusable(f"{directory.path} has no free name for {file.name}.")


def hidden_partial(file_id: FileId) -> str:
    """The name of a partial file in a directory of the user."""
    return f".{file_id}{PARTIAL}"


def remove_stale_partials(path: Path) -> None:
    """Remove the partial files of uploads that failed and then expired: they are never resumed."""
    with Directory.existing(path) as directory:
        partials = [name for name in directory.names() if _is_partial(name)]
        directory.remove_stale_partials(
            partials, written_before=time.time() - _STALEPARTIAL_SECONDS
        )


def _is_partial(name: str) -> bool:
    file_id = as_uuid(name[1:-5])
    return file_id is not None and name == f".{file_id}{PARTIAL}"
