"""
Watch a workspace: one `ACTIVITY_LOGGED` event for each row of its feed, after its commit.

By server-sent events or by WebSocket; both carry the same JSON.  Both resume after the row whose id
is sent as `Last-Event-ID` or, where a header cannot be set, as the parameter `last_event_id`.

A browser can set no header on either, so the token may be sent in other ways.  For server-sent
events: as the parameter `access_token`; we never log URLs or use them as labels.  For a WebSocket:
as a second subprotocol after `bearer`, which is then the one that is selected, as in
`new WebSocket(url, ["bearer", token])`; not in the URL, which uvicorn can be made to log.

A WebSocket is closed with 1001 when the server stops, 1009 when a message to us was too long, 1011
after a bug, and with 4000 plus the HTTP status that a request would get now: 4401 when the token
was revoked, 4410 when rows were trimmed before they could be sent.  A watcher that does not read
what it is sent is disconnected.
"""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Annotated, cast

import msgspec
import structlog
from msgspec import Meta
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from restante import wire
from restante.database import shares
from restante.errors import (
    BadRequest,
    CursorGone,
    NotAuthenticated,
    RestanteError,
    TooManyAtOnce,
    WorkspaceUnknown,
)
from restante.feed.watch import Watch, WatchPolicy, watching
from restante.http import problems
from restante.http.disconnect import disconnected, while_connected
from restante.http.operations import operation, parameters
from restante.ids import ActivityId, as_uuid
from restante.workspaces import auth

log = structlog.get_logger()

TAG = "events"

WEBSOCKET_PATH = "/workspaces/{workspace_id}/ws"

# Watchers have nothing to send.
MAX_MESSAGE_CHARACTERS = 4096

# The key of the ASGI scope that has the connection's transport.
TRANSPORT = "restante.transport"

_BEARER = "bearer"
_CLOSE_SECONDS = 10.0  # for a refused WebSocket
_GOING_AWAY, _LOST, _TOO_LONG, _BUG = 1001, 1006, 1009, 1011
_CLOSE_CODES = 1000  # and above; a lower number is the HTTP status of a refusal
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
    "is an `Event`. The answer does not end by itself; a comment is sent as a heartbeat. "
    "The same by WebSocket, at `ws` instead of `events`.",
    query=EventsQuery,
    answers={200: "text/event-stream"},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown, CursorGone, TooManyAtOnce),
    headers={"Last-Event-ID": "The id of the last row received; the rows after it come first."},
)
async def stream(request: Request) -> Response:
    caller = _with_token(request, parameters(request).get("access_token"))
    watch = await _watch(caller)
    if request.method == "HEAD":
        return Response(headers=_HEADERS)
    return EventStream(watch, caller)


async def _watch(caller: HTTPConnection) -> AbstractAsyncContextManager[Watch]:
    """A watch for an authorized caller; it begins when it is entered."""
    # Its token may be elsewhere than in the header that was looked at when the request arrived.
    shares.caller.set(auth.access(caller).caller(caller))
    workspace = await auth.owner_or_admin(caller)
    return watching(
        caller.app.state.feed,
        workspace.id,
        after=_after(caller),
        check=lambda: auth.owner_or_admin(caller),
        policy=_policy(caller),
    )


def _with_token(connection: HTTPConnection, token: str | None) -> HTTPConnection:
    """The connection with the token as its header; an Authorization header that was sent wins."""
    if token is None or "authorization" in connection.headers:
        return connection
    header = (b"authorization", f"Bearer {token}".encode("latin-1", "replace"))
    return HTTPConnection({**connection.scope, "headers": [*connection.scope["headers"], header]})


def _after(connection: HTTPConnection) -> ActivityId | None:
    """
    The row to resume after.

    The header wins: a browser that reconnects sends it with the URL of its first attempt.
    """
    sent = connection.headers.get("last-event-id") or parameters(connection).get("last_event_id")
    if not sent:
        return None
    found = as_uuid(sent)
    if found is None:
        raise BadRequest("last_event_id is wrong: it must be the id of a row, a UUID.")
    return ActivityId(found)


def _event(row: wire.ActivityRow) -> bytes:
    return msgspec.json.encode(wire.Event("ACTIVITY_LOGGED", row.workspace_id, row))


class _TooSlow(Exception):
    """The watcher does not read what it is sent."""


class _TooLong(Exception):
    """The watcher sends more than is allowed."""


def _policy(connection: HTTPConnection) -> WatchPolicy:
    return connection.app.state.watch_policy


async def _in_time(connection: HTTPConnection, sending: Awaitable[None], size: int = 0) -> None:
    """Send something of this size; raises _TooSlow."""
    policy = _policy(connection)
    try:
        async with asyncio.timeout(policy.send_seconds + size / policy.bytes_per_second):
            await sending
    except TimeoutError as error:
        raise _TooSlow from error


def _abort(connection: HTTPConnection) -> bool:
    """
    Abort a watcher's connection; False if we do not have its transport.

    What is buffered for it is discarded.  A normal close would wait for the watcher to read it.
    """
    log.warning(
        "watcher_dropped",
        workspace=connection.path_params["workspace_id"],
        way=connection.scope["type"],
    )
    connection.app.state.metrics.connections.cut_off.labels("slow_reader").inc()
    transport = connection.scope.get(TRANSPORT)
    if transport is not None:
        transport.abort()
    return transport is not None


