"""What the handlers work with, put together once by the wiring."""

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from restante.runtime.metrics import Metrics
from restante.services.delivery import Delivery
from restante.services.feed import Feed
from restante.services.push import Push
from restante.services.rates import Rate
from restante.services.readiness import Readiness
from restante.services.registry import Registry
from restante.services.space import SpaceAccount
from restante.services.sweeping import Sweeping


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
