"""The op log for other nodes, and its peers for the operator."""

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from restante import __version__
from restante.errors import (
    BadRequest,
    NotAuthenticated,
    PeerUnknown,
    TooManyAtOnce,
    TooManyMessages,
)
from restante.http.operations import BODY_REFUSALS, json_body, operation, query_of
from restante.http.problems import json_response
from restante.oplog import peers, positions, tables, ulids
from restante.oplog.node import Node
from restante.oplog.peers import Changes, Reader
from restante.oplog.positions import START
from restante.oplog.routes import answer, peer_auth
from restante.oplog.routes.answer import PageAnswer
from restante.oplog.serving import log, readers
from restante.oplog.serving.log import Limits
from restante.oplog.serving.serve import Ask
from restante.oplog.tables import TrackedTable
from restante.text import printable
from restante.wire import common, oplog as wire, oplog_peers
from restante.workspaces import auth

TAG = "oplog"

LONGEST_WAIT_SECONDS = 60
_MAX_PEER_BYTES = 256 * 1024


def _node(request: Request) -> Node:
    return request.app.state.oplog


def _now() -> datetime:
    return datetime.now(UTC)


class SweepQuery(msgspec.Struct, frozen=True):
    """Where a page of the log begins, and how long to wait for it."""

    after: Annotated[
        str, Meta(max_length=200, description="The ULID of the last op that the reader has.")
    ] = ""
    position: Annotated[
        str,
        Meta(
            max_length=200,
            description="The same as a position, for nodes of Restante that show a token.",
        ),
    ] = ""
    wait: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT_SECONDS, description="Seconds to wait for a first op."),
    ] = 0
    floor: Annotated[
        str,
        Meta(
            max_length=26,
            description="A ULID: of records up to it the answer says which are outdated.",
        ),
    ] = ""
    head: Annotated[
        str, Meta(max_length=200, description="The last position of the reader's own log.")
    ] = ""
    limit: Annotated[
        int, Meta(ge=1, le=2**31 - 1, description="How many ops at most, up to 10000.")
    ] = Limits().ops


@operation(
    summary="Read the op log, in the order of arrival.",
    caller="peer",
    query=SweepQuery,
    details="A page has at most 10000 ops and 64 MiB, of the tables that the peer may see. What a "
    "peer asks for confirms that it has everything before. Readers without a token are allowed by "
    "address range; they confirm nothing, and are served as nodes of the older protocol.",
    answers={200: list[wire.Op]},
    refusals=(BadRequest, NotAuthenticated, TooManyAtOnce, TooManyMessages),
    headers={wire.OPLOG_VERSION: "`1` if the reader is a node of Restante."},
    optional_headers={
        wire.OPLOG_VERSION: "`1`: this is a node of Restante, and the reader has shown a token.",
        wire.LAST_SCANNED_ULID: "The last op that was looked at, of any table.",
        wire.LIMITED: "`true` if there is more.",
        wire.RETENTION_GAP: "`true` if something after the reader's position is no longer kept.",
        wire.AVAILABLE_MIN_ULID: "With a gap: the lowest ULID that is kept.",
        wire.NEXT_POSITION: "Where to go on, for nodes of Restante.",
        wire.CURSOR_ON_YOU: "How far this node has read the log of the reader.",
        wire.GAP_TABLES: "Tables of which the reader needs a snapshot, as a JSON array.",
        wire.NEW_TABLES: "Tables that the reader could not see before: it needs a snapshot, too.",
        wire.NODE_HOST: "The name of this node, for nodes of Restante.",
        wire.SERVER_TIME: "The time of this node in Unix milliseconds.",
    },
)
async def sweep(request: Request) -> Response:
    node, reader = _node(request), await peer_auth.reader(request)
    sent = query_of(request, SweepQuery)
    if reader.peer is not None:
        node.rates.check(reader.peer, reader.network)
    if reader.is_authenticated and reader.peer is not None:
        async with node.db.connection() as connection:
            await readers.end_snapshots(connection, reader.peer.id, now=_now())
    # Without a token there are no snapshots either: any node is then served as an older one.
    is_ours = reader.is_authenticated and request.headers.get(wire.OPLOG_VERSION) == "1"
    limits = _limits(node.page_limits, reader, sent.limit)
    return PageAnswer(
        node,
        answer.Request(
            _ask(sent, is_ours=is_ours, limits=limits),
            sent.wait,
            partial(peer_auth.reader, request),
            _now,
        ),
    )


def _limits(limits: Limits, reader: Reader, asked: int) -> Limits:
    """A peer with a low rate gets small pages, rather than large ones with long pauses."""
    peer = reader.peer
    ops, size = [limits.ops, asked], [limits.bytes]
    if peer is not None and peer.max_ops_per_minute:
        ops.append(peer.max_ops_per_minute)
    if peer is not None and peer.max_bytes_per_minute:
        size.append(peer.max_bytes_per_minute)
    return Limits(min(ops), min(size))


