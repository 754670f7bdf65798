"""Every metric, its labels and its help text, on one page.  All label values start at 0."""

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

PASS_OUTCOMES = ("ok", "error", "deadline")
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """The counters of one process."""

    def __init__(self, namespace: str) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace=namespace, registry=self.registry)
        gauge = partial(Gauge, namespace=namespace, registry=self.registry)
        histogram = partial(Histogram, namespace=namespace, registry=self.registry)

        self.http_requests = counter(
            "http_requests_total",
            "Requests answered, by route pattern and status.",
            ["method", "path", "status"],
        )
        self.http_request_seconds = histogram(
            "http_request_duration_seconds",
            "Time from a request's first byte to the answer's last.",
            ["method", "path"],
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30, 120),
        )
        self.loop_passes = counter(
            "loop_passes_total",
            "Background passes by how they ended.",
            ["loop", "outcome"],
        )
        self.loop_pass_seconds = gauge(
            "loop_last_pass_seconds", "How long the last pass of a loop took.", ["loop"]
        )
        self.loop_last_success = gauge(
            "loop_last_success_timestamp_seconds",
            "When a loop's pass last succeeded, in Unix time; 0 means not since the start.",
            ["loop"],
        )
        self.loop_restarts = counter(
            "loop_restarts_total", "Loops that crashed and were started again.", ["loop"]
        )
        self.websocket_connections = gauge(
            "websocket_connections_active", "WebSockets that are open now."
        )
        self.event_streams = gauge(
            "event_streams_active", "Streams of server-sent events that are open now."
        )

    def expect_loops(self, names: Iterable[str]) -> None:
        """Show every loop at 0 before its first pass: an alert can tell none from missing."""
        for name in names:
            for outcome in PASS_OUTCOMES:
                self.loop_passes.labels(name, outcome)
            self.loop_pass_seconds.labels(name)
            self.loop_last_success.labels(name)
            self.loop_restarts.labels(name)

    def pass_ended(self, loop: str, outcome: str, seconds: float) -> None:
        self.loop_passes.labels(loop, outcome).inc()
        self.loop_pass_seconds.labels(loop).set(seconds)
        if outcome == "ok":
            self.loop_last_success.labels(loop).set_to_current_time()

    def loop_restarted(self, loop: str) -> None:
        self.loop_restarts.labels(loop).inc()

    def request_ended(self, method: str, path: str, status: int, seconds: float) -> None:
        self.http_requests.labels(method, path, status).inc()
        self.http_request_seconds.labels(method, path).observe(seconds)

    def page(self) -> bytes:
        """All of it as Prometheus text."""
        return generate_latest(self.registry)
