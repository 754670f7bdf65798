"""
The canvas watches a workspace: one `ACTIVITY_LOGGED` for each row of its feed, after its commit.

By server-sent events or by WebSocket; both carry the same JSON, and both go on after a row whose id
comes as `Last-Event-ID` or, where a header cannot be set, as `last_event_id` in the address.

A browser can set no header on either, so the token may come otherwise.  For server-sent events: as
`access_token` in the address; addresses are neither logged by us nor used as labels.  For a
WebSocket: as a second subprotocol after `bearer`, which is then the one that is agreed on, as in
`new WebSocket(url, ["bearer", token])`; not in the address, which uvicorn can be made to log.

We close a WebSocket with 1001 when the server stops, 1009 when a message to us was too long, 1011
after a bug, and with 4000 plus the status that a request would be refused with now: 4401 when the
token was revoked, 4410 when rows were trimmed before they could be sent.  A watcher that does not
take what it is sent is cut off, whichever way it watches.
"""

import asyncio
import time
from collections.abc import Awaitable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from typing import Annotated, Any, cast

import msgspec
import structlog
from msgspec import Meta
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from restante import wire
from restante.delivery.download import until_gone
from restante.errors import (
    BadRequest,
    CursorGone,
    NotAuthenticated,
    RestanteError,
    TooManyAtOnce,
    WorkspaceUnknown,
)
from restante.feed.rules import Activity
from restante.feed.watch import Watch, watching
from restante.feed.web import row_of
from restante.http import problems
from restante.http.operations import operation
from restante.ids import ActivityId, as_uuid
from restante.server.context import context
from restante.server.observe import route_pattern
from restante.workspaces import auth

log = structlog.get_logger()

# A watcher that does not take one event in this time is dropped; it can come back for the rest.
SEND_SECONDS = 10.0
# Nothing is expected from a watcher.
MAX_MESSAGE_CHARACTERS = 4096

# Where the application keeps the connection's transport for `cut`.
TRANSPORT = "restante.transport"

_BEARER = "bearer"
_GOING_AWAY, _LOST, _TOO_LONG, _BUG = 1001, 1006, 1009, 1011
_CLOSE_CODES = 1000  # and above; what is below is the status of a refusal
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store, no-transform",
    "X-Accel-Buffering": "no",  # nginx would gather events until it has a page of them
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
    "is an `Event`. The answer does not end by itself; a comment comes when it has been quiet for "
    "a while. The same by WebSocket, at `ws` instead of `events`.",
    query=EventsQuery,
    answers={200: "text/event-stream"},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown, CursorGone, TooManyAtOnce),
    headers={"Last-Event-ID": "The id of the last row received; the rows after it come first."},
)
async def stream(request: Request) -> Response:
    caller = _with_token(request, request.query_params.get("access_token"))
    watch = await _watch(caller)
    if request.method == "HEAD":
        return Response(headers=_HEADERS)
    return EventStream(watch, caller)


async def _watch(caller: HTTPConnection) -> AbstractAsyncContextManager[Watch]:
    """A watch that the caller may have; it begins when it is entered."""
    workspace = await auth.owner_or_admin(caller)
    return watching(
        context(caller).feed,
        workspace.id,
        after=_after(caller),
        check=lambda: auth.owner_or_admin(caller),
    )


def _with_token(connection: HTTPConnection, token: str | None) -> HTTPConnection:
    """The connection as if its token had come in the header; a header that did come wins."""
    if token is None or "authorization" in connection.headers:
        return connection
    header = (b"authorization", f"Bearer {token}".encode("latin-1", "replace"))
    return HTTPConnection({**connection.scope, "headers": [*connection.scope["headers"], header]})


def _after(connection: HTTPConnection) -> ActivityId | None:
    """
    The row to go on after.

    The header wins: a browser that connects again sends it along with an address that is as old as
    its first try.
    """
    sent = connection.headers.get("last-event-id") or connection.query_params.get("last_event_id")
    if not sent:
        return None
    found = as_uuid(sent)
    if found is None:
        raise BadRequest("last_event_id is wrong: it must be the id of a row, a UUID.")
    return ActivityId(found)


def _event(row: Activity) -> bytes:
    return msgspec.json.encode(wire.Event("ACTIVITY_LOGGED", row.workspace_id, row_of(row)))


class _TooSlow(Exception):
    """The watcher does not take what it is sent."""


class _TooLong(Exception):
    """The watcher sends more than it may."""


