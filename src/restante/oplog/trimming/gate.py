"""
Who needs the ops of a partition: pure decisions about peers.

A peer holds back what it has not read, and what was logged before we had read what it wrote until
then: see `passed` in the table of peers.  Its mark counts only if it is a configured peer that may
see the table.  One without a readable mark holds back everything.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from restante.database.partitions import Partition
from restante.oplog import positions, ulids
from restante.oplog.positions import Position
from restante.oplog.trimming.limits import Policy
from restante.text import printable

_MAX_QUOTED = 60
# The reason of a hold that ends by itself.
MARGIN = "margin"


@dataclass(frozen=True, slots=True)
class Mark:
    """How far one peer and we have read each other's logs."""

    host: str
    passed: str = ""  # as it is stored
    confirmed: str = ""  # what it has read, whatever we have read of it
    tables: frozenset[str] | None = None  # it may see these; None: all
    reached_at: datetime | None = None  # when the first op arrived that it has not passed
    seen_at: datetime | None = None  # when it last read
    added_at: datetime | None = None
    evict_after: timedelta | None = None
    evicted_at: datetime | None = None
    spared_until: datetime | None = None
    failure: str | None = None  # why we cannot read from it


class Standing(StrEnum):
    """What the mark of a peer is worth."""

    READABLE = "readable"
    MISSING = "missing"
    UNREADABLE = "unreadable"
    IMPLAUSIBLE = "implausible"
    EVICTED = "evicted"  # it may not hold anything back
    AWAY = "away"  # it has not been seen for longer than it may be away


@dataclass(frozen=True, slots=True)
class Pin:
    """A snapshot that a peer is taking; it needs everything after its start."""

    host: str
    position: Position


@dataclass(frozen=True, slots=True)
class Piece:
    """A partition, and the last op in it; without one it is empty."""

    partition: Partition
    last: Position | None = None
    first_at: datetime | None = None  # when its first op arrived
    last_at: datetime | None = None

    @property
    def name(self) -> str:
        return self.partition.name

    @property
    def bytes(self) -> int:
        return self.partition.bytes

    @property
    def end(self) -> datetime:
        assert self.partition.span is not None  # noqa: S101 - only attached ones are looked at
        return self.partition.span.end

    @property
    def all_at(self) -> datetime:
        """When all of its ops had arrived."""
        return min(self.end, self.last_at or self.end)

    @property
    def start(self) -> datetime:
        assert self.partition.span is not None  # noqa: S101 - only attached ones are looked at
        return max(self.partition.span.start, self.first_at or self.partition.span.start)


@dataclass(frozen=True, slots=True)
class TableLog:
    """The log of one table, and who is interested in it."""

    name: str
    policy: Policy = field(default_factory=Policy)
    pieces: Sequence[Piece] = ()  # the oldest first; none of the future
    pins: Sequence[Pin] = ()
    taking_from: str | None = None  # from whom we take a snapshot of the table
    obstacle: "Hold | None" = None  # a partition because of which none can go
    last_at: datetime | None = None  # when its last op arrived

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Hold:
    """Who needs the ops of a partition, and why."""

    who: str
    why: str
    reason: str  # one word, for the metrics
    since: datetime | None = None
    is_final: bool = False  # no cap beats it


def standing(mark: Mark, *, now: datetime) -> Standing:
    """What the mark of a peer is worth."""
    if mark.evicted_at is not None:
        return Standing.EVICTED
    if mark.evict_after is not None:
        seen_at = mark.seen_at or mark.added_at
        if seen_at is not None and seen_at + mark.evict_after <= now:
            return Standing.AWAY
    if not mark.passed:
        return Standing.MISSING
    position = positions.parsed(mark.passed)
    if position is None:
        return Standing.UNREADABLE
    return Standing.READABLE if _is_plausible(position, now=now) else Standing.IMPLAUSIBLE


def _is_plausible(position: Position, *, now: datetime) -> bool:
    """An era is the time at which Postgres started here."""
    try:
        began = datetime.fromtimestamp(position.era / 1_000_000, UTC)
    except (OverflowError, OSError, ValueError):
        return False
    return ulids.EARLIEST <= began <= now + ulids.MAX_AHEAD


_WORTHLESS = {
    Standing.MISSING: "has not read the log yet, or we have not read its log",
    Standing.UNREADABLE: "has a mark that is unreadable",
    Standing.IMPLAUSIBLE: "has a mark of an implausible time",
}


def holds(
    log: TableLog, piece: Piece, marks: Iterable[Mark], *, margin: timedelta, now: datetime
) -> list[Hold]:
    """Everybody who needs the ops of a partition."""
    if log.taking_from is not None:
        why = f"a snapshot of {log.name} is being taken from it"
        return [Hold(log.taking_from, why, "taking_snapshot", is_final=True)]
    if log.obstacle is not None:
        return [log.obstacle]
    found = [
        Hold(pin.host, "takes a snapshot of the table", "pinned", is_final=True)
        for pin in log.pins
        if piece.last is not None and piece.last > pin.position
    ]
    for mark in marks:
        if mark.tables is None or log.name in mark.tables:
            found += _held_by(mark, piece, margin=margin, now=now)
    return found


def _held_by(mark: Mark, piece: Piece, *, margin: timedelta, now: datetime) -> list[Hold]:
    worth = standing(mark, now=now)
    is_spared = mark.spared_until is not None and mark.spared_until > now
    if piece.last is None:
        return []
    if worth in {Standing.EVICTED, Standing.AWAY}:
        needs = is_spared and mark.confirmed < str(piece.last)
        return [Hold(mark.host, "has just taken a snapshot", "spared", is_final=True)] * needs
    if why := _WORTHLESS.get(worth):
        if worth is not Standing.MISSING:
            why += f" ({printable(mark.passed, max_length=_MAX_QUOTED)})"
        if mark.failure:
            why += f": {printable(mark.failure)}"
        since = mark.seen_at or mark.added_at
        return [Hold(mark.host, why, worth.value, since, is_final=is_spared)]
    passed = positions.parsed(mark.passed)
    assert passed is not None  # noqa: S101 - it is readable
    reached_at = now if mark.reached_at is None else mark.reached_at
    if piece.last <= passed and piece.all_at <= reached_at - margin:
        return []
    if piece.last <= passed:
        hours = f"{margin / timedelta(hours=1):g} h"
        return [Hold(mark.host, f"has read it for less than {hours}", MARGIN, is_final=is_spared)]
    return [Hold(mark.host, "has not read it", "behind", mark.reached_at, is_final=is_spared)]
