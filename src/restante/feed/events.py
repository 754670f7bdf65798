"""
Watch by server-sent events: an `ACTIVITY_LOGGED` for each row of a feed, after its commit.

A row with which an agent answers its user has an `AGENT_MESSAGE` before that.  Only the last event
of a row has its id: a watcher that resumes between the two is sent both again.

A browser can set no header, so the token may be sent as the parameter `access_token`; we never log
URLs or use them as labels.
"""

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from restante import wire
from restante.errors import (
    BadRequest,
    CursorGone,
    NotAuthenticated,
    RestanteError,
    TooManyAtOnce,
    WorkspaceUnknown,
)
from restante.feed.admission import Watching, abort, admitted, in_time, log_ended
from restante.feed.batches import TooSlow
from restante.feed.row_events import WatchedEvent
from restante.feed.watch import Watch
from restante.feed.watch_all import WatchAll
from restante.http.disconnect import disconnected, while_connected
from restante.http.operations import operation, parameters

TAG = "events"

_ON_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
_REFUSALS = (BadRequest, NotAuthenticated, WorkspaceUnknown, CursorGone, TooManyAtOnce)
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store, no-transform",
    "X-Accel-Buffering": "no",  # nginx would buffer events
}


class EventsQuery(msgspec.Struct, frozen=True):
    """For watchers that cannot set headers."""

    last_event_id: Annotated[
        str | None,
        Meta(
            description="The id of the last row received, unless `Last-Event-ID` is sent.",
            extra_json_schema={"format": "uuid"},
        ),
    ] = None
    access_token: Annotated[
        str | None, Meta(description="The token, unless `Authorization` is sent.")
    ] = None


@operation(
    summary="Watch a workspace by server-sent events.",
    caller="workspace or admin",
    details="One event `ACTIVITY_LOGGED` for each new row of the feed, with the row's id; its data "
    "is an `Event`. Before that, for an answer of the workspace's agent to its user, an event "
    "`AGENT_MESSAGE` without an id; its data is an `AgentEvent`. The answer does not end by "
    "itself; a comment is sent as a heartbeat. The same by WebSocket, at `ws` instead of `events`.",
    query=EventsQuery,
    answers={200: "text/event-stream"},
    refusals=_REFUSALS,
    headers={"Last-Event-ID": "The id of the last row received; the rows after it come first."},
)
async def stream(request: Request) -> Response:
    watching = await admitted(request, parameters(request).get("access_token"))
    if request.method == "HEAD":
        return Response(headers=_HEADERS)
    return EventStream(watching, request)


class AnyEventsQuery(msgspec.Struct, frozen=True):
    """For watchers that cannot set headers."""

    workspace_id: Annotated[
        str | None, Meta(description="The workspace, unless `X-Workspace-ID` is sent.")
    ] = None
    last_event_id: Annotated[
        str | None,
        Meta(description="The id of the last event received, unless `Last-Event-ID` is sent."),
    ] = None
    access_token: Annotated[
        str | None, Meta(description="The token, unless `Authorization` is sent.")
    ] = None


@operation(
    summary="Watch the workspace of a token, or all of them, by server-sent events.",
    caller="any workspace or admin",
    details="The same for the workspace that the token belongs to. The operator's token watches "
    "all workspaces, unless `X-Workspace-ID` names one. An event of all workspaces has as its id a "
    "moment before which nothing was missed: a watcher that resumes after it may be sent the "
    "events of the last minutes again. The operator is also told what happens to the server "
    "itself: an event `OPLOG_PEER_EVICTED` without an id, whose data is a `NodeEvent`, is sent "
    "once to those who watch then. The same by WebSocket, at `/ws`.",
    query=AnyEventsQuery,
    answers={200: "text/event-stream"},
    refusals=_REFUSALS,
    headers={
        wire.CALLER_ID: "The workspace; for a workspace's token, its own.",
        "Last-Event-ID": "The id of the last event received; what came after it comes first.",
    },
)
async def stream_any(request: Request) -> Response:
    return await stream(request)


class EventStream(Response):
    """
    Server-sent events until the watcher leaves or the server stops.
    """

    def __init__(self, watching: Watching, request: Request) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._watching = watching
        self._request = request

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async with self._watching as watch:
            with self._request.app.state.metrics.requests.event_streams.track_inprogress():
                try:
                    await while_connected(self._send(watch, send), disconnected(receive))
                except TooSlow as error:
                    if not abort(self._request):
                        raise ClientDisconnect from error
                    await disconnected(receive)  # uvicorn logs an error for an incomplete answer

    async def _send(self, watch: Watch | WatchAll, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        # The id comes first, so that a watcher that reconnects before the first row misses nothing.
        await self._send_piece(send, _id_alone(watch) if watch.last_id else b":\n\n")
        try:
            async with watch.batches.sending():
                await self._send_events(watch, send)
        except RestanteError as error:
            log_ended(self._request, error)
        await self._send_piece(send, b"", more=False)

    async def _send_events(self, watch: Watch | WatchAll, send: Send) -> None:
        while (events := await watch.batch()) is not None:
            for event in events:
                await self._send_piece(send, _block(event, watch))
            if not events:
                await self._send_piece(send, _heartbeat(watch))

    async def _send_piece(self, send: Send, piece: bytes, *, more: bool = True) -> None:
        message = {"type": "http.response.body", "body": piece, "more_body": more}
        await in_time(self._request, send(message), len(piece))


def _id_alone(watch: Watch | WatchAll) -> bytes:
    return f"id: {watch.last_id}\n\n".encode()


def _heartbeat(watch: Watch | WatchAll) -> bytes:
    """Over all workspaces the id moves on without events, and the older ones are refused."""
    return _id_alone(watch) if isinstance(watch, WatchAll) else b":\n\n"


def _block(event: WatchedEvent, watch: Watch | WatchAll) -> bytes:
    """One event; line breaks of stored JSON are between its values, and become blanks."""
    data = msgspec.json.encode(event).translate(_ON_ONE_LINE)
    head = f"event: {event.event}\n"
    if isinstance(event, wire.Event):
        head = f"id: {watch.id_after(event)}\n{head}"
    return b"%bdata: %b\n\n" % (head.encode(), data)


ROUTES: list[BaseRoute] = [
    Route("/workspaces/{workspace_id}/events", stream),
    Route("/events/stream", stream_any),
]
