"""Every metric, its labels and its help text, on one page.  All label values start at 0."""

import math
from collections.abc import Iterable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from restante.retention.account import Space

PASS_OUTCOMES = ("ok", "error", "deadline")
SWEEP_OUTCOMES = ("acked", "expired", "error")
UPLOAD_STATES = ("never_fetched", "fetched", "acked", "expired")
PARTITIONED_TABLES = ("chunks", "feed")
CONTENT_TYPE = CONTENT_TYPE_LATEST


class _Page:
    """What is shown to the same readers, under one namespace."""

    def __init__(self, namespace: str) -> None:
        self.registry = CollectorRegistry()
        self.counter = partial(Counter, namespace=namespace, registry=self.registry)
        self.gauge = partial(Gauge, namespace=namespace, registry=self.registry)
        self.histogram = partial(Histogram, namespace=namespace, registry=self.registry)


class Metrics:
    """The counters of one process, by subject."""

    def __init__(self, namespace: str) -> None:
        for_all, for_operator = _Page(namespace), _Page(namespace)
        self.registry, self.operator_registry = for_all.registry, for_operator.registry
        self.requests = RequestMetrics(for_all)
        self.loops = LoopMetrics(for_all)
        self.sweep = SweepMetrics(for_all)
        self.space = SpaceMetrics(for_all)
        # These name workspaces, so only the operator is shown them.
        self.workspaces = WorkspaceMetrics(for_operator)

    def saw_space(self, space: Space) -> None:
        """Show what a look at the tables found."""
        self.space.saw(space)
        self.workspaces.saw(space)

    def page(self, *, for_operator: bool = False) -> bytes:
        """All of it as Prometheus text; what names workspaces only for the operator."""
        theirs = generate_latest(self.operator_registry) if for_operator else b""
        return generate_latest(self.registry) + theirs


class RequestMetrics:
    """What is asked over HTTP, and who is connected."""

    def __init__(self, page: _Page) -> None:
        self.answered = page.counter(
            "http_requests_total",
            "Requests answered, by route pattern and status.",
            ["method", "path", "status"],
        )
        self.seconds = page.histogram(
            "http_request_duration_seconds",
            "Time from a request's first byte to the answer's last.",
            ["method", "path"],
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30, 120),
        )
        self.websocket_connections = page.gauge(
            "websocket_connections_active", "WebSockets that are open now."
        )
        self.event_streams = page.gauge(
            "event_streams_active", "Streams of server-sent events that are open now."
        )

    def expect(self, method: str, path: str, statuses: Iterable[int]) -> None:
        """Show a route at 0 before its first request, with every status it is known to answer."""
        for status in statuses:
            self.answered.labels(method, path, status)
        self.seconds.labels(method, path)

    def request_ended(self, method: str, path: str, status: int, seconds: float) -> None:
        self.answered.labels(method, path, status).inc()
        self.seconds.labels(method, path).observe(seconds)


class LoopMetrics:
    """How the background passes go."""

    def __init__(self, page: _Page) -> None:
        self.passes = page.counter(
            "loop_passes_total",
            "Background passes by how they ended.",
            ["loop", "outcome"],
        )
        self.last_pass_seconds = page.gauge(
            "loop_last_pass_seconds", "How long the last pass of a loop took.", ["loop"]
        )
        self.last_success = page.gauge(
            "loop_last_success_timestamp_seconds",
            "When a loop's pass last succeeded, in Unix time; 0 means not since the start.",
            ["loop"],
        )
        self.restarts = page.counter(
            "loop_restarts_total", "Loops that crashed and were started again.", ["loop"]
        )

    def expect(self, names: Iterable[str]) -> None:
        """Show every loop at 0 before its first pass: an alert can tell none from missing."""
        for name in names:
            for outcome in PASS_OUTCOMES:
                self.passes.labels(name, outcome)
            self.last_pass_seconds.labels(name)
            self.last_success.labels(name)
            self.restarts.labels(name)

    def pass_ended(self, loop: str, outcome: str, seconds: float) -> None:
        self.passes.labels(loop, outcome).inc()
        self.last_pass_seconds.labels(loop).set(seconds)
        if outcome == "ok":
            self.last_success.labels(loop).set_to_current_time()

    def loop_restarted(self, loop: str) -> None:
        self.restarts.labels(loop).inc()


