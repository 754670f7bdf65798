"""Snapshots of tables, for peers that have missed something or are new."""

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from restante.errors import SnapshotGone, TableBusy, TableNotTracked
from restante.http.operations import json_body
from restante.http.problems import json_response
from restante.oplog.node import Node
from restante.oplog.routes import peer_auth
from restante.oplog.snapshots import snapshot
from restante.wire import oplog as wire

TAG = "oplog"

# A key may be long, and up to a thousand are asked for at once.
_MAX_KEYS_BYTES = 4 * 1024 * 1024


def _node(request: Request) -> Node:
    return request.app.state.oplog


@peer_auth.asked_by_peers(
    "Begin a snapshot of a table, at the present end of the log.",
    wire.SnapshotRequest,
    wire.SnapshotStart,
    TableNotTracked,
    TableBusy,
    details="The log after `start` is kept until the peer asks for anything else, or is silent for "
    "a quarter of an hour.",
)
async def begin(request: Request) -> Response:
    peer = await peer_auth.authenticated(request)
    asked = await json_body(request, wire.SnapshotRequest)
    now = datetime.now(UTC)
    return json_response(await snapshot.begin(_node(request).db, peer, asked, now=now))


@peer_auth.asked_by_peers(
    "Read the next deletes, or the next records, of a snapshot.",
    wire.SnapshotPageRequest,
    wire.SnapshotPage,
    TableNotTracked,
    SnapshotGone,
)
async def page(request: Request) -> Response:
    peer = await peer_auth.authenticated(request)
    asked = await json_body(request, wire.SnapshotPageRequest, max_bytes=_MAX_KEYS_BYTES)
    now = datetime.now(UTC)
    return json_response(await snapshot.page(_node(request).db, peer, asked, now=now))


@peer_auth.asked_by_peers(
    "List those of the given keys that have no record here.",
    wire.SnapshotKeysRequest,
    wire.SnapshotPage,
    TableNotTracked,
    SnapshotGone,
)
async def missing(request: Request) -> Response:
    peer = await peer_auth.authenticated(request)
    asked = await json_body(request, wire.SnapshotKeysRequest, max_bytes=_MAX_KEYS_BYTES)
    now = datetime.now(UTC)
    return json_response(await snapshot.missing(_node(request).db, peer, asked, now=now))


ROUTES = [
    Route("/internal/oplog/snapshot", begin, methods=["POST"]),
    Route("/internal/oplog/snapshot/page", page, methods=["POST"]),
    Route("/internal/oplog/snapshot/missing", missing, methods=["POST"]),
]
