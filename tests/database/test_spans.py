"""Partitions ahead of the clock: no overlap and no gap, whatever the widths were before."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

from hypothesis import given, strategies as st

from restante.database.spans import Span, floor, missing
from restante.delivery.rules import bucket_of

START = datetime(2026, 3, 1, tzinfo=UTC)

widths = st.sampled_from([60, 90, 600, 3600, 7200, 86_400, 100_000]).map(
    lambda seconds: timedelta(seconds=seconds)
)
moments = st.integers(0, 10 * 86_400 * 10**6).map(lambda us: START + timedelta(microseconds=us))
# At each of these moments a server looks, with the width that is configured then.
looks = st.lists(st.tuples(moments, widths, st.integers(0, 30)), min_size=1, max_size=6)


def hour(number: int) -> datetime:
    return START + timedelta(hours=number)


@given(looks)
def test_partitions_never_overlap_and_every_moment_ahead_has_one(
    history: list[tuple[datetime, timedelta, int]],
):
    partitions: list[Span] = []

    for now, width, widths_ahead in sorted(history):
        lead = widths_ahead * width
        partitions += missing(partitions, now=now, width=width, lead=lead)

        partitions.sort(key=lambda span: span.start)
        assert all(span.start < span.end for span in partitions)
        assert all(one.end <= other.start for one, other in pairwise(partitions))
        position = bucket_of(now)
        for span in partitions:
            if span.start <= position < span.end:
                position = span.end
        assert position > now + lead


@given(looks)
def test_looking_twice_creates_nothing_more(history: list[tuple[datetime, timedelta, int]]):
    partitions: list[Span] = []
    for now, width, widths_ahead in sorted(history):
        partitions += missing(partitions, now=now, width=width, lead=widths_ahead * width)

        assert missing(partitions, now=now, width=width, lead=widths_ahead * width) == []


@given(moments, widths, st.integers(0, 30))
def test_on_an_empty_table_partitions_are_whole_and_aligned(
    now: datetime, width: timedelta, widths_ahead: int
):
    created = missing([], now=now, width=width, lead=widths_ahead * width)

    assert len(created) in {widths_ahead + 1, widths_ahead + 2}
    for span in created:
        assert span.end - span.start == width
        assert floor(span.start, width) == span.start


def test_a_wider_partition_starts_where_the_last_one_ends():
    existing = [Span(hour(0), hour(1)), Span(hour(1), hour(2))]

    created = missing(existing, now=hour(1), width=timedelta(hours=24), lead=timedelta(hours=24))

    assert created == [Span(hour(2), hour(24)), Span(hour(24), hour(48))]


def test_after_a_long_pause_no_past_partition_is_created():
    existing = [Span(hour(0), hour(1))]

    created = missing(existing, now=hour(9), width=timedelta(hours=1), lead=timedelta(0))

    assert created == [Span(hour(9), hour(10))]
