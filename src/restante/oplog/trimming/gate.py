"""
Which ops may go: pure decisions about the partitions of the log.

A peer holds back what it has not read, and what was logged before we had read what it wrote until
then: see `passed` in the table of peers.  Its mark counts only if it is a configured peer that may
see the table.  One without a readable mark holds back everything.  A cap, or a peer's absence for
longer than it may be away, beats the gate: then the peer is evicted, and takes a snapshot when it
comes back.  Nothing beats a snapshot that is being taken.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from restante.database.partitions import Partition
from restante.oplog import positions, ulids
from restante.oplog.positions import Position
from restante.text import printable

# A partition of which less than this is due is left until all of it is.
_LEAST_DUE = 0.5
# Smaller partitions are not worth being rewritten.
_LEAST_CUT_BYTES = 1024 * 1024
# So much of a partition is written anew at most; that takes seconds.
MOST_REWRITTEN_BYTES = 256 * 1024 * 1024
_MAX_QUOTED = 60
# Few enough to read the log fast, many enough to trim it finely.
_PARTITIONS_KEPT = 7
# An empty partition is dropped when its range has ended for so long.
_EMPTY_KEPT = timedelta(hours=1)
_NEVER = datetime(1, 1, 1, tzinfo=UTC)
# The reason of a hold that ends by itself.
MARGIN = "margin"


@dataclass(frozen=True, slots=True)
class Policy:
    """How long ops of one table are kept; None: for ever, and whatever they take."""

    retention: timedelta | None = None
    cap_age: timedelta | None = None
    cap_bytes: int | None = None

    @property
    def is_off(self) -> bool:
        return self.retention is None and self.cap_age is None and self.cap_bytes is None


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds for the whole log; the policy is for tables that have none of their own."""

    policy: Policy = Policy()  # its bytes are those of all tables together
    margin: timedelta = timedelta(hours=1)
    dormant_after: timedelta | None = None


def width(policy: Policy, widest: timedelta) -> timedelta:
    """How wide partitions are, so that little more is kept than the retention says."""
    kept = [one for one in (policy.retention, policy.cap_age) if one is not None]
    if not kept:
        return widest
    days = min(kept) / _PARTITIONS_KEPT // timedelta(days=1)
    return min(max(timedelta(days=days), timedelta(days=1)), widest)


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
    policy: Policy = Policy()
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


