"""Routes and middleware, assembled."""

from functools import cache

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from restante.delivery import web as uploads
from restante.errors import RestanteError
from restante.feed import events, messages
from restante.feed import web as feed
from restante.http import problems
from restante.server import admin as retention
from restante.server import docs, health
from restante.server.context import Context
from restante.server.observe import Observed
from restante.workspaces import web as workspaces

_WORKSPACE = "/workspaces/{workspace_id}"
_FILE = _WORKSPACE + "/pending-uploads/{file_id}"
_ADMIN = "/admin/workspaces/{workspace_id}"

ROUTES = [
    Route("/health", health.health),
    Route("/ready", health.ready),
    Route("/metrics", health.metrics),
    Route("/openapi.json", docs.document),
    Route("/docs", docs.read),
    Route("/registry/register", workspaces.register, methods=["POST"]),
    Route("/registry/heartbeat", workspaces.heartbeat, methods=["POST"]),
    Route(_WORKSPACE, workspaces.change, methods=["PATCH"]),
    Route(_WORKSPACE, workspaces.remove, methods=["DELETE"]),
    Route(_WORKSPACE + "/chat/uploads", uploads.upload, methods=["POST"]),
    Route(_WORKSPACE + "/a2a", messages.send, methods=["POST"]),
    Route(_WORKSPACE + "/activity", feed.read),
    Route(_WORKSPACE + "/activity/ack", feed.acknowledge, methods=["POST"]),
    Route(_WORKSPACE + "/events", events.stream),
    Route(_WORKSPACE + "/pending-uploads", uploads.waiting),
    Route(_FILE + "/content", uploads.content),
    Route(_FILE + "/ack", uploads.acknowledge, methods=["POST"]),
    Route(_FILE + "/reopen", uploads.reopen, methods=["POST"]),
    Route("/admin/workspaces", workspaces.page),
    Route(_ADMIN, workspaces.show),
    Route(_ADMIN + "/token", workspaces.reissue_token, methods=["POST"]),
    Route(_ADMIN + "/token", workspaces.revoke_token, methods=["DELETE"]),
    Route("/admin/retention/plan", retention.plan),
    Route("/admin/retention/sweep", retention.sweep, methods=["POST"]),
    Route("/admin/status", retention.status),
]

SOCKETS = [WebSocketRoute(_WORKSPACE + "/ws", events.socket)]


class _Application(Starlette):
    """
    Starlette that keeps a connection's transport at hand for those who must cut it.

    Uvicorn's `send` is a method of the object that has it; middleware hides that from handlers.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server_side = getattr(send, "__self__", None)
        scope[events.TRANSPORT] = getattr(server_side, "transport", None)
        await super().__call__(scope, receive, send)


def build(context: Context) -> Starlette:
    """The application; everything it needs is in the context."""
    app = _Application(
        routes=[*ROUTES, *SOCKETS],
        middleware=[Middleware(Observed, metrics=context.metrics.requests)],
        exception_handlers={
            RestanteError: problems.on_restante_error,
            HTTPException: problems.on_http_exception,
        },
    )
    app.state.context = context
    app.state.reference = _reference()
    for (method, path), statuses in _reference().statuses.items():
        context.metrics.requests.expect(method, path, statuses)
    return app


@cache
def _reference() -> docs.Reference:
    return docs.reference(ROUTES)
