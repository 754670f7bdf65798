"""What is decided about one bucket: drop it, move its live files first, or name who keeps it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from restante.database.partitions import Partition, PartitionState
from restante.database.spans import Span
from restante.delivery.buckets import LiveFiles
from restante.delivery.subject import DROP_BUCKET, MOVE_FILES, BucketContents, Buckets
from restante.ids import WorkspaceId
from restante.wire import HeldSpace, PlanStep

NOW = datetime(2026, 3, 29, 12, 30, tzinfo=UTC)
HOUR = timedelta(hours=1)
MIB = 1024 * 1024
DAY = timedelta(days=1)
MOMENT = timedelta(microseconds=1)
EMPTY = BucketContents()
HOARDER = WorkspaceId(UUID(int=7))
BUCKETS = Buckets(width=HOUR, ack_retention=HOUR)


def bucket(**other: Any) -> Partition:
    """1000 bytes; its range ended two hours ago."""
    span = Span(NOW - 3 * HOUR, NOW - 2 * HOUR)
    state = PartitionState.ATTACHED
    return replace(Partition("chunks", "chunks_1", state, span, "chunks", 1000), **other)


def live(files: int, size: int, **other: Any) -> BucketContents:
    found = LiveFiles(files, size, HOARDER, size - 1, NOW - DAY, NOW + DAY)
    return BucketContents(live=found, **other)


def decided_on(partition: Partition, contents: BucketContents | None) -> list[str] | HeldSpace:
    decided = BUCKETS.decide(partition, contents, now=NOW)
    return decided if isinstance(decided, HeldSpace) else [step.action for step in decided]


def test_an_empty_bucket_is_dropped_and_its_bytes_are_counted():
    decided = BUCKETS.decide(bucket(), EMPTY, now=NOW)

    why = "no live file is in it"
    assert decided == [PlanStep(DROP_BUCKET, "chunks_1", 0, 1000, why, "buckets")]


@pytest.mark.parametrize(("later", "goes"), [(-MOMENT, True), (0 * MOMENT, True), (MOMENT, False)])
def test_a_bucket_is_left_alone_until_it_has_settled(later: timedelta, goes: bool):
    """A statement that began in its last second may still be writing."""
    end = NOW - BUCKETS.settling + later

    decided = decided_on(bucket(span=Span(end - HOUR, end)), EMPTY)

    assert decided == ([DROP_BUCKET] if goes else [])


def test_nothing_is_decided_about_a_bucket_that_was_not_looked_at():
    assert decided_on(bucket(), None) == []


@pytest.mark.parametrize(("live_bytes", "moves"), [(1, True), (300, True), (301, False)])
def test_files_are_moved_out_of_mostly_dead_buckets_only(live_bytes: int, moves: bool):
    decided = decided_on(bucket(), live(2, live_bytes))

    if moves:
        assert decided == [MOVE_FILES, DROP_BUCKET]
    else:
        assert isinstance(decided, HeldSpace)


def test_moved_bytes_are_written_before_the_bucket_comes_back():
    decided = BUCKETS.decide(bucket(), live(2, 200), now=NOW)

    assert not isinstance(decided, HeldSpace)
    assert [(step.rows, step.bytes) for step in decided] == [(2, -200), (0, 1000)]


def test_the_workspace_that_keeps_a_bucket_is_named():
    decided = decided_on(bucket(), live(2, 900))

    assert decided == HeldSpace(
        "chunks_1",
        1000,
        "2 live files are in it",
        HOARDER,
        899,
        NOW - DAY,
        NOW + DAY,
        subject="buckets",
        reclaimable_bytes=100,
    )


def test_a_bucket_with_more_files_than_were_counted_is_not_moved():
    assert isinstance(decided_on(bucket(), live(1, 1, all_counted=False)), HeldSpace)


@pytest.mark.parametrize("contents", [EMPTY, live(1, 1), live(2, 900)])
def test_a_bucket_with_an_arriving_upload_is_held(contents: BucketContents):
    decided = decided_on(bucket(), replace(contents, arriving=2))

    why, unused = "2 uploads are still arriving in it", 1000 - contents.live.bytes
    assert decided == HeldSpace("chunks_1", 1000, why, subject="buckets", reclaimable_bytes=unused)


def test_a_sealed_bucket_is_decided_on_like_any_other():
    """An earlier pass was interrupted after the seal."""
    assert decided_on(bucket(state=PartitionState.SEALED), EMPTY) == [DROP_BUCKET]


def test_the_open_bucket_is_held_if_much_of_it_is_unused():
    """What was deleted in it comes back after its hour, and the plan says so."""
    found = replace(bucket(), bytes=3 * MIB, span=Span(NOW - HOUR / 2, NOW + HOUR / 2))

    decided = decided_on(found, live(1, MIB))

    assert isinstance(decided, HeldSpace)
    assert (decided.bytes, decided.reclaimable_bytes) == (3 * MIB, 2 * MIB)
    assert decided.until == NOW + HOUR / 2
    assert decided.why == f"new files go into it until {decided.until:%H:%M} UTC"


@pytest.mark.parametrize(
    "contents",
    [live(1, 3 * MIB - 1000), live(1, 1, all_counted=False)],
    ids=["used", "not counted"],
)
def test_the_open_bucket_is_not_worth_a_line_if_it_is_used(contents: BucketContents):
    found = replace(bucket(), bytes=3 * MIB, span=Span(NOW - HOUR / 2, NOW + HOUR / 2))

    assert decided_on(found, contents) == []
