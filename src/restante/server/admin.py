"""What a sweep would do, doing it now, and what takes space: for the operator."""

from starlette.requests import Request
from starlette.responses import Response

from restante import wire
from restante.errors import NotAuthenticated
from restante.http.operations import operation
from restante.http.problems import json_response
from restante.retention import reports
from restante.server.context import context
from restante.workspaces import auth


@operation(
    summary="Show what a sweep would do now; changes nothing.",
    caller="admin",
    answers={200: wire.RetentionPlan},
    refusals=(NotAuthenticated,),
)
async def plan(request: Request) -> Response:
    auth.admin(request)
    return json_response(reports.plan_view(await context(request).sweeping.plan()))


@operation(
    summary="Run one pass of the sweep now.",
    caller="admin",
    answers={200: wire.SweepReport},
    refusals=(NotAuthenticated,),
)
async def sweep(request: Request) -> Response:
    auth.admin(request)
    here = context(request)
    return json_response(
        reports.report_view(await here.sweeping.one_pass(here.metrics.sweep, closely=True))
    )


@operation(
    summary="Show what takes space, what holds it, and how deliveries stand.",
    caller="admin",
    answers={200: wire.SpaceView},
    refusals=(NotAuthenticated,),
)
async def status(request: Request) -> Response:
    auth.admin(request)
    return json_response(reports.space_view(await context(request).space.look()))
