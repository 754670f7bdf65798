"""
One request to a server over HTTP, and its answer: the timeouts, what is read of it, and which error
it is if there is none.
"""

import asyncio
import io
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from yarl import URL

from restante import __version__
from restante.client.addresses import proxy_for, server_url
from restante.client.calls import Call
from restante.client.http_replies import failure, reply_of
from restante.client.sending import MultipartBody
from restante.delivery.rules import Pace, time_allowed
from restante.errors import AnswerInvalid, BadRequest

T = TypeVar("T")

_UPLOAD_PACE = Pace(grace_seconds=60, min_bytes_per_second=16_384)
_PIECE_BYTES = 256 * 1024
_TLS_PROBE_SECONDS = 3

_CONNECTION_ERRORS = (aiohttp.ClientError, TimeoutError, ConnectionError, ssl.SSLError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """
    How long a client waits for a server, and how much it reads of an answer.

    Without `min_bytes_per_second`, counted after `slow_start_seconds`, a server that sends one byte
    now and then would keep a request open for ever.
    """

    connect_timeout_seconds: float = 10
    read_timeout_seconds: float = 30
    slow_start_seconds: float = 15
    min_bytes_per_second: float = 1024
    # A page has one message of up to 16 MiB, or at a server of before ROWS_PER_PAGE of 1 MiB each.
    max_answer_bytes: int = 64 * 1024 * 1024


DEFAULT_LIMITS = Limits()


class Connection:
    """Sends single requests to one server, between `open` and `close`."""

    def __init__(self, url: str, limits: Limits) -> None:
        self.url = server_url(url)
        self._limits = limits
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make requests possible; nothing is sent yet."""
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            # Compressed bodies are never unpacked: a small one could expand to gigabytes.
            headers={"User-Agent": f"restante/{__version__}", "Accept-Encoding": "identity"},
            auto_decompress=False,
            # Not `trust_env`: credentials from a .netrc would replace the token.
            proxy=proxy_for(self.url),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """End all requests.  Idempotent."""
        if self._session:
            await self._session.close()
            self._session = None

    async def exchange(
        self, call: Call[T], token: str | None, body: MultipartBody | None = None
    ) -> T:
        """Send a request once and parse its answer."""
        with self._connection_errors():
            async with await self.request(call, token, body) as answer:
                return call.read(reply_of(answer, await self.read_all(answer)))

    async def request(
        self, call: Call[Any], token: str | None, body: MultipartBody | None = None
    ) -> aiohttp.ClientResponse:
        """Send a request and return its answer with the body unread; redirects are not followed."""
        if self._session is None:
            raise RuntimeError("Use the client inside `async with`.")
        with self._connection_errors():
            return await self._session.request(
                call.method,
                URL(self.url + call.path),
                params=call.query,
                headers=dict(call.headers) | _authorization(token),
                # A large body is read in pieces: written at once, it would stop the event loop.
                data=body.pieces() if body else call.body and io.BytesIO(call.body),
                allow_redirects=False,
                timeout=self._timeout(call),
            )

    def _timeout(self, call: Call[Any]) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(
            total=_upload_seconds(call),
            sock_connect=self._limits.connect_timeout_seconds,
            sock_read=self._limits.read_timeout_seconds + call.wait_seconds,
        )

    async def read_all(self, answer: aiohttp.ClientResponse) -> bytes:
        """The body of an answer, which must not be too long."""
        body = bytearray()
        async for piece in self.pieces(answer):
            body += piece
            if len(body) > self._limits.max_answer_bytes:
                raise AnswerInvalid("The server's answer is too long; the rest was not read.")
        return bytes(body)

    async def pieces(self, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The body of an answer as it arrives, which must not be too slow."""
        limits = self._limits
        started_at, received = time.monotonic(), 0
        with self._connection_errors():
            async for piece in answer.content.iter_chunked(_PIECE_BYTES):
                received += len(piece)
                allowed = limits.slow_start_seconds + received / limits.min_bytes_per_second
                if time.monotonic() - started_at > allowed:
                    raise AnswerInvalid("The server's answer is too slow; the rest was not read.")
                yield piece

    @contextmanager
    def _connection_errors(self) -> Iterator[None]:
        try:
            yield
        except _CONNECTION_ERRORS as error:
            raise failure(self.url, error) from error


async def speaks_tls(url: str) -> bool:
    """Whether the server at a plain http address expects TLS; False if it cannot be asked."""
    address = URL(url)
    if address.scheme != "http" or proxy_for(url) or address.host is None:
        return False
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE  # nothing is sent to it
    try:
        async with asyncio.timeout(_TLS_PROBE_SECONDS):
            _, writer = await asyncio.open_connection(address.host, address.port, ssl=anybody)
            writer.transport.abort()
    except (OSError, TimeoutError):
        return False
    return True


def _upload_seconds(call: Call[Any]) -> float | None:
    """
    The time limit of a whole upload, None for other calls; never below the server's own limit.

    No other timeout ends an upload to a server that has stopped reading.
    """
    length = call.headers.get("Content-Length")
    if length is None:
        return None
    return time_allowed(int(length), _UPLOAD_PACE).total_seconds()


def _authorization(token: str | None) -> dict[str, str]:
    if token and not token.isprintable():
        raise BadRequest("The token contains a line break or a control character.")
    return {"Authorization": f"Bearer {token}"} if token else {}
