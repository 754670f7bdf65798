"""The client for asyncio: sends what `calls` builds, and retries what can be repeated."""

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar
from uuid import UUID, uuid4

import aiohttp
from yarl import URL

from restante import __version__, wire
from restante.client import calls
from restante.client.addresses import proxy_for, server_url
from restante.client.calls import Call, Credentials, Cursor, FeedPage, Reply
from restante.client.fetching import Fetch
from restante.client.patience import Patience, is_passing
from restante.client.poller import Inbox
from restante.client.sending import Outgoing, Progress, Source, body_of, unheard
from restante.delivery.rules import Pace, time_allowed
from restante.errors import AnswerInvalid, BadRequest, RestanteError, ServerUnreachable
from restante.ids import FileId, WorkspaceId
from restante.text import printable

T = TypeVar("T")

_TRIES = 4
_CONNECT_SECONDS = 10
_SILENCE_SECONDS = 30
_UPLOAD_PACE = Pace(grace_seconds=60, min_bytes_per_second=16_384)
_PIECE_BYTES = 256 * 1024

# A server that sends a byte now and then would otherwise keep us for ever.
_PATIENT_SECONDS = 15
_SLOWEST_BYTES_PER_SECOND = 1024

Body = Callable[[], AsyncIterator[bytes]]

_LOST = (aiohttp.ClientError, TimeoutError, ConnectionError, ssl.SSLError)