async def _in_time(sending: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(SEND_SECONDS):
            await sending
    except TimeoutError as error:
        raise _TooSlow from error


async def _unless_gone(
    sending: Coroutine[Any, Any, None], leaving: Coroutine[Any, Any, None]
) -> None:
    """Send until there is no more to send or nobody to send it to."""
    tasks = [asyncio.create_task(sending), asyncio.create_task(leaving)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _cut(connection: HTTPConnection) -> bool:
    """
    Drop a watcher; False if its connection is not in our hands.

    What was written for it is thrown away.  An orderly close would wait until the watcher takes it,
    which is what it does not do.
    """
    log.warning(
        "watcher_dropped",
        workspace=connection.path_params["workspace_id"],
        way=connection.scope["type"],
    )
    transport = connection.scope.get(TRANSPORT)
    if transport is not None:
        transport.abort()
    return transport is not None


class EventStream(Response):
    """
    Server-sent events until the watcher leaves or the server stops.

    After a disconnect a bare `send` succeeds silently, so the watcher is watched in turn.
    """

    def __init__(self, watch: AbstractAsyncContextManager[Watch], caller: HTTPConnection) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._watch = watch
        self._caller = caller

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async with self._watch as watch:
            with context(self._caller).metrics.requests.event_streams.track_inprogress():
                try:
                    await _unless_gone(self._send(watch, send), until_gone(receive))
                except _TooSlow as error:
                    if not _cut(self._caller):
                        raise ClientDisconnect from error
                    await until_gone(receive)  # uvicorn would complain of half an answer

    async def _send(self, watch: Watch, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        # With an id of its own from the beginning, a watcher that comes back has missed nothing.
        body = f"id: {watch.last_id}\n\n".encode() if watch.last_id else b":\n\n"
        await _send_piece(send, body)
        try:
            while (rows := await watch.batch()) is not None:
                for row in rows:
                    await _send_piece(send, _block(row))
                if not rows:
                    await _send_piece(send, b":\n\n")
        except RestanteError as error:
            _log_ended(self._caller, error)
        await _in_time(send({"type": "http.response.body", "body": b"", "more_body": False}))


async def _send_piece(send: Send, piece: bytes) -> None:
    await _in_time(send({"type": "http.response.body", "body": piece, "more_body": True}))


def _block(row: Activity) -> bytes:
    """One event; JSON that was stored with line breaks goes over several lines."""
    lines = b"".join(b"data: %b\n" % line for line in _event(row).splitlines())
    return b"id: %b\nevent: ACTIVITY_LOGGED\n%b\n" % (str(row.id).encode(), lines)


def _log_ended(connection: HTTPConnection, error: RestanteError) -> None:
    log.info("watching_ended", workspace=connection.path_params["workspace_id"], code=error.code)


class _Socket:
    """Watch a workspace by WebSocket; leaves one line in the log, however it ends."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        code = _LOST
        try:
            code = await _watched_and_closed(WebSocket(scope, receive, send))
        except WebSocketDisconnect as left:
            code = int(left.code)
        except OSError:
            pass  # it left before it was accepted
        finally:
            seconds = round(time.monotonic() - started, 4)
            log.info("websocket", route=route_pattern(scope), code=code, seconds=seconds)
        if code < _CLOSE_CODES:
            await _until_closed(receive)


async def _until_closed(receive: Receive) -> None:
    """
    Wait for the end of a connection that was refused.

    Uvicorn takes a refused handshake for an unfinished one, and complains, until the connection is
    gone.  It says so in a second `disconnect`; the first is for the refusal.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(SEND_SECONDS):
            for _ in range(2):
                while (await receive())["type"] != "websocket.disconnect":
                    pass


socket = _Socket()


async def _watched_and_closed(websocket: WebSocket) -> int:
    """The close code, or the status of a refusal; Starlette answers errors of plain HTTP only."""
    try:
        await _watch_by(websocket)
    except (WebSocketDisconnect, OSError):
        raise
    except _TooLong:
        return await _close(websocket, _TOO_LONG)
    except _TooSlow:
        _cut(websocket)
        return _LOST
    except RestanteError as error:
        response = await problems.on_restante_error(cast("Request", websocket), error)
        return await _turn_away(websocket, response, 4000 + response.status_code, error.code)
    except Exception as error:
        response = await problems.on_bug(cast("Request", websocket), error)
        return await _turn_away(websocket, response, _BUG, "internal")
    return await _close(websocket, _GOING_AWAY)


async def _watch_by(websocket: WebSocket) -> None:
    """Accept and send until the server stops; everything else that can end it is raised."""
    token = _offered_token(websocket)
    caller = _with_token(websocket, token)
    async with await _watch(caller) as watch:
        await websocket.accept(subprotocol=_BEARER if token else None)
        with context(websocket).metrics.requests.websocket_connections.track_inprogress():
            await _unless_gone(_send_messages(websocket, watch), _until_left(websocket))


def _offered_token(websocket: WebSocket) -> str | None:
    offered = websocket.scope["subprotocols"]
    return offered[1] if len(offered) == 2 and offered[0] == _BEARER else None


async def _send_messages(websocket: WebSocket, watch: Watch) -> None:
    while (rows := await watch.batch()) is not None:
        for row in rows:
            await _in_time(websocket.send_text(_event(row).decode()))


async def _until_left(websocket: WebSocket) -> None:
    """Read over what is sent to us."""
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        if len(message.get("text") or message.get("bytes") or "") > MAX_MESSAGE_CHARACTERS:
            raise _TooLong


async def _turn_away(websocket: WebSocket, response: Response, code: int, reason: str) -> int:
    """Refuse as plain HTTP would, or close if it is too late for that."""
    if websocket.application_state is not WebSocketState.CONNECTING:
        return await _close(websocket, code, reason)
    await websocket.send_denial_response(response)
    return response.status_code


async def _close(websocket: WebSocket, code: int, reason: str = "") -> int:
    try:
        await _in_time(websocket.close(code, reason))
    except _TooSlow:
        _cut(websocket)
    return code
