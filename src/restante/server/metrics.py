"""Every metric, with its labels and its help text.  All label values start at 0."""

import math
import platform
from collections import Counter as Counts, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from restante import __version__
from restante.retention.disk import DiskState
from restante.retention.subjects import Subjects
from restante.server.metric_page import Page
from restante.server.oplog_metrics import OplogMetrics
from restante.server.trimming_metrics import TrimmingMetrics
from restante.wire import SpaceView, UploadStates

PASS_OUTCOMES = ("ok", "error", "deadline")
SWEEP_OUTCOMES = ("acked", "expired", "error")
CONNECTION_REFUSALS = ("total", "address", "workspace")
CUT_OFFS = ("slow_reader", "slow_request", "long_request", "noisy_watcher")
UPLOAD_STATES = UploadStates.__struct_fields__
CONTENT_TYPE = CONTENT_TYPE_LATEST

_OF_REQUESTS = ("method", "path", "status")
_DAY_SECONDS = 86_400


class Metrics:
    """The counters of one process, by subject."""

    def __init__(self, namespace: str, subjects: Subjects) -> None:
        self._for_all = for_all = Page(namespace)
        self._for_operator = for_operator = Page(namespace)
        self.registry, self.operator_registry = for_all.registry, for_operator.registry
        ProcessCollector(registry=for_all.registry)
        _build_info(for_all.registry)
        self.requests = RequestMetrics(for_all)
        self.connections = ConnectionMetrics(for_all)
        self.listening_silent_seconds = for_all.gauge(
            "listening_silent_seconds",
            "Time since the connection for notifications of other servers last showed life.",
        )
        self.loops = LoopMetrics(for_all)
        self.sweep = SweepMetrics(for_all, subjects)
        self.space = SpaceMetrics(for_all, subjects)
        self.disk = DiskMetrics(for_all)
        # These name workspaces and peers, so only the operator sees them.
        self.workspaces = WorkspaceMetrics(for_operator)
        self.oplog = OplogMetrics(for_all, for_operator)
        self.trimming = TrimmingMetrics(for_all, for_operator)

    def saw_space(self, space: SpaceView) -> None:
        """Set the gauges to what a look at the tables found."""
        self.space.saw(space)
        self.workspaces.saw(space)
        self.trimming.saw_space(space)

    async def page(self, *, for_operator: bool = False) -> bytes:
        """All metrics as Prometheus text; those that name others for the operator only."""
        ours = await self._for_all.text()
        return ours + await self._for_operator.text() if for_operator else ours


