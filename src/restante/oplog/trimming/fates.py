"""
What becomes of each partition of the log: pure decisions.

What is older than the retention goes when nobody needs it.  A cap, or a peer's absence for longer
than it may be away, beats the gate: then the peer is evicted, and takes a snapshot when it comes
back.  Nothing beats a snapshot that is being taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from restante.oplog.trimming.gate import Hold, Mark, Piece, Standing, TableLog, holds, standing
from restante.oplog.trimming.limits import Limits

# A partition of which less than this is due is left until all of it is.
_LEAST_DUE = 0.5
# Smaller partitions are not worth being rewritten.
_LEAST_CUT_BYTES = 1024 * 1024
# So much of a partition is written anew at most; that takes seconds.
MOST_REWRITTEN_BYTES = 256 * 1024 * 1024
# An empty partition is dropped when its range has ended for so long.
_EMPTY_KEPT = timedelta(hours=1)
_NEVER = datetime(1, 1, 1, tzinfo=UTC)


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