def _ask(sent: SweepQuery, *, is_ours: bool, limits: Limits) -> Ask:
    floor = ulids.parsed(sent.floor) if sent.floor else None
    if sent.floor and floor is None:
        raise BadRequest("floor is wrong: it must be a ULID.")
    if sent.head and positions.parsed(sent.head) is None:
        raise BadRequest("head is wrong: it is no position of an op log.")
    return Ask(
        position=sent.position,
        after=sent.after,
        is_ours=is_ours,
        floor=floor,
        head=sent.head or None,
        limits=limits,
    )


@operation(
    summary="Show what a peer may know of this node: its tables, and how far its log goes.",
    caller="peer",
    answers={200: oplog_peers.NodeStatus},
    refusals=(NotAuthenticated, TooManyAtOnce),
)
async def status(request: Request) -> Response:
    peer = await peer_auth.authenticated(request)
    async with log.reading(_node(request).db) as connection:
        host = await tables.own_host(connection)
        below = await log.horizon(connection)
        head = await log.head(connection, below)
        every = await tables.all_tables(connection)
    return json_response(
        oplog_peers.NodeStatus(
            host=host,
            version=__version__,
            time=int(_now().timestamp() * 1000),
            era=below.era,
            horizon=below.xid,
            head=str(head.position if head else START),
            tables=[_table(one) for one in every if peer.may_see(one.name)],
        )
    )


def _table(table: TrackedTable) -> oplog_peers.TableView:
    columns = [oplog_peers.ColumnView(one.name, one.type) for one in table.columns]
    return oplog_peers.TableView(
        name=table.name,
        state=table.state,
        columns=columns,
        schema_hash=_schema_hash(table.key_columns, columns),
        floor=ulids.text_of(table.floor),
        trimmed=str(table.trimmed) if table.trimmed else "",
    )


def _schema_hash(key: Sequence[str], columns: Sequence[oplog_peers.ColumnView]) -> str:
    """Of names and types; the order of the columns does not matter."""
    described = msgspec.json.encode([key, sorted((one.name, one.type) for one in columns)])
    return hashlib.sha256(described).hexdigest()


@operation(
    summary="Add a peer of the op log, or change one.",
    details="The answer has the token that the peer must show to this node, once. `token` is the "
    "one that this node shows to the peer, which the peer's operator has from there. Both "
    "directions need one: add each node at the other, and then the first one again with `token`.",
    caller="admin",
    body=oplog_peers.PeerChanges,
    answers={200: oplog_peers.PeerAdded},
    refusals=(BadRequest, NotAuthenticated, *BODY_REFUSALS),
)
async def add_peer(request: Request) -> Response:
    auth.admin(request)
    sent = await json_body(request, oplog_peers.PeerChanges, max_bytes=_MAX_PEER_BYTES)
    changes = Changes(
        token=sent.token or None,
        tables=sent.tables,
        relays=sent.relays,
        max_ops_per_minute=sent.max_ops_per_minute,
        max_bytes_per_minute=sent.max_bytes_per_minute,
        evict_after_days=sent.evict_after_days,
        renews_token=sent.new_token,
    )
    node = _node(request)
    own_hosts = [node.own_url] if node.own_url else []
    async with node.db.transaction() as tx:
        added = await peers.add(tx, sent.url, changes, own_hosts=own_hosts, now=_now())
        host = await tables.own_host(tx)
    return json_response(oplog_peers.PeerAdded(added.peer.host, added.token, host))


@operation(
    summary="List the peers of the op log.",
    caller="admin",
    answers={200: oplog_peers.PeerList},
    refusals=(NotAuthenticated,),
)
async def list_peers(request: Request) -> Response:
    auth.admin(request)
    async with _node(request).db.connection() as connection:
        found = await peers.all_peers(connection)
    return json_response(oplog_peers.PeerList([peers.view(peer) for peer in found]))


class PeerQuery(msgspec.Struct, frozen=True):
    """Which peer."""

    url: Annotated[str, Meta(max_length=2048, description="Its address, in any spelling.")] = ""


@operation(
    summary="Remove a peer of the op log; its token stops working at once.",
    caller="admin",
    query=PeerQuery,
    answers={200: common.Status},
    refusals=(BadRequest, NotAuthenticated, PeerUnknown),
)
async def remove_peer(request: Request) -> Response:
    auth.admin(request)
    url = query_of(request, PeerQuery).url
    async with _node(request).db.connection() as connection:
        if not await peers.remove(connection, url):
            raise PeerUnknown(f"There is no peer {printable(url, max_length=200)}.")
    return json_response(common.Status("removed"))


ROUTES = [
    Route("/internal/crud/sweep", sweep),
    Route(oplog_peers.STATUS_PATH, status),
    Route(oplog_peers.PEERS_PATH, add_peer, methods=["POST"]),
    Route(oplog_peers.PEERS_PATH, list_peers),
    Route(oplog_peers.PEERS_PATH, remove_peer, methods=["DELETE"]),
]
