"""One log line and one count per request: id, method, route, status, duration; no contents."""

import re
import secrets
import time

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from restante.runtime.metrics import Metrics

log = structlog.get_logger()

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

# A caller that went away before an answer began; the number is the one proxies use for it.
CLIENT_CLOSED_REQUEST = 499


class Observed:
    """ASGI middleware that watches a request from its first byte to the answer's last."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request_id = _request_id(scope)
        status = CLIENT_CLOSED_REQUEST
        started = time.monotonic()

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_and_note)
            finally:
                self._note(scope, status, time.monotonic() - started)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = route_pattern(scope)
        self._metrics.request_ended(method, route, status, seconds)
        log.info("request", method=method, route=route, status=status, seconds=round(seconds, 4))


def route_pattern(scope: Scope) -> str:
    """The pattern of the route that matched; a raw address never becomes a label."""
    return getattr(scope.get("route"), "path", "unmatched")


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
