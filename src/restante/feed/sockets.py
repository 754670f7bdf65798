"""
Watch by WebSocket; each message is the JSON of one event.

A browser can set no header, so the token may be offered as a subprotocol, which is then the one
that is selected: `new WebSocket(url, ["bearer", token])`, or `["molecule-auth.<hex>"]` with the
token's bytes in hexadecimal.  Not in the URL, which uvicorn can be made to log.

A WebSocket is closed with 1001 when the server stops, 1009 when a message to us was too long, 1011
after a bug, and with 4000 plus the HTTP status that a request would get now: 4401 when the token
was revoked, 4410 when rows were trimmed before they could be sent.
"""

import time
from typing import Any, cast

import msgspec
import structlog
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from restante.errors import RestanteError
from restante.feed.admission import abort, admitted, in_time
from restante.feed.batches import TooSlow
from restante.feed.watch import Watch
from restante.feed.watch_all import WatchAll
from restante.http import problems
from restante.http.disconnect import refusal_read, while_connected

log = structlog.get_logger()

# Watchers have nothing to send.
MAX_MESSAGE_CHARACTERS = 4096

_BEARER = "bearer"
_HEX_TOKEN = "molecule-auth."  # noqa: S105 - what stands before the token
_GOING_AWAY, _LOST, _TOO_LONG, _BUG = 1001, 1006, 1009, 1011
_CLOSE_CODES = 1000  # and above; a lower number is the HTTP status of a refusal


class _TooLong(Exception):
    """The watcher sends more than is allowed."""


class _Socket:
    """Logs one line, however it ends."""

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
            log.info("websocket", route=scope["route"].path, code=code, seconds=seconds)
        if code < _CLOSE_CODES:
            await refusal_read(receive)


socket = _Socket()


async def _watch_and_close(websocket: WebSocket) -> int:
    """The close code, or the HTTP status of a refusal; Starlette handles errors of HTTP only."""
    try:
        await _accept_and_watch(websocket)
    except (WebSocketDisconnect, OSError):
        raise
    except _TooLong:
        return await _close(websocket, _TOO_LONG)
    except TooSlow:
        abort(websocket)
        return _LOST
    except RestanteError as error:
        response = await problems.on_restante_error(websocket, error)
        return await _refuse(websocket, response, 4000 + response.status_code, error.code)
    except Exception as error:
        response = await problems.on_bug(cast("Any", websocket), error)
        return await _refuse(websocket, response, _BUG, "internal")
    return await _close(websocket, _GOING_AWAY)


async def _accept_and_watch(websocket: WebSocket) -> None:
    """Accept and send until the server stops; any other end is raised."""
    token, subprotocol = _offered(websocket.scope["subprotocols"])
    async with await admitted(websocket, token) as watch:
        await websocket.accept(subprotocol=subprotocol)
        with websocket.app.state.metrics.requests.websocket_connections.track_inprogress():
            await while_connected(_send_messages(websocket, watch), _until_left(websocket))


def _offered(subprotocols: list[str]) -> tuple[str | None, str | None]:
    """The token that is offered, and the subprotocol to select with it."""
    if len(subprotocols) == 2 and subprotocols[0] == _BEARER:
        return subprotocols[1], _BEARER
    for one in subprotocols:
        if one.startswith(_HEX_TOKEN):
            return _decoded(one.removeprefix(_HEX_TOKEN)), one
    return None, None


def _decoded(hexadecimal: str) -> str | None:
    try:
        return bytes.fromhex(hexadecimal).decode()
    except ValueError:
        return None


async def _send_messages(websocket: WebSocket, watch: Watch | WatchAll) -> None:
    async with watch.batches.sending():
        while (events := await watch.batch()) is not None:
            for event in events:
                message = msgspec.json.encode(event).decode()
                await in_time(websocket, websocket.send_text(message), len(message))


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
        await in_time(websocket, websocket.close(code, reason))
    except TooSlow:
        abort(websocket)
    return code


ROUTES: list[BaseRoute] = [
    WebSocketRoute("/workspaces/{workspace_id}/ws", socket),
    WebSocketRoute("/ws", socket),
]
