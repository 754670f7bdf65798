"""Fetches a pending upload into a partial file: resumes it, retries, and checks the hash."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import Protocol

from restante import wire
from restante.client.calls import Extent
from restante.client.disk import Partial
from restante.client.retry import Backoff, is_retryable
from restante.client.sending import ProgressCallback
from restante.delivery.rules import MAX_FILE_BYTES, display_name
from restante.errors import AnswerInvalid, FileCorrupt, FileTooLarge, RestanteError, UploadGone
from restante.ids import FileId

_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class WaitingFile:
    """A file as its feed row describes it."""

    file_id: FileId
    name: str
    mimetype: str
    size: int
    display_name: str = ""  # not sent by earlier servers

    @property
    def original_name(self) -> str:
        """The name for people: the sender's, if the server knows it."""
        return self.display_name or self.name


@dataclass(frozen=True, slots=True)
class Fetch:
    """An open answer: which bytes it carries, and the bytes."""

    extent: Extent
    pieces: AsyncIterator[bytes]


class HasLimits(Protocol):
    """Knows the server's limits; AsyncClient does."""

    async def upload_limits(self) -> wire.UploadLimits: ...


class Fetcher(Protocol):
    """Opens a download; AsyncClient is one."""

    def fetch(self, file_id: FileId, start: int = 0) -> AbstractAsyncContextManager[Fetch]: ...


def shown_name(sent: object) -> str:
    """The display name that a server sent, cleaned with the server's own rule; it may be empty."""
    return display_name(sent) if isinstance(sent, str) and sent else ""


async def check_size(client: HasLimits, file: WaitingFile, max_bytes: int | None) -> None:
    """
    Raise FileTooLarge for a file above our own limit, whatever the server offers.

    Without a limit of our own it is the server's, which is asked when a file is larger than any
    server accepts by default.  A server that lies cannot fill the disk: a reserve stays free.
    """
    if max_bytes is None:
        max_bytes = MAX_FILE_BYTES
        if file.size > max_bytes:
            limits = await client.upload_limits()
            max_bytes = max(max_bytes, limits.per_file_bytes)
    if file.size > max_bytes:
        raise FileTooLarge(
            f"{file.name} has {file.size} bytes, and this side accepts at most {max_bytes}.",
            filename=file.name,
            size=file.size,
            max=max_bytes,
        )


async def fetch_whole(
    fetcher: Fetcher, file: WaitingFile, partial: Partial, progress: ProgressCallback
) -> None:
    """
    Fetch a file into a partial file and sync it; a retryable failure is retried a few times.

    Attempts that received at least one byte do not count.  Raises FileCorrupt when the SHA-256
    differs and UploadGone when the server no longer has the file; both leave the partial file
    empty.  An exception of the callback ends the fetch and is raised as it is; what was received
    can be resumed.
    """
    # The callback runs here, outside of the code that handles exceptions of the connection.
    async with aclosing(_fetch_with_retries(fetcher, file, partial)) as sizes:
        async for size in sizes:
            progress(size)
    await asyncio.to_thread(partial.sync)


async def _fetch_with_retries(
    fetcher: Fetcher, file: WaitingFile, partial: Partial
) -> AsyncGenerator[int, None]:
    backoff = Backoff(max_seconds=4)
    while True:
        size_before = partial.size
        try:
            async with aclosing(_fetch_rest(fetcher, file, partial)) as sizes:
                async for size in sizes:
                    yield size
        except UploadGone:
            partial.truncate(0)
            raise
        except RestanteError as error:
            if partial.size > size_before:
                backoff.reset()
            delay = backoff.next_delay(error)
            if not is_retryable(error) or backoff.failures >= _ATTEMPTS:
                raise
        else:
            return
        await asyncio.sleep(delay)


async def _fetch_rest(
    fetcher: Fetcher, file: WaitingFile, partial: Partial
) -> AsyncGenerator[int, None]:
    """Append what is missing; yields the size after each piece."""
    # The last byte is always fetched, because its answer carries the hash of the whole file.
    start = max(min(partial.size, file.size - 1), 0)
    # Before the request: hashing gigabytes takes so long that the server would give up.
    await asyncio.to_thread(partial.truncate, start)
    partial.check_room(file.size)
    async with fetcher.fetch(file.file_id, start) as fetch:
        _check_extent(fetch.extent, file, start)
        partial.truncate(fetch.extent.start)
        async for piece in fetch.pieces:
            if partial.size + len(piece) > file.size:
                partial.truncate(0)
                raise AnswerInvalid(f"{file.name} is longer than the server announced.")
            partial.write(piece)
            yield partial.size
    if partial.size != file.size or partial.sha256 != fetch.extent.sha256:
        partial.truncate(0)
        raise FileCorrupt(f"The received bytes of {file.name} are corrupt: the SHA-256 differs.")


def _check_extent(extent: Extent, file: WaitingFile, start: int) -> None:
    if extent.size != file.size:
        raise AnswerInvalid(
            f"{file.name} was announced with {file.size} bytes and has {extent.size}."
        )
    if extent.start not in {0, start}:
        raise AnswerInvalid(f"The server sent a different range of {file.name} than requested.")
