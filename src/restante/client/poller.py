"""
Follows a workspace's feed: `async for item in inbox`.

Asking for the next item marks the previous one as handled.  After a crash the item that was not
handled comes again, and possibly those before it on the same page.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

import msgspec

from restante import wire
from restante.client import calls
from restante.client.calls import Cursor, FeedPage, body_of, decoded
from restante.client.disk import Directory
from restante.client.fetching import WaitingFile, check_size, fetch_whole
from restante.client.retry import Backoff, is_retryable
from restante.client.sending import ProgressCallback, no_progress
from restante.delivery.rules import MAX_FILE_BYTES, UPLOAD_METHOD, clean_name
from restante.errors import AnswerInvalid, CursorGone, RestanteError
from restante.ids import ActivityId, FileId, as_uuid

if TYPE_CHECKING:
    from restante.client.aio import AsyncClient

WAIT_SECONDS = 30
_MIN_POLL_SECONDS = 1

# By default no server keeps an upload longer.  Where one does, the file is fetched from the start.
_STALE_PARTIAL_SECONDS = 7 * 24 * 3600


class _Announced(msgspec.Struct, frozen=True, rename={"mime_type": "mimeType"}):
    """The body of a row that announces a file."""

    file_id: UUID
    name: str
    size: Annotated[int, msgspec.Meta(ge=0)]
    mime_type: str = ""


class MessageItem:
    """A message."""

    is_file: Final = False

    def __init__(self, client: "AsyncClient", row: wire.ActivityRow) -> None:
        self._client = client
        self.row = row

    @property
    def seq(self) -> int:
        return self.row.seq

    @property
    def method(self) -> str:
        """The JSON-RPC method, such as `message/send`."""
        return self.row.method or ""

    @property
    def body(self) -> Any:
        """The message as it was sent."""
        return body_of(self.row)

    async def ack(self) -> None:
        """Record on the server that the feed has been handled up to this message."""
        await self._client.acknowledge_feed(self.seq)


class FileItem:
    """A file to fetch."""

    is_file: Final = True

    def __init__(self, client: "AsyncClient", row: wire.ActivityRow, file: WaitingFile) -> None:
        self._client = client
        self.row = row
        self.file = file

    @property
    def seq(self) -> int:
        return self.row.seq

    @property
    def name(self) -> str:
        """The file name, safe on every filesystem."""
        return self.file.name

    async def save(
        self,
        directory: str | os.PathLike[str],
        *,
        max_bytes: int = MAX_FILE_BYTES,
        progress: ProgressCallback = no_progress,
    ) -> Path:
        """
        Fetch the file into a directory and return its path; it is complete, verified and synced.

        The name starts with random hex digits, so that no file is replaced.  An interrupted
        download is resumed from its partial file, `.<file id>.part`.  Raises UploadGone if the
        server no longer has the file.  An exception that `progress` raises ends the download and
        is raised here.

        Partial files in the directory that are a week old and in use by no process are removed.
        """
        check_size(self.file, max_bytes)
        path = Path(directory)
        partial_name = f".{self.file.file_id}.part"
        with Directory.open(path) as folder, folder.partial(partial_name) as partial:
            await asyncio.to_thread(_remove_stale_partials, path)
            await fetch_whole(self._client, self.file, partial, progress)
            return folder.place(partial_name, folder, unique_name(self.name))

    async def ack(self) -> None:
        """Acknowledge the file: the server deletes it."""
        await self._client.acknowledge(self.file.file_id)


Item = FileItem | MessageItem


def unique_name(name: str) -> str:
    """A file name that does not exist yet."""
    return f"{os.urandom(16).hex()}-{name}"


def _remove_stale_partials(path: Path) -> None:
    """Remove the partial files of uploads that failed and then expired: they are never resumed."""
    with Directory.open(path) as directory:
        partials = [name for name in directory.names() if _is_partial(name)]
        directory.remove_stale_partials(
            partials, written_before=time.time() - _STALE_PARTIAL_SECONDS
        )


def _is_partial(name: str) -> bool:
    return name[:1] == "." and name[-5:] == ".part" and as_uuid(name[1:-5]) is not None


def announced(row: wire.ActivityRow) -> WaitingFile | None:
    """The file that a row announces, None for a message."""
    if row.method != UPLOAD_METHOD or row.source_id is not None:
        return None  # only the server announces files; a workspace could forge such a message
    try:
        sent = decoded(row.request_body, _Announced)
    except AnswerInvalid:
        return None
    return WaitingFile(FileId(sent.file_id), clean_name(sent.name), sent.mime_type, sent.size)


class Inbox:
    """The files and messages of a workspace, in order."""

    def __init__(self, client: "AsyncClient", cursor: Cursor | None, *, once: bool = False) -> None:
        self._client = client
        self._once = once
        self._until: int | None = None
        self._cursor_losses = 0
        self._is_marked = True
        self.cursor = cursor
        self.missed = 0

    async def __aiter__(self) -> AsyncIterator[Item]:
        backoff = Backoff()
        while True:
            try:
                await self.mark()
                if self._once and self.at_end:
                    return
                items = await self.page(0 if self._once else WAIT_SECONDS)
            except RestanteError as error:
                if not is_retryable(error):
                    raise
                await asyncio.sleep(backoff.next_delay(error))
                continue
            backoff.reset()
            for item in items:
                yield item
                self.consumed(item)

    async def mark(self) -> None:
        """Record on the server how far the feed has been handled, if that has changed."""
        if self.cursor and not self._is_marked:
            await self._client.acknowledge_feed(self.cursor.seq)
        self._is_marked = True

    @property
    def at_end(self) -> bool:
        """Whether every row that existed when reading started has been consumed."""
        return (
            self._until is not None and self.cursor is not None and (self.cursor.seq >= self._until)
        )

    def consumed(self, item: Item) -> None:
        """Mark an item as handled: the next page starts after it."""
        before = self.cursor.seq if self.cursor else item.seq - 1
        self.missed += max(item.seq - before - 1, 0)
        self.cursor = Cursor(item.seq, ActivityId(item.row.id))
        self._is_marked = False

    async def page(self, wait_seconds: float = 0) -> list[Item]:
        """
        The next items, possibly none; the same ones again until they are `consumed`.

        `missed` grows by the number of rows that were deleted before they were read.
        """
        started_at = time.monotonic()
        try:
            cursor = self.cursor = self.cursor or await self._beginning()
            page = await self._read(cursor, wait_seconds)
        except CursorGone as gone:
            self._start_over(gone)
            return []
        if not page.rows:
            # A server that is shutting down, or does not know `wait`, answers at once.
            until = started_at + min(wait_seconds, _MIN_POLL_SECONDS)
            await asyncio.sleep(max(until - time.monotonic(), 0))
        self._cursor_losses = 0
        if self._until is None or not page.rows:
            self._until = page.latest_seq if page.rows else cursor.seq
        return [self._item(row) for row in self._fresh(page, cursor)]

    async def _read(self, cursor: Cursor, wait_seconds: float) -> FeedPage:
        """Read a page; an endless inbox retries in its own loop, so it makes one attempt here."""
        call = calls.feed(
            self._client.workspace_id,
            cursor,
            wait_seconds=wait_seconds,
            limit=calls.ROWS_PER_PAGE,
        )
        return await self._client.send(call, attempts=4 if self._once else 1)

    async def _beginning(self) -> Cursor:
        """The last acknowledged row, or the row before the oldest one that still exists."""
        page = await self._client.feed(None, limit=1)
        trimmed = page.lowest_seq - 1
        self.missed += max(trimmed - page.acked_seq, 0)
        return Cursor(max(page.acked_seq, trimmed))

    def _fresh(self, page: FeedPage, cursor: Cursor) -> list[wire.ActivityRow]:
        fresh = [row for row in page.rows if row.seq > cursor.seq]
        if page.rows and not fresh:
            raise AnswerInvalid("The server's feed does not advance: it repeats old rows.")
        return fresh

    def _start_over(self, gone: CursorGone) -> None:
        """
        Continue with the oldest row that still exists.

        If that row is before our cursor, the feed was reset or restored from a backup.  Then all
        of its rows are read.
        """
        self._cursor_losses += 1
        if self._cursor_losses > 2:
            raise AnswerInvalid("The server rejects every position in its feed as gone.")
        lowest = gone.facts.get("lowest_seq")
        at = self.cursor.seq if self.cursor else 0
        if not isinstance(lowest, int) or lowest < 1:
            self.cursor = None
            return
        self.missed += max(lowest - 1 - at, 0)
        self.cursor = Cursor(lowest - 1)

    def _item(self, row: wire.ActivityRow) -> Item:
        file = announced(row)
        return FileItem(self._client, row, file) if file else MessageItem(self._client, row)
