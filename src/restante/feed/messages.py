"""Text messages, which share the feed with files."""

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from restante import wire
from restante.errors import (
    AddressRefused,
    BadRequest,
    DiskLow,
    FeedFull,
    NotAuthenticated,
    ServerFull,
    TooManyAtOnce,
    TooManyMessages,
    TooMuchWritten,
    WorkspaceHasNoCallback,
    WorkspaceUnknown,
    WorkspaceUnreachable,
)
from restante.feed import jsonrpc
from restante.feed.rules import NewActivity, digest_of
from restante.feed.service import Feed
from restante.http.operations import (
    BODY_REFUSALS,
    MAX_DEPTH,
    is_too_deep,
    operation,
    read_limited,
)
from restante.http.problems import json_response
from restante.workspaces import auth, relay
from restante.workspaces.rates import Rate
from restante.workspaces.rules import clean_label

TAG = "messages"


def _feed(request: Request) -> Feed:
    return request.app.state.feed


def _rate(request: Request) -> Rate:
    return request.app.state.message_rate


@operation(
    summary="Send a message to a workspace, as JSON-RPC 2.0.",
    caller="any workspace or admin",
    body=wire.Message,
    details="In poll mode the message becomes a row of the workspace's feed; a message part that "
    "has `type` instead of `kind` is stored with `kind`. In push mode it is forwarded to the "
    "workspace, and the workspace's answer is relayed with its status.",
    answers={200: wire.Queued},
    refusals=(
        BadRequest,
        NotAuthenticated,
        WorkspaceUnknown,
        *BODY_REFUSALS,
        WorkspaceHasNoCallback,
        TooManyMessages,
        TooMuchWritten,
        FeedFull,
        TooManyAtOnce,
        WorkspaceUnreachable,
        AddressRefused,
        ServerFull,
        DiskLow,
    ),
    headers={wire.CALLER_ID: "The sender's workspace; must be the one the token belongs to."},
)
async def send(request: Request) -> Response:
    sender = await auth.sender(request)
    if sender:
        # Before the look-up: a wrong id costs as much as a message, so that ids cannot be probed.
        _rate(request).spend(sender)
    workspace = await auth.recipient(request)
    # Bytes are spent as they arrive: until the last one, they wait in memory.
    body = await read_limited(request, on_bytes=partial(_rate(request).spend_bytes, sender))
    message = _normalised(body)
    if workspace.delivery_mode == "push":
        return relay.message(request, workspace, message.body, sender=sender)
    await _feed(request).append(workspace.id, message.row(sender), now=datetime.now(UTC))
    return json_response(wire.Queued("queued", "poll", message.method))


@dataclass(frozen=True, slots=True)
class _Message:
    """A message that was accepted, in the form in which it is stored and forwarded."""

    body: bytes
    method: str
    message_id: str | None

    def row(self, sender: UUID | None) -> NewActivity:
        digest = self.message_id and digest_of(sender, self.method, self.message_id)
        return NewActivity(self.method, self.method, self.body, sender, digest=digest or None)


def _normalised(body: bytes) -> _Message:
    """Decode and normalise; what was sent in that form already is not encoded again."""
    sent = _decoded(body)
    request = jsonrpc.normalised(sent, new_id=lambda: str(uuid4()))
    if request.body != sent:
        body = msgspec.json.encode(request.body)
    return _Message(body, clean_label(request.method), request.message_id)


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        sent = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise BadRequest("The body must be one JSON-RPC 2.0 object.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("The body is not valid JSON.") from error
    if is_too_deep(sent):
        raise BadRequest(f"The body is nested deeper than {MAX_DEPTH} levels.")
    return sent


ROUTES = [Route("/workspaces/{workspace_id}/a2a", send, methods=["POST"])]
