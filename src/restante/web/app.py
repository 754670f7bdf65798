"""Routes and middleware, assembled."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from restante.errors import RestanteError
from restante.web import health, problems
from restante.web.context import Context
from restante.web.observe import Observed

ROUTES = [
    Route("/health", health.health),
    Route("/ready", health.ready),
    Route("/metrics", health.metrics),
]


def build(context: Context) -> Starlette:
    """The application; everything it needs is in the context."""
    app = Starlette(
        routes=ROUTES,
        middleware=[Middleware(Observed, metrics=context.metrics)],
        exception_handlers={
            RestanteError: problems.on_restante_error,
            HTTPException: problems.on_http_exception,
            Exception: problems.on_bug,
        },
    )
    app.state.context = context
    return app
