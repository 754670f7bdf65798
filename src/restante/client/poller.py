"""
Follows a workspace's feed: `async for item in inbox`.

Asking for the next item says that the one before has been dealt with.  Whoever stops in the middle,
or crashes, gets that item again, and perhaps the few before it on its page.
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
from restante.client.fetching import Progress, WaitingFile, check_size, fetch_whole
from restante.client.patience import Patience, is_passing
from restante.client.sending import unheard
from restante.delivery.rules import MAX_FILE_BYTES, UPLOAD_METHOD, clean_name
from restante.errors import AnswerInvalid, CursorGone, RestanteError
from restante.ids import ActivityId, FileId

if TYPE_CHECKING:
    from restante.client.aio import AsyncClient

WAIT_SECONDS = 30
_SHORTEST_WAIT_SECONDS = 1


class _Announced(msgspec.Struct, frozen=True, rename={"mime_type": "mimeType"}):
    """What the row of a file carries."""

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
        """What the message asks for, such as `message/send`."""
        return self.row.method or ""

    @property
    def body(self) -> Any:
        """The message as it was sent."""
        return body_of(self.row)

    async def ack(self) -> None:
        """Note at the server that the feed has been handled up to here."""
        await self._client.acknowledge_feed(self.seq)


class FileItem:
    """A file that waits."""

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
        """Its name, safe on every filesystem."""
        return self.file.name

    async def save(
        self,
        directory: str | os.PathLike[str],
        *,
        max_bytes: int = MAX_FILE_BYTES,
        progress: Progress = unheard,
    ) -> Path:
        """
        Fetch it into a directory and return its path; it is whole, checked and synced.

        The name begins with random digits, so that no file is ever replaced.  A download that was
        cut off goes on where it stopped.  Raises UploadGone if it waits no more.
        """
        check_size(self.file, max_bytes)
        partial_name = f".{self.file.file_id}.part"
        with Directory.open(Path(directory)) as folder, folder.partial(partial_name) as partial:
            await fetch_whole(self._client, self.file, partial, progress)
            return folder.place(partial_name, folder, unique_name(self.name))

    async def ack(self) -> None:
        """Say that it has arrived: the server deletes it."""
        await self._client.acknowledge(self.file.file_id)


Item = FileItem | MessageItem


def unique_name(name: str) -> str:
    """A name that nothing has yet."""
    return f"{os.urandom(16).hex()}-{name}"


def announced(row: wire.ActivityRow) -> WaitingFile | None:
    """The file that a row announces, None if it announces none."""
    if row.method != UPLOAD_METHOD or row.source_id is not None:
        return None  # another workspace can send a message of that name, and no file
    try:
        sent = decoded(row.request_body, _Announced)
    except AnswerInvalid:
        return None
    return WaitingFile(FileId(sent.file_id), clean_name(sent.name), sent.mime_type, sent.size)


class Inbox:
    """What arrives for a workspace, in order."""

    def __init__(self, client: "AsyncClient", cursor: Cursor | None, *, once: bool = False) -> None:
        self._client = client
        self._once = once
        self._until: int | None = None
        self._lost_in_a_row = 0
        self._is_marked = True
        self.cursor = cursor
        self.missed = 0

    async def __aiter__(self) -> AsyncIterator[Item]:
        patience = Patience()
        while True:
            try:
                await self.mark()
                if self._once and self.at_end:
                    return
                items = await self.page(0 if self._once else WAIT_SECONDS)
            except RestanteError as error:
                if not is_passing(error):
                    raise
                await asyncio.sleep(patience.failed(error))
                continue
            patience.succeeded()
            for item in items:
                yield item
                self.consumed(item)

    async def mark(self) -> None:
        """Note at the server how far we are, unless it knows."""
        if self.cursor and not self._is_marked:
            await self._client.acknowledge_feed(self.cursor.seq)
        self._is_marked = True

    @property
    def at_end(self) -> bool:
        """Whether everything has been consumed that was there when reading began."""
        return (
            self._until is not None and self.cursor is not None and (self.cursor.seq >= self._until)
        )

    def consumed(self, item: Item) -> None:
        """Go on after this item from now on."""
        before = self.cursor.seq if self.cursor else item.seq - 1
        self.missed += max(item.seq - before - 1, 0)
        self.cursor = Cursor(item.seq, ActivityId(item.row.id))
        self._is_marked = False

    async def page(self, wait_seconds: float = 0) -> list[Item]:
        """
        The next items, perhaps none; the same ones again until they are `consumed`.

        When rows were deleted before they were read, `missed` has grown by their number.
        """
        began = time.monotonic()
        try:
            cursor = self.cursor = self.cursor or await self._beginning()
            page = await self._read(cursor, wait_seconds)
        except CursorGone as gone:
            self._start_over(gone)
            return []
        if not page.rows:
            # A server that is about to stop does not wait, and one may not know how to.
            until = began + min(wait_seconds, _SHORTEST_WAIT_SECONDS)
            await asyncio.sleep(max(until - time.monotonic(), 0))
        self._lost_in_a_row = 0
        if self._until is None or not page.rows:
            self._until = page.latest_seq if page.rows else cursor.seq
        return [self._item(row) for row in self._fresh(page, cursor)]

    async def _read(self, cursor: Cursor, wait_seconds: float) -> FeedPage:
        """Whoever follows a feed for ever has patience of their own, and tries once."""
        call = calls.feed(
            self._client.workspace_id,
            cursor,
            wait_seconds=wait_seconds,
            limit=calls.ROWS_PER_PAGE,
        )
        return await self._client.send(call, tries=4 if self._once else 1)

    async def _beginning(self) -> Cursor:
        """Where the workspace last said that it had handled its feed, or what is left of it."""
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
        Go on with the oldest row that is left.

        If it lies before our place, this is not the feed that we read before: it was reset, or
        restored and has grown since.  Then all of it is new.
        """
        self._lost_in_a_row += 1
        if self._lost_in_a_row > 2:
            raise AnswerInvalid("The server keeps saying that our place in the feed is gone.")
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
