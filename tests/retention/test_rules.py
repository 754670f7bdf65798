"""The planner: what is in use stays, what is past goes or is named, and the sums are right."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given, strategies as st

from restante.database.partitions import Partition, PartitionState
from restante.database.spans import Span
from restante.delivery.buckets import NO_FILES, LiveFiles
from restante.delivery.subject import (
    DROP_BUCKET,
    MOVE_FILES,
    BucketContents,
    Buckets,
    DueUploads,
    ExpiredAnswers,
)
from restante.feed.subject import TRIM, FeedPartitions
from restante.feed.total import TotalLimit
from restante.ids import WorkspaceId
from restante.retention.rules import (
    DROP_DETACHED,
    FINISH_DETACH,
    Picture,
    Room,
    days_until_full,
    is_low,
    plan,
    reserve_of,
    tightest,
)
from restante.retention.subjects import Subjects
from restante.wire import PlanStep, RetentionPlan

NOW = datetime(2026, 3, 29, 12, 30, tzinfo=UTC)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
FEED_RETENTION = 30 * DAY

UPLOADS, ANSWERS = DueUploads(ack_retention=HOUR), ExpiredAnswers()
BUCKETS = Buckets(width=HOUR, ack_retention=HOUR)
FEED = FeedPartitions(retention=FEED_RETENTION, limit=TotalLimit())
SUBJECTS = Subjects(UPLOADS, ANSWERS, BUCKETS, FEED)

LEFT_OVER = {PartitionState.DETACHING, PartitionState.DETACHED}
FINISHING = {FINISH_DETACH, DROP_DETACHED}
DROPS = {DROP_BUCKET, TRIM, *FINISHING}


@dataclass(frozen=True, slots=True)
class Found:
    """A partition with what the look has found in it."""

    partition: Partition
    contents: BucketContents | None = None


# Around everything that matters: now, the settling after a bucket's end, the feed's retention.
moments = st.one_of(
    st.integers(-40 * 86_400, 3 * 86_400).map(lambda seconds: NOW + timedelta(seconds=seconds)),
    st.sampled_from([NOW, NOW - BUCKETS.settling, NOW - FEED_RETENTION]),
)


def span_before(end: datetime, seconds: int) -> Span:
    return Span(end - timedelta(seconds=seconds), end)


spans = st.builds(span_before, moments, st.integers(1, 100_000))
live_files = st.just(NO_FILES) | st.builds(
    LiveFiles,
    st.integers(1, 10_000),
    st.integers(1, 10**6),
    st.just(WorkspaceId(UUID(int=7))),
    st.just(900),
    st.just(NOW - DAY),
    st.just(NOW + DAY),
)
contents = st.builds(
    BucketContents, live=live_files, all_counted=st.booleans(), arriving=st.integers(0, 2)
)
attached_states = st.sampled_from([PartitionState.ATTACHED, PartitionState.SEALED])
sizes = st.integers(0, 10**6)


def partition(table: str, state: PartitionState, span: Span | None, size: int) -> Partition:
    return Partition(table, "a partition", state, span, table, size)


buckets = st.builds(
    Found, st.builds(partition, st.just("chunks"), attached_states, spans, sizes), contents
)
of_feed = st.builds(Found, st.builds(partition, st.just("feed"), attached_states, spans, sizes))
left_over = st.builds(
    Found,
    st.builds(
        partition,
        st.sampled_from(["chunks", "feed"]),
        st.sampled_from(sorted(LEFT_OVER)),
        st.none(),
        sizes,
    ),
)


def picture_of(
    found: list[Found], due: Mapping[str, int], answers: int, *, is_locked: bool = False
) -> Picture:
    named = {f"partition_{number}": one for number, one in enumerate(found)}
    return Picture(
        NOW,
        [(UPLOADS, due), (ANSWERS, {"answers": answers})],
        [
            replace(
                one.partition,
                name=name,
                is_locked=is_locked,
                bytes=0 if is_locked else one.partition.bytes,
            )
            for name, one in named.items()
        ],
        {name: one.contents for name, one in named.items() if one.contents},
    )


founds = st.lists(buckets | of_feed | left_over, max_size=12)
dues = st.fixed_dictionaries({"acked": st.integers(0, 3), "expired": st.integers(0, 3)})
pictures = st.builds(picture_of, founds, dues, st.integers(0, 2))


def contents_of(picture: Picture, one: Partition) -> BucketContents:
    return picture.contents[one.name]


def attached_buckets(picture: Picture) -> list[Partition]:
    return [one for one in picture.partitions if one.table == "chunks" and one.is_attached]


def with_action(decided: RetentionPlan, *wanted: str) -> set[str]:
    return {step.partition for step in decided.steps if step.partition and step.action in wanted}


def dropped(decided: RetentionPlan) -> set[str]:
    return with_action(decided, *DROPS)


def on_rows(decided: RetentionPlan) -> list[PlanStep]:
    return [step for step in decided.steps if step.partition is None]


def is_past(one: Partition) -> bool:
    return one.span is not None and one.span.end + BUCKETS.settling <= NOW


@given(pictures)
def test_a_bucket_in_use_is_never_dropped(picture: Picture):
    """In use: its range has not ended, an upload is arriving, or live files stay in it."""
    decided = plan(picture, SUBJECTS)
    moved = with_action(decided, MOVE_FILES)

    for one in attached_buckets(picture):
        found = contents_of(picture, one)
        if not is_past(one) or found.arriving:
            assert one.name not in dropped(decided) | moved
        if found.live.files and one.name not in moved:
            assert one.name not in dropped(decided)


@given(pictures)
def test_every_past_bucket_is_dropped_or_named(picture: Picture):
    """Promise 5: what pins space is named."""
    decided = plan(picture, SUBJECTS)
    held = {one.partition: one for one in decided.held}

    for one in attached_buckets(picture):
        if not is_past(one):
            continue
        assert (one.name in dropped(decided)) != (one.name in held)
        if one.name in held:
            named, found = held[one.name], contents_of(picture, one)
            assert (named.bytes, bool(named.why), named.subject) == (one.bytes, True, "buckets")
            expected = None if found.arriving else found.live.workspace_id
            assert named.workspace_id == expected


@given(pictures)
def test_only_past_buckets_are_named(picture: Picture):
    past = {one.name for one in attached_buckets(picture) if is_past(one)}

    assert {one.partition for one in plan(picture, SUBJECTS).held} <= past


@given(pictures)
def test_rows_come_first_then_leftovers_then_partitions(picture: Picture):
    steps = plan(picture, SUBJECTS).steps

    ranks = [
        0 if step.partition is None else 1 if step.action in FINISHING else 2 for step in steps
    ]
    assert ranks == sorted(ranks)
    left = [one.name for one in picture.partitions if one.state in LEFT_OVER]
    assert sorted(left) == sorted(
        step.partition or "" for step in steps if step.action in FINISHING
    )


@given(pictures)
def test_a_partition_is_dropped_once_and_its_files_move_right_before(picture: Picture):
    steps = plan(picture, SUBJECTS).steps
    names = Counter(step.partition for step in steps if step.action in DROPS)

    assert all(count == 1 for name, count in names.items() if name)
    for number, step in enumerate(steps):
        if step.action == MOVE_FILES:
            following = steps[number + 1]
            assert (following.action, following.partition) == (DROP_BUCKET, step.partition)


@given(pictures)
def test_bytes_and_rows_add_up(picture: Picture):
    decided = plan(picture, SUBJECTS)
    by_name = {one.name: one for one in picture.partitions}
    moved = [contents_of(picture, by_name[name]) for name in with_action(decided, MOVE_FILES)]

    assert decided.bytes_to_come_back == sum(
        by_name[name].bytes for name in dropped(decided)
    ) - sum(found.live.bytes for found in moved)
    due = {subject.name: sum(counts.values()) for subject, counts in picture.due}
    planned = {step.subject: step.rows for step in on_rows(decided)}
    assert planned == {name: rows for name, rows in due.items() if rows}


@given(pictures)
def test_the_same_picture_gives_the_same_plan(picture: Picture):
    assert plan(picture, SUBJECTS) == plan(picture, SUBJECTS)


@given(pictures)
def test_feed_partitions_go_at_their_age_and_for_no_other_reason(picture: Picture):
    decided = plan(picture, SUBJECTS)

    assert with_action(decided, TRIM) == {
        one.name
        for one in picture.partitions
        if one.table == "feed" and one.span and one.span.end <= NOW - FEED_RETENTION
    }


@given(founds, dues, st.integers(0, 2))
def test_a_locked_partition_is_left_alone_and_named(
    found: list[Found], due: dict[str, int], answers: int
):
    free = plan(picture_of(found, due, answers), SUBJECTS)

    locked = plan(picture_of(found, due, answers, is_locked=True), SUBJECTS)

    assert locked.steps == on_rows(free)
    assert {one.partition for one in locked.held} == dropped(free) | {
        one.partition for one in free.held
    }
    # Its size is unknown: a bucket is held for its live files only if they are too many to move.
    assert dropped(free) <= {one.partition for one in locked.held if one.action}


# On a disk that is almost full -------------------------------------------------------------------

scarce = st.integers(0, 10**6)


@given(pictures, scarce)
def test_on_a_scarce_disk_what_frees_most_for_the_least_comes_first(picture: Picture, left: int):
    """Leftovers, then the rows that keep buckets, then buckets by size, then everything else."""
    steps = plan(picture, SUBJECTS, scarce_bytes=left).steps

    moving = {step.partition for step in steps if step.action == MOVE_FILES}
    ranks = [scarce_rank(step, moving) for step in steps]
    assert ranks == sorted(ranks)
    for rank in (0, 1, 4):
        freed = [step.bytes for step in steps if scarce_rank(step, moving) == rank]
        assert freed == sorted(freed, reverse=True)


def scarce_rank(step: PlanStep, moving: set[str | None]) -> int:
    if step.partition is None:
        return 2 if step.subject == UPLOADS.name else 6
    if step.action in FINISHING:
        return 0 if step.action == DROP_DETACHED else 1
    return 5 if step.partition in moving else 4


@given(pictures, scarce)
def test_a_scarce_disk_changes_the_order_and_keeps_only_what_would_need_room(
    picture: Picture, left: int
):
    usual, scarce_plan = plan(picture, SUBJECTS), plan(picture, SUBJECTS, scarce_bytes=left)
    kept = {one.partition for one in scarce_plan.held} - {one.partition for one in usual.held}

    expected = [step for step in usual.steps if step.partition not in kept]
    assert Counter(map(repr, scarce_plan.steps)) == Counter(map(repr, expected))
    assert kept == {
        step.partition
        for step in usual.steps
        if step.action == MOVE_FILES and -step.bytes * 4 > left
    }
    assert scarce_plan.bytes_to_come_back == sum(step.bytes for step in expected)


@given(pictures, scarce)
def test_files_move_right_before_their_bucket_goes_on_a_scarce_disk_too(
    picture: Picture, left: int
):
    steps = plan(picture, SUBJECTS, scarce_bytes=left).steps

    for number, step in enumerate(steps):
        if step.action == MOVE_FILES:
            following = steps[number + 1]
            assert (following.action, following.partition) == (DROP_BUCKET, step.partition)


# The reserve -------------------------------------------------------------------------------------

byte_counts = st.integers(0, 2**50)
rooms = st.builds(Room, byte_counts, byte_counts)
reserves = st.none() | byte_counts


@given(byte_counts)
def test_the_reserve_is_a_small_part_of_a_small_disk_and_bounded_on_a_large_one(total: int):
    reserve = reserve_of(total, None)

    assert reserve * 20 <= total
    assert reserve <= 2**30
    assert reserve == 2**30 or (reserve + 1) * 20 > total


@given(rooms, reserves, byte_counts, byte_counts)
def test_a_low_disk_stays_low_when_more_is_written(
    room: Room, chosen: int | None, written: int, more: int
):
    if is_low(room, chosen, written=written):
        assert is_low(room, chosen, written=written + more)


@given(rooms, reserves)
def test_the_disk_is_low_exactly_below_its_reserve(room: Room, chosen: int | None):
    above = room.free - reserve_of(room.total, chosen)

    assert is_low(room, chosen) == (above < 0)
    if above >= 0:
        assert not is_low(room, chosen, written=above)
        assert is_low(room, chosen, written=above + 1)


@given(st.lists(rooms, max_size=4), reserves)
def test_the_tightest_disk_is_low_if_any_is(found: list[Room], chosen: int | None):
    """Tables and WAL may be on two disks; either stops the database."""
    room = tightest(found, chosen)

    assert (room is not None and is_low(room, chosen)) == any(is_low(one, chosen) for one in found)


def test_a_plan_says_what_is_deleted_and_why():
    picture = Picture(NOW, [(UPLOADS, {"acked": 3, "expired": 4})], [], {})

    (step,) = plan(picture, SUBJECTS).steps

    assert step == PlanStep("delete uploads", None, 7, 0, "3 acked, 4 expired", "uploads")


def test_a_partition_of_an_unknown_table_stops_the_plan():
    """A table without a subject would grow for ever, unnoticed."""
    unknown = partition("letters", PartitionState.ATTACHED, Span(NOW - HOUR, NOW), 100)

    with pytest.raises(LookupError, match="letters"):
        plan(Picture(NOW, [], [unknown], {}), SUBJECTS)


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
    """None stands for never, and for unknown; neither may raise an alarm."""
    assert days_until_full(free, growth) == days
