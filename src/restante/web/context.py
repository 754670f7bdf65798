"""What the handlers work with, put together once by the wiring."""

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from restante.runtime.metrics import Metrics
from restante.services.readiness import Readiness


@dataclass(frozen=True, slots=True)
class Context:
    """The services that handlers call."""

    metrics: Metrics
    readiness: Readiness


def context(connection: HTTPConnection) -> Context:
    """The context of the application that this request came to."""
    return connection.app.state.context
