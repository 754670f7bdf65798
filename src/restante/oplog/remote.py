"""
The HTTP client for other nodes: pages of their op logs, snapshots, pushes.

An operator has named every peer, so any address is called.  What a peer answers is bounded in size
and time, and redirects are not followed.
"""

import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Protocol, TypeVar

import msgspec
from aiohttp import (
    ClientConnectorDNSError,
    ClientConnectorError,
    ClientError,
    ClientPayloadError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
    DummyCookieJar,
    InvalidURL,
    ServerDisconnectedError,
    TCPConnector,
)

from restante.errors import PeerUnreachable, SnapshotGone
from restante.oplog import answers
from restante.text import printable
from restante.wire import oplog as wire

T = TypeVar("T")

# A page has 64 MiB at most, and a single record may exceed that a little.
MAX_BODY_BYTES = 80 * 1024 * 1024
_MAX_PROBLEM_BYTES = 16 * 1024
_MAX_SENTENCE = 200

_CONNECT_SECONDS = 10
# Without a single byte; a long poll may take as much longer as it was asked to wait.
_IDLE_SECONDS = 30
_TOTAL_SECONDS = 300
# A peer that has no time for us may say for how long, up to this.
_MAX_RETRY_AFTER_SECONDS = 300
_TOO_MANY = 429

_SWEEP = "/internal/crud/sweep"
_PUSH = "/internal/crud/push"
_SNAPSHOT = "/internal/oplog/snapshot"
_SNAPSHOT_PAGE = "/internal/oplog/snapshot/page"
_SNAPSHOT_MISSING = "/internal/oplog/snapshot/missing"


class Address(Protocol):
    """Where a peer is, and the token that we show to it."""

    @property
    def host(self) -> str: ...
    @property
    def token(self) -> str | None: ...


