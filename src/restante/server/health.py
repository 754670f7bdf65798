"""Alive, ready, and the metrics."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from restante import wire
from restante.database import shares
from restante.errors import NotReady
from restante.http.operations import operation
from restante.http.problems import json_response
from restante.server.metrics import CONTENT_TYPE, Metrics
from restante.server.readiness import Readiness
from restante.workspaces import auth

TAG = "health"

PROBES = frozenset({"/health", "/ready", "/metrics"})


def _readiness(request: Request) -> Readiness:
    return request.app.state.readiness


def _metrics(request: Request) -> Metrics:
    return request.app.state.metrics


@operation(
    summary="Whether the process runs and its event loop responds.",
    caller="anyone",
    answers={200: wire.Alive},
)
async def health(_request: Request) -> Response:
    return json_response(wire.Alive("ok"))


@operation(
    summary="Whether the database is reachable, migrated and accepts writes.",
    caller="anyone",
    details="For load balancers; a server that is not ready need not be restarted. One whose disk "
    "is almost full stays ready, because fetching and acknowledging frees it; `degraded` says so.",
    answers={200: wire.Ready},
    refusals=(NotReady,),
)
async def ready(request: Request) -> Response:
    shares.caller.set(None)  # a probe must not wait for others at its address
    await _readiness(request).probe()
    is_low = request.app.state.disk.is_low
    return json_response(wire.Ready("ready", "disk" if is_low else None))


@operation(
    summary="Every metric as Prometheus text.",
    caller="anyone",
    answers={200: CONTENT_TYPE},
)
async def metrics(request: Request) -> Response:
    page = await _metrics(request).page(for_operator=auth.is_admin(request))
    return Response(page, media_type=CONTENT_TYPE)


ROUTES = [
    Route("/health", health),
    Route("/ready", ready),
    Route("/metrics", metrics),
]
