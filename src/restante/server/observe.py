"""The application as uvicorn sees it: one log line and one count per request, without contents."""

import asyncio
import re
import secrets
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from restante.database import shares
from restante.http import forwarded, turns
from restante.http.disconnect import TRANSPORT
from restante.http.origins import OriginChecks
from restante.http.problems import on_bug, server_stopping
from restante.server.address_limit import AddressLimit
from restante.server.health import PROBES
from restante.workspaces.concurrency import ACCOUNT, RECEIVED

log = structlog.get_logger()

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAX_PATH = 256  # characters in the log
_AFTER_TWO_PARTS = re.compile(r"^(/[^/]*/[^/]*)/.*")
_SECRET = re.compile(r"[A-Za-z0-9_=-]{38,}")  # as long as a token, and longer than an id
_HANDSHAKE_ANSWERS = frozenset({"websocket.accept", "websocket.http.response.start"})
_PROBE = "probe"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
UNMATCHED = "unmatched"  # any address without a route; a raw URL never becomes a label

# The client went away before an answer began; proxies use this number too.
CLIENT_CLOSED_REQUEST = 499


@lru_cache
def path_label(pattern: str) -> str:
    """The pattern of a route as dashboards know it: `/workspaces/:id/activity`."""
    return re.sub(r"{(\w+)}", r":\1", pattern.replace("{workspace_id}", "{id}"))


def _request_id(scope: Scope) -> str:
    """The caller's own, if it is well-formed."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)


def _who_and_where(scope: Scope, route: str) -> dict[str, str]:
    """What a log line says about the caller and the path; nothing is looked up for it."""
    path = scope.get("raw_path", b"").decode("latin-1")
    if route == UNMATCHED:
        path = _AFTER_TWO_PARTS.sub(r"\1/…", path)
    # Somebody may have put a secret into a wrong address, or where an id belongs.
    path = _SECRET.sub("***", path)[:_MAX_PATH]
    client, workspace = scope.get("client"), scope[ACCOUNT].workspace
    found = {"path": path, "client": client[0] if client else ""}
    if workspace is not None:
        found |= {"workspace": str(workspace.id), "name": workspace.name}
    return found


@dataclass(slots=True)
class _Answer:
    """What is sent back, and how far it got."""

    raw_send: Send
    request_id: str
    transport: Any  # None if the server does not show it
    cross_origin: list[tuple[bytes, bytes]]
    status: int = CLIENT_CLOSED_REQUEST
    has_begun: bool = False
    sent: int = 0  # bytes of the body

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.sent += len(message.get("body", b""))
        elif message["type"] == "http.response.start":
            self.has_begun = True
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-ID"] = self.request_id
            headers.raw.extend(self.cross_origin)
            if getattr(self.transport, "body_is_due", False):
                headers["Connection"] = "close"  # the rest of the body is not a request
        await self.raw_send(message)


class ObservedApp(Starlette):
    """
    Starlette that logs and counts each request, from its first byte to the answer's last.

    It also puts the connection's transport into the scope, for handlers that must abort it.
    Uvicorn's `send` is a method of the object that has it; middleware would hide that.
    """

    def build_middleware_stack(self) -> ASGIApp:
        """Leave out Starlette's outermost layer, which would answer errors before `_answer`."""
        checked = OriginChecks(self.router, self.state.cross_origin)
        return ExceptionMiddleware(AddressLimit(checked), handlers=self.exception_handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[TRANSPORT] = getattr(getattr(send, "__self__", None), "transport", None)
        forwarded.reveal(scope, self.state.proxies)
        caller = self.state.access.caller(HTTPConnection(scope))
        # Probes do not wait behind the other requests of their address, which may be a proxy's.
        is_probe = caller is not None and scope["path"] in PROBES
        shares.caller.set((_PROBE, caller) if is_probe else caller)
        with self.state.concurrency.counted(scope), turns.one_request(self.state.turns):
            if scope["type"] == "http":
                await self._observe(scope, receive, send)
            else:
                await self._handshake(scope, receive, send)

    async def _handshake(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A WebSocket: its accepting or refusing answer has a request id, and so has its log."""
        request_id = _request_id(scope)

        async def send_identified(message: Message) -> None:
            if message["type"] in _HANDSHAKE_ANSWERS:
                message.setdefault("headers", [])
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            await self._begin(scope, receive, send_identified)

    async def _begin(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.state.metrics.requests.turn_wait_seconds.time():
            await turns.resume()
        await super().__call__(scope, receive, send)

    async def _observe(self, scope: Scope, receive: Receive, send: Send) -> None:
        cross_origin = self.state.cross_origin.headers(scope)
        answer = _Answer(send, _request_id(scope), scope[TRANSPORT], cross_origin)
        started = time.monotonic()
        with structlog.contextvars.bound_contextvars(request_id=answer.request_id):
            try:
                await self._answer(scope, receive, answer)
            finally:
                seconds = time.monotonic() - started
                method = scope["method"] if scope["method"] in METHODS else "other"
                route = getattr(scope.get("route"), "path", UNMATCHED)
                requests, label = self.state.metrics.requests, path_label(route)
                requests.answered(method, label, answer.status, seconds)
                # Probes come every few seconds, and a failed one is logged as `request_failed`.
                say = log.debug if scope["path"] in PROBES else log.info
                say(
                    "request",
                    method=method,
                    route=route,
                    status=answer.status,
                    seconds=round(seconds, 4),
                    bytes_in=scope.get(RECEIVED, 0),
                    bytes_out=answer.sent,
                    **_who_and_where(scope, route),
                )

    async def _answer(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        """
        Run the handler, and answer for it when it fails.

        An answer that has begun is left incomplete; uvicorn then closes the connection, so that it
        never looks complete.
        """
        try:
            await self._begin(scope, receive, answer.send)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            # Only the shutdown of the server cancels a request.
            if not answer.has_begun:
                await server_stopping()(scope, receive, answer.send)
            raise
        except Exception as error:
            response = await on_bug(Request(scope), error)
            if not answer.has_begun:
                await response(scope, receive, answer.send)
