"""Digests of tables for a peer that compares them with its own."""

from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from restante.database.pool import Database
from restante.http.operations import json_body
from restante.http.problems import json_response
from restante.oplog import status
from restante.oplog.routes import peer_auth
from restante.oplog.verifying.comparison import Here
from restante.wire import oplog_digests as wire

TAG = "oplog"

# Ranges and keys of a request, of which a key may be long.
_MAX_BODY_BYTES = 4 * 1024 * 1024


class Nothing(msgspec.Struct, frozen=True):
    """An empty object."""


def _db(request: Request) -> Database:
    return request.app.state.oplog.db


async def _here(request: Request) -> Here:
    """This node, as the peer that asks may see it."""
    peer = await peer_auth.authenticated(request)
    return Here(_db(request), peer.id, peer.tables)


@peer_auth.asked_by_peers(
    "List the tables that can be compared, and how far each node has read the other.",
    Nothing,
    wire.NodeDescription,
)
async def tables(request: Request) -> Response:
    peer = await peer_auth.authenticated(request)
    described = await Here(_db(request), peer.id, peer.tables).describe()
    async with _db(request).connection() as connection:
        waiting = await status.waiting_for_peer(connection, peer.id, now=datetime.now(UTC))
    return json_response(msgspec.structs.replace(described, waiting=waiting))


@peer_auth.asked_by_peers(
    "Count and hash the records of ranges of keys.",
    wire.DigestRequest,
    wire.DigestAnswer,
)
async def digest(request: Request) -> Response:
    here = await _here(request)
    asked = await json_body(request, wire.DigestRequest, max_bytes=_MAX_BODY_BYTES)
    return json_response(wire.DigestAnswer(list(await here.ranges(asked))))


@peer_auth.asked_by_peers(
    "List keys with the hash of their record: of one range, or of the given keys.",
    wire.RecordsRequest,
    wire.RecordsAnswer,
)
async def records(request: Request) -> Response:
    here = await _here(request)
    asked = await json_body(request, wire.RecordsRequest, max_bytes=_MAX_BODY_BYTES)
    return json_response(wire.RecordsAnswer(list(await here.records(asked))))


ROUTES = [
    Route(wire.TABLES_PATH, tables, methods=["POST"]),
    Route(wire.DIGEST_PATH, digest, methods=["POST"]),
    Route(wire.RECORDS_PATH, records, methods=["POST"]),
]