# A header may list a thousand tables that have a gap.
_MAX_HEADER_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What to ask a peer's log for."""

    position: str = ""  # where we are, if it is one of our nodes
    after: str = ""  # the same as a ULID, for all others
    wait_seconds: int = 0
    floor: str = ""
    head: str = ""
    limit: int | None = None

    def query(self) -> dict[str, str]:
        """The parameters; an `after` is always there, because the older protocol has it so."""
        given = {
            "position": self.position,
            "floor": self.floor,
            "head": self.head,
            "wait": str(self.wait_seconds) if self.wait_seconds else "",
            "limit": str(self.limit) if self.limit else "",
        }
        return {"after": self.after} | {name: text for name, text in given.items() if text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of a peer's log, complete, with what its headers say; none of it is checked yet."""

    ops: list[wire.Op]
    unreadable: int = 0  # ops that have another shape
    size: int = 0  # in bytes
    is_ours: bool = False  # the peer is one of our nodes
    host: str = ""  # under which name it makes changes, if it is one of our nodes
    next_position: str = ""
    cursor_on_you: str | None = None
    gap_tables: list[str] = field(default_factory=list[str])
    new_tables: list[str] = field(default_factory=list[str])  # we could not see them before
    has_gap: bool = False  # in the older protocol
    available_min_ulid: str = ""
    last_scanned_ulid: str = ""
    is_limited: bool = False
    skew_seconds: float | None = None  # how far the peer's clock is ahead of ours


@dataclass(frozen=True, slots=True)
class _Call:
    """One request."""

    method: str
    path: str
    query: Mapping[str, str] | None = None
    body: bytes | None = None
    wait_seconds: int = 0


class Remote:
    """Calls other nodes."""

    def __init__(
        self, session: ClientSession, *, own_host: str, clock: Callable[[], datetime]
    ) -> None:
        self._session = session
        self._own_host = own_host
        self._clock = clock

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, *, own_host: str, clock: Callable[[], datetime]
    ) -> AsyncIterator["Remote"]:
        """Open the client; calls that are still running at the end are closed."""
        async with ClientSession(
            connector=TCPConnector(limit=0, limit_per_host=0),
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            max_field_size=_MAX_HEADER_BYTES,
            headers={"Accept-Encoding": "identity"},
        ) as session:
            yield cls(session, own_host=own_host, clock=clock)

    async def page(self, peer: Address, ask: Ask) -> Page:
        """Ask for a page of the log; raises PeerUnreachable, and then nothing of it counts."""
        call = _Call("GET", _SWEEP, ask.query(), wait_seconds=ask.wait_seconds)
        async with self._called(peer, call) as answer:
            skew_seconds = answers.skew_seconds(answer.headers, self._clock())
            body = await _body(answer)
        ops, unreadable = await answers.in_thread_if_large(answers.ops, body)
        said = answer.headers
        return Page(
            ops=ops,
            unreadable=unreadable,
            size=len(body),
            is_ours=said.get(wire.OPLOG_VERSION) == "1",
            host=said.get(wire.NODE_HOST, ""),
            next_position=said.get(wire.NEXT_POSITION, ""),
            cursor_on_you=said.get(wire.CURSOR_ON_YOU),
            gap_tables=answers.tables_of(said, wire.GAP_TABLES),
            new_tables=answers.tables_of(said, wire.NEW_TABLES),
            has_gap=said.get(wire.RETENTION_GAP, "").lower() == "true",
            available_min_ulid=said.get(wire.AVAILABLE_MIN_ULID, ""),
            last_scanned_ulid=said.get(wire.LAST_SCANNED_ULID, ""),
            is_limited=said.get(wire.LIMITED, "").lower() == "true",
            skew_seconds=skew_seconds,
        )

    async def push(self, peer: Address, op: wire.Op) -> None:
        """Send one op; raises PeerUnreachable unless it was taken."""
        async with self._posted(peer, _PUSH, op):
            return

    async def begin_snapshot(self, peer: Address, table: str) -> wire.SnapshotStart:
        """Begin a snapshot of a table; raises PeerUnreachable."""
        request = wire.SnapshotRequest(table)
        return await self.asked(peer, _SNAPSHOT, request, wire.SnapshotStart)

    async def snapshot_page(
        self, peer: Address, request: wire.SnapshotPageRequest
    ) -> wire.SnapshotPage:
        """The next page; raises SnapshotGone if it must begin again, and PeerUnreachable."""
        return await self._snapshot_answer(peer, _SNAPSHOT_PAGE, request)

    async def snapshot_missing(
        self, peer: Address, request: wire.SnapshotKeysRequest
    ) -> wire.SnapshotPage:
        """Those of the keys that the peer has no record of; raises as `snapshot_page` does."""
        return await self._snapshot_answer(peer, _SNAPSHOT_MISSING, request)

    async def asked(self, peer: Address, path: str, request: object, shape: type[T]) -> T:
        """The answer to a POST, as JSON; raises PeerUnreachable, or SnapshotGone."""
        body = await self._answer(peer, path, request)
        return await answers.in_thread_if_large(partial(answers.decoded, shape=shape), body)

    async def _snapshot_answer(
        self, peer: Address, path: str, request: object
    ) -> wire.SnapshotPage:
        body = await self._answer(peer, path, request)
        return await answers.in_thread_if_large(answers.snapshot_page, body)

    async def _answer(self, peer: Address, path: str, request: object) -> bytes:
        async with self._posted(peer, path, request) as answer:
            return await _body(answer)

    def _posted(
        self, peer: Address, path: str, request: object
    ) -> AbstractAsyncContextManager[ClientResponse]:
        call = _Call("POST", path, body=msgspec.json.encode(request))
        return self._called(peer, call)

    @asynccontextmanager
    async def _called(self, peer: Address, call: "_Call") -> AsyncIterator[ClientResponse]:
        """Call the peer; an answer other than 200 is a failure."""
        try:
            async with self._session.request(
                call.method,
                peer.host + call.path,
                params=call.query,
                data=call.body,
                headers=self._headers(peer, has_body=call.body is not None),
                allow_redirects=False,
                timeout=ClientTimeout(
                    total=_TOTAL_SECONDS + call.wait_seconds,
                    sock_connect=_CONNECT_SECONDS,
                    sock_read=_IDLE_SECONDS + call.wait_seconds,
                ),
            ) as answer:
                if answer.status != 200:
                    raise await _refusal(answer)
                yield answer
        except (ClientError, TimeoutError, OSError, ValueError) as error:
            raise PeerUnreachable(f"{_reason(error)}.") from error

    def _headers(self, peer: Address, *, has_body: bool) -> dict[str, str]:
        headers = {"User-Agent": f"restante {self._own_host}", wire.OPLOG_VERSION: "1"}
        if peer.token:
            headers["Authorization"] = f"Bearer {peer.token}"
        if has_body:
            headers["Content-Type"] = "application/json"
        return headers


