"""What the space account adds up, and what it does not claim to know."""

from typing import Any

import pytest

from restante.retention.account import LeafSpace, Space, States, TableSpace, days_until_full


def space(**other: Any) -> Space:
    given: dict[str, Any] = {
        "tables": [
            TableSpace("chunks", 1000, 0, 3),
            TableSpace("feed", 50, 2, 1),
            TableSpace("uploads", 7, 1, 0),
        ],
        "leaves": [LeafSpace("chunks_a", 900, 400), LeafSpace("feed_a", 50, None)],
        "live_bytes": 400,
        "states": States(0, 0, 0, 0),
        "workspaces_active": 0,
        "workspaces": [],
        "lags": [],
        "pins": [],
        "lead_seconds": {},
        "growth_bytes_per_day": None,
        "free_bytes": None,
    }
    return Space(**(given | other))


def test_what_is_dead_is_what_the_chunks_take_beyond_the_files_that_live():
    seen = space()

    assert (seen.total_bytes, seen.chunk_bytes, seen.dead_bytes) == (1057, 1000, 600)


def test_files_that_take_more_than_their_table_leave_nothing_dead():
    """Small files are measured by their length, and a table by its pages."""
    assert space(live_bytes=1001).dead_bytes == 0


@pytest.mark.parametrize(
    ("free", "growth", "days"),
    [
        (1000, 100.0, 10.0),
        (1000, 3000.0, 1 / 3),
        (0, 5.0, 0.0),
        (1000, 0.0, None),
        (1000, -5.0, None),
        (None, 5.0, None),
        (1000, None, None),
    ],
)
def test_days_until_full(free: int | None, growth: float | None, days: float | None):
    """None stands for never, and for not known; neither may raise an alarm."""
    assert days_until_full(free, growth) == days
    assert space(free_bytes=free, growth_bytes_per_day=growth).days_until_full == days


def test_what_does_not_live_in_a_bucket_is_to_come_back():
    assert LeafSpace("a bucket", 900, 400).dead_bytes == 500
    assert LeafSpace("rounded up by nobody", 400, 900).dead_bytes == 0
    assert LeafSpace("a leaf of the feed", 900, None).dead_bytes is None
