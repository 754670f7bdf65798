"""Files to send: where their bytes come from, and the body or the message that carries them."""

import base64
import mimetypes
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from restante import wire
from restante.client import calls
from restante.client.arguments import Several, several
from restante.client.calls import Part
from restante.client.streams import (
    PIECE_BYTES,
    Readable,
    Rewindable,
    Stream,
    must_be_stored,
    stored,
)
from restante.delivery.rules import (
    MAX_FILE_BYTES,
    MAX_FILES_PER_REQUEST,
    MAX_REQUEST_BYTES,
    clean_mimetype,
    display_name,
)
from restante.errors import FileTooLarge, FileUnreadable

# Called with the number of bytes sent or received so far.
ProgressCallback = Callable[[int], None]


def no_progress(_byte_count: int) -> None:
    """The callback of callers that do not ask for progress."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """A file in memory."""

    name: str
    content: bytes
    mimetype: str = ""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A file to send; its size is fixed, and it can be read again from the start."""

    part: Part
    source: Path | bytes | Rewindable

    @classmethod
    def of(cls, source: "Source") -> "Outgoing":
        """Read a file's size and guess its type; raises FileUnreadable."""
        if isinstance(source, Outgoing):
            return source
        if isinstance(source, Bytes):
            return cls(_part(source, len(source.content)), source.content)
        if isinstance(source, Readable):
            source = Stream.of(source)
        if isinstance(source, Stream):
            file = Rewindable.of(source)
            return cls(_part(source, file.size), file)
        path = Path(source)
        return cls(Part(path.name, _guessed(path.name), _size(path)), path)

    def named(self, name: str) -> "Outgoing":
        """The same file under another name."""
        return replace(self, part=replace(self.part, name=name))

    async def pieces(self) -> AsyncIterator[bytes]:
        """The content; raises FileUnreadable if the file has become shorter."""
        if isinstance(self.source, bytes):
            yield self.source
        elif isinstance(self.source, Path):
            async for piece in self._read(self.source):
                yield piece
        else:
            async for piece in self.source.pieces():
                yield piece

    async def _read(self, path: Path) -> AsyncIterator[bytes]:
        left = self.part.size
        with _opened(path) as file:
            while left:
                piece = _read(path, file, min(PIECE_BYTES, left))
                yield piece
                left -= len(piece)


# What can be sent: a path, an open file, bytes or a stream with a name.
Source = str | os.PathLike[str] | BinaryIO | Bytes | Stream | Outgoing


async def outgoing_files(
    files: Several[Source], max_bytes: int, until: ExitStack
) -> list[Outgoing]:
    """
    The files of a request; raises TypeError for a single path, and FileUnreadable.

    Streams that cannot be rewound, of at most `max_bytes`, are kept until the end of `until`.
    """
    return [
        Outgoing.of(await stored(file, max_bytes, until) if must_be_stored(file) else file)
        for file in several(files, "files")
    ]


# What holds on a server that does not say it.
DEFAULT_UPLOAD_LIMITS = wire.UploadLimits(MAX_FILE_BYTES, MAX_REQUEST_BYTES, MAX_FILES_PER_REQUEST)


def check_sizes(files: Sequence[Outgoing], limits: wire.UploadLimits) -> None:
    """Raise FileTooLarge for a file that the server would refuse after it was sent."""
    for part in (file.part for file in files):
        if part.size > limits.per_file_bytes:
            raise FileTooLarge(
                f"{part.name} has {part.size} bytes; the server accepts at most "
                f"{limits.per_file_bytes} for one file.",
                filename=part.name,
                size=part.size,
                max=limits.per_file_bytes,
            )


def _part(source: Bytes | Stream, size: int) -> Part:
    return Part(source.name, source.mimetype or _guessed(source.name), size)


def _guessed(name: str) -> str:
    return mimetypes.guess_type(name, strict=False)[0] or ""


def _size(path: Path) -> int:
    with _opened(path) as file:
        return os.fstat(file.fileno()).st_size


def _opened(path: Path) -> BinaryIO:
    try:
        if not path.is_file():
            raise FileUnreadable(f"{path} is not there, or is not a file.")
        return path.open("rb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileUnreadable(f"{path} cannot be read: {reason}.") from error


def _read(path: Path, file: BinaryIO, size: int) -> bytes:
    try:
        piece = file.read(size)
    except OSError as error:
        raise FileUnreadable(f"{path} cannot be read: {error}.") from error
    if not piece:
        raise FileUnreadable(f"{path} became shorter while it was being sent.")
    return piece


async def inlined(sources: Several[Source]) -> list[dict[str, Any]]:
    """Files with their content, as a message carries them; raises MessageTooLarge."""
    with ExitStack() as until:
        files = await outgoing_files(sources, wire.MAX_MESSAGE_BYTES, until)
        # Base64 makes 4 characters of 3 bytes.
        calls.check_message_size(sum((file.part.size + 2) // 3 * 4 for file in files))
        return [await _inlined(file) for file in files]


async def _inlined(file: Outgoing) -> dict[str, Any]:
    content = b"".join([piece async for piece in file.pieces()])
    kind = clean_mimetype(file.part.mimetype)
    return {
        "name": display_name(file.part.name),
        **({"mimeType": kind} if kind else {}),
        "bytes": base64.b64encode(content).decode(),
    }


class _Stopped(Exception):
    """Ends a body; the reason is in its `error`."""


class MultipartBody:
    """
    The body of an upload; each call of `pieces` starts again from the beginning.

    The HTTP library reports every exception raised in a body as a lost connection.  `error` keeps
    the original: an unreadable file, or whatever the caller's callback raised.
    """

    def __init__(
        self, key: str, files: Sequence[Outgoing], progress: ProgressCallback = no_progress
    ) -> None:
        self._key = key
        self._files = files
        self._progress = progress
        self.error: BaseException | None = None

    async def pieces(self) -> AsyncIterator[bytes]:
        """The bytes in order; the callback gets the number of file bytes sent so far."""
        try:
            async for piece in self._pieces():
                yield piece
        except GeneratorExit:
            raise
        except BaseException as error:
            self.error = error
            raise _Stopped from error

    async def _pieces(self) -> AsyncIterator[bytes]:
        sent = 0
        for file in self._files:
            yield calls.part_head(self._key, file.part)
            async for piece in file.pieces():
                yield piece
                sent += len(piece)
                self._progress(sent)
            yield calls.PART_END
        yield calls.body_end(self._key)
