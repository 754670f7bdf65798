"""Which partitions of the log go, who keeps them, and who is evicted: case by case."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given, strategies as st

from restante.database.partitions import Partition, PartitionState
from restante.database.spans import Span
from restante.oplog.positions import Position
from restante.oplog.trimming.fates import KEPT, Cause, Fate, fates
from restante.oplog.trimming.gate import Mark, Piece, Pin, Standing, TableLog, standing
from restante.oplog.trimming.limits import Limits, Policy, width

NOW = datetime(2026, 11, 17, 12, tzinfo=UTC)
DAY, HOUR = timedelta(days=1), timedelta(hours=1)
MIB = 1024 * 1024
A, B = "http://a", "http://b"
ERA = round(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1_000_000)

WEEK = Policy(retention=7 * DAY)


def at(xid: int, era: int = ERA) -> Position:
    return Position(era, xid, UUID(int=0), 0)


def piece(days_ago: float, last: int | None, size: int = 10 * MIB, days: float = 1) -> Piece:
    """A partition that began so many days ago; its last op is of this transaction."""
    start = NOW - days_ago * DAY
    partition = Partition(
        "ops",
        f"ops_1_{days_ago}",
        PartitionState.ATTACHED,
        Span(start, start + days * DAY),
        "ops_1",
    )
    return Piece(replace(partition, bytes=size), None if last is None else at(last))


OLD, RECENT, IN_USE = piece(20, 10), piece(3, 20), piece(0.5, 30)
ALL = (OLD, RECENT, IN_USE)
PAGES = TableLog("pages", WEEK, ALL, last_at=NOW - HOUR)

AHEAD = Mark(A, str(at(99)), str(at(99)), seen_at=NOW)
SLOW = Mark(B, str(at(5)), str(at(5)), reached_at=NOW - 21 * DAY, seen_at=NOW - HOUR)


def fate_of(
    one: Piece, log: TableLog = PAGES, marks: tuple[Mark, ...] = (), limits: Limits | None = None
) -> Fate:
    return fates([log], marks, limits or Limits(), now=NOW).get(one.name, KEPT)


def causes(
    log: TableLog, marks: tuple[Mark, ...] = (), limits: Limits | None = None
) -> list[Cause | None]:
    return [fate_of(one, log, marks, limits).cause for one in log.pieces]


# Retention


def test_without_a_limit_everything_stays():
    assert fates([replace(PAGES, policy=Policy())], [AHEAD], Limits(), now=NOW) == {}


@pytest.mark.parametrize("marks", [(), (AHEAD,), (AHEAD, replace(AHEAD, host=B))])
def test_what_is_older_than_the_retention_goes_when_all_are_past_it(marks: tuple[Mark, ...]):
    assert causes(PAGES, marks) == [Cause.RETENTION, None, None]


def test_a_slow_peer_keeps_what_it_has_not_read_and_is_named():
    fate = fate_of(OLD, marks=(AHEAD, SLOW))

    assert fate.cause is None
    (hold,) = fate.holds
    assert (hold.who, hold.reason, hold.since) == (B, "behind", SLOW.reached_at)


@pytest.mark.parametrize(
    ("passed", "reason"),
    [
        ("", "missing"),
        ("QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWKcrXx", "unreadable"),
        ("18423042", "unreadable"),
        ("01ARZ3NDEKTSV4RRFFQ69G5FAV", "unreadable"),
        (str(at(99, era=0)), "implausible"),
        (str(at(99, era=round((NOW + 2 * DAY).timestamp() * 1_000_000))), "implausible"),
        (str(at(99, era=2**63 - 1)), "implausible"),
    ],
)
def test_a_peer_without_a_usable_mark_keeps_everything(passed: str, reason: str):
    fate = fate_of(OLD, marks=(AHEAD, replace(SLOW, passed=passed, reached_at=None)))

    assert [(one.who, one.reason) for one in fate.holds] == [(B, reason)]


def test_an_ancient_mark_that_is_readable_keeps_what_is_after_it():
    ancient = replace(SLOW, passed=str(at(1)), reached_at=NOW - 400 * DAY)

    assert fate_of(OLD, marks=(ancient,)).holds[0].reason == "behind"


@pytest.mark.parametrize(("read_for", "goes"), [(0.5 * HOUR, False), (2 * HOUR, True)])
def test_ops_stay_for_the_margin_after_the_slowest_peer_has_read_them(
    read_for: timedelta, goes: bool
):
    """Its first unread op arrived so long after the end of the partition."""
    mark = replace(SLOW, passed=str(at(10)), reached_at=OLD.end + read_for)

    assert (fate_of(OLD, marks=(mark,)).cause is Cause.RETENTION) == goes


def test_a_peer_that_may_not_see_the_table_keeps_nothing():
    assert fate_of(OLD, marks=(replace(SLOW, tables=frozenset({"others"})),)).cause


def test_each_table_has_its_own_retention():
    month = replace(PAGES, name="months", policy=Policy(retention=30 * DAY))

    assert causes(PAGES) == [Cause.RETENTION, None, None]
    assert causes(month) == [None, None, None]


# Snapshots


def test_a_snapshot_that_a_peer_takes_keeps_what_follows_its_start_even_from_a_cap():
    log = replace(PAGES, pins=[Pin(A, at(5))], policy=Policy(DAY, DAY))

    assert fate_of(OLD, log).holds[0].reason == "pinned"
    assert fate_of(OLD, replace(log, pins=[Pin(A, at(10))])).cause is Cause.CAP_AGE


def test_nothing_goes_while_we_take_a_snapshot_of_the_table():
    log = replace(PAGES, taking_from=A, policy=Policy(DAY, DAY, 1))

    assert causes(log) == [None, None, None]
    assert fate_of(OLD, log).holds[0].who == A


# Caps and eviction


@pytest.mark.parametrize("mark", [SLOW, replace(SLOW, passed=""), replace(SLOW, passed="garbage")])
def test_an_age_cap_beats_the_gate_and_evicts_whoever_is_behind(mark: Mark):
    log = replace(PAGES, policy=Policy(7 * DAY, 10 * DAY))

    assert fate_of(OLD, log, (AHEAD, mark)) == Fate(Cause.CAP_AGE, evicts=(B,))


@pytest.mark.parametrize("passed", [str(at(10)), "", "garbage"])
def test_a_peer_that_has_read_the_ops_is_not_evicted_even_if_we_have_not_read_its_log(passed: str):
    mark = replace(SLOW, passed=passed, confirmed=str(at(10)), reached_at=OLD.end + HOUR / 2)

    assert fate_of(OLD, replace(PAGES, policy=Policy(None, 10 * DAY)), (mark,)).evicts == ()


def test_a_peer_that_has_just_taken_a_snapshot_is_not_evicted_again():
    log, spared = replace(PAGES, policy=Policy(None, DAY)), replace(SLOW, spared_until=NOW + HOUR)

    assert fate_of(OLD, log, (spared,)).cause is None
    assert fate_of(OLD, log, (replace(SLOW, spared_until=NOW - HOUR),)).evicts == (B,)


@pytest.mark.parametrize(
    "mark",
    [
        replace(SLOW, evicted_at=NOW - DAY),
        replace(SLOW, seen_at=NOW - 9 * DAY, evict_after=DAY),
    ],
    ids=["evicted", "away"],
)
def test_a_peer_that_has_just_come_back_keeps_what_it_has_not_read(mark: Mark):
    """Otherwise it would have to take the next snapshot at once."""
    spared = replace(mark, spared_until=NOW + HOUR, confirmed=str(at(5)))

    assert [one.reason for one in fate_of(OLD, marks=(spared,)).holds] == ["spared"]
    assert fate_of(OLD, marks=(replace(spared, confirmed=str(at(10))),)).cause
    assert fate_of(OLD, marks=(replace(spared, spared_until=NOW - HOUR),)).cause


def test_an_evicted_peer_keeps_nothing():
    assert fate_of(OLD, marks=(replace(SLOW, evicted_at=NOW - DAY),)) == Fate(Cause.RETENTION)


@pytest.mark.parametrize(("away", "evicts"), [(2 * DAY, ()), (4 * DAY, (B,))])
def test_a_peer_that_stays_away_too_long_is_evicted(away: timedelta, evicts: tuple[str, ...]):
    mark = replace(SLOW, seen_at=NOW - away, evict_after=3 * DAY)

    assert fate_of(OLD, marks=(mark,)).evicts == evicts


def test_a_peer_that_never_came_is_away_since_it_was_added():
    mark = Mark(B, added_at=NOW - 4 * DAY, evict_after=3 * DAY)

    assert standing(mark, now=NOW) is Standing.AWAY
    assert standing(replace(mark, added_at=NOW - DAY), now=NOW) is Standing.MISSING


def test_a_byte_cap_drops_the_oldest_until_the_rest_fits():
    log = replace(PAGES, policy=Policy(cap_bytes=20 * MIB))

    assert causes(log, (AHEAD,)) == [Cause.CAP_BYTES, None, None]
    assert fate_of(OLD, log, (SLOW,)).evicts == (B,)
    assert causes(replace(log, policy=Policy(cap_bytes=30 * MIB))) == [None, None, None]


def test_a_byte_cap_counts_what_the_retention_drops_anyway():
    log = replace(PAGES, policy=Policy(7 * DAY, cap_bytes=20 * MIB))

    assert causes(log) == [Cause.RETENTION, None, None]


def test_a_byte_cap_cuts_the_partition_in_use_if_that_alone_is_too_large():
    large = piece(0.5, 30, 100 * MIB)
    fate = fate_of(large, TableLog("pages", Policy(cap_bytes=40 * MIB), [large]))

    assert fate.cause is Cause.CAP_BYTES
    assert fate.kept_bytes == pytest.approx(20 * MIB, rel=0.01)
    assert fate.until is not None
    assert NOW - fate.until == pytest.approx(0.2 * 0.5 * DAY, abs=timedelta(seconds=2))


def test_a_byte_cap_for_all_tables_takes_the_oldest_of_any():
    other = TableLog("others", Policy(), [piece(9, 40), piece(0.25, 50)])
    limits = Limits(Policy(cap_bytes=25 * MIB))
    found = fates([replace(PAGES, policy=Policy()), other], [], limits, now=NOW)

    assert found == {
        OLD.name: Fate(Cause.CAP_BYTES),
        other.pieces[0].name: Fate(Cause.CAP_BYTES),
        RECENT.name: Fate(Cause.CAP_BYTES),
    }


# Cutting


def test_a_wide_partition_is_cut_when_more_than_half_of_it_is_due():
    wide = piece(20, 30, 20 * MIB, days=30)
    fate = fate_of(wide, TableLog("pages", WEEK, [wide]), (AHEAD,))

    assert (fate.cause, fate.until) == (Cause.RETENTION, NOW - 7 * DAY)
    assert fate.kept_bytes == pytest.approx(7 * MIB, rel=0.01)
    assert fate_of(wide, TableLog("pages", Policy(11 * DAY), [wide])).cause is None


def test_retention_cuts_only_what_the_slowest_peer_has_read():
    wide = piece(20, 30, 20 * MIB, days=30)
    log = TableLog("pages", WEEK, [wide])

    assert (
        fate_of(wide, log, (replace(SLOW, reached_at=NOW - 8 * DAY),)).until == NOW - 8 * DAY - HOUR
    )
    assert fate_of(wide, log, (replace(SLOW, reached_at=NOW - 15 * DAY),)).cause is None


def test_a_cap_cuts_beyond_a_slow_peer():
    wide = piece(20, 30, 20 * MIB, days=30)
    fate = fate_of(wide, TableLog("pages", Policy(None, 7 * DAY), [wide]), (SLOW,))

    assert (fate.until, fate.evicts) == (NOW - 7 * DAY, (B,))


# Dormant tables

DORMANT = Limits(dormant_after=90 * DAY)


def test_a_dormant_table_loses_all_ops_that_the_peers_have_read():
    quiet = TableLog("pages", Policy(), [piece(100, 10), piece(0.5, None)], last_at=NOW - 99 * DAY)

    assert causes(quiet, (AHEAD,), DORMANT) == [Cause.DORMANT, None]
    assert causes(quiet, (SLOW,), DORMANT) == [None, None]


def test_one_recent_op_protects_the_whole_table():
    log = replace(PAGES, policy=Policy())

    assert causes(replace(log, last_at=NOW - 89 * DAY), (), DORMANT) == [None, None, None]
    assert causes(replace(log, last_at=NOW - 91 * DAY), (), DORMANT) == 3 * [Cause.DORMANT]
    assert causes(replace(log, last_at=NOW - 91 * DAY), ()) == [None, None, None]


def test_a_past_partition_without_ops_goes_whatever_the_limits():
    empty = TableLog("pages", Policy(), [piece(20, None), piece(0.5, None)])

    assert causes(empty) == [Cause.EMPTY, None]


# Any picture

marks_of = st.builds(
    Mark,
    st.sampled_from([A, B]),
    st.sampled_from(["", "garbage", str(at(1)), str(at(15)), str(at(99))]),
    st.sampled_from(["", str(at(1)), str(at(15)), str(at(99))]),
    reached_at=st.one_of(st.none(), st.integers(0, 40).map(lambda days: NOW - days * DAY)),
    seen_at=st.one_of(st.none(), st.integers(0, 40).map(lambda days: NOW - days * DAY)),
    evict_after=st.one_of(st.none(), st.just(5 * DAY)),
    spared_until=st.one_of(st.none(), st.just(NOW + HOUR)),
)
policies = st.builds(
    Policy,
    st.one_of(st.none(), st.just(2 * DAY)),
    st.one_of(st.none(), st.just(4 * DAY)),
    st.one_of(st.none(), st.integers(0, 40 * MIB)),
)


@given(st.lists(marks_of, max_size=3), policies, st.booleans(), st.booleans())
def test_nothing_goes_that_a_peer_needs_unless_it_is_evicted(
    marks: list[Mark], policy: Policy, is_dormant: bool, is_pinned: bool
):
    log = replace(PAGES, policy=policy, pins=[Pin(A, at(15))] if is_pinned else [])
    if is_dormant:
        log = replace(log, last_at=NOW - 100 * DAY)
    for name, fate in fates([log], marks, DORMANT, now=NOW).items():
        one = next(one for one in ALL if one.name == name)
        if fate.cause is None or fate.until is not None:
            continue
        assert one.last is not None
        assert not is_pinned or one.last <= at(15)
        for mark in marks:
            has_passed = "-" in mark.passed and mark.passed >= str(one.last)
            assert has_passed or mark.confirmed >= str(one.last) or mark.host in fate.evicts


@pytest.mark.parametrize(
    ("policy", "days"),
    [
        (Policy(), 30),
        (Policy(retention=7 * DAY), 1),
        (Policy(retention=3 * HOUR), 1),
        (Policy(retention=70 * DAY), 10),
        (Policy(retention=700 * DAY), 30),
        (Policy(70 * DAY, 14 * DAY), 2),
    ],
)
def test_partitions_are_as_wide_as_the_limits_allow(policy: Policy, days: int):
    assert width(policy, 30 * DAY) == days * DAY
