"""
A workspace's folder: its credentials, its progress, and the files it has received.

    <root>/.molecule/chat-uploads/<32 hex>-<name>    received files
    <root>/.molecule/restante/                       credentials, progress, and partial files

Files may also be put into another directory; `places` has both.
"""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self

import msgspec

from restante.client.calls import Credentials
from restante.client.disk import Directory, read_below
from restante.client.places import (
    HOME,
    PARTIAL,
    ChatUploads,
    Into,
    Place,
    chosen_directory,
    remove_stale_partials,
)
from restante.client.progress import Progress, Received, State
from restante.errors import FolderUnusable
from restante.ids import FileId, as_uuid

UPLOADS = "chat-uploads"
OURS = "restante"
_CREDENTIALS = "credentials.json"
_PROGRESS = "progress.sqlite"
_SQLITE_SUFFIXES = ("", "-journal", "-wal", "-shm")


def kept_credentials(root: Path) -> Credentials | None:
    """The credentials stored in a folder, None if it has none."""
    path = root / HOME / OURS / _CREDENTIALS
    try:
        kept = read_below(root, HOME, OURS, _CREDENTIALS)
        return None if kept is None else msgspec.json.decode(kept, type=Credentials)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FolderUnusable(f"{path} cannot be read: {reason}.") from error


class Folder:
    """
    An open folder; only one process can have it open.

    With `into`, new files are put into that directory, under the names that their senders gave.
    """

    def __init__(self, root: Path, into: Path | None = None) -> None:
        self.root = root.absolute()
        directory = chosen_directory(into) if into else None
        with ExitStack() as opened:
            self._ours = opened.enter_context(Directory.open(root, HOME, OURS))
            self._partials = opened.enter_context(Directory.open(root, HOME, OURS, "arriving"))
            uploads = opened.enter_context(Directory.open(root, HOME, UPLOADS))
            self._ours.refuse_links(*(_PROGRESS + suffix for suffix in _SQLITE_SUFFIXES))
            progress = Progress.open(self._ours.path / _PROGRESS)
            self.progress = opened.enter_context(closing(progress))
            self._opened = opened.pop_all()
        self._uploads = ChatUploads(uploads, self._partials, progress)
        self.new_files: Place = Into(directory, progress) if directory else self._uploads

    @classmethod
    def open(cls, root: Path, into: Path | None = None) -> Self:
        """Open a folder and create it if needed; raises FolderInUse."""
        return cls(root, into)

    def close(self) -> None:
        """Close the folder, so that another process can open it."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keep(self, credentials: Credentials) -> None:
        """Store the credentials, readable by their owner only."""
        new = _CREDENTIALS + ".new"
        self._ours.remove(new)
        with self._ours.partial(new) as file:
            file.write(msgspec.json.encode(credentials))
            file.sync()
        self._ours.replace(new, _CREDENTIALS)
        self._ours.sync()

    def place_of(self, received: Received | None) -> Place:
        """Where a file was put when its name was recorded; None for a new one."""
        if received is None:
            return self.new_files
        return (
            Into(Path(received.directory), self.progress) if received.directory else self._uploads
        )

    def remove_partials(self, *, keep: set[FileId]) -> None:
        """Remove the partial files of all uploads but these."""
        for name in self._partials.names():
            file_id = as_uuid(name.removesuffix(PARTIAL))
            if file_id is None or FileId(file_id) not in keep:
                self._partials.remove(name)
        if isinstance(self.new_files, Into):
            remove_stale_partials(self.new_files.path)

    def uri_of(self, file_id: FileId) -> str | None:
        """The URI of a received file, None if it has not been received."""
        received = self.progress.received(file_id)
        place = self.place_of(received)
        if received is None or (received.state is State.PLACING and not place.has(received)):
            return None
        return f"workspace:{place.path / received.name}"
