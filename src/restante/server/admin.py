"""The sweep's plan, a sweep now, and the status: for the operator."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from restante import wire
from restante.errors import NotAuthenticated
from restante.http.operations import operation
from restante.http.problems import json_response
from restante.retention import space
from restante.retention.space import SpaceAccount
from restante.retention.sweep import Sweep
from restante.server.metrics import Metrics
from restante.workspaces import auth

TAG = "retention"


def _sweep(request: Request) -> Sweep:
    return request.app.state.sweep


def _metrics(request: Request) -> Metrics:
    return request.app.state.metrics


def _space(request: Request) -> SpaceAccount:
    return request.app.state.space


@operation(
    summary="Show what a sweep would do now; changes nothing.",
    caller="admin",
    answers={200: wire.RetentionPlan},
    refusals=(NotAuthenticated,),
)
async def plan(request: Request) -> Response:
    auth.admin(request)
    one = _sweep(request)
    return json_response(await one.plan(now=await one.now()))


@operation(
    summary="Run one pass of the sweep now.",
    caller="admin",
    answers={200: wire.SweepReport},
    refusals=(NotAuthenticated,),
)
async def sweep(request: Request) -> Response:
    auth.admin(request)
    one, observer = _sweep(request), _metrics(request).sweep
    report = await one.run_observed(observer, now=await one.now(), closely=True)
    return json_response(report)


@operation(
    summary="Show what takes space, what keeps it, and the state of deliveries.",
    caller="admin",
    answers={200: wire.SpaceView},
    refusals=(NotAuthenticated,),
)
async def status(request: Request) -> Response:
    auth.admin(request)
    return json_response(await space.status(_space(request), _sweep(request)))


ROUTES = [
    Route("/admin/retention/plan", plan),
    Route("/admin/retention/sweep", sweep, methods=["POST"]),
    Route("/admin/status", status),
]