class AsyncClient:
    """
    Speaks to one server, as one workspace or as the admin.

    Use it as `async with AsyncClient(url, token=...) as client`.  Requests that can be repeated are
    repeated a few times when they fail for a reason that passes; others are sent once.
    """

    def __init__(
        self, url: str, *, token: str | None = None, workspace_id: WorkspaceId | UUID | None = None
    ) -> None:
        self.url = server_url(url)
        self._token = token
        self._workspace_id = WorkspaceId(workspace_id) if workspace_id else None
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def of(cls, credentials: Credentials) -> Self:
        """The client of a registered workspace."""
        return cls(credentials.url, token=credentials.token, workspace_id=credentials.workspace_id)

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        self._session = aiohttp.ClientSession(
            timeout=timeout,
            # A body is taken as it comes: what would unpack to gigabytes stays small.
            headers={"User-Agent": f"restante/{__version__}", "Accept-Encoding": "identity"},
            auto_decompress=False,
            # Not all of the environment: a .netrc would speak in the token's place.
            proxy=proxy_for(self.url),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session:
            await self._session.close()
            self._session = None

    @property
    def is_registered(self) -> bool:
        """Whether it is a workspace that has its token."""
        return self._workspace_id is not None and self._token is not None

    @property
    def workspace_id(self) -> WorkspaceId:
        """Who we are; raises BadRequest for a client that is no workspace."""
        if self._workspace_id is None:
            raise BadRequest("This needs a workspace: give the client its workspace_id.")
        return self._workspace_id

    async def register(
        self,
        name: str,
        *,
        registration_token: str | None = None,
        card: Mapping[str, Any] | None = None,
    ) -> Credentials:
        """
        Register a new workspace that polls, and be it from now on.

        Keep what comes back: the token is not told again.
        """
        workspace_id = WorkspaceId(uuid4())
        call = calls.register(workspace_id, name, card=card)
        registered = await self._tried_once(call, token=registration_token)
        if not registered.auth_token:
            raise AnswerInvalid("The server registered the workspace and gave it no token.")
        self._token, self._workspace_id = registered.auth_token, workspace_id
        return Credentials(self.url, workspace_id, registered.auth_token)

    async def rename(self, name: str) -> None:
        """Change what the workspace is called."""
        await self.send(calls.register(self.workspace_id, name))

    async def heartbeat(self, *, active_tasks: int = 0, current_task: str = "") -> None:
        """Say that the workspace lives and what it is doing."""
        await self.send(calls.heartbeat(self.workspace_id, active_tasks, current_task))

    def inbox(self, cursor: Cursor | None = None, *, once: bool = False) -> Inbox:
        """
        What arrives for the workspace, in order: `async for item in client.inbox()`.

        It begins after the cursor, or where the workspace last said that it had handled its feed.
        With `once` it ends when everything that was there has been read.
        """
        return Inbox(self, cursor, once=once)

    async def feed(
        self,
        cursor: Cursor | None = None,
        *,
        wait_seconds: float = 0,
        limit: int = calls.ROWS_PER_PAGE,
        of: WorkspaceId | None = None,
    ) -> FeedPage:
        """One page of the feed after a cursor; raises CursorGone if rows may have been missed."""
        whose = of or self.workspace_id
        return await self.send(calls.feed(whose, cursor, wait_seconds=wait_seconds, limit=limit))

    async def acknowledge_feed(self, seq: int) -> None:
        """Note how far the feed has been handled."""
        await self.send(calls.acknowledge_feed(self.workspace_id, seq))

    async def pending(self) -> AsyncIterator[wire.PendingUpload]:
        """Every file that waits, oldest first."""
        after: FileId | None = None
        while True:
            page = await self.send(calls.pending(self.workspace_id, after=after))
            for upload in page.uploads:
                yield upload
            if not isinstance(page.next_after, UUID) or not page.uploads:
                return
            if page.next_after == after:
                raise AnswerInvalid("The server's list of waiting files does not advance.")
            after = FileId(page.next_after)

    async def acknowledge(self, file_id: FileId | UUID) -> None:
        """The workspace has the file."""
        await self.send(calls.acknowledge(self.workspace_id, FileId(file_id)))

    async def reopen(self, file_id: FileId | UUID) -> None:
        """The file was acknowledged and then lost: let it wait again."""
        await self.send(calls.reopen(self.workspace_id, FileId(file_id)))

    async def workspaces(self) -> AsyncIterator[wire.WorkspaceView]:
        """Every workspace, for the admin."""
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

    async def send_message(
        self, to: WorkspaceId | UUID, message: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Send a JSON-RPC message.  It is sent once: after a lost answer it may have arrived."""
        return await self.send(calls.send_message(WorkspaceId(to), message))

    async def send_files(
        self,
        to: WorkspaceId | UUID,
        files: Sequence[Source],
        *,
        ttl_seconds: int | None = None,
        progress: Progress = unheard,
    ) -> list[wire.StagedFile]:
        """Send files in one request: the workspace gets all of them, or none."""
        key = uuid4().hex
        outgoing = [Outgoing.of(file) for file in files]
        parts = [file.part for file in outgoing]
        call = calls.upload(WorkspaceId(to), parts, key=key, ttl_seconds=ttl_seconds)
        answer = await self.send(call, body=lambda: body_of(key, outgoing, progress))
        return answer.files

    @asynccontextmanager
    async def fetch(self, file_id: FileId | UUID, start: int = 0) -> AsyncIterator[Fetch]:
        """The bytes of a waiting file from this one on, as they come; raises UploadGone."""
        call = calls.content(self.workspace_id, FileId(file_id), start)
        async with self._answer(call, self._token) as answer:
            refused = answer.status not in {200, 206}
            body = await _bounded(answer) if refused else b""
            extent = call.read(_reply(answer, body))
            yield Fetch(extent, _pieces(answer))

    async def send(self, call: Call[T], *, body: Body | None = None, tries: int = _TRIES) -> T:
        """Send a call, again a few times if it is harmless and the failure one that passes."""
        patience = Patience(longest_seconds=4)
        while True:
            try:
                return await self._tried_once(call, token=self._token, body=body)
            except RestanteError as error:
                pause = patience.failed(error)
                if not call.repeatable or not is_passing(error) or patience.failures >= tries:
                    raise
            await asyncio.sleep(pause)

    async def _tried_once(self, call: Call[T], *, token: str | None, body: Body | None = None) -> T:
        async with self._answer(call, token, body) as answer:
            return call.read(_reply(answer, await _bounded(answer)))

    @asynccontextmanager
    async def _answer(
        self, call: Call[Any], token: str | None, body: Body | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The head of an answer; never of another server than ours."""
        if self._session is None:
            raise RuntimeError("Use the client inside of `async with`.")
        headers = dict(call.headers) | _authorization(token)
        silence = aiohttp.ClientTimeout(
            total=_time_for(call),
            sock_connect=_CONNECT_SECONDS,
            sock_read=_SILENCE_SECONDS + call.wait_seconds,
        )
        try:
            async with self._session.request(
                call.method,
                URL(self.url + call.path),
                params=call.query,
                headers=headers,
                data=body() if body else call.body,
                allow_redirects=False,
                timeout=silence,
            ) as answer:
                yield answer
        except _LOST as error:
            # What went wrong while a body was read from disk comes wrapped like a lost connection.
            if isinstance(error.__cause__, RestanteError):
                raise error.__cause__ from None
            raise _failure(self.url, error) from error


def _time_for(call: Call[Any]) -> float | None:
    """
    How long an upload may take in all, which is no less than the servers' own limit.

    Nothing else ends one to a peer that has stopped reading.
    """
    length = call.headers.get("Content-Length")
    if length is None:
        return None
    return time_allowed(int(length), _UPLOAD_PACE).total_seconds()


def _authorization(token: str | None) -> dict[str, str]:
    if token and not token.isprintable():
        raise BadRequest("The token has a line break or a control character in it.")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _failure(url: str, error: Exception) -> RestanteError:
    if isinstance(error, aiohttp.ClientResponseError):
        what = printable(error.message.partition("\n")[0]).rstrip(": ")
        return AnswerInvalid(f"{url} does not answer in HTTP: {what}.")
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0  # names that cannot be looked up have negative ones
        why = os.strerror(number) if number > 0 else error.os_error.strerror or str(error)
        return ServerUnreachable(f"{url} cannot be reached: {why}.")
    if isinstance(error, TimeoutError):
        return ServerUnreachable(f"{url} has not answered in time.")
    why = printable(str(error)) or type(error).__name__
    return ServerUnreachable(f"The connection to {url} broke off: {why}.")


def _reply(answer: aiohttp.ClientResponse, body: bytes) -> Reply:
    headers = {name.lower(): value for name, value in answer.headers.items()}
    return Reply(answer.status, headers, body)


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    """The body, of which no more is read than an honest one can have."""
    body = bytearray()
    async for piece in _pieces(answer):
        body += piece
        if len(body) > calls.MAX_ANSWER_BYTES:
            raise AnswerInvalid("The server's answer does not end; the rest was not read.")
    return bytes(body)


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    began, received = time.monotonic(), 0
    async for piece in answer.content.iter_chunked(_PIECE_BYTES):
        received += len(piece)
        if time.monotonic() - began > _PATIENT_SECONDS + received / _SLOWEST_BYTES_PER_SECOND:
            raise AnswerInvalid("The server's answer comes too slowly; the rest was not read.")
        yield piece
