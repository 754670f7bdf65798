"""
Which partitions a table needs next.

Partitions are created ahead of the clock, because an insert that finds none is refused.  The
catalogue says which exist: a new width applies where there is none yet, and ranges never overlap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta


@dataclass(frozen=True, slots=True)
class Span:
    """The time range of one partition: the start is included, the end is not."""

    start: datetime
    end: datetime


def floor(moment: datetime, width: timedelta) -> datetime:
    """The start of the range of this width that contains the moment."""
    seconds, step = int(moment.timestamp()), int(width.total_seconds())
    return datetime.fromtimestamp(seconds - seconds % step, UTC)


def missing(
    existing: Sequence[Span], *, now: datetime, width: timedelta, lead: timedelta
) -> list[Span]:
    """The partitions to create so that every moment from now to the end of the lead has one."""
    past_ends = (span.end for span in existing if span.end <= now)
    start, spans = max([floor(now, width), *past_ends]), list[Span]()
    while start <= now + lead:
        taken = next((span for span in existing if span.start <= start < span.end), None)
        if taken:
            start = taken.end
            continue
        following = (span.start for span in existing if span.start > start)
        spans.append(Span(start, min([floor(start, width) + width, *following])))
        start = spans[-1].end
    return spans
