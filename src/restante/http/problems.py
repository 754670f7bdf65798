"""Decides the HTTP status and JSON body of every error; anything unknown is a bug."""

import asyncio
from collections.abc import Mapping

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route

from restante import errors
from restante.database import shares
from restante.errors import RestanteError
from restante.http import turns

log = structlog.get_logger()

STATUS: Mapping[type[RestanteError], int] = {
    errors.AddressRefused: 502,
    errors.BadRequest: 400,
    errors.CursorGone: 410,
    errors.DatabaseForbidden: 503,
    errors.DatabaseFull: 507,
    errors.DatabaseReadOnly: 503,
    errors.DatabaseUnavailable: 503,
    errors.DiskLow: 507,
    errors.FeedFull: 429,
    errors.FileTooLarge: 413,
    errors.KeyReused: 422,
    errors.MessageTooLarge: 413,
    errors.NotAuthenticated: 401,
    errors.NotJson: 415,
    errors.NotReady: 503,
    errors.OpRefused: 422,
    errors.OriginRefused: 403,
    errors.OutcomeUnknown: 503,
    errors.PeerUnknown: 404,
    errors.PeerUnreachable: 502,
    errors.PushedTableUnknown: 406,
    errors.QuotaTooSmall: 413,
    errors.RangeNotSatisfiable: 416,
    errors.RequestTooLarge: 413,
    errors.ServerFull: 507,
    errors.SnapshotGone: 410,
    errors.StatementTimedOut: 503,
    errors.TableBusy: 503,
    errors.TableNotTracked: 404,
    errors.TooManyAtOnce: 429,
    errors.TooManyConnections: 503,
    errors.TooManyFiles: 400,
    errors.TooManyMessages: 429,
    errors.TooMuchWritten: 429,
    errors.UploadGone: 404,
    errors.UploadMalformed: 400,
    errors.UploadTooSlow: 408,
    errors.WorkspaceFull: 429,
    errors.WorkspaceHasNoCallback: 422,
    errors.WorkspaceUnknown: 404,
    errors.WorkspaceUnreachable: 502,
}

_OUR_FAULT = 500  # and above

NO_SUCH_ROUTE = "no_such_route"
_HTTP_CODES = {404: NO_SUCH_ROUTE, 405: "method_not_allowed"}
_HTTP_SENTENCES = {
    404: "There is nothing at this address.",
    405: "This address does not take that method.",
}


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON answer."""
    return Response(
        msgspec.json.encode(content), status, dict(headers or {}), media_type="application/json"
    )


async def on_restante_error(request: HTTPConnection, error: Exception) -> Response:
    """The answer to an error that we raised on purpose: its sentence, its code, and its status."""
    assert isinstance(error, RestanteError)  # noqa: S101 - registered for this type
    status = STATUS.get(type(error), 500)
    if status >= 500:
        log.warning("request_failed", code=error.code, reason=str(error))
    body = {"error": str(error), "code": error.code} | error.facts
    await _delay(request, status)
    return json_response(body, status, _headers(error))


async def _delay(request: HTTPConnection, status: int) -> None:
    """Hold a refusal back for a caller that gets many, unless it is not the caller's fault."""
    if status < _OUR_FAULT:
        turns.pause()
        now, state = asyncio.get_running_loop().time(), request.app.state
        if seconds := state.refusal_delays.next(shares.caller.get(), now=now):
            state.metrics.requests.refusals_delayed.inc()
            await asyncio.sleep(seconds)


def _headers(error: RestanteError) -> dict[str, str]:
    """The headers that HTTP defines for such an error."""
    headers: dict[str, str] = {}
    if isinstance(error, errors.NotAuthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, errors.RangeNotSatisfiable):
        headers["Content-Range"] = f"bytes */{error.facts['size']}"
    if isinstance(error, errors.TooManyAtOnce):
        headers["Connection"] = "close"
    if "retry_after_seconds" in error.facts:
        headers["Retry-After"] = str(error.facts["retry_after_seconds"])
    return headers


async def on_http_exception(request: HTTPConnection, error: Exception) -> Response:
    """What the router refuses, in the same shape as our own errors."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this type
    status = error.status_code
    body = {
        "error": _HTTP_SENTENCES.get(status, error.detail),
        "code": _HTTP_CODES.get(status, "bad_request"),
    }
    headers = dict(error.headers or {})
    if status == 405:
        headers["Allow"] = _allowed(request)
    await _delay(request, status)
    return json_response(body, status, headers)


def _allowed(request: HTTPConnection) -> str:
    """Every method of the address; the router knows only those of the first matching route."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    found = {
        method
        for route in routes
        if route.path_regex.match(request.url.path)
        for method in route.methods or ()
    }
    return ", ".join(sorted(found))


async def on_bug(_request: Request, error: Exception) -> Response:
    """Anything else: "internal" in the answer, the full trace in the log."""
    log.error("bug", exc_info=error)
    return json_response({"error": "Something went wrong in the server.", "code": "internal"}, 500)


def server_stopping() -> Response:
    """For a request that was still running when the shutdown grace ended."""
    body = {"error": "The server is stopping. Try again in a moment.", "code": "stopping"}
    return json_response(body, 503, {"Retry-After": "1", "Connection": "close"})
