"""One log line and one count per request: id, method, route, status, duration; no contents."""

import asyncio
import re
import secrets
import time

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from restante.http.problems import on_bug, server_stopping
from restante.server.metrics import RequestMetrics

log = structlog.get_logger()

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

# A caller that went away before an answer began; the number is the one proxies use for it.
CLIENT_CLOSED_REQUEST = 499


class Observed:
    """ASGI middleware that watches a request from its first byte to the answer's last."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        answer = _Answer(send, _request_id(scope))
        started = time.monotonic()
        with structlog.contextvars.bound_contextvars(request_id=answer.request_id):
            try:
                await self._answered(scope, receive, answer)
            finally:
                self._note(scope, answer.status, time.monotonic() - started)

    async def _answered(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        """
        Let the application answer, and answer for it when it cannot.

        An answer that has begun is left incomplete; uvicorn then cuts the connection, so that it
        is never taken for a whole one.
        """
        try:
            await self._app(scope, receive, answer.send)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            # Nobody but the end of the server cuts a request.
            if not answer.begun:
                await server_stopping()(scope, receive, answer.send)
            raise
        except Exception as error:
            response = await on_bug(Request(scope), error)
            if not answer.begun:
                await response(scope, receive, answer.send)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = route_pattern(scope)
        self._metrics.request_ended(method, route, status, seconds)
        log.info("request", method=method, route=route, status=status, seconds=round(seconds, 4))


class _Answer:
    """What is sent back, and how far it got."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.status = CLIENT_CLOSED_REQUEST
        self.begun = False
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-ID"] = self.request_id
        await self._send(message)


def route_pattern(scope: Scope) -> str:
    """The pattern of the route that matched; a raw address never becomes a label."""
    return getattr(scope.get("route"), "path", "unmatched")


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
