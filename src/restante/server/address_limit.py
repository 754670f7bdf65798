"""Limits the requests of one address that come through a listed proxy."""

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from restante.errors import TooManyConnections
from restante.http import problems
from restante.http.disconnect import refuse_websocket
from restante.http.networks import network_of
from restante.workspaces.concurrency import PLACE


class AddressLimit:
    """
    Counts requests that a proxy passes on for their client, until they are authenticated.

    A proxy's own connections count for nobody; those of other clients count when they are opened.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place, client = scope.get(PLACE), scope.get("client")
        if place is None or place.admits(network_of(client[0] if client else "")):
            await self._app(scope, receive, send)
        else:
            await self._refuse(scope, receive, send)

    @staticmethod
    async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
        refusal = TooManyConnections(
            "The server has too many open requests from this address. Try again in a moment.",
            retry_after_seconds=1,
        )
        if scope["type"] == "http":
            raise refusal
        websocket = WebSocket(scope, receive, send)
        response = await problems.on_restante_error(websocket, refusal)
        await refuse_websocket(websocket, receive, response, code=refusal.code)
