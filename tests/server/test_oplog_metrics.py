"""The metrics of the op log: from 0, by peer, and gone with the peer."""

import math

import msgspec
from server.oplog_looks import NOW, PEER, PLAN, STATUS
from sweeps import make_subjects

from restante.oplog.applying.boundary import Refusal
from restante.server.metrics import Metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    for registry in (metrics.registry, metrics.operator_registry):
        found = registry.get_sample_value(f"molecule_oplog_{name}", labels)
        if found is not None:
            return found
    return None


def test_known_reasons_and_states_are_shown_from_0():
    metrics = Metrics("molecule", make_subjects())

    for reason in Refusal:
        assert value(metrics, "refused_total", reason=reason) == 0
    for reason in ("foreign_key", "unique", "type", "future", "below_floor"):
        assert value(metrics, "parked", reason=reason) == 0
    for state in ("tracked", "paused", "missing"):
        assert value(metrics, "tables", state=state) == 0
    assert value(metrics, "appended_total") == 0


def test_a_look_sets_everything_and_only_the_operator_sees_peers():
    metrics = Metrics("molecule", make_subjects())

    metrics.oplog.saw_counts(
        appended=11, refused={"table": 2}, outbox_dropped={PEER.host: 8, "https://gone": 1}
    )
    metrics.oplog.saw(STATUS, now_seconds=NOW.timestamp())

    peer = {"peer": PEER.host}
    assert value(metrics, "appended_total") == 11
    assert value(metrics, "refused_total", reason="table") == 2
    assert value(metrics, "parked", reason="future") == 3
    assert value(metrics, "tables", state="paused") == 1
    assert value(metrics, "horizon_delay_seconds") == 12
    assert value(metrics, "clock_ahead_seconds") == 1.5
    assert [
        value(metrics, f"{name}_total", **peer)
        for name in ("applied", "superseded", "conflicts", "gaps", "outbox_dropped")
    ] == [5, 4, 1, 6, 8]
    assert value(metrics, "lag_ops", direction="in", **peer) == 7
    assert value(metrics, "lag_bytes", direction="out", **peer) == 900
    assert value(metrics, "lag_seconds", direction="out", **peer) == 90
    assert value(metrics, "clock_skew_seconds", **peer) == -3
    assert value(metrics, "peer_failing_seconds", **peer) == 90
    assert value(metrics, "schema_differences", **peer) == 1
    assert (
        metrics.registry.get_sample_value("molecule_oplog_lag_ops", peer | {"direction": "in"})
        is None
    )


def test_a_removed_peer_disappears_and_an_unknown_lag_is_not_0():
    metrics = Metrics("molecule", make_subjects())
    unknown = msgspec.structs.replace(PEER, behind=None)

    metrics.oplog.saw(msgspec.structs.replace(STATUS, peers=[unknown]), now_seconds=0)
    lag = value(metrics, "lag_ops", direction="in", peer=PEER.host)
    metrics.oplog.saw(msgspec.structs.replace(STATUS, peers=[]), now_seconds=0)

    assert lag is not None
    assert math.isnan(lag)
    for name in ("lag_ops", "lag_bytes", "lag_seconds"):
        assert value(metrics, name, direction="out", peer=PEER.host) is None
    assert value(metrics, "applied_total", peer=PEER.host) is None


def test_reasons_and_standings_of_the_retention_are_shown_from_0():
    metrics = Metrics("molecule", make_subjects())

    for reason in ("behind", "missing", "unreadable", "implausible", "pinned", "taking_snapshot"):
        assert value(metrics, "trim_skipped_total", reason=reason) == 0
    for standing in ("readable", "missing", "evicted", "away"):
        assert value(metrics, "peer_marks", standing=standing) == 0


def test_a_plan_says_how_old_the_log_is_and_who_keeps_it():
    metrics = Metrics("molecule", make_subjects())

    metrics.trimming.saw_plan(PLAN, now=NOW)
    metrics.trimming.saw_skipped({"behind": 3})

    peer, table = {"peer": PEER.host}, {"table": "pages"}
    assert value(metrics, "floor_age_seconds", **table) == 9 * 86400
    assert value(metrics, "floor_lag_seconds", **peer) == 9 * 86400
    assert value(metrics, "pinned_bytes", **peer) == 6_000_000
    assert value(metrics, "peer_marks", standing="readable") == 1
    assert value(metrics, "due_bytes") == 1_000_000
    assert value(metrics, "dormant_tables") == 1
    assert value(metrics, "trim_skipped_total", reason="behind") == 3


def test_a_peer_that_is_removed_pins_nothing_any_more():
    metrics = Metrics("molecule", make_subjects())

    metrics.trimming.saw_plan(PLAN, now=NOW)
    metrics.trimming.saw_plan(msgspec.structs.replace(PLAN, peers=[], tables=[]), now=NOW)

    assert value(metrics, "pinned_bytes", peer=PEER.host) is None
    assert value(metrics, "floor_lag_seconds", peer=PEER.host) is None
    assert value(metrics, "floor_age_seconds", table="pages") is None


def test_what_was_dropped_is_counted_by_table_and_evictions_by_peer():
    metrics = Metrics("molecule", make_subjects())

    metrics.trimming.dropped.saw(STATUS)

    assert value(metrics, "dropped_ops_total", table="pages") == 700
    assert value(metrics, "dropped_bytes_total", table="pages") == 70_000
    assert value(metrics, "dormant_ops_total", table="pages") == 30
    assert value(metrics, "evictions_total", peer=PEER.host) == 2
