"""What the handlers work with, put together once by the wiring."""

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from restante.delivery.fetch import Delivery
from restante.feed.rates import Rate
from restante.feed.service import Feed
from restante.retention.space import SpaceAccount
from restante.retention.sweep import Sweeping
from restante.server.metrics import Metrics
from restante.server.readiness import Readiness
from restante.workspaces.push import Push
from restante.workspaces.registry import Registry


@dataclass(frozen=True, slots=True)
class Context:
    """The services that handlers call."""

    metrics: Metrics
    readiness: Readiness
    registry: Registry
    delivery: Delivery
    feed: Feed
    sweeping: Sweeping
    space: SpaceAccount
    push: Push
    message_rate: Rate
    staging_enabled: bool


def context(connection: HTTPConnection) -> Context:
    """The context of the application that this request came to."""
    return connection.app.state.context
