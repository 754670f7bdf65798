"""
The blocking client: the same calls for programs without an event loop.

It runs the asyncio client on a loop in a thread of its own, so it works wherever it is called from,
and both clients stay one.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, Self, TypeVar
from uuid import UUID

from restante import wire
from restante.client.aio import AsyncClient
from restante.client.calls import ROWS_PER_PAGE, Credentials, Cursor, FeedPage
from restante.client.fetching import Progress
from restante.client.poller import FileItem, Inbox, Item, MessageItem
from restante.client.sending import Source, unheard
from restante.delivery.rules import MAX_FILE_BYTES
from restante.ids import FileId, WorkspaceId

T = TypeVar("T")


_END: Final = object()


class _Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="restante", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it to its end; whoever stops waiting stops it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def each(self, items: AsyncIterator[T]) -> Iterator[T]:
        """The items one by one."""
        while (item := self.run(_next(items))) is not _END:
            yield item  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        """End what still runs, and the thread."""
        self.run(_wound_up())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _wound_up() -> None:
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

    is_file: Final = False

    def __init__(self, loop: _Loop, item: MessageItem) -> None:
        self._loop = loop
        self._item = item
        self.row = item.row
        self.seq = item.seq
        self.method = item.method

    @property
    def body(self) -> Any:
        """The message as it was sent."""
        return self._item.body

    def ack(self) -> None:
        """Note at the server that the feed has been handled up to here."""
        self._loop.run(self._item.ack())


class BlockingFile:
    """A file that waits."""

    is_file: Final = True

    def __init__(self, loop: _Loop, item: FileItem) -> None:
        self._loop = loop
        self._item = item
        self.row = item.row
        self.seq = item.seq
        self.file = item.file
        self.name = item.name

    def save(
        self,
        directory: str | PathLike[str],
        *,
        max_bytes: int = MAX_FILE_BYTES,
        progress: Progress = unheard,
    ) -> Path:
        """Fetch it into a directory and return its path; it is whole, checked and synced."""
        return self._loop.run(self._item.save(directory, max_bytes=max_bytes, progress=progress))

    def ack(self) -> None:
        """Say that it has arrived: the server deletes it."""
        self._loop.run(self._item.ack())


class BlockingInbox:
    """What arrives for a workspace, in order."""

    def __init__(self, loop: _Loop, inbox: Inbox) -> None:
        self._loop = loop
        self._inbox = inbox

    @property
    def cursor(self) -> Cursor | None:
        """How far it has been read; keep it to go on from there."""
        return self._inbox.cursor

    @property
    def missed(self) -> int:
        """How many rows the server deleted before they were read."""
        return self._inbox.missed

    def __iter__(self) -> Iterator[BlockingFile | BlockingMessage]:
        items: AsyncIterator[Item] = aiter(self._inbox)
        for item in self._loop.each(items):
            if isinstance(item, FileItem):
                yield BlockingFile(self._loop, item)
            else:
                yield BlockingMessage(self._loop, item)


class Client:
    """Speaks to one server, as one workspace or as the admin; see AsyncClient for each call."""

    def __init__(
        self, url: str, *, token: str | None = None, workspace_id: WorkspaceId | UUID | None = None
    ) -> None:
        self._client = AsyncClient(url, token=token, workspace_id=workspace_id)
        self._running: _Loop | None = None

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
            raise RuntimeError("Use the client inside of `with`.")
        return self._running

    @property
    def url(self) -> str:
        """The server."""
        return self._client.url

    @property
    def is_registered(self) -> bool:
        """Whether it is a workspace that has its token."""
        return self._client.is_registered

    @property
    def workspace_id(self) -> WorkspaceId:
        """Who we are; raises BadRequest for a client that is no workspace."""
        return self._client.workspace_id

    def register(
        self,
        name: str,
        *,
        registration_token: str | None = None,
        card: Mapping[str, Any] | None = None,
    ) -> Credentials:
        """Register a new workspace that polls, and be it from now on."""
        return self._loop.run(
            self._client.register(name, registration_token=registration_token, card=card)
        )

    def rename(self, name: str) -> None:
        """Change what the workspace is called."""
        self._loop.run(self._client.rename(name))

    def heartbeat(self, *, active_tasks: int = 0, current_task: str = "") -> None:
        """Say that the workspace lives and what it is doing."""
        self._loop.run(self._client.heartbeat(active_tasks=active_tasks, current_task=current_task))

    def inbox(self, cursor: Cursor | None = None, *, once: bool = False) -> BlockingInbox:
        """What arrives for the workspace, in order: `for item in client.inbox()`."""
        return BlockingInbox(self._loop, self._client.inbox(cursor, once=once))

    def feed(
        self,
        cursor: Cursor | None = None,
        *,
        wait_seconds: float = 0,
        limit: int = ROWS_PER_PAGE,
        of: WorkspaceId | None = None,
    ) -> FeedPage:
        """One page of the feed after a cursor; raises CursorGone if rows may have been missed."""
        return self._loop.run(
            self._client.feed(cursor, wait_seconds=wait_seconds, limit=limit, of=of)
        )

    def acknowledge_feed(self, seq: int) -> None:
        """Note how far the feed has been handled."""
        self._loop.run(self._client.acknowledge_feed(seq))

    def pending(self) -> Iterator[wire.PendingUpload]:
        """Every file that waits, oldest first."""
        return self._loop.each(self._client.pending())

    def acknowledge(self, file_id: FileId | UUID) -> None:
        """The workspace has the file."""
        self._loop.run(self._client.acknowledge(file_id))

    def reopen(self, file_id: FileId | UUID) -> None:
        """The file was acknowledged and then lost: let it wait again."""
        self._loop.run(self._client.reopen(file_id))

    def workspaces(self) -> Iterator[wire.WorkspaceView]:
        """Every workspace, for the admin."""
        return self._loop.each(self._client.workspaces())

    def send_message(self, to: WorkspaceId | UUID, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a JSON-RPC message.  It is sent once: after a lost answer it may have arrived."""
        return self._loop.run(self._client.send_message(to, message))

    def send_files(
        self,
        to: WorkspaceId | UUID,
        files: Sequence[Source],
        *,
        ttl_seconds: int | None = None,
        progress: Progress = unheard,
    ) -> list[wire.StagedFile]:
        """Send files in one request: the workspace gets all of them, or none."""
        return self._loop.run(
            self._client.send_files(to, files, ttl_seconds=ttl_seconds, progress=progress)
        )
