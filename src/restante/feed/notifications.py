"""What an agent tells its user: a row of its own feed, which pollers skip."""

from contextlib import suppress
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from restante import wire
from restante.errors import (
    BadRequest,
    DiskLow,
    FeedFull,
    NotAuthenticated,
    RestanteError,
    ServerFull,
    TooManyAtOnce,
    TooManyMessages,
    TooMuchWritten,
)
from restante.feed.message_rules import notification
from restante.feed.service import Feed
from restante.http.operations import BODY_REFUSALS, MAX_JSON_BYTES, json_body, operation
from restante.http.problems import json_response
from restante.workspaces import auth
from restante.workspaces.rates import Rate

TAG = "messages"


def _feed(request: Request) -> Feed:
    return request.app.state.feed


def _rate(request: Request) -> Rate:
    return request.app.state.message_rate


@operation(
    summary="Tell the user of this workspace something.",
    caller="workspace",
    body=wire.Notification,
    details="It becomes a row of the workspace's own feed with the method `notify`, which the "
    "canvas shows and pollers skip; in push mode too. Its `response_body` has the message as "
    "`result` and the attachments as `parts`.",
    answers={200: wire.Notified},
    refusals=(
        BadRequest,
        NotAuthenticated,
        *BODY_REFUSALS,
        TooManyMessages,
        TooMuchWritten,
        FeedFull,
        TooManyAtOnce,
        ServerFull,
        DiskLow,
    ),
)
async def notify(request: Request) -> Response:
    workspace = await auth.owner(request)
    rate = _rate(request)
    rate.spend(workspace.id)

    async def on_bytes(size: int) -> None:
        rate.spend_bytes(workspace.id, size)

    sent = await json_body(request, wire.Notification, max_bytes=MAX_JSON_BYTES, on_bytes=on_bytes)
    row, now = notification(sent), datetime.now(UTC)
    appended = await _feed(request).append(workspace.id, row, now=now)
    if workspace.delivery_mode == "push" and appended.seq is not None:
        with suppress(RestanteError):  # it is sent; the next one does the same
            await _feed(request).acknowledge_notifications(workspace.id, appended.seq)
    return json_response(wire.Notified("sent"))


ROUTES = [Route("/workspaces/{workspace_id}/notify", notify, methods=["POST"])]
