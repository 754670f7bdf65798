"""
One request for every route that succeeds if its caller may make it, and a workspace to make it for.

A test compares the table with the routes of the server: a new route must be added to it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import WSServerHandshakeError
from callers import FORM, Answer, Caller, Part, form, registered
from sites import Site

from restante.oplog import peers
from restante.oplog.peers import Changes

W = "/workspaces/{workspace_id}"
A = "/admin/workspaces"
KEY = "the-victims-key"

CALLERS = frozenset({"nobody", "garbage", "other", "peer", "own", "admin"})
ANYONE = CALLERS
WORKSPACE = frozenset({"own"})
WORKSPACE_OR_ADMIN = frozenset({"own", "admin"})
ANY_WORKSPACE_OR_ADMIN = frozenset({"own", "other", "admin"})
ADMIN_ALONE = frozenset({"admin"})
PEER_ALONE = frozenset({"peer"})
SUCCESS = frozenset({101, 200})
# What a caller that is let in gets for a body that says nothing.
INCOMPLETE = frozenset({400})
PEER_URL = "http://127.0.0.1:9/peer"


@dataclass(frozen=True, slots=True)
class Call:
    """A request that succeeds if its caller may make it."""

    may: frozenset[str]
    json: Callable[[str], Any] | None = None  # of the workspace's id
    data: bytes | None = None
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    acked: bool = False  # it is about a file that was acknowledged
    hides: bool = True  # a missing workspace gets the same refusal as another's
    answers: frozenset[int] = SUCCESS  # what its callers get


def registration(workspace_id: str) -> dict[str, Any]:
    return {"id": workspace_id, "agent_card": {"name": "x"}}


def nothing(_workspace_id: str) -> dict[str, Any]:
    return {}


MESSAGE: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "message/send",
    "params": {"message": {"parts": []}},
}

TABLE: dict[tuple[str, str], Call] = {
    ("GET", "/health"): Call(ANYONE),
    ("GET", "/ready"): Call(ANYONE),
    ("GET", "/metrics"): Call(ANYONE),
    ("GET", "/openapi.json"): Call(ANYONE),
    ("GET", "/docs"): Call(ANYONE),
    ("GET", "/uploads/limits"): Call(ANYONE),
    # Only its owner may register a taken id again.  An open server accepts a new id from anyone, so
    # a caller can see whether an id is taken.
    ("POST", "/registry/register"): Call(WORKSPACE, json=registration, hides=False),
    ("POST", "/registry/heartbeat"): Call(
        WORKSPACE, json=lambda workspace_id: {"workspace_id": workspace_id}
    ),
    ("PATCH", W): Call(ADMIN_ALONE, json=lambda _: {"name": "changed"}),
    ("DELETE", W): Call(WORKSPACE_OR_ADMIN, query={"confirm": "true"}),
    ("POST", W + "/chat/uploads"): Call(
        WORKSPACE_OR_ADMIN, data=form(Part(b"new")), headers={"Content-Type": FORM}
    ),
    ("POST", W + "/a2a"): Call(ANY_WORKSPACE_OR_ADMIN, json=lambda _: MESSAGE),
    ("POST", W + "/notify"): Call(WORKSPACE, json=lambda _: {"message": "hello"}),
    ("GET", W + "/activity"): Call(WORKSPACE_OR_ADMIN),
    ("POST", W + "/activity/ack"): Call(WORKSPACE_OR_ADMIN, json=lambda _: {"acked_seq": 1}),
    ("GET", W + "/events"): Call(WORKSPACE_OR_ADMIN),
    ("GET", "/events/stream"): Call(ANY_WORKSPACE_OR_ADMIN),
    ("GET", W + "/pending-uploads"): Call(WORKSPACE_OR_ADMIN),
    ("GET", W + "/pending-uploads/{file_id}/content"): Call(WORKSPACE_OR_ADMIN),
    ("POST", W + "/pending-uploads/{file_id}/ack"): Call(WORKSPACE_OR_ADMIN),
    ("POST", W + "/pending-uploads/{file_id}/reopen"): Call(WORKSPACE_OR_ADMIN, acked=True),
    ("GET", A): Call(ADMIN_ALONE),
    ("GET", A + "/{workspace_id}"): Call(ADMIN_ALONE),
    ("POST", A + "/{workspace_id}/token"): Call(ADMIN_ALONE),
    ("DELETE", A + "/{workspace_id}/token"): Call(ADMIN_ALONE),
    ("GET", "/admin/retention/plan"): Call(ADMIN_ALONE),
    ("POST", "/admin/retention/sweep"): Call(ADMIN_ALONE),
    ("GET", "/admin/status"): Call(ADMIN_ALONE),
    ("GET", "/internal/crud/sweep"): Call(PEER_ALONE),
    ("POST", "/internal/crud/push"): Call(PEER_ALONE, json=nothing, answers=frozenset({422})),
    ("GET", "/internal/oplog/status"): Call(PEER_ALONE),
    ("POST", "/internal/oplog/snapshot"): Call(PEER_ALONE, json=nothing, answers=INCOMPLETE),
    ("POST", "/internal/oplog/snapshot/page"): Call(PEER_ALONE, json=nothing, answers=INCOMPLETE),
    ("POST", "/internal/oplog/snapshot/missing"): Call(
        PEER_ALONE, json=nothing, answers=INCOMPLETE
    ),
    ("POST", "/internal/oplog/digest/tables"): Call(PEER_ALONE, json=nothing),
    ("POST", "/internal/oplog/digest"): Call(PEER_ALONE, json=nothing, answers=INCOMPLETE),
    ("POST", "/internal/oplog/digest/records"): Call(PEER_ALONE, json=nothing, answers=INCOMPLETE),
    ("POST", "/internal/oplog/cursors"): Call(PEER_ALONE, json=lambda _: {"hosts": []}),
    ("GET", "/admin/oplog/peers"): Call(ADMIN_ALONE),
    ("POST", "/admin/oplog/peers"): Call(ADMIN_ALONE, json=lambda _: {"url": PEER_URL}),
    ("DELETE", "/admin/oplog/peers"): Call(ADMIN_ALONE, query={"url": PEER_URL}),
    ("WS", W + "/ws"): Call(WORKSPACE_OR_ADMIN),
    ("WS", "/ws"): Call(ANY_WORKSPACE_OR_ADMIN),
}


@dataclass(frozen=True, slots=True)
class Victim:
    """A workspace with files, rows, an acknowledged file and a remembered answer."""

    caller: Caller
    file_id: str  # waits
    acked_id: str
    row_id: str
    peer_token: str  # of a peer of the op log, which no workspace has to do with

    def file_for(self, call: Call) -> str:
        return self.acked_id if call.acked else self.file_id


async def victim_on(site: Site) -> Victim:
    caller = await registered(site)
    waiting, acked = await caller.staged(Part(b"secret-1"), Part(b"secret-2"))
    await caller.upload(Part(b"secret-3"), Idempotency_Key=KEY)
    await caller.ack(acked)
    rows = await caller.feed()
    return Victim(caller, waiting, acked, rows[-1]["id"], await _peer_of(site))


async def _peer_of(site: Site) -> str:
    async with site.state.db.connection() as connection:
        added = await peers.add(
            connection, PEER_URL, Changes(renews_token=True), now=datetime.now(UTC)
        )
    return added.token or ""


async def make(
    site: Site, method: str, path: str, call: Call, *, workspace_id: str, headers: Any, file_id: str
) -> Answer:
    """Make the call; the body of an event stream is not read."""
    where = path.format(workspace_id=workspace_id, file_id=file_id)
    headers = {**call.headers, **headers}
    if method == "WS":
        try:
            async with site.http.ws_connect(where, headers=headers):
                return Answer(101, {}, b"")
        except WSServerHandshakeError as refusal:
            return Answer(refusal.status, refusal.headers or {}, b"")
    body: dict[str, Any] = {"json": call.json(workspace_id)} if call.json else {"data": call.data}
    async with site.http.request(
        method, where, headers=headers, params=call.query, **body
    ) as answer:
        endless = answer.content_type == "text/event-stream"
        return Answer(answer.status, answer.headers, b"" if endless else await answer.read())