class RequestMetrics:
    """HTTP requests and open connections."""

    def __init__(self, page: Page) -> None:
        self._count = page.counter(
            "http_requests_total",
            "Requests answered, by route pattern and status.",
            _OF_REQUESTS,
        )
        self._seconds_total = SecondsTotal(f"{page.namespace}_http_request_duration_seconds_total")
        page.registry.register(self._seconds_total)
        self._seconds = page.histogram(
            "http_request_duration_seconds",
            "Time from a request's first byte to the answer's last.",
            ["method", "path"],
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30, 120),
        )
        self.turn_wait_seconds = page.histogram(
            "turn_wait_seconds",
            "Time that requests wait for their first turn on the event loop.",
            [],
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5),
        )
        self.refusals_delayed = page.counter(
            "refusals_delayed_total", "Refusals that were held back, for callers that get many."
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
            self._count.labels(method, path, status)
            self._seconds_total.add(0, method, path, str(status))
        self._seconds.labels(method, path)

    def answered(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count a request, whose answer is complete or will never be."""
        self._count.labels(method, path, status).inc()
        self._seconds_total.add(seconds, method, path, str(status))
        self._seconds.labels(method, path).observe(seconds)


class SecondsTotal(Collector):
    """
    The sum of the durations, under a name that existing dashboards use.

    A `Counter` of this name could not be beside the histogram: without `_total` they have the same
    one.  In the text format the two are different metrics.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._seconds = defaultdict[tuple[str, ...], float](float)

    def add(self, seconds: float, *labels: str) -> None:
        self._seconds[labels] += seconds

    def collect(self) -> Iterator[Metric]:
        """What the page shows; called in a thread."""
        found = CounterMetricFamily(
            self._name, "Time that requests took, by route pattern and status.", labels=_OF_REQUESTS
        )
        for labels, seconds in list(self._seconds.items()):
            found.add_metric(labels, seconds)
        yield found


class ConnectionMetrics:
    """Open connections, and those that were refused or cut off."""

    def __init__(self, page: Page) -> None:
        self.open = page.gauge("connections_open", "Connections that are open now.")
        self.limit = page.gauge("connections_limit", "How many connections may be open.")
        self.refused = page.counter(
            "connections_refused_total",
            "Connections and requests refused because too many were open, by limit.",
            ["limit"],
        )
        for limit in CONNECTION_REFUSALS:
            self.refused.labels(limit)
        self.cut_off = page.counter(
            "connections_cut_off_total",
            "Connections that the server ended because of what the client did, by reason.",
            ["reason"],
        )
        for reason in CUT_OFFS:
            self.cut_off.labels(reason)


class LoopMetrics:
    """Background passes."""

    def __init__(self, page: Page) -> None:
        self.passes = page.counter(
            "loop_passes_total",
            "Background passes by outcome.",
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
    """What sweeps have done."""

    def __init__(self, page: Page, subjects: Subjects) -> None:
        self.rows = page.counter(
            "retention_deleted_rows_total",
            "Rows deleted because they were due, by kind; acked and expired are uploads.",
            ["kind"],
        )
        for outcome in subjects.outcomes:
            self.rows.labels(outcome)
        self.uploads = page.counter(
            "pending_uploads_swept_total",
            "Uploads deleted by the sweep, and failed passes.",
            ["outcome"],
        )
        for outcome in SWEEP_OUTCOMES:
            self.uploads.labels(outcome)
        self.bytes_given_back = page.counter(
            "space_given_back_bytes_total",
            "Bytes given back to the filesystem by dropping partitions.",
        )
        self.bytes_moved = page.counter(
            "space_moved_bytes_total",
            "Bytes rewritten by sweeps, to move files out of buckets that they drop.",
        )
        self.steps_postponed = page.counter(
            "sweep_steps_postponed_total",
            "Steps of a sweep that were left for the next pass, most often because of a lock.",
        )
        self.phantom_busy_resets = page.counter(
            "phantom_busy_resets_total",
            "Workspaces whose tasks were reset because they were silent.",
        )

    def deleted(self, rows: Counts[str]) -> None:
        for kind, count in rows.items():
            self.rows.labels(kind).inc(count)
        self.uploads.labels("acked").inc(rows["acked"])
        self.uploads.labels("expired").inc(rows["expired"])

    def gave_back(self, dropped: int, moved: int) -> None:
        self.bytes_given_back.inc(dropped)
        self.bytes_moved.inc(moved)

    def postponed(self, steps: int) -> None:
        self.steps_postponed.inc(steps)

    def sweep_failed(self) -> None:
        self.uploads.labels("error").inc()


class SpaceMetrics:
    """The size of the tables, and the state of deliveries."""

    def __init__(self, page: Page, subjects: Subjects) -> None:
        self.bytes = page.gauge(
            "space_bytes", "Bytes of each table on disk, partitions included.", ["table"]
        )
        self.live_bytes = page.gauge("space_live_bytes", "Bytes of uploads that are not swept yet.")
        self.dead_bytes = page.gauge(
            "space_dead_bytes", "Bytes of chunks that belong to no upload any more."
        )
        self.growth = page.gauge(
            "space_growth_bytes_per_day", "How fast the tables grow; NaN until that is known."
        )
        self.seconds_until_full = page.gauge(
            "space_seconds_until_full",
            "When the disk is full at this growth; NaN if not known, or never.",
        )
        self.leaf_lead_seconds = page.gauge(
            "leaf_lead_seconds", "How far ahead of the clock a table has partitions.", ["table"]
        )
        for table in subjects.partitioned_tables:
            self.leaf_lead_seconds.labels(table.name)
        self.pins = page.gauge(
            "space_pins",
            "Transactions, replication slots, workspaces and feed rows that keep space.",
        )
        self.feed_bytes = page.gauge("feed_bytes", "Bytes of the rows that all feeds keep.")
        self.feed_bytes_limit = page.gauge(
            "feed_bytes_limit", "Messages are refused when all feeds would keep more than this."
        )
        self.uploads = page.gauge("uploads", "Uploads by state.", ["state"])
        for state in UPLOAD_STATES:
            self.uploads.labels(state)
        self.workspaces_active = page.gauge(
            "workspaces_active", "Workspaces that are registered and not removed."
        )

    def saw(self, space: SpaceView) -> None:
        for table in space.tables:
            self.bytes.labels(table.name).set(table.bytes)
        self.live_bytes.set(space.live_bytes)
        self.dead_bytes.set(space.dead_bytes)
        self.growth.set(_or_nan(space.growth_bytes_per_day))
        self.seconds_until_full.set(_or_nan(space.days_until_full) * _DAY_SECONDS)
        self.pins.set(len(space.pins))
        self.feed_bytes.set(space.feed_bytes)
        self.feed_bytes_limit.set(space.max_feed_bytes)
        for state in UPLOAD_STATES:
            self.uploads.labels(state).set(getattr(space.uploads, state))
        self.workspaces_active.set(space.workspaces_active)

    def saw_lead(self, seconds_by_table: Mapping[str, float]) -> None:
        for table, seconds in seconds_by_table.items():
            self.leaf_lead_seconds.labels(table).set(seconds)


class DiskMetrics:
    """The free space of the database's disk, and what is kept back."""

    def __init__(self, page: Page) -> None:
        self.is_low = page.gauge(
            "disk_low", "1 while nothing new is stored because the disk is almost full, else 0."
        )
        self.free = page.gauge(
            "disk_free_bytes", "Free bytes on the database's disk; NaN if it cannot be seen."
        )
        self.reserve = page.gauge(
            "disk_reserve_bytes", "Nothing new is stored when less is free; NaN if not known."
        )
        self.ballast = page.gauge(
            "disk_ballast_bytes", "Bytes that can still be given up on a full disk."
        )
        self.released = page.counter(
            "disk_ballast_released_bytes_total", "Bytes given up because the disk was full."
        )
        self._ballast_before = 0

    def saw(self, disk: DiskState) -> None:
        self.is_low.set(disk.is_low)
        self.free.set(_or_nan(disk.free_bytes))
        self.reserve.set(_or_nan(disk.reserve_bytes))
        self.ballast.set(disk.ballast_bytes)
        self.released.inc(max(self._ballast_before - disk.ballast_bytes, 0))
        self._ballast_before = disk.ballast_bytes


class WorkspaceMetrics:
    """The workspaces with most undelivered bytes and rows."""

    def __init__(self, page: Page) -> None:
        self.uploads = page.gauge(
            "workspace_uploads",
            "Uploads by state, of the workspaces with most unacknowledged bytes.",
            ["workspace", "state"],
        )
        self.written = page.gauge(
            "workspace_written_bytes",
            "Bytes written since they exist, aborted ones too, of the workspaces that wrote most.",
            ["workspace"],
        )
        self.feed_bytes = page.gauge(
            "workspace_feed_bytes",
            "Bytes of the rows that a feed keeps, of the workspaces that wrote most.",
            ["workspace"],
        )
        self.lag = page.gauge(
            "workspace_feed_lag_rows",
            "Unacknowledged feed rows, of the workspaces with most.",
            ["workspace"],
        )

    def saw(self, space: SpaceView) -> None:
        """Labels of workspaces that are no longer among the first are dropped."""
        self.uploads.clear()
        for one in space.workspaces:
            for state in UPLOAD_STATES:
                count = getattr(one.uploads, state)
                self.uploads.labels(str(one.workspace_id), state).set(count)
        self.written.clear()
        self.feed_bytes.clear()
        for writer in space.writers:
            self.written.labels(str(writer.workspace_id)).set(writer.total_bytes)
            self.feed_bytes.labels(str(writer.workspace_id)).set(writer.feed_bytes)
        self.lag.clear()
        for lag in space.lags:
            self.lag.labels(str(lag.workspace_id)).set(lag.behind)


def _build_info(registry: CollectorRegistry) -> None:
    """Its name does not depend on the namespace: it says which program this is."""
    info = Gauge(
        "restante_build_info",
        "Always 1; the labels say which release runs, and on which Python.",
        ["version", "python"],
        registry=registry,
    )
    info.labels(__version__, platform.python_version()).set(1)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
