"""
Which web pages may use this server: CORS for HTTP, a check of our own for WebSockets.

A browser lets a page read an answer from another origin only if the answer allows it, and asks
first (a preflight) before it sends what a plain form could not.  It opens a WebSocket for any page,
so there the server must look at the origin.  Programs send no `Origin`, and notice nothing of this.
"""

from collections.abc import Collection, Iterable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from restante.errors import OriginRefused
from restante.http import problems
from restante.http.disconnect import refuse_websocket
from restante.http.operations import operation_of
from restante.text import MAX_QUOTED, printable

# An origin that is taken off the list is refused at its next preflight, this much later.
_PREFLIGHT_SECONDS = 600

# Libraries for server-sent events add Cache-Control, which no route reads.
_ALLOWED_ALWAYS = ("Authorization", "Cache-Control", "Content-Type", "X-Request-ID")
_SENT_ANYWHERE = ("Content-Range", "Retry-After", "WWW-Authenticate", "X-Request-ID")
_VARY = (b"vary", b"Origin")

_ASKED_METHOD = "access-control-request-method"
_ASKED_PRIVATE = "access-control-request-private-network"
_ALLOWED = 204

PREFLIGHT_STATUSES = (_ALLOWED, problems.STATUS[OriginRefused])


class CrossOrigin:
    """The origins whose pages may use this server, and what they are told about its routes."""

    def __init__(self, allowed: Collection[str], routes: Iterable[BaseRoute]) -> None:
        self._allowed = frozenset(allowed)
        described = [
            (route.methods or (), operation)
            for route in routes
            if isinstance(route, Route) and (operation := operation_of(route.endpoint))
        ]
        methods = {method for methods, _ in described for method in methods}
        read = {name for _, operation in described for name in operation.headers}
        sent = {
            name
            for _, operation in described
            for name in (*operation.answer_headers, *operation.optional_headers)
        }
        self._preflight = {
            "Access-Control-Allow-Methods": _list(methods),
            "Access-Control-Allow-Headers": _list(read.union(_ALLOWED_ALWAYS)),
            "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
        }
        exposed = _list(sent.union(_SENT_ANYWHERE)).encode()
        self._answer = (
            (b"access-control-allow-credentials", b"true"),
            (b"access-control-expose-headers", exposed),
        )

    def allows(self, origin: str | None) -> bool:
        """Whether a page of this origin may use the server."""
        return origin is not None and origin.lower() in self._allowed

    def headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """What any answer to this request needs, so that the page that sent it may read it."""
        if not self._allowed:
            return []
        origin = origin_of(scope)
        if origin is None or not self.allows(origin):
            return [_VARY]
        return [_VARY, (b"access-control-allow-origin", origin.encode("latin-1")), *self._answer]

    def preflight(self, origin: str, *, to_private: bool) -> Response:
        """The answer to a browser that asks what a page may send; raises OriginRefused."""
        if not self.allows(origin):
            raise _refusal(origin)
        headers = dict(self._preflight)
        if to_private:
            headers["Access-Control-Allow-Private-Network"] = "true"
        return Response(status_code=_ALLOWED, headers=headers)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def origin_of(scope: Scope) -> str | None:
    """The origin of the page that sends this; several, which no browser sends, match nothing."""
    sent = [value for name, value in scope["headers"] if name == b"origin"]
    return b", ".join(sent).decode("latin-1") if sent else None


def is_same_origin(origin: str, host: str | None) -> bool:
    """Whether the page comes from this server; the scheme may be that of a proxy before it."""
    return bool(host) and origin.lower().partition("://")[2] == (host or "").lower()


def _refusal(origin: str) -> OriginRefused:
    shown = printable(origin, max_length=MAX_QUOTED)
    return OriginRefused(f"The operator of this server has not listed {shown} as an origin.")


class OriginChecks:
    """Answers preflights, and refuses WebSockets of pages that may not use the server."""

    def __init__(self, app: ASGIApp, cross_origin: CrossOrigin) -> None:
        self._app = app
        self._cross_origin = cross_origin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = origin_of(scope)
        if origin is None or self._may_pass(origin, scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            to_private = Headers(scope=scope).get(_ASKED_PRIVATE) == "true"
            answer = self._cross_origin.preflight(origin, to_private=to_private)
            await answer(scope, receive, send)
        else:
            refusal, websocket = _refusal(origin), WebSocket(scope, receive, send)
            response = await problems.on_restante_error(websocket, refusal)
            await refuse_websocket(websocket, receive, response, code=refusal.code)

    def _may_pass(self, origin: str, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        if scope["type"] == "http":
            return scope["method"] != "OPTIONS" or _ASKED_METHOD not in headers
        return self._cross_origin.allows(origin) or is_same_origin(origin, headers.get("host"))
