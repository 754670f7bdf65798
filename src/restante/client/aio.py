"""The asyncio client: sends the requests that `calls` builds, and retries the repeatable ones."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Self, TypeVar
from uuid import UUID, uuid4

from restante import wire
from restante.client import calls, notifying
from restante.client.arguments import AnyId, Several, file_id_of, several, workspace_id_of
from restante.client.calls import Call, Credentials, Cursor, FeedPage
from restante.client.connection import DEFAULT_LIMITS, Connection, Limits
from restante.client.fetching import Fetch
from restante.client.http_replies import has_done_nothing, reply_of
from restante.client.messages import (
    Attachment,
    Said,
    attached,
    checked_text,
    text_message,
)
from restante.client.poller import Inbox
from restante.client.retry import Backoff, is_retryable
from restante.client.sending import (
    DEFAULT_UPLOAD_LIMITS,
    MultipartBody,
    ProgressCallback,
    Source,
    check_sizes,
    inlined,
    no_progress,
    outgoing_files,
)
from restante.client.streams import must_be_stored
from restante.delivery.rules import MAX_FILE_BYTES
from restante.errors import AnswerInvalid, BadRequest, RestanteError
from restante.ids import FileId, WorkspaceId

T = TypeVar("T")

_ATTEMPTS = 4
_MAX_DELAY_SECONDS = 4


class AsyncClient:
    """
    Talks to one server, as one workspace or as the admin.

    Use it as `async with AsyncClient(url, token=...) as client`.  Requests that are safe to repeat
    are retried a few times after a temporary failure; all others are sent once.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        workspace_id: AnyId | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._connection = Connection(url, limits)
        self._token = token
        self._workspace_id = None if workspace_id is None else workspace_id_of(workspace_id)

    def __repr__(self) -> str:
        of = f", workspace_id={str(self._workspace_id)!r}" if self._workspace_id else ""
        return f"{type(self).__name__}({self.url!r}{of})"

    @classmethod
    def of(cls, credentials: Credentials) -> Self:
        """The client of a registered workspace."""
        return cls(credentials.url, token=credentials.token, workspace_id=credentials.workspace_id)

    async def __aenter__(self) -> Self:
        await self._connection.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()

    @property
    def url(self) -> str:
        """The server's address."""
        return self._connection.url

    @property
    def is_registered(self) -> bool:
        """Whether the client has a workspace id and a token."""
        return self._workspace_id is not None and self._token is not None

    @property
    def workspace_id(self) -> WorkspaceId:
        """The client's workspace; raises BadRequest if it has none."""
        if self._workspace_id is None:
            raise BadRequest("This needs a workspace: pass workspace_id to the client.")
        return self._workspace_id

    async def register(
        self,
        name: str,
        *,
        registration_token: str | None = None,
        card: Mapping[str, Any] | None = None,
    ) -> Credentials:
        """
        Register a new workspace in poll mode; the client acts as that workspace afterwards.

        Store the credentials: the server returns the token only once.
        """
        workspace_id = WorkspaceId(uuid4())
        call = calls.register(workspace_id, name, card=card)
        registered = await self._connection.exchange(call, registration_token)
        if not registered.auth_token:
            raise AnswerInvalid("The server registered the workspace but returned no token.")
        self._token, self._workspace_id = registered.auth_token, workspace_id
        return Credentials(self.url, workspace_id, registered.auth_token)

    async def rename(self, name: str) -> None:
        """Change the workspace's name."""
        await self.send(calls.register(self.workspace_id, name))

    async def heartbeat(self, *, active_tasks: int = 0, current_task: str = "") -> None:
        """Report that the workspace is alive and what it is working on."""
        await self.send(calls.heartbeat(self.workspace_id, active_tasks, current_task))

    def inbox(
        self, cursor: Cursor | None = None, *, once: bool = False, skip_acked: bool = False
    ) -> Inbox:
        """
        The files and messages of the workspace, in order: `async for item in client.inbox()`.

        It starts after the cursor.  Without one it starts after the last row that the workspace
        acknowledged; with `skip_acked` it starts after the later one of the two.  With `once` it
        stops at the row that was the newest when it started.
        """
        return Inbox(self, cursor, once=once, skip_acked=skip_acked)

    async def feed(
        self,
        cursor: Cursor | None = None,
        *,
        wait_seconds: float = 0,
        limit: int = calls.ROWS_PER_PAGE,
        of: AnyId | None = None,
    ) -> FeedPage:
        """
        One page of the feed after a cursor; raises CursorGone if rows may have been missed.

        The admin can read the feed `of` any workspace.
        """
        workspace_id = self.workspace_id if of is None else workspace_id_of(of)
        call = calls.feed(workspace_id, cursor, wait_seconds=wait_seconds, limit=limit)
        return await self.send(call)

    async def acknowledge_feed(self, handled: Cursor | int) -> None:
        """
        Record on the server that the feed has been handled up to this row.

        With a cursor that has the row's id, a server that was restored from a backup does not
        confuse the row with another one of the same seq.
        """
        cursor = Cursor(handled) if isinstance(handled, int) else handled
        await self.send(calls.acknowledge_feed(self.workspace_id, cursor))

    async def pending(
        self, *, per_page: int = calls.ROWS_PER_PAGE
    ) -> AsyncIterator[wire.PendingUpload]:
        """All pending uploads, oldest first."""
        after: FileId | None = None
        while True:
            page = await self.send(calls.pending(self.workspace_id, after=after, limit=per_page))
            for upload in page.uploads:
                yield upload
            if not isinstance(page.next_after, UUID) or not page.uploads:
                return
            if page.next_after == after:
                raise AnswerInvalid("The server's list of pending uploads does not advance.")
            after = FileId(page.next_after)

    async def acknowledge(self, file_id: AnyId) -> None:
        """Acknowledge a file: the workspace has it, and the server deletes it."""
        await self.send(calls.acknowledge(self.workspace_id, file_id_of(file_id)))

    async def reopen(self, file_id: AnyId) -> None:
        """Make an acknowledged file pending again, for a workspace that lost it."""
        await self.send(calls.reopen(self.workspace_id, file_id_of(file_id)))

    async def workspaces(self) -> AsyncIterator[wire.WorkspaceEntry]:
        """All workspaces; needs the admin token."""
        after: UUID | None = None
        while True:
            page = await self.send(calls.workspaces(after))
            for workspace in page.workspaces:
                yield workspace
            if not isinstance(page.next_after, UUID) or not page.workspaces:
                return
            if after and page.next_after <= after:
                raise AnswerInvalid("The server's list of workspaces does not advance.")
            after = page.next_after

    async def send_message(  # noqa: PLR0913 - the fields of a message
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
        """
        Send a text, or a whole JSON-RPC request; returns the server's or the workspace's answer.

        `files` travel inside of the message, which may have 16 MiB; `attachments` refer to files
        that `send_files` has sent.  The message is sent again after a temporary failure, with the
        same `messageId`, and queued once.  A workspace in push mode is called once: raises
        OutcomeUnknown if a first attempt may have reached it.  `is_repetition`: an earlier call
        with the same `message_id` may have.
        """
        if isinstance(message, str):
            message = text_message(
                message,
                [*await inlined(files), *map(attached, several(attachments, "attachments"))],
                message_id=message_id,
                context_id=context_id,
                role=role,
            )
        elif files or attachments or context_id or message_id:
            raise BadRequest("A JSON-RPC request has its own files and ids: they go with a text.")
        call = calls.send_message(workspace_id_of(to), message)
        return await self.send(call.repeated(2) if is_repetition else call)

    async def notify(
        self,
        text: str,
        *,
        files: Several[Source] = (),
        attachments: Several[Attachment] = (),
        since: Cursor | None = None,
    ) -> None:
        """
        Say something to the workspace's user, at the canvas.

        The protocol has no id for it, so it is sent once; if the answer is lost, the feed tells
        whether it arrived.  Raises ServerUnreachable or OutcomeUnknown if it had not arrived when
        the feed was read.  With `since`, nothing is sent if the same was said after that row.
        """
        checked_text(text)
        own = self.workspace_id
        given, referred = several(files, "files"), several(attachments, "attachments")
        sent = await self._upload(own, given, caller=own) if given else []
        said = Said(text, [attached(one) for one in (*referred, *sent)])
        await notifying.say(self, said, since)

    async def upload_limits(self) -> wire.UploadLimits:
        """The largest files and requests that the server accepts; the defaults if it is older."""
        try:
            return await self.send(calls.upload_limits())
        except RestanteError as error:
            if is_retryable(error):
                raise
            return DEFAULT_UPLOAD_LIMITS

    async def send_files(
        self,
        to: AnyId,
        files: Several[Source],
        *,
        ttl_seconds: int | None = None,
        progress: ProgressCallback = no_progress,
    ) -> list[wire.StagedFile]:
        """
        Send files in one request: the workspace gets all of them or none.

        Each is a path, an open file, or a `Bytes` or `Stream` with a name.  Files are read while
        they are sent, a piece at a time.  A file that is larger than the server accepts is refused
        before anything is sent.

        `progress` gets the number of bytes sent so far, which restarts at 0 with a retry.  An
        exception that it raises ends the request and is raised here; nothing is stored then.
        """
        return await self._upload(
            workspace_id_of(to),
            several(files, "files"),
            ttl_seconds=ttl_seconds,
            progress=progress,
        )

    async def _upload(
        self,
        to: WorkspaceId,
        files: list[Source],
        *,
        ttl_seconds: int | None = None,
        progress: ProgressCallback = no_progress,
        caller: WorkspaceId | None = None,
    ) -> list[wire.StagedFile]:
        key = uuid4().hex
        limits = await self.upload_limits() if any(map(must_be_stored, files)) else None
        with ExitStack() as until:
            max_bytes = (limits or DEFAULT_UPLOAD_LIMITS).per_file_bytes
            outgoing = await outgoing_files(files, max_bytes, until)
            if any(file.part.size > MAX_FILE_BYTES for file in outgoing):
                check_sizes(outgoing, limits or await self.upload_limits())
            parts = [file.part for file in outgoing]
            call = calls.upload(to, parts, key=key, ttl_seconds=ttl_seconds, caller=caller)
            answer = await self.send(call, body=MultipartBody(key, outgoing, progress))
        return answer.files

    @asynccontextmanager
    async def fetch(self, file_id: AnyId, start: int = 0) -> AsyncIterator[Fetch]:
        """Download a pending file from this byte on; raises UploadGone."""
        call = calls.content(self.workspace_id, file_id_of(file_id), start)
        async with await self._connection.request(call, self._token) as answer:
            is_refused = answer.status not in {200, 206}
            body = await self._connection.read_all(answer) if is_refused else b""
            extent = call.read(reply_of(answer, body))
            yield Fetch(extent, self._connection.pieces(answer))

    async def send(
        self, call: Call[T], *, body: MultipartBody | None = None, attempts: int = _ATTEMPTS
    ) -> T:
        """
        Send a call; retry it if it is repeatable and the failure is temporary.

        The error's fact `may_have_arrived` says whether the server may have got the call.
        """
        backoff = Backoff(max_seconds=_MAX_DELAY_SECONDS)
        while True:
            outcome = await self._outcome(call, body)
            if body and body.error is not None:
                raise body.error
            if not isinstance(outcome, RestanteError):
                return outcome
            delay = backoff.next_delay(outcome)
            call = call if has_done_nothing(outcome) else call.repeated(backoff.failures + 1)
            outcome.facts["may_have_arrived"] = call.is_repetition
            if not call.repeatable or not is_retryable(outcome) or backoff.failures >= attempts:
                raise outcome
            await asyncio.sleep(delay)

    async def _outcome(self, call: Call[T], body: MultipartBody | None) -> T | RestanteError:
        try:
            return await self._connection.exchange(call, self._token, body)
        except RestanteError as error:
            return error
