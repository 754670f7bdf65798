"""
Calls push workspaces: streams a request to them and their answer back.

Bodies are never buffered: each piece waits until the other side has taken the one before.  A call
that stalls is ended, and an address that may not be called is refused.
"""

import asyncio
import os
import socket
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit
from uuid import UUID

import structlog
from aiohttp import (
    ClientConnectorDNSError,
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    InvalidURL,
    ServerDisconnectedError,
    TCPConnector,
)

from restante.errors import (
    AddressRefused,
    TooManyAtOnce,
    WorkspaceHasNoCallback,
    WorkspaceUnreachable,
)
from restante.workspaces.addresses import may_call
from restante.workspaces.rules import PushCalls, Workspace, ingest_url, push_refusal

log = structlog.get_logger()

_MAX_ANSWER_BYTES = 64 * 1024 * 1024

# A workspace counts as stalled if it does not take this much within the timeout.
_PIECE_BYTES = 64 * 1024

_RETRY_SECONDS = 1

# The total time of a call, in multiples of the timeout: an answer may be slow, but must end.
_TOTAL_TIMEOUTS = 10

# The answer's headers that are relayed.  Cookies, redirects and connection headers are not.
_RELAYED = ("Content-Type", "Content-Encoding", "Content-Length", "Retry-After")
_WITHOUT_BODY = frozenset({204, 304})

# As returned by `getaddrinfo`; the last part begins with the address as text.
AddrInfo: TypeAlias = tuple[int, int, int, str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A workspace's answer; the body is streamed."""

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]


class Push:
    """The HTTP client for push-mode workspaces."""

    def __init__(self, session: ClientSession, *, timeout_seconds: float) -> None:
        self._session = session
        self._timeout_seconds = timeout_seconds
        self._running = _Running()

    @classmethod
    @asynccontextmanager
    async def opened(cls, *, to_private: bool, timeout_seconds: float) -> AsyncIterator["Push"]:
        """Open the client; calls that are still running at the end are closed."""
        connector = TCPConnector(
            # A call that the connector held back would wait for stalled ones: `_Running` refuses.
            limit=0,
            limit_per_host=0,
            # A kept-alive connection may close during a body that cannot be sent twice.
            force_close=True,
            use_dns_cache=False,
            socket_factory=_Sockets(to_private=to_private, timeout_seconds=timeout_seconds),
        )
        async with ClientSession(
            connector=connector,
            cookie_jar=DummyCookieJar(),
            timeout=ClientTimeout(
                total=None
            ),  # `_StallTimeout` knows which side is being waited for
            auto_decompress=False,
            trust_env=False,
            headers={"User-Agent": "restante", "Accept-Encoding": "identity"},
            skip_auto_headers=("Content-Type",),
        ) as session:
            yield cls(session, timeout_seconds=timeout_seconds)

    def upload(
        self,
        workspace: Workspace,
        body: AsyncIterable[bytes],
        *,
        headers: Mapping[str, str],
        within_seconds: float,
    ) -> AbstractAsyncContextManager[Answer]:
        """
        Forward a body as it arrives, within the time that its sender has.

        Raises WorkspaceUnreachable or AddressRefused, also inside the block if the answer breaks,
        and TooManyAtOnce.
        """
        url = ingest_url(_url(workspace))
        return self._limited(
            self._call(workspace, url, body, headers, within_seconds), workspace, None
        )

    def message(
        self, workspace: Workspace, body: bytes, *, sender: UUID | None
    ) -> AbstractAsyncContextManager[Answer]:
        """Forward a message of a workspace, or of the operator; raises as `upload` does."""
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        call = self._call(workspace, _url(workspace), _one(body), headers, 0)
        return self._limited(call, workspace, sender)

    @asynccontextmanager
    async def _limited(
        self, call: AbstractAsyncContextManager[Answer], workspace: Workspace, sender: UUID | None
    ) -> AsyncIterator[Answer]:
        with self._running.one_more(workspace, sender):
            async with call as answer:
                yield answer

    @asynccontextmanager
    async def _call(
        self,
        workspace: Workspace,
        url: str,
        body: AsyncIterable[bytes],
        headers: Mapping[str, str],
        within_seconds: float,
    ) -> AsyncIterator[Answer]:
        secret = {"Authorization": f"Bearer {workspace.inbound_secret}"}
        total_seconds = within_seconds + _TOTAL_TIMEOUTS * self._timeout_seconds
        try:
            async with (
                asyncio.timeout(total_seconds),
                asyncio.timeout(None) as limit,
            ):
                stall_timeout = _StallTimeout(limit, self._timeout_seconds)
                async with self._session.post(
                    url,
                    data=stall_timeout.sending(body),
                    headers={**headers, **secret},
                    allow_redirects=False,
                ) as response:
                    try:
                        answer = _answer(response, stall_timeout)
                        log.info("pushed", workspace=str(workspace.id), status=answer.status)
                        yield answer
                    finally:
                        response.close()
        except (ClientError, TimeoutError, OSError) as error:
            log.warning("push_failed", workspace=str(workspace.id), reason=_reason(error))
            if _is_refused(error):
                raise AddressRefused(
                    "The workspace's url leads to an address that this server does not call."
                ) from error
            raise WorkspaceUnreachable("workspace unreachable") from error


