"""The metrics of the op log: from 0, by peer, and gone with the peer."""

import math
from datetime import UTC, datetime, timedelta

import msgspec
from sweeps import make_subjects

from restante.oplog.applying.boundary import Refusal
from restante.server.metrics import Metrics
from restante.wire.oplog_status import HorizonHolder, Lag, LogTable, OplogStatus, PeerStatus

NOW = datetime(2026, 11, 17, tzinfo=UTC)
PEER = PeerStatus(
    host="https://b.example",
    protocol="restante",
    cursor="",
    cursor_problem=None,
    pulled_at=NOW,
    failing_since=NOW - timedelta(seconds=90),
    failure="It does not answer.",
    behind=Lag(7, 700, 70.0),
    skew_seconds=-3.0,
    applied=5,
    superseded=4,
    parked=3,
    refused=2,
    conflicts=1,
    gaps=6,
    confirmed="",
    confirmed_at=None,
    waiting=Lag(9, 900, 90.0),
    schema_differences=["x"],
)
STATUS = OplogStatus(
    host="https://a.example",
    clock_ahead_seconds=1.5,
    tables=[
        LogTable(
            name="pages",
            state="paused",
            ops=1,
            bytes=1,
            floor="",
            floor_at=None,
            partitions=1,
            ahead_seconds=1.0,
        )
    ],
    peers=[PEER],
    snapshots=[],
    parked={"future": 3},
    conflicts=0,
    conflicts_since=None,
    horizon=HorizonHolder(pid=1, who="x", state="active", seconds=12.0, query_started_at=None),
)


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
