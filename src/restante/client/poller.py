"""
Follows a workspace's feed: `async for item in inbox`.

Asking for the next item marks the previous one as handled.  After a crash the item that was not
handled comes again, and possibly those before it on the same page.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from uuid import UUID

import msgspec

from restante import wire
from restante.client import calls
from restante.client.arguments import Several
from restante.client.calls import Cursor, FeedPage
from restante.client.disk import Directory
from restante.client.fetching import WaitingFile, check_size, fetch_whole, shown_name
from restante.client.http_replies import body_of, decoded
from restante.client.messages import ANSWER_ROLE, context_of, is_answerable, is_own, said_in
from restante.client.places import (
    hidden_partial,
    place_freely,
    remove_stale_partials,
    unique_name,
)
from restante.client.retry import Backoff, is_retryable
from restante.client.sending import ProgressCallback, Source, no_progress
from restante.delivery.rules import UPLOAD_METHOD, clean_name
from restante.errors import AnswerInvalid, CursorGone, RestanteError
from restante.ids import ActivityId, FileId

if TYPE_CHECKING:
    from restante.client.aio import AsyncClient

WAIT_SECONDS = 30
_MIN_POLL_SECONDS = 1
_ALL_GONE = "The server rejects every position in its feed as gone."
_MAX_CURSOR_LOSSES = 2


class _Announced(msgspec.Struct, frozen=True, rename={"mime_type": "mimeType"}):
    """The body of a row that announces a file."""

    file_id: UUID
    name: str
    size: Annotated[int, msgspec.Meta(ge=0)]
    mime_type: str = ""
    display_name: Any = None  # a wrong one must not hide the file


class MessageItem:
    """A message."""

    kind: ClassVar[Literal["message"]] = "message"
    is_file: ClassVar[Literal[False]] = False

    def __init__(self, client: "AsyncClient", row: wire.ActivityRow) -> None:
        self._client = client
        self.row = row

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seq={self.seq}, method={self.method!r})"

    @property
    def seq(self) -> int:
        """Its position in the feed."""
        return self.row.seq

    @property
    def method(self) -> str:
        """The JSON-RPC method, such as `message/send`."""
        return self.row.method or ""

    @property
    def body(self) -> Any:
        """The message as it was sent."""
        return body_of(self.row)

    @property
    def text(self) -> str:
        """The text of the message, empty if it has none."""
        return said_in(self.body).text

    @property
    def is_answerable(self) -> bool:
        """Whether the message asks for an answer; an answer does not."""
        return is_answerable(self.row, self.body)

    async def reply(
        self,
        text: str,
        *,
        files: Several[Source] = (),
        message_id: str | None = None,
        is_repetition: bool = False,
    ) -> None:
        """
        Answer the sender: the user at the canvas, or the workspace that sent the message.

        To a workspace it is a message of the same conversation, with the role `agent`, and its
        files travel inside of it: 16 MiB at most.  `message_id` is the id of that message; the same
        id is queued once.  `is_repetition`: an earlier call with it may have reached the workspace,
        which is not called again if it is in push mode.
        """
        if self.row.source_id is None:
            await self._client.notify(text, files=files)
            return
        await self._client.send_message(
            self.row.source_id,
            text,
            files=files,
            context_id=context_of(self.body),
            message_id=message_id,
            role=ANSWER_ROLE,
            is_repetition=is_repetition,
        )

    async def ack(self) -> None:
        """Record on the server that the feed has been handled up to this message."""
        await self._client.acknowledge_feed(Cursor(self.seq, ActivityId(self.row.id)))


class FileItem:
    """A file to fetch."""

    kind: ClassVar[Literal["file"]] = "file"
    is_file: ClassVar[Literal[True]] = True

    def __init__(self, client: "AsyncClient", row: wire.ActivityRow, file: WaitingFile) -> None:
        self._client = client
        self.row = row
        self.file = file

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seq={self.seq}, name={self.name!r}, size={self.file.size})"

    @property
    def seq(self) -> int:
        """Its position in the feed."""
        return self.row.seq

    @property
    def name(self) -> str:
        """The file name, safe on every filesystem."""
        return self.file.name

    @property
    def display_name(self) -> str:
        """The name that the sender gave, for people; not safe as a path."""
        return self.file.original_name

    async def save(
        self,
        directory: str | os.PathLike[str],
        *,
        original_name: bool = False,
        max_bytes: int | None = None,
        progress: ProgressCallback = no_progress,
    ) -> Path:
        """
        Fetch the file into a directory and return its path; it is complete, verified and synced.

        The name starts with random hex digits, so that no file is replaced; with `original_name` it
        is the sender's, made safe, and `a (2).txt` if there is an `a.txt`.  An interrupted download
        is resumed from its partial file, `.<file id>.part`.  Raises UploadGone if the server no
        longer has the file.  An exception that `progress` raises ends the download and is raised
        here.

        A file above `max_bytes` is refused; by default above the server's limit.  Partial
        files in the directory that are a week old and in use by no process are removed.
        """
        await check_size(self._client, self.file, max_bytes)
        path = Path(directory)
        partial_name = hidden_partial(self.file.file_id)
        with Directory.open(path) as folder, folder.partial(partial_name) as partial:
            await asyncio.to_thread(remove_stale_partials, path)
            await fetch_whole(self._client, self.file, partial, progress)
            if original_name:
                return await asyncio.to_thread(_place_freely, folder, partial_name, self.file)
            return folder.place(partial_name, folder, unique_name(self.name))

    async def ack(self) -> None:
        """Acknowledge the file: the server deletes it."""
        await self._client.acknowledge(self.file.file_id)


Item = FileItem | MessageItem


def _place_freely(folder: Directory, partial: str, file: WaitingFile) -> Path:
    name = place_freely(folder, partial, file)
    folder.sync()
    folder.remove(partial)
    return folder.path / name


def announced(row: wire.ActivityRow) -> WaitingFile | None:
    """The file that a row announces, None for a message."""
    if row.method != UPLOAD_METHOD or row.source_id is not None:
        return None  # only the server announces files; a workspace could forge such a message
    return _file_in(row)


def own_file(row: wire.ActivityRow) -> WaitingFile | None:
    """The file that the workspace itself uploaded, for its user; None for any other row."""
    return _file_in(row) if row.method == UPLOAD_METHOD and is_own(row) else None


def _file_in(row: wire.ActivityRow) -> WaitingFile | None:
    try:
        sent = decoded(row.request_body, _Announced)
    except AnswerInvalid:
        return None
    return WaitingFile(
        FileId(sent.file_id),
        clean_name(sent.name),
        sent.mime_type,
        sent.size,
        shown_name(sent.display_name),
    )


@dataclass(slots=True)
class Gaps:
    """How often, and by how many rows, reading did not simply continue after the cursor."""

    missed: int = 0  # rows that the server deleted before they were read
    skipped: int = 0  # rows after the cursor that an earlier run had acknowledged
    restores: int = 0  # times that a restored server no longer knew the cursor's row
    repeated: int = 0  # rows up to the cursor that may come again, at most


class Inbox:
    """The files and messages of a workspace, in order."""

    def __init__(
        self,
        client: "AsyncClient",
        cursor: Cursor | None,
        *,
        once: bool = False,
        skip_acked: bool = False,
    ) -> None:
        self._client = client
        self._once = once
        self._skip_acked = skip_acked
        self._until: int | None = None
        self._cursor_losses = 0
        self._is_marked = True
        self._has_started = cursor is None
        self.cursor = cursor
        self.gaps = Gaps()
        self.rows_behind = 0  # of the last page, when it was read

    @property
    def missed(self) -> int:
        """The number of rows that were deleted before they were read."""
        return self.gaps.missed

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
                if not is_own(item.row):
                    yield item
                self.consumed(item)

    async def mark(self) -> None:
        """Record on the server how far the feed has been handled, if that has changed."""
        if self.cursor and not self._is_marked:
            await self._client.acknowledge_feed(self.cursor)
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
        self.gaps.missed += max(item.seq - before - 1, 0)
        self.cursor = Cursor(item.seq, ActivityId(item.row.id))
        self._is_marked = False

    async def page(self, wait_seconds: float = 0) -> list[Item]:
        """
        The next items, possibly none; the same ones again until they are `consumed`.

        `gaps` grows when rows were deleted before they were read, or come a second time.
        """
        started_at = time.monotonic()
        try:
            cursor = self.cursor = self.cursor or await self._beginning()
            page = await self._read(cursor, wait_seconds)
        except CursorGone:
            await self._start_over()
            return []
        if self._has_moved_on(page, cursor):
            return []
        if not page.rows:
            # A server that is shutting down, or does not know `wait`, answers at once.
            until = started_at + min(wait_seconds, _MIN_POLL_SECONDS)
            await asyncio.sleep(max(until - time.monotonic(), 0))
        self._cursor_losses = 0
        self.rows_behind = max(page.latest_seq - page.rows[-1].seq, 0) if page.rows else 0
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
        self.gaps.missed += max(trimmed - page.acked_seq, 0)
        return Cursor(max(page.acked_seq, trimmed))

    def _has_moved_on(self, page: FeedPage, cursor: Cursor) -> bool:
        """
        At the start: move to the acknowledged row if that is further; returns whether it moved.

        A cursor before it is from a backup, or its reader wants to read the rows again.
        """
        acked_rows = 0 if self._has_started else max(page.acked_seq - cursor.seq, 0)
        self._has_started = True
        if acked_rows and self._skip_acked:
            self.gaps.skipped += acked_rows
            self.cursor = Cursor(page.acked_seq)
            return True
        self.gaps.repeated += acked_rows
        return False

    def _fresh(self, page: FeedPage, cursor: Cursor) -> list[wire.ActivityRow]:
        fresh = [row for row in page.rows if row.seq > cursor.seq]
        if page.rows and not fresh:
            raise AnswerInvalid("The server's feed does not advance: it repeats old rows.")
        return fresh

    async def _start_over(self) -> None:
        """Continue with the oldest row that is left, or where a restored feed was acknowledged."""
        if self._cursor_losses == _MAX_CURSOR_LOSSES:
            raise AnswerInvalid(_ALL_GONE)
        try:
            page = await self._client.feed(None, limit=1)
        except CursorGone as error:
            raise AnswerInvalid(_ALL_GONE) from error
        at = self.cursor.seq if self.cursor else 0
        trimmed = page.lowest_seq - 1
        if trimmed >= at:
            handled = max(at, page.acked_seq) if self._skip_acked else at
            self.gaps.missed += max(trimmed - handled, 0)
            self.cursor = Cursor(trimmed)
        else:
            self.cursor = self._restored(page, at)
        self._is_marked = True
        self._cursor_losses += 1

    def _restored(self, page: FeedPage, at: int) -> Cursor:
        """
        Where to continue in a feed that was restored from a backup.

        The acknowledged mark was restored with the feed, so rows up to it were handled.  Rows after
        it may have come before, or may be new and have the seqs of lost ones: they all come.
        """
        start = max(page.acked_seq, page.lowest_seq - 1)
        self.gaps.restores += 1
        self.gaps.repeated += max(min(at, page.latest_seq) - start, 0)
        self.gaps.skipped += max(start - at, 0)
        return Cursor(start)

    def _item(self, row: wire.ActivityRow) -> Item:
        file = announced(row)
        return FileItem(self._client, row, file) if file else MessageItem(self._client, row)
