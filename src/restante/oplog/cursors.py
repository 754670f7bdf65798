"""
How far a peer's log has been read: pure decisions about cursors and gaps.

Our own nodes are read by position.  Peers of the older protocol are read by ULID, and what they
say about gaps is believed only within bounds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from restante.oplog import positions, ulids
from restante.oplog.positions import Position
from restante.text import printable

# The older protocol serves by ULID, so an op that was committed late lies behind the cursor.
OVERLAP = timedelta(minutes=5)

_MAX_QUOTED = 60


@dataclass(frozen=True, slots=True)
class Cursor:
    """A stored cursor as it was understood; without either it is missing."""

    position: Position | None = None
    ulid: UUID | None = None
    problem: str | None = None  # why what is stored is not used


def loaded(text: str, *, now: datetime) -> Cursor:
    """
    Read a stored cursor.

    One that is unreadable or implausible is treated as missing, so that it heals.
    """
    if not text:
        return Cursor()
    shown = printable(text, max_length=_MAX_QUOTED)
    if position := positions.parsed(text):
        if not _is_plausible_era(position.era, now=now):
            return Cursor(problem=f"The stored cursor {shown} has an implausible era.")
        return Cursor(position=position)
    ulid = ulids.parsed(text)
    if ulid is None:
        return Cursor(problem=f"The stored cursor {shown} is unreadable.")
    if not ulids.is_plausible(ulid, now=now):
        return Cursor(problem=f"The stored cursor {shown} is not of a plausible time.")
    return Cursor(ulid=ulid)


def _is_plausible_era(era: int, *, now: datetime) -> bool:
    """An era is wall time in microseconds, of the peer's clock; the start of a log has none."""
    if era == 0:
        return True
    try:
        began = datetime.fromtimestamp(era / 1_000_000, UTC)
    except (OverflowError, OSError, ValueError):
        return False
    return ulids.EARLIEST <= began <= now + ulids.MAX_AHEAD


def overlapping(ulid: UUID) -> UUID:
    """Where to read from, so that ops that were committed late are seen."""
    return ulids.lowest_at(ulids.moment_of(ulid) - OVERLAP)


def honoured_gap(available_min: str, cursor: UUID | None, *, now: datetime) -> UUID | None:
    """
    The lowest ULID that the peer says it has kept; None if that is not to be believed.

    Without a cursor nothing can have been missed, so a first contact cannot be steered.
    """
    lowest = ulids.parsed(available_min)
    if cursor is None or lowest is None or not ulids.is_plausible(lowest, now=now):
        return None
    return lowest if lowest > cursor else None


def end_of_page(seen: Sequence[str], scanned: str, *, now: datetime) -> UUID | None:
    """Where a page that is not the last one ends; an empty one says only what was scanned."""
    for text in (scanned, *seen[-1:]):
        ulid = ulids.parsed(text)
        if ulid is not None and ulids.is_plausible(ulid, now=now):
            return ulid
    return None


def following(
    cursor: UUID | None, seen: Iterable[str], *, gap: UUID | None, now: datetime
) -> UUID | None:
    """
    The cursor after a page: the greatest of what was seen, but not ahead of our clock.

    An op of a clock that is ahead comes last in every page.  A cursor on it would skip all that is
    written until then; so such ops are read again, and are known by then.  A gap has been checked.
    """
    known = [ulid for text in seen if (ulid := ulids.parsed(text)) is not None]
    plausible = [ulid for ulid in known if ulids.is_plausible(ulid, now=now)]
    reached = [min(max(plausible), ulids.lowest_at(now))] if plausible else []
    return max([*reached, *(ulid for ulid in (gap, cursor) if ulid)], default=None)
