"""The planner: what is in use stays, what is over goes or is named, and the sums are right."""

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restante.database.spans import Span
from restante.ids import WorkspaceId
from restante.retention.rules import (
    Held,
    Holder,
    Kind,
    Leaf,
    LeafState,
    Live,
    Picture,
    Plan,
    Policy,
    Step,
    plan,
)

NOW = datetime(2026, 3, 29, 12, 30, tzinfo=UTC)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
MOMENT = timedelta(microseconds=1)
POLICY = Policy(ack_retention=HOUR, feed_retention=30 * DAY, settling=timedelta(seconds=5))
SOMEBODY = Holder(WorkspaceId(UUID(int=7)), 900, 2, NOW - DAY, NOW + DAY)

LEFT_OVER = {LeafState.DETACHING, LeafState.DETACHED}
LEFTOVER_KINDS = {Kind.FINISH_DETACH, Kind.DROP_DETACHED}
DROPS = {Kind.DROP_BUCKET, Kind.TRIM_FEED, *LEFTOVER_KINDS}

# Around everything that matters: now, the settling after a bucket's end, the retention of the feed.
moments = st.one_of(
    st.integers(-40 * 86_400, 3 * 86_400).map(lambda seconds: NOW + timedelta(seconds=seconds)),
    st.sampled_from([NOW, NOW - POLICY.settling, NOW - POLICY.feed_retention]),
)


def span_before(end: datetime, seconds: int) -> Span:
    return Span(end - timedelta(seconds=seconds), end)


spans = st.builds(span_before, moments, st.integers(1, 100_000))
lives = st.one_of(
    st.just(Live(0, 0)),
    st.builds(
        Live, st.integers(1, 10_000), st.integers(1, 10**6), st.booleans(), st.just(SOMEBODY)
    ),
)
attached = st.builds(
    Leaf,
    table=st.sampled_from(["chunks", "feed"]),
    name=st.just("a leaf"),
    state=st.sampled_from([LeafState.ATTACHED, LeafState.SEALED]),
    bytes=st.integers(0, 10**6),
    span=spans,
    live=lives,
    arriving=st.integers(0, 2),
)
left_over = st.builds(
    Leaf,
    table=st.sampled_from(["chunks", "feed"]),
    name=st.just("a leaf"),
    state=st.sampled_from(sorted(LEFT_OVER)),
    bytes=st.integers(0, 10**6),
    span=st.none() | spans,
)


def picture_of(found: list[Leaf], acked: int, expired: int) -> Picture:
    named = [replace(leaf, name=f"leaf_{number}") for number, leaf in enumerate(found)]
    return Picture(NOW, acked, expired, named)


pictures = st.builds(
    picture_of,
    st.lists(attached | left_over, max_size=12),
    st.integers(0, 3),
    st.integers(0, 3),
)


def dropped(decided: Plan) -> set[str]:
    return {step.leaf.name for step in decided.steps if step.leaf and step.kind in DROPS}


def is_over(leaf: Leaf) -> bool:
    return leaf.span is not None and leaf.span.end + POLICY.settling <= NOW


@given(pictures)
def test_what_is_in_use_or_arriving_or_not_over_is_never_dropped(picture: Picture):
    decided = plan(picture, POLICY)
    moved = {step.leaf.name for step in decided.steps if step.leaf and step.kind is Kind.MOVE_FILES}

    for leaf in picture.leaves:
        if leaf.state in LEFT_OVER or leaf.table != "chunks":
            continue
        if not is_over(leaf) or leaf.arriving:
            assert leaf.name not in dropped(decided) | moved
        if leaf.live.files and leaf.name not in moved:
            assert leaf.name not in dropped(decided)


@given(pictures)
def test_every_bucket_that_is_over_goes_or_is_named(picture: Picture):
    """Promise 5: what pins space is named."""
    decided = plan(picture, POLICY)
    held = {one.leaf: one for one in decided.held}

    for leaf in picture.leaves:
        if leaf.table == "chunks" and leaf.state not in LEFT_OVER and is_over(leaf):
            assert (leaf.name in dropped(decided)) != (leaf.name in held)
            if leaf.name in held:
                one = held[leaf.name]
                assert (one.bytes, bool(one.why)) == (leaf.bytes, True)
                assert one.by == (None if leaf.arriving else leaf.live.holder)


@given(pictures)
def test_only_what_is_over_is_named(picture: Picture):
    over = {leaf.name for leaf in picture.leaves if leaf.table == "chunks" and is_over(leaf)}

    assert {one.leaf for one in plan(picture, POLICY).held} <= over


@given(pictures)
def test_rows_come_first_then_leftovers_then_leaves(picture: Picture):
    decided = plan(picture, POLICY)
    kinds = [step.kind for step in decided.steps]

    ranks = [
        0 if kind is Kind.DELETE_UPLOADS else 1 + (kind not in LEFTOVER_KINDS) for kind in kinds
    ]
    assert ranks == sorted(ranks)
    assert [*decided.steps_on_rows, *decided.steps_on_leaves] == decided.steps
    assert sum(kind in LEFTOVER_KINDS for kind in kinds) == sum(
        leaf.state in LEFT_OVER for leaf in picture.leaves
    )


