"""
A workspace's folder: its credentials, its progress, and the files it has received.

    <root>/.molecule/chat-uploads/<32 hex>-<name>    what arrived
    <root>/.molecule/restante/                       credentials, progress, and what is arriving
"""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self

import msgspec

from restante.client.calls import Credentials
from restante.client.disk import Directory, Partial, disk_errors
from restante.client.poller import unique_name
from restante.client.progress import Progress, Received, State
from restante.errors import FolderUnusable
from restante.ids import FileId, as_uuid

HOME = ".molecule"
UPLOADS = "chat-uploads"
OURS = "restante"
_CREDENTIALS = "credentials.json"
_PARTIAL = ".part"


def kept_credentials(root: Path) -> Credentials | None:
    """The credentials in a folder, None if no workspace has been registered from it."""
    path = root / HOME / OURS / _CREDENTIALS
    try:
        return msgspec.json.decode(path.read_bytes(), type=Credentials)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FolderUnusable(f"{path} cannot be read: {error}.") from error


class Folder:
    """An open folder; one process has it at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        with ExitStack() as opened:
            self._ours = opened.enter_context(Directory.open(root, HOME, OURS))
            self._partials = opened.enter_context(Directory.open(root, HOME, OURS, "arriving"))
            self.uploads = opened.enter_context(Directory.open(root, HOME, UPLOADS))
            progress = Progress.open(self._ours.path / "progress.sqlite")
            self.progress = opened.enter_context(closing(progress))
            self._opened = opened.pop_all()

    @classmethod
    def open(cls, root: Path) -> Self:
        """Open a folder, making it if it is not there; raises FolderInUse."""
        return cls(root)

    def close(self) -> None:
        """Let others have it."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def credentials_path(self) -> Path:
        """Where the credentials are kept."""
        return self._ours.path / _CREDENTIALS

    def keep(self, credentials: Credentials) -> None:
        """Write the credentials for the next time, readable by their owner only."""
        new = _CREDENTIALS + ".new"
        self._ours.remove(new)
        with self._ours.partial(new) as file:
            file.write(msgspec.json.encode(credentials))
            file.sync()
        with disk_errors(self.credentials_path):
            (self._ours.path / new).replace(self.credentials_path)
            self._ours.sync()

    def arriving(self, file_id: FileId) -> Partial:
        """Where the bytes of a file are collected."""
        return self._partials.partial(f"{file_id}{_PARTIAL}")

    def intend(self, file_id: FileId, name: str) -> str:
        """Choose the name of a file that is whole, and note it before the file gets it."""
        chosen = unique_name(name)
        self.progress.note(file_id, chosen, State.PLACING)
        return chosen

    def place(self, file_id: FileId, name: str) -> Path:
        """
        Give a file the name that was noted, unless an earlier run did.

        With neither the name nor the collected bytes there, it was placed and taken away since.
        """
        partial = f"{file_id}{_PARTIAL}"
        if not self.uploads.has(name) and self._waits_for_its_name(partial):
            self._partials.place(partial, self.uploads, name)
        else:
            self.uploads.sync()
            self._partials.remove(partial)
        return self.uploads.path / name

    def _waits_for_its_name(self, partial: str) -> bool:
        return self._partials.has(partial) and not self._partials.has_other_name(partial)

    def was_taken(self, file_id: FileId, received: Received) -> bool:
        """Whether a file was placed, and is there no more."""
        partial = f"{file_id}{_PARTIAL}"
        return not self.has(received) and not self._waits_for_its_name(partial)

    def has(self, received: Received) -> bool:
        """Whether a received file is still where it was put."""
        return self.uploads.has(received.name)

    def forget_arriving(self, *, keep: set[FileId]) -> None:
        """Remove the bytes of files that no longer wait."""
        for name in self._partials.names():
            file_id = as_uuid(name.removesuffix(_PARTIAL))
            if file_id is None or FileId(file_id) not in keep:
                self._partials.remove(name)

    def uri_of(self, file_id: FileId) -> str | None:
        """How a message names a file that has arrived."""
        received = self.progress.received(file_id)
        if received is None or (received.state is State.PLACING and not self.has(received)):
            return None
        return f"workspace:{self.uploads.path / received.name}"
