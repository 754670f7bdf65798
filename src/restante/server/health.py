"""Alive, ready, and the metrics page."""

from starlette.requests import Request
from starlette.responses import Response

from restante import wire
from restante.errors import NotReady
from restante.http.operations import operation
from restante.http.problems import json_response
from restante.server.context import context
from restante.server.metrics import CONTENT_TYPE
from restante.workspaces import auth


@operation(
    summary="Whether the process runs and its event loop turns.",
    caller="anyone",
    answers={200: wire.Alive},
)
async def health(_request: Request) -> Response:
    return json_response(wire.Alive("alive"))


@operation(
    summary="Whether the database is reachable and migrated.",
    caller="anyone",
    details="Decides where requests go; a server that is not ready need not be restarted.",
    answers={200: wire.Ready},
    refusals=(NotReady,),
)
async def ready(request: Request) -> Response:
    await context(request).readiness.check()
    return json_response(wire.Ready("ready"))


@operation(
    summary="Every metric as Prometheus text.",
    caller="anyone",
    answers={200: CONTENT_TYPE},
)
async def metrics(request: Request) -> Response:
    return Response(
        context(request).metrics.page(for_operator=auth.is_admin(request)), media_type=CONTENT_TYPE
    )
