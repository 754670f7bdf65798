"""Every metric, its labels and its help text, on one page.  All label values start at 0."""

import math
from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from restante.core.space import Space

PASS_OUTCOMES = ("ok", "error", "deadline")
SWEEP_OUTCOMES = ("acked", "expired", "error")
UPLOAD_STATES = ("never_fetched", "fetched", "acked", "expired")
PARTITIONED_TABLES = ("chunks", "feed")
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

        self.pending_uploads_swept = counter(
            "pending_uploads_swept_total",
            "Uploads deleted by the sweep, and passes of it that failed.",
            ["outcome"],
        )
        for outcome in SWEEP_OUTCOMES:
            self.pending_uploads_swept.labels(outcome)
        self.bytes_given_back = counter(
            "space_given_back_bytes_total", "Bytes that sweeps gave back to the filesystem."
        )
        self.sweep_steps_postponed = counter(
            "sweep_steps_postponed_total",
            "Steps of a sweep that found somebody in their way and were left for the next pass.",
        )
        self.phantom_busy_resets = counter(
            "phantom_busy_resets_total",
            "Workspaces whose tasks were reset because they were silent.",
        )
        self.space_bytes = gauge(
            "space_bytes", "What each table takes on disk, with its leaves.", ["table"]
        )
        self.space_live_bytes = gauge(
            "space_live_bytes", "Bytes of files that wait or can be reopened."
        )
        self.space_dead_bytes = gauge(
            "space_dead_bytes", "What the chunks take beyond the files that live."
        )
        self.space_growth = gauge(
            "space_growth_bytes_per_day", "How fast the tables grow; NaN until that is known."
        )
        self.days_until_full = gauge(
            "space_days_until_full",
            "When the disk is full at this growth; NaN if not known, or never.",
        )
        self.leaf_lead_seconds = gauge(
            "leaf_lead_seconds", "How far ahead of the clock a table has leaves.", ["table"]
        )
        self.pins = gauge(
            "space_pins", "Open transactions and replication slots that hold space back."
        )
        self.uploads = gauge("uploads", "Uploads by how far they got.", ["state"])
        self.workspaces_active = gauge(
            "workspaces_active", "Workspaces that were registered and not removed."
        )
        # These name workspaces, so only the operator is shown them.
        self.operator_registry = CollectorRegistry()
        self.workspace_uploads = Gauge(
            "workspace_uploads",
            "The same for the workspaces with most bytes waiting.",
            ["workspace", "state"],
            namespace=namespace,
            registry=self.operator_registry,
        )
        self.workspace_lag = Gauge(
            "workspace_feed_lag_rows",
            "Rows not handled yet, for the workspaces furthest behind.",
            ["workspace"],
            namespace=namespace,
            registry=self.operator_registry,
        )
        for table in PARTITIONED_TABLES:
            self.leaf_lead_seconds.labels(table)
        for state in UPLOAD_STATES:
            self.uploads.labels(state)

    def swept(self, acked: int, expired: int, bytes_back: int, postponed: int) -> None:
        self.pending_uploads_swept.labels("acked").inc(acked)
        self.pending_uploads_swept.labels("expired").inc(expired)
        self.bytes_given_back.inc(bytes_back)
        self.sweep_steps_postponed.inc(postponed)

    def sweep_failed(self) -> None:
        self.pending_uploads_swept.labels("error").inc()

    def saw_space(self, space: Space) -> None:
        """Show what a look at the tables found."""
        for table in space.tables:
            self.space_bytes.labels(table.name).set(table.bytes)
        self.space_live_bytes.set(space.live_bytes)
        self.space_dead_bytes.set(space.dead_bytes)
        self.space_growth.set(_or_nan(space.growth_bytes_per_day))
        self.days_until_full.set(_or_nan(space.days_until_full))
        self.pins.set(len(space.pins))
        self.workspaces_active.set(space.workspaces_active)
        for table_name, seconds in space.lead_seconds.items():
            self.leaf_lead_seconds.labels(table_name).set(seconds)
        self._saw_uploads(space)

    def _saw_uploads(self, space: Space) -> None:
        """Workspaces that are no longer among the first are forgotten, so that labels stay few."""
        for state in UPLOAD_STATES:
            self.uploads.labels(state).set(getattr(space.states, state))
        self.workspace_uploads.clear()
        for one in space.workspaces:
            for state in UPLOAD_STATES:
                self.workspace_uploads.labels(str(one.workspace_id), state).set(
                    getattr(one.states, state)
                )
        self.workspace_lag.clear()
        for lag in space.lags:
            self.workspace_lag.labels(str(lag.workspace_id)).set(lag.behind)

    def expect_loops(self, names: Iterable[str]) -> None:
        """Show every loop at 0 before its first pass: an alert can tell none from missing."""
        for name in names:
            for outcome in PASS_OUTCOMES:
                self.loop_passes.labels(name, outcome)
            self.loop_pass_seconds.labels(name)
            self.loop_last_success.labels(name)
            self.loop_restarts.labels(name)

    def expect_requests(self, method: str, path: str, statuses: Iterable[int]) -> None:
        """Show a route at 0 before its first request, with every status it is known to answer."""
        for status in statuses:
            self.http_requests.labels(method, path, status)
        self.http_request_seconds.labels(method, path)

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

    def page(self, *, for_operator: bool = False) -> bytes:
        """All of it as Prometheus text; what names workspaces only for the operator."""
        theirs = generate_latest(self.operator_registry) if for_operator else b""
        return generate_latest(self.registry) + theirs


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
