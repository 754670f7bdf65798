"""
Which leaves a partitioned table needs next.

Leaves are created ahead of the clock; rows that find none would be refused.  The catalogue says
which exist, so a change of the width takes effect where none is yet, and ranges never overlap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta


@dataclass(frozen=True, slots=True)
class Span:
    """The stretch of time that one leaf covers: from its start up to, not including, its end."""

    start: datetime
    end: datetime


def floor(moment: datetime, width: timedelta) -> datetime:
    """The start of the stretch of this width that holds the moment."""
    seconds, step = int(moment.timestamp()), int(width.total_seconds())
    return datetime.fromtimestamp(seconds - seconds % step, UTC)


def missing(
    existing: Sequence[Span], *, now: datetime, width: timedelta, lead: timedelta
) -> list[Span]:
    """The leaves to create so that every moment from now to the end of the lead has one."""
    over = (span.end for span in existing if span.end <= now)
    start, spans = max([floor(now, width), *over]), list[Span]()
    while start <= now + lead:
        taken = next((span for span in existing if span.start <= start < span.end), None)
        if taken:
            start = taken.end
            continue
        following = (span.start for span in existing if span.start > start)
        spans.append(Span(start, min([floor(start, width) + width, *following])))
        start = spans[-1].end
    return spans