class Cause(StrEnum):
    """Why ops go."""

    RETENTION = "retention"
    CAP_AGE = "cap_age"
    CAP_BYTES = "cap_bytes"
    DORMANT = "dormant"
    EMPTY = "empty"
    RESET = "reset"  # an operator has compared the tables with a peer's


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a partition."""

    cause: Cause | None = None  # None: it stays
    until: datetime | None = None  # only what arrived before goes; None: all of it
    evicts: Sequence[str] = ()  # the peers that needed it
    holds: Sequence[Hold] = ()  # who keeps what would be due
    kept_bytes: int = 0  # what is written anew of a partition that is cut


KEPT = Fate()


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


def fates(
    logs: Sequence[TableLog], marks: Sequence[Mark], limits: Limits, *, now: datetime
) -> dict[str, Fate]:
    """What becomes of each partition, by its name; those that nobody asks for are left out."""
    decided = dict[str, Fate]()
    for log in logs:
        judge = _Judge(log, marks, limits, now)
        decided |= {piece.name: judge.by_age(piece) for piece in log.pieces}
        decided |= judge.by_bytes(decided)
    decided |= _by_all_bytes(logs, marks, limits, decided, now=now)
    return {name: fate for name, fate in decided.items() if fate != KEPT}


def cut_off(
    log: TableLog, marks: Sequence[Mark], limits: Limits, *, now: datetime
) -> datetime | None:
    """What arrived before this may go by the retention; None: nothing."""
    if log.policy.retention is None or log.taking_from is not None:
        return None
    judge = _Judge(log, marks, limits, now)
    reached = [judge.limit(mark) for mark in judge.interested()]
    moment = min([now - log.policy.retention, *reached])
    return None if moment <= _NEVER else moment


@dataclass(frozen=True, slots=True)
class _Judge:
    """Decides about the log of one table."""

    log: TableLog
    marks: Sequence[Mark]
    limits: Limits
    now: datetime
    seen: dict[str, list[Hold]] = field(default_factory=dict[str, list[Hold]])

    @property
    def is_dormant(self) -> bool:
        after, last_at = self.limits.dormant_after, self.log.last_at
        return after is not None and last_at is not None and last_at <= self.now - after

    def holds(self, piece: Piece) -> list[Hold]:
        if piece.name not in self.seen:
            self.seen[piece.name] = holds(
                self.log, piece, self.marks, margin=self.limits.margin, now=self.now
            )
        return self.seen[piece.name]

    def by_age(self, piece: Piece) -> Fate:
        """By the age cap, the retention, or because nothing happens to the table any more."""
        policy = self.log.policy
        if piece.last is None:
            is_over = piece.end + _EMPTY_KEPT <= self.now and self.log.taking_from is None
            return Fate(Cause.EMPTY) if is_over else KEPT
        if policy.cap_age is not None:
            fate = self.dropped(piece, self.now - policy.cap_age, Cause.CAP_AGE)
            if fate.cause is not None:
                return fate
        found = list[Fate]()
        if policy.retention is not None:
            found.append(self.dropped(piece, self.now - policy.retention, Cause.RETENTION))
        if self.is_dormant:
            found.append(self._dormant(piece))
        return next((fate for fate in found if fate.cause), next(iter(found), KEPT))

    def _dormant(self, piece: Piece) -> Fate:
        held = self.holds(piece)
        return Fate(holds=held) if held else Fate(Cause.DORMANT, evicts=self._away(piece))

    def dropped(self, piece: Piece, due: datetime, cause: Cause) -> Fate:
        """The fate of what arrived before a moment."""
        whole, share = piece.all_at <= due, _share(piece, due, now=self.now)
        if piece.last is None or not (whole or self._is_worth_cutting(piece, share)):
            return KEPT
        held = self.holds(piece)
        if not whole:
            return self._cut(piece, due, cause, held)
        is_cap = cause in {Cause.CAP_AGE, Cause.CAP_BYTES}
        if held and (not is_cap or any(one.is_final for one in held)):
            return Fate(holds=held)
        holders = {one.who for one in held}
        behind = [
            mark.host
            for mark in self.marks
            if mark.host in holders and mark.confirmed < str(piece.last)
        ]
        return Fate(cause, evicts=(*behind, *self._away(piece)))

    def _away(self, piece: Piece) -> tuple[str, ...]:
        """Those who have not read a partition, and have been away for longer than they may be."""
        return tuple(
            mark.host
            for mark in self.marks
            if (mark.tables is None or self.log.name in mark.tables)
            and standing(mark, now=self.now) is Standing.AWAY
            and mark.confirmed < str(piece.last or "")
        )

    def _is_worth_cutting(self, piece: Piece, share: float) -> bool:
        is_short = piece.bytes * (1 - share) <= MOST_REWRITTEN_BYTES
        return share >= _LEAST_DUE and piece.bytes >= _LEAST_CUT_BYTES and is_short

    def _cut(self, piece: Piece, due: datetime, cause: Cause, held: Sequence[Hold]) -> Fate:
        """
        The fate of a partition of which the older part is due.

        It is cut where nobody needs what was before, unless a cap says that they must not wait.
        """
        if any(one.is_final for one in held):
            return Fate(holds=held)
        if cause is Cause.RETENTION:
            due = min([due, *(self.limit(mark) for mark in self.interested())])
        share = _share(piece, due, now=self.now)
        if not self._is_worth_cutting(piece, share):
            return Fate(holds=held)
        behind = [mark.host for mark in self.interested() if self._is_behind(mark, due)]
        kept = round(piece.bytes * (1 - share))
        return Fate(cause, due, (*behind, *self._away(piece)), kept_bytes=kept)

    def _is_behind(self, mark: Mark, due: datetime) -> bool:
        """Whether it has not read all that arrived before a moment."""
        return self.limit(mark) + self.limits.margin < due

    def interested(self) -> list[Mark]:
        return [
            mark
            for mark in self.marks
            if (mark.tables is None or self.log.name in mark.tables)
            and standing(mark, now=self.now) not in {Standing.EVICTED, Standing.AWAY}
        ]

    def limit(self, mark: Mark) -> datetime:
        """Up to when ops may go for this peer."""
        if standing(mark, now=self.now) is not Standing.READABLE:
            return _NEVER
        return (mark.reached_at or self.now) - self.limits.margin

    def by_bytes(self, decided: dict[str, Fate]) -> dict[str, Fate]:
        """By the byte cap of the table: the oldest partitions go until the rest fits."""
        cap = self.log.policy.cap_bytes
        if cap is None:
            return {}
        return surplus([(self, piece) for piece in self.log.pieces], decided, cap)


def _by_all_bytes(
    logs: Sequence[TableLog],
    marks: Sequence[Mark],
    limits: Limits,
    decided: dict[str, Fate],
    *,
    now: datetime,
) -> dict[str, Fate]:
    """By the byte cap of all tables together."""
    cap = limits.policy.cap_bytes
    if cap is None:
        return {}
    judges = [_Judge(log, marks, limits, now) for log in logs]
    pieces = [(judge, piece) for judge in judges for piece in judge.log.pieces]
    return surplus(sorted(pieces, key=lambda pair: pair[1].start), decided, cap)


def surplus(
    pieces: Sequence[tuple[_Judge, Piece]], decided: dict[str, Fate], cap: int
) -> dict[str, Fate]:
    """The oldest of these partitions, until the others fit into the cap."""
    stays = [pair for pair in pieces if decided.get(pair[1].name, KEPT).cause is None]
    cut = sum(
        fate.kept_bytes for _, piece in pieces if (fate := decided.get(piece.name, KEPT)).cause
    )
    excess = sum(piece.bytes for _, piece in stays) + cut - cap
    found = dict[str, Fate]()
    for judge, piece in stays:
        if excess <= 0:
            break
        if piece.last is None:
            continue
        due = piece.end if piece.end <= judge.now else _fitting(piece, excess, now=judge.now)
        fate = judge.dropped(piece, due, Cause.CAP_BYTES)
        if fate != KEPT:
            found[piece.name] = fate
        if fate.cause:
            excess -= piece.bytes - fate.kept_bytes
    return found


def _fitting(piece: Piece, excess: int, *, now: datetime) -> datetime:
    """
    Up to when ops of the partition in use must go, so that half of what may stay is left.

    Half of it, so that it is not rewritten again at once.
    """
    stays = min(max(piece.bytes - excess, 0) / 2, MOST_REWRITTEN_BYTES / 2)
    return now - (now - piece.start) * (stays / max(piece.bytes, 1))


def _share(piece: Piece, due: datetime, *, now: datetime) -> float:
    """How much of a partition arrived before a moment, if they arrived evenly."""
    whole = (min(piece.end, now) - piece.start).total_seconds()
    return max((due - piece.start).total_seconds(), 0.0) / max(whole, 1.0)
