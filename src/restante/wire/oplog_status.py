"""What the status of the op log shows."""

from datetime import datetime

from msgspec import Struct

from restante.wire.oplog_plan import OplogPlan


class Lag(Struct, frozen=True):
    """What of a log has not been read yet."""

    ops: int = 0  # changed records
    bytes: int = 0
    seconds: float = 0.0  # the age of the oldest
    is_more: bool = False  # there are more; counting stopped


class LogTable(Struct, frozen=True, kw_only=True):
    """A tracked table and its part of the log."""

    name: str
    state: str  # tracked, paused or missing
    ops: int  # as Postgres estimates them
    bytes: int
    floor: str  # the largest ULID that was ever dropped; empty: none
    floor_at: datetime | None
    partitions: int
    ahead_seconds: float | None  # how far ahead of the clock it has partitions
    dropped_ops: int = 0  # since it is tracked
    dropped_bytes: int = 0
    dropped_at: datetime | None = None
    dormant_ops: int = 0  # of those dropped, because the table was dormant


class Eviction(Struct, frozen=True, kw_only=True):
    """What was dropped although a peer had not read it."""

    table: str
    cause: (
        str  # cap_age, cap_bytes, retention or dormant: for the last two it was away for too long
    )
    ops: int  # about
    bytes: int


class PeerStatus(Struct, frozen=True, kw_only=True):
    """A peer, in both directions."""

    host: str
    protocol: str | None
    # What we read from it.
    cursor: str
    cursor_problem: str | None
    pulled_at: datetime | None
    failing_since: datetime | None
    failure: str | None
    behind: Lag | None  # None: it cannot tell, or was not asked yet
    skew_seconds: float | None
    applied: int
    superseded: int
    parked: int
    refused: int
    refused_by: dict[str, int] = {}  # by reason, but for those of snapshots
    conflicts: int
    gaps: int
    # What it reads from us.
    confirmed: str
    confirmed_at: datetime | None
    waiting: Lag
    schema_differences: list[str]
    evict_after_days: float | None = None
    evicted_at: datetime | None = None  # since then ops go although it has not read them
    evictions: int = 0
    eviction: Eviction | None = None  # the last one


class HorizonHolder(Struct, frozen=True, kw_only=True):
    """The oldest transaction that writes; what commits after it began is served when it ends."""

    pid: int | None  # None: a prepared transaction
    who: str
    state: str
    seconds: float
    query_started_at: datetime | None
    prepared: str | None = None


class SnapshotStatus(Struct, frozen=True, kw_only=True):
    """A snapshot that is being taken from a peer."""

    peer: str
    table: str
    phase: str
    records: int
    started_at: datetime
    progressed_at: datetime


class Kept(Struct, frozen=True, kw_only=True):
    """What is kept beside the log; each of them is bounded.  Counting stops at 100,000."""

    parked: int  # changes of peers that could not be applied
    parked_bytes: int
    conflicts: int
    snapshots_taken: int  # by us, and not complete yet
    snapshots_served: int
    unsettled_deletes: int  # that wait for the end of a transaction
    hosts: int  # that have made changes


class OplogStatus(Struct, frozen=True, kw_only=True):
    """The op log of this node."""

    host: str
    clock_ahead_seconds: float  # how far the hybrid clock is ahead of the wall clock
    tables: list[LogTable]
    peers: list[PeerStatus]
    snapshots: list[SnapshotStatus]
    parked: dict[str, int]  # by reason
    conflicts: int
    conflicts_since: datetime | None  # of the oldest that is kept
    horizon: HorizonHolder | None
    kept: Kept | None = None
    plan: OplogPlan | None = None  # what retention and caps would do now, and who keeps what is due
