"""
Receives into a folder: fetches, verifies, places and acknowledges files; passes on messages.

The order of the steps is the promise.  A file is recorded before it gets its name, and acknowledged
after it is on disk; the cursor moves last.  So the next run finishes whatever a crash interrupts.
A failure of a single file is retried from the server's list of pending uploads.  A failure of the
network or the disk pauses everything.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec

from restante import errors, wire
from restante.client import commands
from restante.client.aio import AsyncClient
from restante.client.answering import Answers
from restante.client.fetching import WaitingFile, check_size, fetch_whole, shown_name
from restante.client.folder import Folder
from restante.client.messages import is_answerable, is_own, pending_file, rewritten, text_of
from restante.client.places import Place
from restante.client.poller import WAIT_SECONDS, FileItem, Gaps, Inbox, Item, MessageItem
from restante.client.progress import Received, State
from restante.client.retry import Backoff, is_retryable
from restante.delivery.rules import clean_name
from restante.errors import RestanteError, UploadGone
from restante.ids import FileId

# A retry does not fix these: a token or an address has to be changed.
FINAL = (errors.NotAuthenticated, errors.WorkspaceUnknown, errors.BadRequest)

# Not about one file: the next file would fail in the same way.
_DISK_ERRORS = (errors.FolderFull, errors.FolderUnusable)

_FIRST_RETRY_SECONDS = 1
_MAX_RETRY_SECONDS = 300
# Bounds a very long or endless list; the next pass sees the rest.
_MAX_FILES_PER_PASS = 20_000
_MAX_REPORTED = 1000
# A longer queue is shown as that long.
_MAX_COUNTED = 10_000
_COUNTED_PER_PAGE = 500


class Observer(Protocol):
    """Is notified of each event, to display it."""

    def queued(self, files: int, size: int) -> None: ...
    def arriving(self, file: WaitingFile) -> None: ...
    def progress(self, received: int) -> None: ...
    def ended(self) -> None: ...
    def delivered(self, file: WaitingFile, path: Path) -> None: ...
    def failed(self, what: str, error: RestanteError) -> None: ...
    def gone(self, file: WaitingFile) -> None: ...
    def message(self, method: str, text: str) -> None: ...
    def answered(self, text: str) -> None: ...
    def missed(self, rows: int) -> None: ...
    def skipped(self, rows: int) -> None: ...
    def restored(self, repeated: int) -> None: ...
    def again(self, file: WaitingFile) -> None: ...
    def said(self, line: str) -> None: ...
    def waiting(self, error: RestanteError, seconds: float) -> None: ...
    def connected(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Handlers:
    """The commands for files and messages, split into words; empty for none."""

    file: Sequence[str] = ()
    message: Sequence[str] = ()
    # Whether what the command of a message prints is the answer to it.
    answers: bool = False


class Receiver:
    """Receives the files and messages of a workspace into its folder."""

    def __init__(
        self,
        client: AsyncClient,
        folder: Folder,
        observer: Observer,
        handlers: Handlers = Handlers(),  # noqa: B008 - frozen
        *,
        max_bytes: int | None = None,
    ) -> None:
        self._client = client
        self._folder = folder
        self._observer = observer
        self._handlers = handlers
        self._max_bytes = max_bytes
        self._answers = Answers(client, folder.progress)
        self._gaps = Gaps()
        self._reported = dict[FileId, None]()
        self._queue = dict[FileId, int]()  # the sizes of the files that wait, as far as known
        self._pending_backoff = Backoff(max_seconds=_MAX_RETRY_SECONDS)
        # 0: files that an earlier run failed to receive are retried as soon as the feed is read.
        self._retry_at = 0.0

    async def run(self) -> NoReturn:
        """Receive until cancelled; raises only errors that a retry does not fix."""
        inbox = self._client.inbox(self._folder.progress.cursor(), skip_acked=True)
        backoff = Backoff()
        while True:
            try:
                await self._poll(inbox)
                backoff.reset()
            except FINAL:
                raise
            except RestanteError as error:
                delay = backoff.next_delay(error)
                self._observer.waiting(error, delay)
                await asyncio.sleep(delay)
                # The next poll does not wait, so that the display soon shows the reconnect.
                self._retry_at = 0.0

    async def run_once(self) -> int:
        """Receive everything that exists now; returns the number of files that failed."""
        inbox = self._client.inbox(self._folder.progress.cursor(), once=True, skip_acked=True)
        while not inbox.at_end:
            await self._receive_page(inbox, wait_seconds=0)
        await inbox.mark()
        return await self._receive_pending(skip=frozenset(self._reported))

    async def _poll(self, inbox: Inbox) -> None:
        until_retry = max(self._retry_at - time.monotonic(), 0)
        received = await self._receive_page(inbox, min(WAIT_SECONDS, until_retry))
        if not received and time.monotonic() >= self._retry_at:
            await self._receive_pending()

    async def _receive_page(self, inbox: Inbox, wait_seconds: float) -> int:
        before = inbox.cursor
        items = await inbox.page(wait_seconds)
        if inbox.cursor != before:  # it has passed rows that are not for us
            self._save_cursor(inbox)
        self._observer.connected()
        self._report_gaps(inbox)
        await self._count(items, has_more=inbox.rows_behind > 0)
        for item in items:
            await self._receive(item)
            inbox.consumed(item)
            self._save_cursor(inbox)
        if self._queue and not inbox.rows_behind:  # what is left has failed before
            self._queue.clear()
            self._report_queue()
        self._report_gaps(inbox)
        await inbox.mark()
        return len(items)

    async def _count(self, items: Sequence[Item], *, has_more: bool) -> None:
        """Note what waits: the files of a page, and at the first of several pages all others."""
        files = [item.file for item in items if isinstance(item, FileItem)]
        if files and has_more and not self._queue:
            async for upload in self._client.pending(per_page=_COUNTED_PER_PAGE):
                if upload.source_id != self._client.workspace_id:
                    self._queue[FileId(upload.file_id)] = upload.size
                if len(self._queue) == _MAX_COUNTED:
                    break
        self._queue |= {file.file_id: file.size for file in files}
        self._report_queue()

    def _report_queue(self) -> None:
        self._observer.queued(len(self._queue), sum(self._queue.values()))

    def _report_gaps(self, inbox: Inbox) -> None:
        """Report each gap once, also to the next run: the cursor after it is stored."""
        now, before = inbox.gaps, self._gaps
        if now == before:
            return
        if now.missed > before.missed:
            self._observer.missed(now.missed - before.missed)
        if now.skipped > before.skipped:
            self._observer.skipped(now.skipped - before.skipped)
        if now.restores > before.restores:
            self._observer.restored(now.repeated - before.repeated)
        self._gaps = replace(now)
        self._save_cursor(inbox)

    def _save_cursor(self, inbox: Inbox) -> None:
        if inbox.cursor:
            self._folder.progress.keep_cursor(inbox.cursor)

    async def _receive(self, item: Item) -> None:
        if isinstance(item, FileItem):
            await self._receive_file(item.file)
        elif not is_own(item.row):
            await self._receive_message(item)

    async def _receive_pending(self, *, skip: Collection[FileId] = ()) -> int:
        """
        Try every pending file, except some that have just failed, and schedule the next pass.

        Returns the number of failed files, skipped ones included.
        """
        failed, seen = 0, set[FileId]()
        async for upload in self._client.pending():
            file = _waiting_file(upload)
            seen.add(file.file_id)
            if upload.source_id != self._client.workspace_id:  # else it is for our user
                failed += file.file_id in skip or not await self._receive_file(file)
            if len(seen) == _MAX_FILES_PER_PASS:
                break
        else:
            self._folder.remove_partials(keep=seen)
        if failed:
            self._retry_at = time.monotonic() + self._pending_backoff.next_delay()
        else:
            self._pending_backoff.reset()
            self._retry_at = time.monotonic() + _MAX_RETRY_SECONDS
        return failed

    async def _receive_file(self, file: WaitingFile) -> bool:
        """Receive one file; returns False if it has to be retried."""
        try:
            await self._deliver(file)
        except UploadGone:
            self._observer.gone(file)
        except RestanteError as error:
            if is_retryable(error) or _is_about_everything(error):
                raise
            self._report_failure(file, error)
            self._retry_at = min(self._retry_at, time.monotonic() + _FIRST_RETRY_SECONDS)
            self._leave_queue(file)
            return False
        self._leave_queue(file)
        return True

    def _leave_queue(self, file: WaitingFile) -> None:
        self._queue.pop(file.file_id, None)
        self._report_queue()

    def _report_failure(self, file: WaitingFile, error: RestanteError) -> None:
        """Report why a file failed, once per file."""
        if file.file_id not in self._reported:
            self._observer.failed(file.original_name, error)
        self._reported[file.file_id] = None
        if len(self._reported) > _MAX_REPORTED:
            del self._reported[next(iter(self._reported))]

    async def _deliver(self, file: WaitingFile) -> None:
        received = self._folder.progress.received(file.file_id)
        place = self._folder.place_of(received)
        if received and received.state is State.ACKED:
            if place.has_unchanged(received, file.size):
                await self._acknowledge(file, received)
                return
            self._observer.again(file)
        has_command = bool(self._handlers.file)
        if not received or place.is_missing(file.file_id, received, has_command=has_command):
            received, place = None, self._folder.new_files
            await self._fetch(file, place)
        received = await asyncio.to_thread(place.place, file, received)
        path = place.path / received.name
        if has_command and received.state is not State.HANDLED:
            await self._run_file_command(file, path)
        received = await asyncio.to_thread(
            place.settle, file.file_id, received, has_command=has_command
        )
        await self._acknowledge(file, received)
        self._observer.delivered(file, path)

    async def _fetch(self, file: WaitingFile, place: Place) -> None:
        await check_size(self._client, file, self._max_bytes)
        self._folder.progress.check_room()
        self._observer.arriving(file)
        try:
            with place.partial(file.file_id) as partial:
                await fetch_whole(self._client, file, partial, self._observer.progress)
        finally:
            self._observer.ended()

    async def _acknowledge(self, file: WaitingFile, received: Received) -> None:
        with suppress(UploadGone):  # expired, or acknowledged by an earlier run
            await self._client.acknowledge(file.file_id)
        self._folder.progress.record(file.file_id, received.now(State.ACKED))

    async def _run_file_command(self, file: WaitingFile, path: Path) -> None:
        variables = {
            "RESTANTE_FILE_ID": str(file.file_id),
            "RESTANTE_FILE_NAME": file.name,
            "RESTANTE_FILE_DISPLAY_NAME": file.original_name,
            "RESTANTE_FILE_TYPE": file.mimetype,
        }
        command = [*self._handlers.file, str(path)]
        await commands.run(command, self._observer.said, variables=variables)

    async def _receive_message(self, item: MessageItem) -> None:
        try:
            body = rewritten(item.body, self._local_uri)
        except errors.AnswerInvalid as error:
            # It stays unreadable; skip it, so that the messages after it are handled.
            self._observer.failed(f"message {item.seq}", error)
            return
        try:
            answer = await self._handle_message(item, body)
        except RestanteError:
            # A message that fails must not block the files behind it until they expire.
            await self._receive_pending()
            raise
        self._observer.message(item.method, text_of(body))
        if isinstance(answer, RestanteError):
            self._observer.failed(f"answer to message {item.seq}", answer)
        elif answer:
            self._observer.answered(answer)

    async def _handle_message(self, item: MessageItem, body: Any) -> str | RestanteError | None:
        """Run the command for a message; returns its answer, or why there is none."""
        if not self._handlers.message:
            return None
        run = partial(self._run_message_command, item, body)
        if self._handlers.answers and is_answerable(item.row, body):
            return await self._answers.answer(item, run)
        await run(None)
        return None

    async def _run_message_command(
        self, item: MessageItem, body: Any, printed: bytearray | None
    ) -> None:
        row = msgspec.structs.replace(item.row, request_body=msgspec.Raw(msgspec.json.encode(body)))
        await commands.run(
            self._handlers.message,
            self._observer.said,
            stdin=msgspec.json.encode(row),
            variables={"RESTANTE_METHOD": item.method},
            printed=printed,
        )

    def _local_uri(self, uri: str) -> str | None:
        file_id = pending_file(uri, self._client.workspace_id)
        return self._folder.uri_of(file_id) if file_id else None


def _is_about_everything(error: RestanteError) -> bool:
    return isinstance(error, (*_DISK_ERRORS, *FINAL)) and not isinstance(
        error, errors.NoRoomForFile
    )


def _waiting_file(upload: wire.PendingUpload) -> WaitingFile:
    return WaitingFile(
        FileId(upload.file_id),
        clean_name(upload.name),
        upload.mime_type,
        upload.size,
        shown_name(upload.display_name),
    )
