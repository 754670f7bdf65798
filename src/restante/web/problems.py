"""RestanteError to status and JSON body, in one table; anything else is a bug and says so."""

from collections.abc import Mapping

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from restante import errors
from restante.errors import RestanteError

log = structlog.get_logger()

STATUS: Mapping[type[RestanteError], int] = {
    errors.DatabaseUnavailable: 503,
    errors.StatementTimedOut: 503,
    errors.DatabaseFull: 507,
    errors.NotReady: 503,
}

_HTTP_CODES = {404: "no_such_route", 405: "method_not_allowed"}
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


async def on_restante_error(_request: Request, error: Exception) -> Response:
    """A failure we raised on purpose: its sentence, its code, and its status."""
    assert isinstance(error, RestanteError)  # noqa: S101 - registered for this type
    status = STATUS.get(type(error), 500)
    if status >= 500:
        log.warning("request_failed", code=error.code, reason=str(error))
    return json_response({"error": str(error), "code": error.code}, status)


async def on_http_exception(_request: Request, error: Exception) -> Response:
    """What the router refuses by itself, in the same shape as everything else."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this type
    status = error.status_code
    body = {
        "error": _HTTP_SENTENCES.get(status, error.detail),
        "code": _HTTP_CODES.get(status, "bad_request"),
    }
    return json_response(body, status, error.headers)


async def on_bug(_request: Request, error: Exception) -> Response:
    """Anything else: "internal" outside, the full trace inside."""
    log.error("bug", exc_info=error)
    return json_response({"error": "Something went wrong in the server.", "code": "internal"}, 500)
