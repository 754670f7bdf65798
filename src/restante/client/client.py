"""
The blocking client: the methods of AsyncClient for programs without an event loop.

It runs an AsyncClient on an event loop in its own thread, so it also works where another event loop
is running.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self, TypeVar

from restante import wire
from restante.client.aio import AsyncClient
from restante.client.arguments import AnyId, Several
from restante.client.calls import ROWS_PER_PAGE, Credentials, Cursor, FeedPage
from restante.client.connection import DEFAULT_LIMITS, Limits
from restante.client.messages import Attachment
from restante.client.poller import FileItem, Gaps, Inbox, Item, MessageItem
from restante.client.sending import ProgressCallback, Source, no_progress
from restante.ids import WorkspaceId

T = TypeVar("T")

_END: Final = object()


class _Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="restante", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result; cancel it if the wait is interrupted."""
        future = asyncio.run_coroutine_threadsafe(_caught(work), self._loop)
        try:
            result = future.result()
        finally:
            future.cancel()
        if isinstance(result, _Raised):
            raise result.error
        return result

    def each(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Iterate over an async iterator."""
        while (item := self.run(_next(items))) is not _END:
            yield item  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        """Cancel the running tasks and stop the thread."""
        self.run(_cancel_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


async def _caught(work: Coroutine[Any, Any, T]) -> T | _Raised:
    """
    Return an exception as a value, so that the caller gets the same object.

    A future would copy a TimeoutError, and a SystemExit of a callback would stop the loop instead.
    """
    try:
        return await work
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return _Raised(error)


async def _cancel_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


async def _next(items: AsyncIterator[T]) -> T | object:
    return await anext(items, _END)


class BlockingMessage:
    """A message."""

    kind: ClassVar[Literal["message"]] = "message"
    is_file: ClassVar[Literal[False]] = False

    def __init__(self, loop: _Loop, item: MessageItem) -> None:
        self._loop = loop
        self._item = item
        self.row = item.row
        self.seq = item.seq
        self.method = item.method

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seq={self.seq}, method={self.method!r})"

    @property
    def body(self) -> Any:
        """The message as it was sent."""
        return self._item.body

    @property
    def text(self) -> str:
        """The text of the message, empty if it has none."""
        return self._item.text

    @property
    def is_answerable(self) -> bool:
        """Whether the message asks for an answer; an answer does not."""
        return self._item.is_answerable

    def reply(
        self,
        text: str,
        *,
        files: Several[Source] = (),
        message_id: str | None = None,
        is_repetition: bool = False,
    ) -> None:
        """Answer the sender; see MessageItem.reply."""
        self._loop.run(
            self._item.reply(text, files=files, message_id=message_id, is_repetition=is_repetition)
        )

    def ack(self) -> None:
        """Record on the server that the feed has been handled up to this message."""
        self._loop.run(self._item.ack())


class BlockingFile:
    """A file to fetch."""

    kind: ClassVar[Literal["file"]] = "file"
    is_file: ClassVar[Literal[True]] = True

    def __init__(self, loop: _Loop, item: FileItem) -> None:
        self._loop = loop
        self._item = item
        self.row = item.row
        self.seq = item.seq
        self.file = item.file
        self.name = item.name
        self.display_name = item.display_name

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seq={self.seq}, name={self.name!r}, size={self.file.size})"

    def save(
        self,
        directory: str | PathLike[str],
        *,
        original_name: bool = False,
        max_bytes: int | None = None,
        progress: ProgressCallback = no_progress,
    ) -> Path:
        """Fetch the file into a directory and return its path; see FileItem.save."""
        return self._loop.run(
            self._item.save(
                directory, original_name=original_name, max_bytes=max_bytes, progress=progress
            )
        )

    def ack(self) -> None:
        """Acknowledge the file: the server deletes it."""
        self._loop.run(self._item.ack())


BlockingItem = BlockingFile | BlockingMessage


class BlockingInbox:
    """The files and messages of a workspace, in order."""

    def __init__(self, loop: _Loop, inbox: Inbox) -> None:
        self._loop = loop
        self._inbox = inbox

    @property
    def cursor(self) -> Cursor | None:
        """How far the feed has been read; store it to resume there."""
        return self._inbox.cursor

    @property
    def missed(self) -> int:
        """The number of rows that were deleted before they were read."""
        return self._inbox.missed

    @property
    def gaps(self) -> Gaps:
        """Where reading did not simply continue after the cursor."""
        return self._inbox.gaps

    def __iter__(self) -> Iterator[BlockingItem]:
        items: AsyncIterator[Item] = aiter(self._inbox)
        for item in self._loop.each(items):
            if isinstance(item, FileItem):
                yield BlockingFile(self._loop, item)
            else:
                yield BlockingMessage(self._loop, item)


class Client:
    """
    Talks to one server, as one workspace or as the admin; AsyncClient documents each method.

    Progress callbacks run in the client's thread.  They must not call the client.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        workspace_id: AnyId | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._client = AsyncClient(url, token=token, workspace_id=workspace_id, limits=limits)
        self._running: _Loop | None = None

    def __repr__(self) -> str:
        return repr(self._client).removeprefix("Async")

    @classmethod
    def of(cls, credentials: Credentials) -> Self:
        """The client of a registered workspace."""
        return cls(credentials.url, token=credentials.token, workspace_id=credentials.workspace_id)

    def __enter__(self) -> Self:
        self._running = _Loop()
        self._loop.run(self._client.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        loop, self._running = self._loop, None
        try:
            loop.run(self._client.__aexit__())
        finally:
            loop.close()

    @property
    def _loop(self) -> _Loop:
        if self._running is None:
            raise RuntimeError("Use the client inside `with`.")
        return self._running

    @property
    def url(self) -> str:
        """The server's address."""
        return self._client.url

    @property
    def is_registered(self) -> bool:
        """Whether the client has a workspace id and a token."""
        return self._client.is_registered

    @property
    def workspace_id(self) -> WorkspaceId:
        """The client's workspace; raises BadRequest if it has none."""
        return self._client.workspace_id

    def register(
        self,
        name: str,
        *,
        registration_token: str | None = None,
        card: Mapping[str, Any] | None = None,
    ) -> Credentials:
        """Register a new workspace in poll mode; the client acts as that workspace afterwards."""
        return self._loop.run(
            self._client.register(name, registration_token=registration_token, card=card)
        )

    def rename(self, name: str) -> None:
        """Change the workspace's name."""
        self._loop.run(self._client.rename(name))

    def heartbeat(self, *, active_tasks: int = 0, current_task: str = "") -> None:
        """Report that the workspace is alive and what it is working on."""
        self._loop.run(self._client.heartbeat(active_tasks=active_tasks, current_task=current_task))

    def inbox(
        self, cursor: Cursor | None = None, *, once: bool = False, skip_acked: bool = False
    ) -> BlockingInbox:
        """The files and messages of the workspace, in order: `for item in client.inbox()`."""
        inbox = self._client.inbox(cursor, once=once, skip_acked=skip_acked)
        return BlockingInbox(self._loop, inbox)

    def feed(
        self,
        cursor: Cursor | None = None,
        *,
        wait_seconds: float = 0,
        limit: int = ROWS_PER_PAGE,
        of: AnyId | None = None,
    ) -> FeedPage:
        """One page of the feed after a cursor; raises CursorGone if rows may have been missed."""
        return self._loop.run(
            self._client.feed(cursor, wait_seconds=wait_seconds, limit=limit, of=of)
        )

    def acknowledge_feed(self, handled: Cursor | int) -> None:
        """Record on the server that the feed has been handled up to this row."""
        self._loop.run(self._client.acknowledge_feed(handled))

    def pending(self, *, per_page: int = ROWS_PER_PAGE) -> Iterator[wire.PendingUpload]:
        """All pending uploads, oldest first."""
        return self._loop.each(self._client.pending(per_page=per_page))

    def acknowledge(self, file_id: AnyId) -> None:
        """Acknowledge a file: the workspace has it, and the server deletes it."""
        self._loop.run(self._client.acknowledge(file_id))

    def reopen(self, file_id: AnyId) -> None:
        """Make an acknowledged file pending again, for a workspace that lost it."""
        self._loop.run(self._client.reopen(file_id))

    def workspaces(self) -> Iterator[wire.WorkspaceEntry]:
        """All workspaces; needs the admin token."""
        return self._loop.each(self._client.workspaces())

    def send_message(  # noqa: PLR0913 - the fields of a message
        self,
        to: AnyId,
        message: str | Mapping[str, Any],
        *,
        files: Several[Source] = (),
        attachments: Several[Attachment] = (),
        context_id: str | None = None,
        message_id: str | None = None,
        role: str = "user",
        is_repetition: bool = False,
    ) -> dict[str, Any]:
        """Send a text, or a whole JSON-RPC request; returns the answer."""
        return self._loop.run(
            self._client.send_message(
                to,
                message,
                files=files,
                attachments=attachments,
                context_id=context_id,
                message_id=message_id,
                role=role,
                is_repetition=is_repetition,
            )
        )

    def notify(
        self,
        text: str,
        *,
        files: Several[Source] = (),
        attachments: Several[Attachment] = (),
        since: Cursor | None = None,
    ) -> None:
        """Say something to the workspace's user, at the canvas."""
        self._loop.run(self._client.notify(text, files=files, attachments=attachments, since=since))

    def upload_limits(self) -> wire.UploadLimits:
        """The largest files and requests that the server accepts; the defaults if it is older."""
        return self._loop.run(self._client.upload_limits())

    def send_files(
        self,
        to: AnyId,
        files: Several[Source],
        *,
        ttl_seconds: int | None = None,
        progress: ProgressCallback = no_progress,
    ) -> list[wire.StagedFile]:
        """Send files in one request: the workspace gets all of them or none."""
        return self._loop.run(
            self._client.send_files(to, files, ttl_seconds=ttl_seconds, progress=progress)
        )