class _Running:
    """The calls that are running; one too many is refused at once, because waiting would stall."""

    def __init__(self) -> None:
        self._count = Counter[object]()

    @contextmanager
    def one_more(self, workspace: Workspace, sender: UUID | None) -> Iterator[None]:
        """Count a call while it runs; raises TooManyAtOnce.  The operator's have no sender."""
        to, at = ("to", workspace.id), ("at", urlsplit(workspace.url or "").netloc.lower())
        by = ("by", sender)
        running = PushCalls(
            self._count[to], self._count[at], self._count[by] if sender else 0, self._count["all"]
        )
        if refusal := push_refusal(running):
            log.info("push_refused", workspace=str(workspace.id), reason=refusal)
            raise TooManyAtOnce(
                f"{refusal}; let one of them end first.", retry_after_seconds=_RETRY_SECONDS
            )
        keys = (to, at, by, "all")
        self._count.update(keys)
        try:
            yield
        finally:
            self._count.subtract(keys)
            self._count = +self._count  # without the zeros


class _StallTimeout:
    """Ends a call without progress; time spent waiting for the sender does not count."""

    def __init__(self, limit: asyncio.Timeout, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._sender_is_due = False
        self._renew()

    def _renew(self) -> None:
        when = None if self._sender_is_due else asyncio.get_running_loop().time() + self._seconds
        with suppress(RuntimeError):  # it has run out already
            self._limit.reschedule(when)

    async def sending(self, body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """The body on its way to the workspace."""
        self._turn(of_sender=True)
        async for piece in body:
            self._turn(of_sender=False)
            for at in range(0, len(piece), _PIECE_BYTES):
                self._renew()
                yield piece[at : at + _PIECE_BYTES]
            self._turn(of_sender=True)
        self._turn(of_sender=False)

    def _turn(self, *, of_sender: bool) -> None:
        self._sender_is_due = of_sender
        self._renew()

    async def receiving(self, response: ClientResponse) -> AsyncIterator[bytes]:
        """The answer's body, as the workspace sends it."""
        received = 0
        self._renew()
        async for piece in response.content.iter_any():
            self._renew()
            received += len(piece)
            if received > _MAX_ANSWER_BYTES:
                raise _AnswerTooLong
            yield piece


class _Sockets:
    """
    Creates the socket of each connection attempt, and refuses addresses that may not be called.

    The check comes after name resolution and right before the connect, so that no second look-up
    can return another address (DNS rebinding).
    """

    def __init__(self, *, to_private: bool, timeout_seconds: float) -> None:
        self._to_private = to_private
        self._timeout_seconds = timeout_seconds

    def __call__(self, info: AddrInfo) -> socket.socket:
        family, kind, protocol, _, address = info
        if not may_call(address[0], private_allowed=self._to_private):
            raise _Refused
        made = socket.socket(family, kind, protocol)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # The kernel does not keep unsent data for a peer that never reads.
            made.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._timeout_seconds * 1000)
            )
        return made


class _Refused(OSError):
    """An address that may not be called; the HTTP client tries the next one."""

    def __str__(self) -> str:
        return "address refused"


class _AnswerTooLong(ClientError):
    """An answer that is longer than what is relayed."""

    def __str__(self) -> str:
        return "its answer is too long"


def _url(workspace: Workspace) -> str:
    if not workspace.url:
        raise WorkspaceHasNoCallback("workspace has no callback URL")
    return workspace.url


async def _one(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _answer(response: ClientResponse, stall_timeout: _StallTimeout) -> Answer:
    status = response.status
    if not 200 <= status <= 599:
        raise ClientError(f"status {status}")
    if (response.content_length or 0) > _MAX_ANSWER_BYTES:
        raise _AnswerTooLong
    headers = {name: response.headers[name] for name in _RELAYED if name in response.headers}
    if status in _WITHOUT_BODY:
        headers.pop("Content-Length", None)
    return Answer(status, headers, stall_timeout.receiving(response))


def _is_refused(error: Exception) -> bool:
    return isinstance(error, InvalidURL) or isinstance(getattr(error, "os_error", None), _Refused)


def _reason(error: Exception) -> str:
    """What went wrong, without the URL, which the HTTP client's own messages contain."""
    if _is_refused(error):
        return "the address may not be called"
    if isinstance(error, _AnswerTooLong):
        return str(error)
    if isinstance(error, TimeoutError):
        return "no progress within the timeout"
    if isinstance(error, ClientConnectorDNSError):
        return "the host name does not resolve"
    if isinstance(error, ServerDisconnectedError):
        return "it closed the connection without an answer"
    cause = error.os_error if isinstance(error, ClientConnectorError) else error
    number = cause.errno if isinstance(cause, OSError) else None
    return os.strerror(number) if number else type(cause).__name__
