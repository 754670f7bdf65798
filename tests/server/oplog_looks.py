"""What looks at the op log find, for tests of its metrics and of its status page."""

from datetime import UTC, datetime, timedelta

from restante.wire.oplog_plan import Holder, OplogPlan, PeerMark, PlannedRemoval, PlannedTable
from restante.wire.oplog_status import (
    Eviction,
    HorizonHolder,
    Lag,
    LogTable,
    OplogStatus,
    PeerStatus,
)

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
    evicted_at=NOW - timedelta(hours=2),
    evictions=2,
    eviction=Eviction(table="pages", cause="cap_bytes", ops=1000, bytes=5_000_000),
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
            dropped_ops=700,
            dropped_bytes=70_000,
            dormant_ops=30,
        )
    ],
    peers=[PEER],
    snapshots=[],
    parked={"future": 3},
    conflicts=0,
    conflicts_since=None,
    horizon=HorizonHolder(pid=1, who="x", state="active", seconds=12.0, query_started_at=None),
)
PLAN = OplogPlan(
    tables=[
        PlannedTable(
            name="pages",
            bytes=9_000_000,
            retention_days=7.0,
            cap_days=None,
            cap_bytes=None,
            floor="",
            floor_at=None,
            cut_off=NOW - timedelta(days=9),
            last_op_at=NOW,
            is_dormant=True,
            removals=[
                PlannedRemoval(cause="retention", partitions=1, rows=10, bytes=1_000_000, evicts=[])
            ],
            holders=[
                Holder(
                    who=PEER.host,
                    reason="behind",
                    why="has not read it",
                    since=NOW - timedelta(days=9),
                    bytes=6_000_000,
                )
            ],
            dropped_ops=700,
            dropped_bytes=70_000,
            dropped_at=NOW,
        )
    ],
    peers=[
        PeerMark(
            host=PEER.host,
            standing="readable",
            passed="x",
            behind_since=NOW - timedelta(days=9),
            seen_at=NOW,
            evicted_at=None,
            held_bytes=6_000_000,
        )
    ],
    bytes_to_come_back=1_000_000,
)
