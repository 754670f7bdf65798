"""How far this node has read, for a peer that resets its log."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from restante.errors import BadRequest, NotAuthenticated
from restante.http.operations import BODY_REFUSALS, json_body, operation
from restante.http.problems import json_response
from restante.oplog.resetting import seeds
from restante.oplog.routes import peer_auth
from restante.wire import oplog_reset as wire

TAG = "oplog"

_MAX_BODY_BYTES = 512 * 1024


@operation(
    summary="Say how far this node has read the asking one, and those of the named nodes.",
    caller="peer",
    body=wire.CursorsRequest,
    answers={200: wire.CursorsAnswer},
    refusals=(BadRequest, NotAuthenticated, *BODY_REFUSALS),
)
async def cursors(request: Request) -> Response:
    peer = await peer_auth.authenticated(request)
    asked = await json_body(request, wire.CursorsRequest, max_bytes=_MAX_BODY_BYTES)
    async with request.app.state.oplog.db.connection() as connection:
        return json_response(await seeds.tell(connection, peer, asked.hosts))


ROUTES = [Route(wire.CURSORS_PATH, cursors, methods=["POST"])]
