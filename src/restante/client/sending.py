"""Files to send: where their bytes come from, and the body or the message that carries them."""

import base64
import mimetypes
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from restante import wire
from restante.client import calls
from restante.client.calls import Part
from restante.delivery.rules import (
    MAX_FILE_BYTES,
    MAX_FILES_PER_REQUEST,
    MAX_REQUEST_BYTES,
    clean_mimetype,
    display_name,
)
from restante.errors import FileTooLarge, FileUnreadable

_PIECE_BYTES = 256 * 1024

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
    source: Path | bytes

    @classmethod
    def of(cls, source: "Source") -> "Outgoing":
        """Read a file's size and guess its type; raises FileUnreadable."""
        if isinstance(source, Outgoing):
            return source
        if isinstance(source, Bytes):
            part = Part(source.name, source.mimetype or _guessed(source.name), len(source.content))
            return cls(part, source.content)
        path = Path(source)
        return cls(Part(path.name, _guessed(path.name), _size(path)), path)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The content; raises FileUnreadable if the file has become shorter."""
        if isinstance(self.source, bytes):
            yield self.source
            return
        left = self.part.size
        with _opened(self.source) as file:
            while left:
                piece = _read(self.source, file, min(_PIECE_BYTES, left))
                yield piece
                left -= len(piece)


# What can be sent: a path, or bytes with a name.
Source = Path | str | Bytes | Outgoing


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
        raise FileUnreadable(f"{path} cannot be read: {error}.") from error


def _read(path: Path, file: BinaryIO, size: int) -> bytes:
    try:
        piece = file.read(size)
    except OSError as error:
        raise FileUnreadable(f"{path} cannot be read: {error}.") from error
    if not piece:
        raise FileUnreadable(f"{path} became shorter while it was being sent.")
    return piece


async def inlined(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Files with their content, as a message carries them; raises MessageTooLarge."""
    files = [Outgoing.of(source) for source in sources]
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
