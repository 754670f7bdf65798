"""
A workspace's folder: its credentials, its progress, and the files it has received.

    <root>/.molecule/chat-uploads/<32 hex>-<name>    received files
    <root>/.molecule/restante/                       credentials, progress, and partial files
"""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self

import msgspec

from restante.client.calls import Credentials
from restante.client.disk import Directory, Partial, read_below
from restante.client.poller import unique_name
from restante.client.progress import Progress, Received, State
from restante.errors import FolderUnusable
from restante.ids import FileId, as_uuid

HOME = ".molecule"
UPLOADS = "chat-uploads"
OURS = "restante"
_CREDENTIALS = "credentials.json"
_PROGRESS = "progress.sqlite"
_SQLITE_SUFFIXES = ("", "-journal", "-wal", "-shm")
_PARTIAL = ".part"


def kept_credentials(root: Path) -> Credentials | None:
    """The credentials stored in a folder, None if it has none."""
    path = root / HOME / OURS / _CREDENTIALS
    try:
        kept = read_below(root, HOME, OURS, _CREDENTIALS)
        return None if kept is None else msgspec.json.decode(kept, type=Credentials)
    except (OSError, ValueError) as error:
        raise FolderUnusable(f"{path} cannot be read: {error}.") from error


class Folder:
    """An open folder; only one process can have it open."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        with ExitStack() as opened:
            self._ours = opened.enter_context(Directory.open(root, HOME, OURS))
            self._partials = opened.enter_context(Directory.open(root, HOME, OURS, "arriving"))
            self.uploads = opened.enter_context(Directory.open(root, HOME, UPLOADS))
            self._ours.refuse_links(*(_PROGRESS + suffix for suffix in _SQLITE_SUFFIXES))
            progress = Progress.open(self._ours.path / _PROGRESS)
            self.progress = opened.enter_context(closing(progress))
            self._opened = opened.pop_all()

    @classmethod
    def open(cls, root: Path) -> Self:
        """Open a folder and create it if needed; raises FolderInUse."""
        return cls(root)

    def close(self) -> None:
        """Close the folder, so that another process can open it."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def credentials_path(self) -> Path:
        """The path of the credentials file."""
        return self._ours.path / _CREDENTIALS

    def keep(self, credentials: Credentials) -> None:
        """Store the credentials, readable by their owner only."""
        new = _CREDENTIALS + ".new"
        self._ours.remove(new)
        with self._ours.partial(new) as file:
            file.write(msgspec.json.encode(credentials))
            file.sync()
        self._ours.replace(new, _CREDENTIALS)
        self._ours.sync()

    def partial(self, file_id: FileId) -> Partial:
        """Open the partial file of an upload."""
        return self._partials.partial(f"{file_id}{_PARTIAL}")

    def choose_name(self, file_id: FileId, name: str) -> str:
        """Choose the final name of a complete file, and record it before the file is placed."""
        chosen = unique_name(name)
        self.progress.record(file_id, chosen, State.PLACING)
        return chosen

    def place(self, file_id: FileId, name: str) -> Path:
        """
        Give a file its recorded name, unless an earlier run did.

        If neither the file nor its partial file exists, it was placed and moved away since.
        """
        partial = f"{file_id}{_PARTIAL}"
        if not self.uploads.has(name) and self._is_unplaced(partial):
            self._partials.place(partial, self.uploads, name)
        else:
            self.uploads.sync()
            self._partials.remove(partial)
        return self.uploads.path / name

    def _is_unplaced(self, partial: str) -> bool:
        return self._partials.has(partial) and not self._partials.has_other_name(partial)

    def was_moved_away(self, file_id: FileId, received: Received) -> bool:
        """Whether a file was placed and no longer exists under its name."""
        partial = f"{file_id}{_PARTIAL}"
        return not self.has(received) and not self._is_unplaced(partial)

    def has(self, received: Received) -> bool:
        """Whether a received file still exists under its name."""
        return self.uploads.has(received.name)

    def remove_partials(self, *, keep: set[FileId]) -> None:
        """Remove the partial files of all uploads but these."""
        for name in self._partials.names():
            file_id = as_uuid(name.removesuffix(_PARTIAL))
            if file_id is None or FileId(file_id) not in keep:
                self._partials.remove(name)

    def uri_of(self, file_id: FileId) -> str | None:
        """The URI of a received file, None if it has not been received."""
        received = self.progress.received(file_id)
        if received is None or (received.state is State.PLACING and not self.has(received)):
            return None
        return f"workspace:{self.uploads.path / received.name}"