class EventStream(Response):
    """
    Server-sent events until the watcher leaves or the server stops.
    """

    def __init__(self, watch: AbstractAsyncContextManager[Watch], caller: HTTPConnection) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._watch = watch
        self._caller = caller

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async with self._watch as watch:
            with self._caller.app.state.metrics.requests.event_streams.track_inprogress():
                try:
                    await while_connected(self._send(watch, send), disconnected(receive))
                except _TooSlow as error:
                    if not _abort(self._caller):
                        raise ClientDisconnect from error
                    await disconnected(receive)  # uvicorn logs an error for an incomplete answer

    async def _send(self, watch: Watch, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        # The id comes first, so that a watcher that reconnects before the first row misses nothing.
        body = f"id: {watch.last_id}\n\n".encode() if watch.last_id else b":\n\n"
        await self._send_piece(send, body)
        try:
            while (rows := await watch.batch()) is not None:
                for row in rows:
                    await self._send_piece(send, _block(row))
                if not rows:
                    await self._send_piece(send, b":\n\n")
        except RestanteError as error:
            _log_ended(self._caller, error)
        await self._send_piece(send, b"", more=False)

    async def _send_piece(self, send: Send, piece: bytes, *, more: bool = True) -> None:
        message = {"type": "http.response.body", "body": piece, "more_body": more}
        await _in_time(self._caller, send(message), len(piece))


def _block(row: wire.ActivityRow) -> bytes:
    """One event; stored JSON that has line breaks becomes several data lines."""
    lines = b"".join(b"data: %b\n" % line for line in _event(row).splitlines())
    return b"id: %b\nevent: ACTIVITY_LOGGED\n%b\n" % (str(row.id).encode(), lines)


def _log_ended(connection: HTTPConnection, error: RestanteError) -> None:
    log.info("watching_ended", workspace=connection.path_params["workspace_id"], code=error.code)


class _Socket:
    """Watch a workspace by WebSocket; logs one line, however it ends."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        code = _LOST
        try:
            code = await _watch_and_close(WebSocket(scope, receive, send))
        except WebSocketDisconnect as left:
            code = int(left.code)
        except OSError:
            pass  # it disconnected before it was accepted
        finally:
            seconds = round(time.monotonic() - started, 4)
            log.info("websocket", route=WEBSOCKET_PATH, code=code, seconds=seconds)
        if code < _CLOSE_CODES:
            await _until_closed(receive)


async def _until_closed(receive: Receive) -> None:
    """
    Wait until a refused connection is closed.

    Uvicorn logs an error if the application returns earlier.  The first `disconnect` is for the
    refusal, the second for the closed connection.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_SECONDS):
            for _ in range(2):
                while (await receive())["type"] != "websocket.disconnect":
                    pass


socket = _Socket()


async def _watch_and_close(websocket: WebSocket) -> int:
    """The close code, or the HTTP status of a refusal; Starlette handles errors of HTTP only."""
    try:
        await _accept_and_watch(websocket)
    except (WebSocketDisconnect, OSError):
        raise
    except _TooLong:
        return await _close(websocket, _TOO_LONG)
    except _TooSlow:
        _abort(websocket)
        return _LOST
    except RestanteError as error:
        response = await problems.on_restante_error(websocket, error)
        return await _refuse(websocket, response, 4000 + response.status_code, error.code)
    except Exception as error:
        response = await problems.on_bug(cast("Request", websocket), error)
        return await _refuse(websocket, response, _BUG, "internal")
    return await _close(websocket, _GOING_AWAY)


async def _accept_and_watch(websocket: WebSocket) -> None:
    """Accept and send until the server stops; any other end is raised."""
    token = _offered_token(websocket)
    caller = _with_token(websocket, token)
    async with await _watch(caller) as watch:
        await websocket.accept(subprotocol=_BEARER if token else None)
        with websocket.app.state.metrics.requests.websocket_connections.track_inprogress():
            await while_connected(_send_messages(websocket, watch), _until_left(websocket))


def _offered_token(websocket: WebSocket) -> str | None:
    offered = websocket.scope["subprotocols"]
    return offered[1] if len(offered) == 2 and offered[0] == _BEARER else None


async def _send_messages(websocket: WebSocket, watch: Watch) -> None:
    while (rows := await watch.batch()) is not None:
        for row in rows:
            text = _event(row).decode()
            await _in_time(websocket, websocket.send_text(text), len(text))


async def _until_left(websocket: WebSocket) -> None:
    """Ignore what is sent to us until the watcher disconnects."""
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        if len(message.get("text") or message.get("bytes") or "") > MAX_MESSAGE_CHARACTERS:
            raise _TooLong


async def _refuse(websocket: WebSocket, response: Response, code: int, reason: str) -> int:
    """Refuse with an HTTP answer, or close if the WebSocket was accepted already."""
    if websocket.application_state is not WebSocketState.CONNECTING:
        return await _close(websocket, code, reason)
    await websocket.send_denial_response(response)
    return response.status_code


async def _close(websocket: WebSocket, code: int, reason: str = "") -> int:
    try:
        await _in_time(websocket, websocket.close(code, reason))
    except _TooSlow:
        _abort(websocket)
    return code


ROUTES: list[BaseRoute] = [
    Route("/workspaces/{workspace_id}/events", stream),
    WebSocketRoute(WEBSOCKET_PATH, socket),
]
