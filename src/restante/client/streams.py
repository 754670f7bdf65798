"""
Files to send that are read from something open: a file object, a pipe, an asynchronous iterator.

An upload says its length first, and is read again from the start after a lost connection.  So what
cannot be rewound is stored in a temporary file before it is sent.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import SEEK_END, SEEK_SET
from pathlib import PurePath
from typing import Any, BinaryIO, Protocol, TypeGuard, runtime_checkable

from restante.errors import FileTooLarge, FileUnreadable

PIECE_BYTES = 256 * 1024
_IN_MEMORY_BYTES = 1024 * 1024


@runtime_checkable
class Readable(Protocol):
    """Anything open for reading in binary mode."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Stream:
    """
    A file that is read from something open, from its current position to its end.

    A file object is left open.  What cannot be rewound, such as a pipe, is stored in a temporary
    file first.
    """

    name: str
    source: Readable | AsyncIterable[bytes]
    mimetype: str = ""

    @classmethod
    def of(cls, file: Readable) -> "Stream":
        """The stream of an open file, under its own name; raises TypeError if it has none."""
        path = getattr(file, "name", None)
        if not isinstance(path, str) or path.startswith("<"):
            raise TypeError(f"{file!r} has no file name: pass Stream('report.pdf', ...) instead.")
        return cls(PurePath(path).name, file)


@dataclass(frozen=True, slots=True)
class Rewindable:
    """The rest of a file object that can be read again."""

    name: str
    file: BinaryIO
    start: int
    size: int

    @classmethod
    def of(cls, stream: Stream) -> "Rewindable":
        """Measure what is left of it; raises FileUnreadable."""
        file: Any = stream.source
        try:
            start = file.tell()
            size = file.seek(0, SEEK_END) - start
            file.seek(start, SEEK_SET)
        except (OSError, ValueError) as error:
            raise _unreadable(stream.name, error) from error
        return cls(stream.name, file, start, size)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The content; raises FileUnreadable if it has become shorter."""
        at, end = self.start, self.start + self.size
        while at < end:
            piece = await asyncio.to_thread(self._read, at, min(PIECE_BYTES, end - at))
            if not piece:
                raise FileUnreadable(f"{self.name} became shorter while it was being sent.")
            yield piece
            at += len(piece)

    def _read(self, at: int, size: int) -> bytes:
        try:
            self.file.seek(at)
            return _checked(self.name, self.file.read(size))
        except (OSError, ValueError) as error:
            raise _unreadable(self.name, error) from error


def must_be_stored(source: object) -> TypeGuard[Stream | Readable]:
    """Whether it is a stream that cannot be rewound."""
    file = source.source if isinstance(source, Stream) else source
    if isinstance(file, AsyncIterable):
        return True
    return isinstance(file, Readable) and not _is_seekable(file)


async def stored(source: Stream | Readable, max_bytes: int, until: ExitStack) -> Stream:
    """
    Copy a stream into a temporary file, which is removed at the end of `until`.

    Raises FileTooLarge after more than `max_bytes`: a pipe may have no end.
    """
    stream = source if isinstance(source, Stream) else Stream.of(source)
    file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115 - by `until`
    until.enter_context(file)
    size = 0
    async for piece in _pieces(stream):
        size += len(piece)
        if size > max_bytes:
            raise FileTooLarge(
                f"{stream.name} has more than {max_bytes} bytes, which is all that is accepted.",
                filename=stream.name,
                max=max_bytes,
            )
        await asyncio.to_thread(_write, stream.name, file, piece)
    file.seek(0)
    return replace(stream, source=file)


async def _pieces(stream: Stream) -> AsyncIterator[bytes]:
    if isinstance(stream.source, AsyncIterable):
        async for piece in stream.source:
            yield _checked(stream.name, piece)
        return
    while piece := await asyncio.to_thread(_next, stream.name, stream.source):
        yield piece


def _next(name: str, file: Readable) -> bytes:
    try:
        return _checked(name, file.read(PIECE_BYTES))
    except (OSError, ValueError) as error:
        raise _unreadable(name, error) from error


def _checked(name: str, piece: object) -> bytes:
    # A file in text mode gives str, and one that does not block gives None.
    if not isinstance(piece, bytes | bytearray):
        raise TypeError(f"{name} gives {type(piece).__name__}: open it in binary mode.")
    return bytes(piece)


def _write(name: str, file: Any, piece: bytes) -> None:
    try:
        file.write(piece)
    except OSError as error:
        where = tempfile.gettempdir()
        raise FileUnreadable(f"{name} cannot be stored in {where} first: {error}.") from error


def _is_seekable(file: object) -> bool:
    seekable = getattr(file, "seekable", None)
    try:
        return bool(seekable and seekable())
    except ValueError as error:
        raise _unreadable(repr(file), error) from error


def _unreadable(name: str, error: Exception) -> FileUnreadable:
    return FileUnreadable(f"{name} cannot be read: {error}.")
