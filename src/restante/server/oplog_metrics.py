"""
The metrics of the op log.

Totals by peer are kept in the database, because several servers may pull: each of them shows the
same ones.  What is counted by reason is counted by each server.
"""

import math
from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from restante.database.driver_errors import RECORD_FAULTS
from restante.oplog.applying.boundary import Refusal
from restante.oplog.rules import Verdict
from restante.server.metric_page import Page
from restante.wire.oplog_status import Lag, OplogStatus

# By the field of the peer's status.
_OF_STATUS = {
    "applied": "Changed records of a peer that were applied.",
    "superseded": "Changed records of a peer that were older than what this node has.",
    "conflicts": "Changes that lost against one they had not seen, found when reading this peer.",
    "gaps": "Times that a peer had deleted ops before this node read them.",
}
_DROPPED = "outbox_dropped"
_TOTALS = _OF_STATUS | {_DROPPED: "Ops that were not pushed because the outbox was full."}
_PARKED_REASONS = (*RECORD_FAULTS, Verdict.PARK_FUTURE, Verdict.PARK_FLOOR)
_TABLE_STATES = ("tracked", "paused", "missing")
_IN, _OUT = "in", "out"


class Totals(Collector):
    """Counters by peer, as the database has them."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._values: dict[str, dict[str, float]] = {name: {} for name in _TOTALS}

    def saw(self, name: str, by_peer: Mapping[str, float]) -> None:
        self._values[name] = dict(by_peer)

    def collect(self) -> Iterator[Metric]:
        """What the page shows; called in a thread."""
        for name, meaning in _TOTALS.items():
            found = CounterMetricFamily(f"{self._namespace}_oplog_{name}", meaning, labels=["peer"])
            for peer, total in self._values[name].items():
                found.add_metric([peer], total)
            yield found


class OplogMetrics:
    """What the log gets, what becomes of it, and how far it is behind."""

    def __init__(self, for_all: Page, for_operator: Page) -> None:
        self.appended = for_all.counter(
            "oplog_appended_total", "Records written to the log, by all writers of the database."
        )
        self.refused = for_all.counter(
            "oplog_refused_total", "Records of peers that were refused, by reason.", ["reason"]
        )
        for reason in Refusal:
            self.refused.labels(reason)
        self.parked = for_all.gauge(
            "oplog_parked", "Records of peers that wait because they cannot be applied.", ["reason"]
        )
        for reason in _PARKED_REASONS:
            self.parked.labels(reason)
        self.tables = for_all.gauge("oplog_tables", "Tracked tables by state.", ["state"])
        for state in _TABLE_STATES:
            self.tables.labels(state)
        self.horizon_delay = for_all.gauge(
            "oplog_horizon_delay_seconds",
            "Age of the oldest transaction that writes; younger changes are served when it ends.",
        )
        self.clock_ahead = for_all.gauge(
            "oplog_clock_ahead_seconds", "How far the clock of the log is ahead of the wall clock."
        )
        self.snapshots = for_all.gauge(
            "oplog_snapshots", "Tables whose snapshot is being taken from a peer."
        )
        self.snapshot_records = for_all.gauge(
            "oplog_snapshot_records", "Records that those snapshots have taken so far."
        )
        self._dropped: dict[str, int] = {}
        self.totals = Totals(for_operator.namespace)
        for_operator.registry.register(self.totals)
        self.lag_ops = for_operator.gauge(
            "oplog_lag_ops",
            "Records not read yet: in, by this node; out, by the peer; at most 10000.",
            ["peer", "direction"],
        )
        self.lag_bytes = for_operator.gauge(
            "oplog_lag_bytes", "The bytes of those records.", ["peer", "direction"]
        )
        self.lag_seconds = for_operator.gauge(
            "oplog_lag_seconds", "The age of the oldest of those records.", ["peer", "direction"]
        )
        self.skew = for_operator.gauge(
            "oplog_clock_skew_seconds", "How far a peer's clock is ahead of ours.", ["peer"]
        )
        self.failing = for_operator.gauge(
            "oplog_peer_failing_seconds",
            "How long pulls from a peer have failed; 0: not.",
            ["peer"],
        )
        self.differences = for_operator.gauge(
            "oplog_schema_differences", "Columns that differ from a peer's.", ["peer"]
        )

    def saw_counts(
        self, *, appended: int, refused: Mapping[str, int], outbox_dropped: Mapping[str, int]
    ) -> None:
        """What was appended and refused since the last look, and dropped since the start."""
        self.appended.inc(appended)
        for reason, count in refused.items():
            self.refused.labels(reason).inc(count)
        self._dropped = dict(outbox_dropped)

    def saw(self, found: OplogStatus, *, now_seconds: float) -> None:
        """Set everything to what a look found; peers that were removed disappear."""
        self._saw_node(found)
        for name in _OF_STATUS:
            self.totals.saw(name, {peer.host: getattr(peer, name) for peer in found.peers})
        hosts = [peer.host for peer in found.peers]
        self.totals.saw(_DROPPED, {host: self._dropped.get(host, 0) for host in hosts})
        for gauge in (self.lag_ops, self.lag_bytes, self.lag_seconds, self.skew, self.failing):
            gauge.clear()
        self.differences.clear()
        for peer in found.peers:
            self._saw_lag(peer.host, _IN, peer.behind)
            self._saw_lag(peer.host, _OUT, peer.waiting)
            self.skew.labels(peer.host).set(_or_nan(peer.skew_seconds))
            since = peer.failing_since
            failing = now_seconds - since.timestamp() if since else 0
            self.failing.labels(peer.host).set(max(failing, 0))
            self.differences.labels(peer.host).set(len(peer.schema_differences))

    def _saw_node(self, found: OplogStatus) -> None:
        for reason in _PARKED_REASONS:
            self.parked.labels(reason).set(found.parked.get(reason, 0))
        states = [table.state for table in found.tables]
        for state in _TABLE_STATES:
            self.tables.labels(state).set(states.count(state))
        self.horizon_delay.set(found.horizon.seconds if found.horizon else 0)
        self.clock_ahead.set(found.clock_ahead_seconds)
        self.snapshots.set(len(found.snapshots))
        self.snapshot_records.set(sum(one.records for one in found.snapshots))

    def _saw_lag(self, peer: str, direction: str, lag: Lag | None) -> None:
        self.lag_ops.labels(peer, direction).set(_or_nan(lag and lag.ops))
        self.lag_bytes.labels(peer, direction).set(_or_nan(lag and lag.bytes))
        self.lag_seconds.labels(peer, direction).set(_or_nan(lag and lag.seconds))


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