class SweepMetrics:
    """What the sweeps have done."""

    def __init__(self, page: _Page) -> None:
        self.uploads = page.counter(
            "pending_uploads_swept_total",
            "Uploads deleted by the sweep, and passes of it that failed.",
            ["outcome"],
        )
        for outcome in SWEEP_OUTCOMES:
            self.uploads.labels(outcome)
        self.bytes_given_back = page.counter(
            "space_given_back_bytes_total",
            "Bytes that sweeps gave back to the filesystem by dropping leaves.",
        )
        self.bytes_moved = page.counter(
            "space_moved_bytes_total",
            "Bytes that sweeps wrote again, to move files out of what they drop.",
        )
        self.steps_postponed = page.counter(
            "sweep_steps_postponed_total",
            "Steps of a sweep that found somebody in their way and were left for the next pass.",
        )
        self.phantom_busy_resets = page.counter(
            "phantom_busy_resets_total",
            "Workspaces whose tasks were reset because they were silent.",
        )

    def swept(self, acked: int, expired: int) -> None:
        self.uploads.labels("acked").inc(acked)
        self.uploads.labels("expired").inc(expired)

    def gave_back(self, dropped: int, moved: int) -> None:
        self.bytes_given_back.inc(dropped)
        self.bytes_moved.inc(moved)

    def postponed(self, steps: int) -> None:
        self.steps_postponed.inc(steps)

    def sweep_failed(self) -> None:
        self.uploads.labels("error").inc()


class SpaceMetrics:
    """What the tables take, and how deliveries stand."""

    def __init__(self, page: _Page) -> None:
        self.bytes = page.gauge(
            "space_bytes", "What each table takes on disk, with its leaves.", ["table"]
        )
        self.live_bytes = page.gauge(
            "space_live_bytes", "Bytes of files that wait or can be reopened."
        )
        self.dead_bytes = page.gauge(
            "space_dead_bytes", "What the chunks take beyond the files that live."
        )
        self.growth = page.gauge(
            "space_growth_bytes_per_day", "How fast the tables grow; NaN until that is known."
        )
        self.days_until_full = page.gauge(
            "space_days_until_full",
            "When the disk is full at this growth; NaN if not known, or never.",
        )
        self.leaf_lead_seconds = page.gauge(
            "leaf_lead_seconds", "How far ahead of the clock a table has leaves.", ["table"]
        )
        for table in PARTITIONED_TABLES:
            self.leaf_lead_seconds.labels(table)
        self.pins = page.gauge(
            "space_pins", "Open transactions and replication slots that hold space back."
        )
        self.uploads = page.gauge("uploads", "Uploads by how far they got.", ["state"])
        for state in UPLOAD_STATES:
            self.uploads.labels(state)
        self.workspaces_active = page.gauge(
            "workspaces_active", "Workspaces that were registered and not removed."
        )

    def saw(self, space: Space) -> None:
        for table in space.tables:
            self.bytes.labels(table.name).set(table.bytes)
        self.live_bytes.set(space.live_bytes)
        self.dead_bytes.set(space.dead_bytes)
        self.growth.set(_or_nan(space.growth_bytes_per_day))
        self.days_until_full.set(_or_nan(space.days_until_full))
        self.pins.set(len(space.pins))
        for state in UPLOAD_STATES:
            self.uploads.labels(state).set(getattr(space.states, state))
        self.workspaces_active.set(space.workspaces_active)

    def saw_lead(self, seconds_by_table: Mapping[str, float]) -> None:
        for table, seconds in seconds_by_table.items():
            self.leaf_lead_seconds.labels(table).set(seconds)


class WorkspaceMetrics:
    """The workspaces with most to deliver."""

    def __init__(self, page: _Page) -> None:
        self.uploads = page.gauge(
            "workspace_uploads",
            "The same for the workspaces with most bytes waiting.",
            ["workspace", "state"],
        )
        self.lag = page.gauge(
            "workspace_feed_lag_rows",
            "Rows not handled yet, for the workspaces furthest behind.",
            ["workspace"],
        )

    def saw(self, space: Space) -> None:
        """Workspaces that are no longer among the first are forgotten, so that labels stay few."""
        self.uploads.clear()
        for one in space.workspaces:
            for state in UPLOAD_STATES:
                count = getattr(one.states, state)
                self.uploads.labels(str(one.workspace_id), state).set(count)
        self.lag.clear()
        for lag in space.lags:
            self.lag.labels(str(lag.workspace_id)).set(lag.behind)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
