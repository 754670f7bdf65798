"""
Notices that the client has gone, and refuses WebSockets.

After a disconnect a bare ASGI `send` succeeds silently, so a handler that takes time must watch
`receive` while it works.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope
from starlette.websockets import WebSocket

log = structlog.get_logger()

Result = TypeVar("Result")

# The key of the ASGI scope that has the connection's transport.
TRANSPORT = "restante.transport"

_REFUSED_SECONDS = 10.0  # for a refused WebSocket to be closed


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone away; what it still sends is ignored."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def aborted(scope: Scope, receive: Receive) -> None:
    """
    Abort a connection, and wait until it is closed; an answer that has begun stays incomplete.

    What is buffered for the client is discarded.  A normal close would wait for the client to read
    it.  Uvicorn logs an error if the application returns earlier.
    """
    transport = scope.get(TRANSPORT)
    if transport is None:
        raise ClientDisconnect
    transport.abort()
    await disconnected(receive)


async def refuse_websocket(
    websocket: WebSocket, receive: Receive, response: Response, *, code: str
) -> None:
    """Refuse a WebSocket before its route; Starlette's error handlers answer HTTP only."""
    log.info("websocket_refused", code=code, status=response.status_code)
    await websocket.send_denial_response(response)
    await refusal_read(receive)


async def refusal_read(receive: Receive) -> None:
    """
    Wait until the connection of a refused WebSocket is closed.

    Uvicorn logs an error if the application returns earlier.  The first `disconnect` is for the
    refusal, the second for the closed connection.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_REFUSED_SECONDS):
            for _ in range(2):
                while (await receive())["type"] != "websocket.disconnect":
                    pass


async def while_connected(
    work: Coroutine[Any, Any, Result], gone: Coroutine[Any, Any, None]
) -> Result:
    """
    Run the work until it ends or `gone` returns, which cancels it and raises ClientDisconnect.

    What either of them raises is raised.  Work that ends together with the client counts as done.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            leaving.result()
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
