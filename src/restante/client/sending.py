"""Files on their way to a server: where their bytes come from, and the body that carries them."""

import mimetypes
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from restante.client import calls
from restante.client.calls import Part
from restante.delivery.rules import MAX_FILE_BYTES
from restante.errors import FileTooLarge, FileUnreadable

_PIECE_BYTES = 256 * 1024

Progress = Callable[[int], None]


def unheard(_bytes_sent: int) -> None:
    """For those who wait for the end."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """A file that is in memory."""

    name: str
    content: bytes
    mimetype: str = ""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A file whose size is known, and which can be read from its start as often as needed."""

    part: Part
    source: Path | bytes

    @classmethod
    def of(cls, source: "Source") -> "Outgoing":
        """Look at a file; raises FileUnreadable, or FileTooLarge before anything is sent."""
        if isinstance(source, Outgoing):
            return source
        if isinstance(source, Bytes):
            part = Part(source.name, source.mimetype or _guessed(source.name), len(source.content))
            found = cls(part, source.content)
        else:
            path = Path(source)
            found = cls(Part(path.name, _guessed(path.name), _size(path)), path)
        if found.part.size > MAX_FILE_BYTES:
            raise FileTooLarge(
                f"{found.part.name} has {found.part.size} bytes; at most {MAX_FILE_BYTES} can be "
                "sent as one file.",
                filename=found.part.name,
                size=found.part.size,
                max=MAX_FILE_BYTES,
            )
        return found

    async def pieces(self) -> AsyncIterator[bytes]:
        """The bytes; raises FileUnreadable if there are not as many as were announced."""
        if isinstance(self.source, bytes):
            yield self.source
            return
        left = self.part.size
        with _opened(self.source) as file:
            while left:
                piece = file.read(min(_PIECE_BYTES, left))
                if not piece:
                    raise FileUnreadable(f"{self.source} became shorter while it was sent.")
                yield piece
                left -= len(piece)


# What can be sent: something on disk, or bytes with a name.
Source = Path | str | Bytes | Outgoing


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


async def body_of(
    key: str, files: Sequence[Outgoing], progress: Progress = unheard
) -> AsyncIterator[bytes]:
    """The body of an upload, piece by piece; `progress` hears how many file bytes have gone."""
    sent = 0
    for file in files:
        yield calls.opening(key, file.part)
        async for piece in file.pieces():
            yield piece
            sent += len(piece)
            progress(sent)
        yield calls.PART_END
    yield calls.closing(key)
