"""Addresses that no route has, such as one with a slash at its end."""

from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from restante.http import problems
from restante.http.disconnect import refuse_websocket

# The client repeats the request as it was, with its method and body.
REPEAT_ELSEWHERE = 307


def redirecting(router: Router) -> ASGIApp:
    """
    What answers for unknown addresses: some are a route but for slashes at the end.

    Starlette's own redirect is absolute.  Behind a proxy that ends TLS it would send the client,
    and its token, to `http`; and the host in it is whatever the client has sent.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/") and _is_route(router, scope):
            response = Response(status_code=REPEAT_ELSEWHERE, headers={"Location": _target(scope)})
            await response(scope, receive, send)
        elif scope["type"] == "websocket":
            await _refuse(WebSocket(scope, receive, send), receive)
        else:
            await router.not_found(scope, receive, send)

    return answer


async def _refuse(websocket: WebSocket, receive: Receive) -> None:
    response = await problems.on_http_exception(websocket, HTTPException(404))
    await refuse_websocket(websocket, receive, response, code=problems.NO_SUCH_ROUTE)


def _is_route(router: Router, scope: Scope) -> bool:
    shorter = {**scope, "path": scope["path"].rstrip("/")}
    return any(route.matches(shorter)[0] is not Match.NONE for route in router.routes)


def _target(scope: Scope) -> str:
    """Relative, and with a single slash in front: two would be followed by the name of a host."""
    query = scope["query_string"].decode("latin-1")
    return "/" + quote(scope["path"].strip("/")) + (f"?{query}" if query else "")