@given(pictures)
def test_no_leaf_is_dropped_twice_and_files_move_right_before_their_bucket_goes(picture: Picture):
    steps = plan(picture, POLICY).steps
    names = Counter(step.leaf.name for step in steps if step.leaf and step.kind in DROPS)

    assert all(count == 1 for count in names.values())
    for number, step in enumerate(steps):
        if step.kind is Kind.MOVE_FILES:
            following = steps[number + 1]
            assert (following.kind, following.leaf) == (Kind.DROP_BUCKET, step.leaf)


@given(pictures)
def test_bytes_and_rows_add_up(picture: Picture):
    decided = plan(picture, POLICY)
    by_name = {leaf.name: leaf for leaf in picture.leaves}
    moved = [step.leaf for step in decided.steps if step.kind is Kind.MOVE_FILES and step.leaf]

    assert decided.bytes_to_come_back == sum(
        by_name[name].bytes for name in dropped(decided)
    ) - sum(leaf.live.bytes for leaf in moved)
    assert all(leaf.live.bytes <= POLICY.move_below * leaf.bytes for leaf in moved)
    rows = [step.rows for step in decided.steps if step.kind is Kind.DELETE_UPLOADS]
    due = picture.acked_due + picture.expired_due
    assert rows == ([due] if due else [])


@given(pictures)
def test_the_same_picture_gives_the_same_plan(picture: Picture):
    assert plan(picture, POLICY) == plan(picture, POLICY)


@given(pictures)
def test_feed_leaves_go_at_their_age_and_for_no_other_reason(picture: Picture):
    decided = plan(picture, POLICY)
    trimmed = {
        step.leaf.name for step in decided.steps if step.leaf and step.kind is Kind.TRIM_FEED
    }

    assert trimmed == {
        leaf.name
        for leaf in picture.leaves
        if leaf.table == "feed"
        and leaf.state not in LEFT_OVER
        and leaf.span
        and leaf.span.end <= NOW - POLICY.feed_retention
    }


@given(pictures)
def test_a_leaf_that_somebody_has_locked_is_left_alone_and_named_if_it_would_go(picture: Picture):
    locked = replace(
        picture, leaves=[replace(leaf, bytes=0, is_locked=True) for leaf in picture.leaves]
    )
    free, decided = plan(picture, POLICY), plan(locked, POLICY)

    assert decided.steps_on_leaves == []
    assert decided.steps_on_rows == free.steps_on_rows
    assert {one.leaf for one in decided.held} == dropped(free) | {one.leaf for one in free.held}


def feed_leaf(end: datetime) -> Leaf:
    return Leaf("feed", "feed_1", LeafState.ATTACHED, 100, Span(end - DAY, end))


@pytest.mark.parametrize(("later", "goes"), [(-MOMENT, True), (0 * MOMENT, True), (MOMENT, False)])
def test_a_feed_leaf_goes_when_its_last_moment_is_as_old_as_the_retention(
    later: timedelta, goes: bool
):
    """Its end is the first moment that is not in it."""
    leaf = feed_leaf(NOW - POLICY.feed_retention + later)

    steps = plan(Picture(NOW, 0, 0, [leaf]), POLICY).steps

    assert [step.kind for step in steps] == ([Kind.TRIM_FEED] if goes else [])


def bucket(**other: object) -> Leaf:
    span = Span(NOW - 3 * HOUR, NOW - 2 * HOUR)
    return replace(Leaf("chunks", "chunks_1", LeafState.ATTACHED, 1000, span), **other)


def decided_on(leaf: Leaf) -> tuple[list[Kind], list[Held]]:
    decided = plan(Picture(NOW, 0, 0, [leaf]), POLICY)
    return [step.kind for step in decided.steps], list(decided.held)


@pytest.mark.parametrize(("later", "goes"), [(-MOMENT, True), (0 * MOMENT, True), (MOMENT, False)])
def test_a_bucket_is_left_alone_until_it_has_settled(later: timedelta, goes: bool):
    end = NOW - POLICY.settling + later

    kinds, held = decided_on(bucket(span=Span(end - HOUR, end)))

    assert (kinds, held) == ([Kind.DROP_BUCKET] if goes else [], [])


@pytest.mark.parametrize(("live_bytes", "moves"), [(1, True), (300, True), (301, False)])
def test_files_are_moved_out_of_what_is_mostly_dead_and_of_nothing_else(
    live_bytes: int, moves: bool
):
    kinds, held = decided_on(bucket(live=Live(2, live_bytes, holder=SOMEBODY)))

    assert kinds == ([Kind.MOVE_FILES, Kind.DROP_BUCKET] if moves else [])
    assert [one.by for one in held] == ([] if moves else [SOMEBODY])


def test_a_bucket_with_more_files_than_were_counted_is_not_moved():
    kinds, held = decided_on(bucket(live=Live(1, 1, counted=False, holder=SOMEBODY)))

    assert (kinds, len(held)) == ([], 1)


def test_a_bucket_with_an_upload_on_its_way_is_held_even_if_nothing_lives_in_it():
    kinds, held = decided_on(bucket(arriving=2))

    assert kinds == []
    assert held == [Held("chunks_1", 1000, "2 uploads are still arriving in it")]


def test_a_plan_says_what_is_deleted_and_why():
    (step,) = plan(Picture(NOW, 3, 4, []), POLICY).steps

    assert step == Step(Kind.DELETE_UPLOADS, rows=7, why="3 acknowledged, 4 expired")
