"""What retention, caps and dormant cleanup would remove from the op log."""

from datetime import datetime

from msgspec import Struct


class PlannedRemoval(Struct, frozen=True, kw_only=True):
    """Ops of one table that go for the same reason."""

    cause: str  # retention, cap_age, cap_bytes, dormant or empty
    partitions: int
    rows: int  # as Postgres estimates them
    bytes: int
    evicts: list[str]  # the peers that have not read them


class Holder(Struct, frozen=True, kw_only=True):
    """Who keeps ops that are due, and what they take."""

    who: str
    # behind, margin, missing, unreadable, implausible, pinned, taking_snapshot, spared, locked,
    # default_partition
    reason: str
    why: str
    since: datetime | None
    bytes: int


class PlannedTable(Struct, frozen=True, kw_only=True):
    """The plan for the log of one table."""

    name: str
    bytes: int
    retention_days: float | None  # None: for ever
    cap_days: float | None
    cap_bytes: int | None
    floor: str  # the largest ULID that was ever dropped; empty: none
    floor_at: datetime | None
    cut_off: datetime | None  # what arrived before it may go; None: nothing
    last_op_at: datetime | None
    is_dormant: bool
    removals: list[PlannedRemoval]
    holders: list[Holder]
    dropped_ops: int  # so far
    dropped_bytes: int
    dropped_at: datetime | None


class PeerMark(Struct, frozen=True, kw_only=True):
    """How far a peer and we have read each other, and what that keeps."""

    host: str
    standing: str  # readable, missing, unreadable, implausible, evicted or away
    passed: str
    behind_since: datetime | None  # when the first op arrived that it has not passed
    seen_at: datetime | None
    evicted_at: datetime | None
    held_bytes: int  # what would be due without it


class OplogPlan(Struct, frozen=True, kw_only=True):
    """What a sweep would do to the op log now."""

    tables: list[PlannedTable]
    peers: list[PeerMark]
    bytes_to_come_back: int
