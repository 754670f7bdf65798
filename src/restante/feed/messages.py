"""Text messages, which share the feed with files."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from restante import wire
from restante.errors import (
    AddressRefused,
    BadRequest,
    DiskLow,
    FeedFull,
    NotAuthenticated,
    OutcomeUnknown,
    ServerFull,
    TooManyAtOnce,
    TooManyMessages,
    TooMuchWritten,
    WorkspaceHasNoCallback,
    WorkspaceUnknown,
    WorkspaceUnreachable,
)
from restante.feed import jsonrpc
from restante.feed.message_rules import digest_of
from restante.feed.rules import NewActivity
from restante.feed.service import Feed
from restante.http import turns
from restante.http.body_room import SMALL_BYTES, BodyRoom, Place
from restante.http.operations import (
    BODY_REFUSALS,
    MAX_DEPTH,
    decoded,
    is_too_deep,
    largest_length,
    operation,
    read_limited,
)
from restante.http.problems import json_response
from restante.workspaces import auth, relay
from restante.workspaces.rates import Rate
from restante.workspaces.rules import Workspace, clean_label

TAG = "messages"


def _feed(request: Request) -> Feed:
    return request.app.state.feed


def _rate(request: Request) -> Rate:
    return request.app.state.message_rate


def _room(request: Request) -> BodyRoom:
    return request.app.state.body_room


@operation(
    summary="Send a message to a workspace, as JSON-RPC 2.0.",
    caller="any workspace or admin",
    body=wire.Message,
    details="In poll mode the message becomes a row of the workspace's feed. In push mode it is "
    "forwarded to the workspace, and the workspace's answer is relayed with its status. Older "
    "shapes are accepted: without the envelope or parts of it, with `content` instead of `parts`, "
    "with `type` instead of `kind`. A body may have 16 MiB. In poll mode a message with the "
    "`messageId` and method of an earlier one of the same sender within a day is not queued "
    "again.",
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
        OutcomeUnknown,
        ServerFull,
        DiskLow,
    ),
    headers={
        wire.CALLER_ID: "The sender's workspace; must be the one the token belongs to.",
        wire.ATTEMPT: relay.ATTEMPT_MEANING,
    },
)
async def send(request: Request) -> Response:
    sender = await auth.sender(request)
    if sender:
        # Before the look-up: a wrong id costs as much as a message, so that ids cannot be probed.
        _rate(request).spend(sender)
    workspace = await auth.recipient(request)
    if workspace.delivery_mode == "push":
        relay.refuse_repetition(request)
    return _Delivery(request, workspace, sender)


class _Delivery(Response):
    """
    Receives a message and delivers it.

    A response, because a large body has its room until the answer of a push workspace is relayed.
    """

    def __init__(self, request: Request, workspace: Workspace, sender: UUID | None) -> None:
        super().__init__()
        self._request = request
        self._workspace = workspace
        self._sender = sender
        self._has_begun = False
        self._is_forwarded = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: MutableMapping[str, Any]) -> None:
            self._has_begun = True
            await send(message)

        size = largest_length(self._request, wire.MAX_MESSAGE_BYTES)
        try:
            async with _room(self._request).place(size) as place:
                message = await _message(self._request, await self._body(place))
                response = await self._delivered(message)
                self._is_forwarded = self._workspace.delivery_mode == "push"
                place.wait_for_client()  # a push workspace may be slow to take it
                await response(scope, receive, answer)
        except TooManyAtOnce as error:
            if self._has_begun:  # the connection is closed: a short answer must not pass
                return
            if self._is_forwarded:
                raise relay.outcome_unknown() from error
            raise

    async def _body(self, place: Place) -> bytes:
        async def on_bytes(size: int) -> None:
            # They are spent as they arrive: until the last one, they wait in memory.
            _rate(self._request).spend_bytes(self._sender, size)
            await place.grow(size)

        body = await read_limited(
            self._request, max_bytes=wire.MAX_MESSAGE_BYTES, on_bytes=on_bytes
        )
        place.gives_way = False
        return body

    async def _delivered(self, message: "_Message") -> Response:
        workspace = self._workspace
        if workspace.delivery_mode == "push":
            return relay.message(self._request, workspace, message.body, sender=self._sender)
        row = message.row(self._sender)
        await _feed(self._request).append(workspace.id, row, now=datetime.now(UTC))
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


async def _message(request: Request, body: bytes) -> _Message:
    """
    Decode and normalise.

    Large ones take turns.  Each step of one stops the event loop for tens of milliseconds, and what
    is decoded takes up to four times the size of the body.
    """
    if len(body) <= SMALL_BYTES:
        return _encoded(*_normalised(body))
    async with _room(request).decoding:
        shaped = _normalised(body)
        await turns.next_turn()
        message = _encoded(*shaped)
    await turns.next_turn()
    return message


def _normalised(body: bytes) -> tuple[jsonrpc.Request, bytes | None]:
    """What it becomes, and the body if that is what was sent."""
    try:
        sent, body = decoded(body, dict[str, Any])
    except msgspec.ValidationError as error:
        raise BadRequest("The body must be one JSON-RPC 2.0 object.") from error
    if is_too_deep(sent):
        raise BadRequest(f"The body is nested deeper than {MAX_DEPTH} levels.")
    shaped = jsonrpc.normalised(sent, new_id=lambda: str(uuid4()))
    return shaped, body if shaped.body == sent else None


def _encoded(shaped: jsonrpc.Request, body: bytes | None) -> _Message:
    """What was sent in its one shape already is not encoded again."""
    if body is None:
        body = msgspec.json.encode(shaped.body)
    return _Message(body, clean_label(shaped.method), shaped.message_id)


ROUTES = [Route("/workspaces/{workspace_id}/a2a", send, methods=["POST"])]