class _Problem(msgspec.Struct):
    """A refusal of one of our nodes."""

    error: str = ""
    code: str = ""


async def _body(answer: ClientResponse) -> bytes:
    """The whole body; raises PeerUnreachable if it is too long."""
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise PeerUnreachable("Its answer is compressed, which was not asked for.")
    arrived = bytearray()
    async for piece in answer.content.iter_any():
        arrived += piece
        if len(arrived) > MAX_BODY_BYTES:
            raise PeerUnreachable(f"Its answer has more than {MAX_BODY_BYTES} bytes.")
    return bytes(arrived)


async def _refusal(answer: ClientResponse) -> PeerUnreachable | SnapshotGone:
    """What the peer says about its refusal."""
    said = await answer.content.read(_MAX_PROBLEM_BYTES)
    try:
        problem = msgspec.json.decode(said, type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        problem = _Problem()
    if problem.code == SnapshotGone.code:
        return SnapshotGone("The peer no longer keeps the snapshot; it begins again.")
    sentence = printable(problem.error, max_length=_MAX_SENTENCE)
    return PeerUnreachable(
        f"It answered with status {answer.status}{': ' if sentence else '.'}{sentence}",
        status=answer.status,
        peer_code=problem.code or None,
        retry_after_seconds=_retry_after_seconds(answer),
    )


def _retry_after_seconds(answer: ClientResponse) -> float | None:
    """When to ask again, if the peer has refused only because it is asked too often."""
    if answer.status != _TOO_MANY:
        return None
    said = answer.headers.get("Retry-After", "")
    seconds = int(said) if said.isdecimal() and said.isascii() and len(said) < 10 else 1
    return float(min(max(seconds, 1), _MAX_RETRY_AFTER_SECONDS))


def is_about_all(error: PeerUnreachable) -> bool:
    """Whether any other request would fail as well: it is away, or does not let us in."""
    if isinstance(error.__cause__, ClientConnectorError | ConnectionTimeoutError):
        return True
    return error.facts.get("status") in (401, 403, _TOO_MANY)


def _reason(error: Exception) -> str:
    """What went wrong, without the URL, which the HTTP client's own messages contain."""
    for kind, sentence in _REASONS.items():
        if isinstance(error, kind):
            return sentence
    cause = error.os_error if isinstance(error, ClientConnectorError) else error
    number = cause.errno if isinstance(cause, OSError) else None
    return f"It cannot be reached: {os.strerror(number) if number else type(cause).__name__}"


_REASONS: dict[type[Exception], str] = {
    InvalidURL: "Its address is not a URL",
    TimeoutError: "It did not answer in time",
    ClientConnectorDNSError: "Its host name does not resolve",
    ServerDisconnectedError: "It closed the connection without an answer",
    ClientPayloadError: "Its answer breaks off",
    ssl.SSLError: "Its certificate is not valid, or it does not speak TLS",
}
