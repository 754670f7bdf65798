"""One page of metrics as Prometheus text."""

import asyncio
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from restante.server.single_flight import SingleFlight

_BETWEEN_PAGES_SECONDS = 0.25


class Page:
    """Metrics for the same readers, in one namespace."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.registry = CollectorRegistry()
        self.counter = partial(Counter, namespace=namespace, registry=self.registry)
        self.gauge = partial(Gauge, namespace=namespace, registry=self.registry)
        self.histogram = partial(Histogram, namespace=namespace, registry=self.registry)
        # It takes milliseconds, and anybody may ask: so it is done in a thread.
        self._text = SingleFlight(
            lambda: asyncio.to_thread(generate_latest, self.registry),
            at_most_every_seconds=_BETWEEN_PAGES_SECONDS,
        )

    async def text(self) -> bytes:
        """As Prometheus text, of a moment after the call."""
        return await self._text.result()
