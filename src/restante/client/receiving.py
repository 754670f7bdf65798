"""
Receives into a folder: files are fetched, checked, placed and acknowledged; messages are handed on.

The order of the steps is the promise.  A file is noted before it gets its name and acknowledged
after it is on disk, and the cursor moves after both, so that a crash between any two of them is
finished by the next run.  What fails for a reason of its own is tried again from the server's list
of waiting files; what fails because of the network or the disk stops everything for a while.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec

from restante import errors, wire
from restante.client import commands
from restante.client.aio import AsyncClient
from restante.client.fetching import WaitingFile, check_size, fetch_whole
from restante.client.folder import Folder
from restante.client.messages import pending_file, rewritten, text_of
from restante.client.patience import Patience, is_passing
from restante.client.poller import WAIT_SECONDS, FileItem, Inbox, Item, MessageItem
from restante.client.progress import Received, State
from restante.delivery.rules import MAX_FILE_BYTES, clean_name
from restante.errors import RestanteError, UploadGone
from restante.ids import FileId

# These do not pass by waiting: somebody has to do something.
FINAL = (errors.NotAuthenticated, errors.WorkspaceUnknown, errors.BadRequest)

# These say nothing about one file: the next one would fail in the same way.
_ABOUT_THE_DISK = (errors.FolderFull, errors.FolderUnusable)

_FIRST_RETRY_SECONDS = 1
_LONGEST_RETRY_SECONDS = 300
# Of a list that does not end, or of a very long one: what is left is seen by the next look.
_TRIED_AT_ONCE = 20_000
_TOLD_AT_MOST = 1000


class Observer(Protocol):
    """Hears what happens, to show it."""

    def arriving(self, file: WaitingFile) -> None: ...
    def progress(self, received: int) -> None: ...
    def ended(self) -> None: ...
    def delivered(self, file: WaitingFile, path: Path) -> None: ...
    def failed(self, what: str, error: RestanteError) -> None: ...
    def gone(self, file: WaitingFile) -> None: ...
    def message(self, method: str, text: str) -> None: ...
    def missed(self, rows: int) -> None: ...
    def said(self, line: str) -> None: ...
    def waiting(self, error: RestanteError, seconds: float) -> None: ...
    def connected(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Handlers:
    """The commands that take what arrives, as words; empty: what arrives is only shown."""

    file: Sequence[str] = ()
    message: Sequence[str] = ()


class Receiver:
    """Brings what waits for a workspace into its folder, until it is stopped."""

    def __init__(
        self,
        client: AsyncClient,
        folder: Folder,
        observer: Observer,
        handlers: Handlers = Handlers(),  # noqa: B008 - frozen
        *,
        max_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._client = client
        self._folder = folder
        self._observer = observer
        self._handlers = handlers
        self._max_bytes = max_bytes
        self._missed = 0
        self._told = dict[FileId, None]()
        self._retries = Patience(longest_seconds=_LONGEST_RETRY_SECONDS)
        # What an earlier run could not bring in is looked for once the feed has been read.
        self._retry_at = 0.0

    async def run(self) -> NoReturn:
        """Receive for ever; raises only what waiting does not mend."""
        inbox = self._client.inbox(self._folder.progress.cursor())
        patience = Patience()
        while True:
            try:
                await self._round(inbox)
                patience.succeeded()
            except FINAL:
                raise
            except RestanteError as error:
                pause = patience.failed(error)
                self._observer.waiting(error, pause)
                await asyncio.sleep(pause)
                # The next answer is not waited for, so that a person soon sees who is back.
                self._retry_at = 0.0

    async def run_once(self) -> int:
        """Receive what is there now; returns how many files still wait because they failed."""
        inbox = self._client.inbox(self._folder.progress.cursor(), once=True)
        while not inbox.at_end:
            await self._take_page_or_files(inbox, wait_seconds=0)
        await inbox.mark()
        return await self._take_waiting(but=frozenset(self._told))

    async def _round(self, inbox: Inbox) -> None:
        until_retry = max(self._retry_at - time.monotonic(), 0)
        taken = await self._take_page_or_files(inbox, min(WAIT_SECONDS, until_retry))
        if not taken and time.monotonic() >= self._retry_at:
            await self._take_waiting()

    async def _take_page_or_files(self, inbox: Inbox, wait_seconds: float) -> int:
        try:
            return await self._take_page(inbox, wait_seconds)
        except errors.CommandFailed:
            # A message that nobody takes must not keep the files behind it until they expire.
            await self._take_waiting()
            raise

    async def _take_page(self, inbox: Inbox, wait_seconds: float) -> int:
        items = await inbox.page(wait_seconds)
        self._observer.connected()
        for item in items:
            await self._take(item)
            inbox.consumed(item)
            self._keep(inbox)
        self._tell_missed(inbox)
        await inbox.mark()
        return len(items)

    def _tell_missed(self, inbox: Inbox) -> None:
        if inbox.missed > self._missed:
            self._observer.missed(inbox.missed - self._missed)
        self._missed = inbox.missed

    def _keep(self, inbox: Inbox) -> None:
        if inbox.cursor:
            self._folder.progress.keep_cursor(inbox.cursor)

    async def _take(self, item: Item) -> None:
        if isinstance(item, FileItem):
            await self._take_file(item.file)
        else:
            await self._take_message(item)

    async def _take_waiting(self, *, but: Collection[FileId] = ()) -> int:
        """
        Try every file that waits, but for some that have just failed.

        Returns how many failed in all, and sets when to try again.
        """
        failed, seen = 0, set[FileId]()
        async for upload in self._client.pending():
            file = _waiting_file(upload)
            seen.add(file.file_id)
            failed += file.file_id in but or not await self._take_file(file)
            if len(seen) == _TRIED_AT_ONCE:
                break
        else:
            self._folder.forget_arriving(keep=seen)
        if failed:
            self._retry_at = time.monotonic() + self._retries.failed()
        else:
            self._retries.succeeded()
            self._retry_at = time.monotonic() + _LONGEST_RETRY_SECONDS
        return failed

    async def _take_file(self, file: WaitingFile) -> bool:
        """Bring one file in; True if it needs no further try."""
        try:
            await self._deliver(file)
        except UploadGone:
            self._observer.gone(file)
        except RestanteError as error:
            if is_passing(error) or isinstance(error, (*_ABOUT_THE_DISK, *FINAL)):
                raise
            self._tell(file, error)
            self._retry_at = min(self._retry_at, time.monotonic() + _FIRST_RETRY_SECONDS)
            return False
        return True

    def _tell(self, file: WaitingFile, error: RestanteError) -> None:
        """Say why a file failed, the first time."""
        if file.file_id not in self._told:
            self._observer.failed(file.name, error)
        self._told[file.file_id] = None
        if len(self._told) > _TOLD_AT_MOST:
            del self._told[next(iter(self._told))]

    async def _deliver(self, file: WaitingFile) -> None:
        received = self._folder.progress.received(file.file_id)
        if received and received.state is State.ACKED and self._folder.has(received):
            await self._acknowledge(file, received.name)
            return
        if received is None or self._has_to_come_again(file, received):
            received = await self._fetch(file)
        path = await asyncio.to_thread(self._folder.place, file.file_id, received.name)
        if self._handlers.file and received.state is not State.HANDLED:
            await self._hand_over(file, path)
            self._folder.progress.note(file.file_id, received.name, State.HANDLED)
        await self._acknowledge(file, received.name)
        self._observer.delivered(file, path)

    def _has_to_come_again(self, file: WaitingFile, received: Received) -> bool:
        """One that was reopened, or that a command moved away and did not handle to its end."""
        if received.state is State.PLACING and self._handlers.file:
            return self._folder.was_taken(file.file_id, received)
        return received.state is State.ACKED

    async def _fetch(self, file: WaitingFile) -> Received:
        check_size(file, self._max_bytes)
        self._folder.progress.check_room()
        self._observer.arriving(file)
        try:
            with self._folder.arriving(file.file_id) as partial:
                await fetch_whole(self._client, file, partial, self._observer.progress)
        finally:
            self._observer.ended()
        return Received(self._folder.intend(file.file_id, file.name), State.PLACING)

    async def _acknowledge(self, file: WaitingFile, name: str) -> None:
        with suppress(UploadGone):  # it expired, or an earlier run's ack arrived
            await self._client.acknowledge(file.file_id)
        self._folder.progress.note(file.file_id, name, State.ACKED)

    async def _hand_over(self, file: WaitingFile, path: Path) -> None:
        facts = {
            "RESTANTE_FILE_ID": str(file.file_id),
            "RESTANTE_FILE_NAME": file.name,
            "RESTANTE_FILE_TYPE": file.mimetype,
        }
        await commands.run([*self._handlers.file, str(path)], self._observer.said, facts=facts)

    async def _take_message(self, item: MessageItem) -> None:
        try:
            body = rewritten(item.body, self._known)
        except errors.AnswerInvalid as error:
            # It will never be readable, and what comes after it is.
            self._observer.failed(f"message {item.seq}", error)
            return
        if self._handlers.message:
            row = msgspec.structs.replace(
                item.row, request_body=msgspec.Raw(msgspec.json.encode(body))
            )
            await commands.run(
                self._handlers.message,
                self._observer.said,
                given=msgspec.json.encode(row),
                facts={"RESTANTE_METHOD": item.method},
            )
        self._observer.message(item.method, text_of(body))

    def _known(self, uri: str) -> str | None:
        file_id = pending_file(uri, self._client.workspace_id)
        return self._folder.uri_of(file_id) if file_id else None


def _waiting_file(upload: wire.PendingUpload) -> WaitingFile:
    return WaitingFile(
        FileId(upload.file_id), clean_name(upload.name), upload.mime_type, upload.size
    )
