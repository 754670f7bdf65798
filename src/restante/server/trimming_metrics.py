"""
The metrics of what bounds the op log: retention, caps, dormant cleanup, and who stands in the way.

What was dropped is counted in the database, because any server may sweep: each of them shows the
same totals.  What a sweep had to leave is counted by each server.
"""

import math
from collections.abc import Iterator, Mapping
from datetime import datetime

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from restante.oplog.trimming.gate import Standing
from restante.retention.rules import days_until_full
from restante.server.metric_page import Page
from restante.wire import SpaceView
from restante.wire.oplog_plan import OplogPlan
from restante.wire.oplog_status import OplogStatus

_LOG = "ops"
_DAY_SECONDS = 86_400
_DROPPED = {
    "dropped_ops": "Ops that were dropped, about.",
    "dropped_bytes": "The bytes of those ops on disk.",
    "dormant_ops": "Ops that were dropped because their table was dormant.",
}
_EVICTIONS = "evictions"
_STANDINGS = tuple(Standing)
_REASONS = (
    "behind",
    "margin",
    "missing",
    "unreadable",
    "implausible",
    "pinned",
    "taking_snapshot",
    "spared",
    "locked",
    "default_partition",
)


class Dropped(Collector):
    """Counters as the database has them."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._by_table: dict[str, dict[str, int]] = {name: {} for name in _DROPPED}
        self._evictions: dict[str, int] = {}

    def saw(self, found: OplogStatus) -> None:
        for name in _DROPPED:
            self._by_table[name] = {table.name: getattr(table, name) for table in found.tables}
        self._evictions = {peer.host: peer.evictions for peer in found.peers}

    def collect(self) -> Iterator[Metric]:
        """What the page shows; called in a thread."""
        for name, meaning in _DROPPED.items():
            yield self._family(name, meaning, "table", self._by_table[name])
        meaning = "Times that ops were dropped although the peer had not read them."
        yield self._family(_EVICTIONS, meaning, "peer", self._evictions)

    def _family(self, name: str, meaning: str, label: str, totals: Mapping[str, int]) -> Metric:
        found = CounterMetricFamily(f"{self._namespace}_oplog_{name}", meaning, labels=[label])
        for value, total in totals.items():
            found.add_metric([value], total)
        return found


class TrimmingMetrics:
    """How far the log reaches back, and because of whom."""

    def __init__(self, for_all: Page, for_operator: Page) -> None:
        self.skipped = for_all.counter(
            "oplog_trim_skipped_total",
            "Partitions of the log that a sweep had to leave although they were due, by reason.",
            ["reason"],
        )
        for reason in _REASONS:
            self.skipped.labels(reason)
        self.growth = for_all.gauge(
            "oplog_growth_bytes_per_day", "How fast the log grows; NaN until that is known."
        )
        self.seconds_until_full = for_all.gauge(
            "oplog_seconds_until_full",
            "When the disk is full at the growth of the log alone; NaN if not known, or never.",
        )
        self.due_bytes = for_all.gauge("oplog_due_bytes", "What the next sweep drops of the log.")
        self.dormant_tables = for_all.gauge(
            "oplog_dormant_tables", "Tables without an op for longer than the threshold."
        )
        self.standings = for_all.gauge(
            "oplog_peer_marks", "Peers by what their mark is worth to the retention.", ["standing"]
        )
        for standing in _STANDINGS:
            self.standings.labels(standing)
        self.dropped = Dropped(for_operator.namespace)
        for_operator.registry.register(self.dropped)
        self.cut_off_age = for_operator.gauge(
            "oplog_floor_age_seconds",
            "The age from which on ops of a table may go; NaN: none may.",
            ["table"],
        )
        self.floor_lag = for_operator.gauge(
            "oplog_floor_lag_seconds",
            "The age of the oldest op that a peer and this node have not both passed; 0: none.",
            ["peer"],
        )
        self.pinned_bytes = for_operator.gauge(
            "oplog_pinned_bytes", "What is due and stays because of this peer.", ["peer"]
        )

    def saw_skipped(self, reasons: Mapping[str, int]) -> None:
        """What sweeps had to leave since the last look."""
        for reason, count in reasons.items():
            self.skipped.labels(reason).inc(count)

    def saw_plan(self, found: OplogPlan, *, now: datetime) -> None:
        """Set everything to what a plan says; tables and peers that were removed disappear."""
        self.due_bytes.set(found.bytes_to_come_back)
        self.dormant_tables.set(sum(table.is_dormant for table in found.tables))
        standings = [peer.standing for peer in found.peers]
        for standing in _STANDINGS:
            self.standings.labels(standing).set(standings.count(standing))
        for gauge in (self.cut_off_age, self.floor_lag, self.pinned_bytes):
            gauge.clear()
        for table in found.tables:
            self.cut_off_age.labels(table.name).set(_age(table.cut_off, now, otherwise=math.nan))
        for peer in found.peers:
            self.floor_lag.labels(peer.host).set(_age(peer.behind_since, now, otherwise=0.0))
            self.pinned_bytes.labels(peer.host).set(peer.held_bytes)

    def saw_space(self, space: SpaceView) -> None:
        """How fast the log grows, and what that means for the disk."""
        growth = next(
            (table.growth_bytes_per_day for table in space.tables if table.name == _LOG), None
        )
        self.growth.set(_or_nan(growth))
        days = days_until_full(space.free_bytes, growth)
        self.seconds_until_full.set(_or_nan(days) * _DAY_SECONDS)


def _age(moment: datetime | None, now: datetime, *, otherwise: float) -> float:
    return otherwise if moment is None else max((now - moment).total_seconds(), 0.0)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
