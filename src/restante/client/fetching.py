"""Brings the bytes of a waiting file to disk: goes on where it was cut off, and checks the hash."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from restante.client.calls import Extent
from restante.client.disk import Partial
from restante.client.patience import Patience, is_passing
from restante.delivery.rules import MAX_FILE_BYTES
from restante.errors import AnswerInvalid, FileCorrupt, FileTooLarge, RestanteError
from restante.ids import FileId

_TRIES = 4

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class WaitingFile:
    """A file as its announcement describes it."""

    file_id: FileId
    name: str
    mimetype: str
    size: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """An open answer: which bytes it carries, and the bytes."""

    extent: Extent
    pieces: AsyncIterator[bytes]


class Source(Protocol):
    """Where bytes come from."""

    def fetch(self, file_id: FileId, start: int = 0) -> AbstractAsyncContextManager[Fetch]: ...


def check_size(file: WaitingFile, max_bytes: int = MAX_FILE_BYTES) -> None:
    """Refuse what is larger than we take, whatever the server allows."""
    if file.size > max_bytes:
        raise FileTooLarge(
            f"{file.name} has {file.size} bytes, and this side takes at most {max_bytes}.",
            filename=file.name,
            size=file.size,
            max=max_bytes,
        )


async def fetch_whole(
    source: Source, file: WaitingFile, partial: Partial, progress: Progress
) -> None:
    """
    Fetch a file to its end and sync it; a few interruptions in a row are borne.

    Raises FileCorrupt when what came is not the file; then nothing of it is kept.
    """
    patience = Patience(longest_seconds=4)
    while True:
        had = partial.size
        try:
            await _fetch_rest(source, file, partial, progress)
        except RestanteError as error:
            if partial.size > had:
                patience.succeeded()
            pause = patience.failed(error)
            if not is_passing(error) or patience.failures >= _TRIES:
                raise
        else:
            await asyncio.to_thread(partial.sync)
            return
        await asyncio.sleep(pause)


async def _fetch_rest(
    source: Source, file: WaitingFile, partial: Partial, progress: Progress
) -> None:
    # The last byte is always fetched, because the answer to it tells the hash of the whole.
    start = max(min(partial.size, file.size - 1), 0)
    async with source.fetch(file.file_id, start) as fetch:
        _check_extent(fetch.extent, file, start)
        partial.cut(fetch.extent.start)
        async for piece in fetch.pieces:
            if partial.size + len(piece) > file.size:
                partial.cut(0)
                raise AnswerInvalid(f"{file.name} is longer than the server announced.")
            partial.write(piece)
            progress(partial.size)
    if partial.size != file.size or partial.sha256 != fetch.extent.sha256:
        partial.cut(0)
        raise FileCorrupt(f"What came of {file.name} is not what was sent: its SHA-256 differs.")


def _check_extent(extent: Extent, file: WaitingFile, start: int) -> None:
    if extent.size != file.size:
        raise AnswerInvalid(
            f"{file.name} was announced with {file.size} bytes and has {extent.size}."
        )
    if extent.start not in {0, start}:
        raise AnswerInvalid(f"The server sent another part of {file.name} than was asked for.")
