"""Alive, ready, and the metrics page."""

from starlette.requests import Request
from starlette.responses import Response

from restante.runtime.metrics import CONTENT_TYPE
from restante.web.context import context
from restante.web.problems import json_response


async def health(_request: Request) -> Response:
    """The process runs and its event loop turns."""
    return json_response({"status": "alive"})


async def ready(request: Request) -> Response:
    """The database is reachable and migrated; 503 with the reason otherwise."""
    await context(request).readiness.check()
    return json_response({"status": "ready"})


async def metrics(request: Request) -> Response:
    """Every metric as Prometheus text."""
    return Response(context(request).metrics.page(), media_type=CONTENT_TYPE)
