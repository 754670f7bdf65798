"""
Ops that peers push, one at a time.

A push only saves time: what is lost or refused comes with the next pull.  So it is accepted in the
peer's own name only, and bounded more tightly than a page.
"""

from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from restante.errors import (
    BadRequest,
    NotAuthenticated,
    OpRefused,
    PushedTableUnknown,
    TableBusy,
    TooManyAtOnce,
    TooManyMessages,
)
from restante.http.body_room import BodyRoom
from restante.http.operations import (
    BODY_REFUSALS,
    decoded,
    largest_length,
    operation,
    read_limited,
)
from restante.oplog.applying import apply
from restante.oplog.applying.apply import PageResult
from restante.oplog.applying.boundary import Refusal
from restante.oplog.node import Node
from restante.oplog.routes import peer_auth
from restante.wire.oplog import Op

TAG = "oplog"

MAX_PUSH_BYTES = 16 * 1024 * 1024

_UNKNOWN = (Refusal.TABLE, Refusal.FORBIDDEN_TABLE)
_SENTENCES: dict[str, str] = {
    Refusal.ULID: "The ULID cannot be read.",
    Refusal.TIME: "The ULID is from before 2024, or more than 24 h ahead.",
    Refusal.HOST: "A peer pushes ops in its own name only.",
    Refusal.DATA: "A record is no JSON object, or lacks its key.",
    Refusal.TOO_LARGE: "A record is too large.",
}


def _node(request: Request) -> Node:
    return request.app.state.oplog


def _room(request: Request) -> BodyRoom:
    return request.app.state.body_room


@operation(
    summary="Push one op to this node.",
    caller="peer",
    body=Op,
    details="The answer has no body. An op that loses against a newer change, or has to wait, is "
    "taken too. Pushes may be lost: the pull is what guarantees delivery. A transient op reaches "
    "callbacks and changes no table. A body may have 16 MiB.",
    answers={200: None},
    refusals=(
        BadRequest,
        NotAuthenticated,
        PushedTableUnknown,
        *BODY_REFUSALS,
        OpRefused,
        TooManyAtOnce,
        TooManyMessages,
        TableBusy,
    ),
)
async def push(request: Request) -> Response:
    peer, node = await peer_auth.authenticated(request), _node(request)
    node.rates.check(peer)
    async with _room(request).place(largest_length(request, MAX_PUSH_BYTES)) as place:
        body = await read_limited(request, max_bytes=MAX_PUSH_BYTES, on_bytes=place.grow)
        place.gives_way = False
        node.rates.spend(peer, ops=1, size=len(body))
        result = await apply.apply_pushed(
            node.db, _op(body), peer, now=datetime.now(UTC), callbacks=node.callbacks
        )
    _check(result)
    return Response()


def _op(body: bytes) -> Op:
    try:
        return decoded(body, Op)[0]
    except msgspec.ValidationError as error:
        raise OpRefused(f"This is not an op: {error}.") from error


def _check(result: PageResult) -> None:
    """Raise what a sender should know; records beside a refused one were taken."""
    if result.stopped:
        raise TableBusy("The op must wait; it comes with the next pull.")
    for why in result.refused_by:
        if why in _UNKNOWN:
            raise PushedTableUnknown("This table is not tracked here.")
        raise OpRefused(_SENTENCES[why])


ROUTES = [Route("/internal/crud/push", push, methods=["POST"])]
