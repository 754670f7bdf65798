"""What becomes of an incoming op, and of each key of a snapshot, case by case with its reason."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given, strategies as st

from restante.oplog import rules, ulids
from restante.oplog.rules import (
    Channel,
    Incoming,
    Newest,
    Outcome,
    SnapshotPair,
    SnapshotSides,
    SnapshotVerdict,
    Verdict,
    Version,
    judge,
    judge_snapshot,
)

NOW = datetime(2026, 11, 17, 12, tzinfo=UTC)
A, B, C = "http://a", "http://b", "http://c"


def at(minute: int) -> UUID:
    return ulids.lowest_at(NOW - timedelta(hours=2) + timedelta(minutes=minute))


def made(minute: int, origin: str = A) -> Version:
    return Version(at(minute), origin)


FLOOR = at(50)
OLD, NEW, NEWER = made(10), made(60), made(70)
pulled = Incoming(NEW, Channel.PULL)


@pytest.mark.parametrize(
    ("incoming", "newest", "verdict", "reason"),
    [
        (pulled, None, Verdict.APPLY, "its key has no op here, and it is newer than all dropped"),
        (pulled, Newest(OLD, is_delete=False), Verdict.APPLY, "it is newer"),
        (pulled, Newest(OLD, is_delete=True), Verdict.APPLY, "it is newer than the delete"),
        (pulled, Newest(NEW, is_delete=False), Verdict.SUPERSEDED, "it is the same op"),
        (pulled, Newest(NEWER, is_delete=True), Verdict.SUPERSEDED, "the delete is newer"),
        (
            pulled,
            Newest(made(60, B), is_delete=False),
            Verdict.SUPERSEDED,
            "of the same moment, the origin that sorts last wins",
        ),
        (
            replace(pulled, version=made(60, B)),
            Newest(NEW, is_delete=False),
            Verdict.APPLY,
            "of the same moment, the origin that sorts last wins",
        ),
        (
            pulled,
            Newest(NEWER, is_delete=False, is_approximate=True),
            Verdict.REPORT,
            "the record here may be older than its version says",
        ),
        (
            pulled,
            Newest(NEW, is_delete=False, is_approximate=True),
            Verdict.SUPERSEDED,
            "the same op again loses nothing",
        ),
        (
            Incoming(OLD, Channel.PULL),
            None,
            Verdict.WAIT,
            "what the peer has not read of ours may be newer",
        ),
        (
            Incoming(OLD, Channel.PULL, has_read_us=True),
            None,
            Verdict.APPLY,
            "the peer has read all that we dropped, and still holds this for the newest",
        ),
        (
            Incoming(OLD, Channel.PULL, has_read_us=True, is_newest_there=False),
            None,
            Verdict.SKIP,
            "a newer op of the key follows",
        ),
        (Incoming(OLD, Channel.PUSH, has_read_us=True), None, Verdict.SKIP, "the pull brings it"),
        (Incoming(OLD, Channel.ULID), None, Verdict.PARK_FLOOR, "the peer cannot vouch for it"),
        (
            Incoming(OLD, Channel.RETRY),
            None,
            Verdict.APPLY,
            "a newer op of the key would have removed it from the parked ones",
        ),
        (
            Incoming(Version(FLOOR, A), Channel.PUSH),
            None,
            Verdict.SKIP,
            "the floor itself has been dropped",
        ),
        (
            Incoming(OLD, Channel.PULL),
            Newest(made(5), is_delete=False),
            Verdict.APPLY,
            "the floor says nothing about a key that has an op",
        ),
        (
            Incoming(Version(ulids.lowest_at(NOW + rules.CLOCK_SKEW), A), Channel.PULL),
            None,
            Verdict.APPLY,
            "clocks may differ by so much",
        ),
        (
            Incoming(made(126), Channel.PULL),
            None,
            Verdict.PARK_FUTURE,
            "a clock is too far ahead, and would drag ours with it",
        ),
        (Incoming(made(126), Channel.PUSH), None, Verdict.PARK_FUTURE, "pushed ones as well"),
        (Incoming(made(126), Channel.RETRY), None, Verdict.APPLY, "an operator may insist"),
    ],
)
def test_an_incoming_op_is_judged(
    incoming: Incoming, newest: Newest | None, verdict: Verdict, reason: str
):
    assert judge(incoming, newest, floor=FLOOR, now=NOW) is verdict, reason


versions = st.builds(made, st.integers(0, 100), st.sampled_from([A, B]))
newests = st.builds(Newest, version=versions, is_delete=st.booleans(), is_approximate=st.booleans())
incomings = st.builds(
    Incoming,
    version=versions,
    channel=st.sampled_from(Channel),
    is_approximate=st.booleans(),
    is_newest_there=st.booleans(),
    has_read_us=st.booleans(),
)


@given(incomings, newests)
def test_only_a_newer_op_is_applied_over_another(incoming: Incoming, newest: Newest):
    """Whatever the way it came, and whatever the floor: else an old op would revert newer data."""
    verdict = judge(incoming, newest, floor=FLOOR, now=NOW)

    assert (verdict is Verdict.APPLY) == (incoming.version > newest.version)


@given(incomings, st.none() | newests)
def test_an_op_that_was_applied_is_superseded_when_it_comes_again(
    incoming: Incoming, newest: Newest | None
):
    if judge(incoming, newest, floor=FLOOR, now=NOW) is not Verdict.APPLY:
        return

    now_newest = Newest(incoming.version, is_delete=False, is_approximate=incoming.is_approximate)

    assert judge(incoming, now_newest, floor=FLOOR, now=NOW) is Verdict.SUPERSEDED


SIDES = SnapshotSides(
    server=B, taker=A, server_floor=FLOOR, own_floor=at(20), is_first=False, has_read_us=False
)
READ = replace(SIDES, has_read_us=True)
FIRST = replace(SIDES, is_first=True)
DIFFERENT = SnapshotPair(
    server=None, own=None, server_has_record=True, own_has_record=True, is_same=False
)
SAME = replace(DIFFERENT, is_same=True)
UNSENT = replace(
    DIFFERENT, server_has_record=False, has_unsent=True, is_unsent_on_server_record=True
)
THEIR_FLOOR = Version(FLOOR, B)


def op(version: Version, *, is_approximate: bool = False) -> Newest:
    return Newest(version, is_delete=False, is_approximate=is_approximate)


KEPT = SnapshotVerdict(Outcome.KEEP)
KEPT_AND_REPORTED = SnapshotVerdict(Outcome.KEEP, reports=True)


@pytest.mark.parametrize(
    ("pair", "sides", "verdict", "reason"),
    [
        (SAME, SIDES, KEPT, "both have the same record, older than both floors"),
        (
            DIFFERENT,
            READ,
            SnapshotVerdict(Outcome.TAKE, THEIR_FLOOR, is_approximate=True),
            "the server knew what we had dropped",
        ),
        (
            DIFFERENT,
            SIDES,
            SnapshotVerdict(Outcome.TAKE, THEIR_FLOOR, is_approximate=True, reports=True),
            "we had dropped something that the server has not read",
        ),
        (
            DIFFERENT,
            replace(SIDES, own_floor=at(55)),
            SnapshotVerdict(Outcome.TAKE, Version(at(55), B), is_approximate=True, reports=True),
            "its version must beat what we had dropped ourselves",
        ),
        (
            replace(DIFFERENT, server_has_record=False),
            FIRST,
            SnapshotVerdict(Outcome.REISSUE, Version(ulids.following(FLOOR), A)),
            "a server that has never read from us does not know our record",
        ),
        (
            replace(DIFFERENT, own=op(OLD), server_has_record=False, has_unsent=True),
            FIRST,
            SnapshotVerdict(Outcome.REISSUE, Version(ulids.following(FLOOR), A), reports=True),
            "the same although it is logged, but it may have had it from others and deleted it",
        ),
        (
            replace(DIFFERENT, server=op(NEW), own=op(OLD)),
            SIDES,
            SnapshotVerdict(Outcome.TAKE, NEW),
            "the server's is newer",
        ),
        (
            replace(DIFFERENT, server=op(NEW), own=op(NEWER)),
            SIDES,
            KEPT,
            "ours is newer, and the server will read it",
        ),
        (
            replace(DIFFERENT, server=op(NEW), own=op(NEWER, is_approximate=True)),
            SIDES,
            KEPT_AND_REPORTED,
            "ours may be older than its version says",
        ),
        (
            replace(DIFFERENT, server=op(NEW)),
            SIDES,
            SnapshotVerdict(Outcome.TAKE, NEW),
            "it is newer than all that we dropped",
        ),
        (
            replace(SAME, server=op(OLD)),
            SIDES,
            SnapshotVerdict(Outcome.KEEP_UNDER, Version(at(20), A), is_approximate=True),
            "ours may be newer, with the same record: it stays under our floor",
        ),
        (
            replace(DIFFERENT, own=op(NEW)),
            SIDES,
            KEPT,
            "ours is newer than all that the server dropped",
        ),
        (
            replace(DIFFERENT, own=op(OLD)),
            SIDES,
            SnapshotVerdict(Outcome.TAKE, THEIR_FLOOR, is_approximate=True),
            "the server has read ours, and has something else now",
        ),
        (
            replace(DIFFERENT, own=op(OLD), has_unsent=True, is_unsent_on_server_record=True),
            READ,
            SnapshotVerdict(Outcome.REISSUE, Version(ulids.following(FLOOR), A)),
            "our unsent change was made to what the server has",
        ),
        (
            replace(UNSENT, own=op(OLD)),
            READ,
            SnapshotVerdict(Outcome.REISSUE, Version(ulids.following(FLOOR), A)),
            "we made the record, and the server never had it",
        ),
        (
            replace(UNSENT, own=op(made(10, C))),
            READ,
            SnapshotVerdict(Outcome.REISSUE, Version(ulids.following(FLOOR), A), reports=True),
            "somebody else made it, and may have deleted it at the server since",
        ),
        (
            replace(DIFFERENT, own=op(OLD), has_unsent=True, is_unsent_on_server_record=True),
            SIDES,
            SnapshotVerdict(Outcome.TAKE, THEIR_FLOOR, is_approximate=True, reports=True),
            "we had dropped unsent changes before it",
        ),
        (
            replace(DIFFERENT, own=op(OLD), has_unsent=True),
            READ,
            SnapshotVerdict(Outcome.TAKE, THEIR_FLOOR, is_approximate=True, reports=True),
            "the server's record was changed meanwhile",
        ),
        (
            replace(DIFFERENT, own=op(THEIR_FLOOR)),
            SIDES,
            KEPT_AND_REPORTED,
            "under the same version it could not be logged, and others would not hear of it",
        ),
    ],
)
def test_a_key_of_a_snapshot_is_judged(
    pair: SnapshotPair, sides: SnapshotSides, verdict: SnapshotVerdict, reason: str
):
    assert judge_snapshot(pair, sides) == verdict, reason


@st.composite
def pairs(draw: st.DrawFn) -> SnapshotPair:
    server_has, own_has = draw(st.booleans()), draw(st.booleans())
    server = draw(st.none() | newests)
    own = draw(st.none() | newests)
    has_unsent = own is not None and draw(st.booleans())
    return SnapshotPair(
        server=replace(server, is_delete=not server_has) if server else None,
        own=replace(own, is_delete=not own_has) if own else None,
        server_has_record=server_has,
        own_has_record=own_has,
        is_same=server_has == own_has and (not server_has or draw(st.booleans())),
        has_unsent=has_unsent,
        is_unsent_on_server_record=has_unsent and draw(st.booleans()),
    )


@st.composite
def both_sides(draw: st.DrawFn) -> SnapshotSides:
    is_first = draw(st.booleans())
    return SnapshotSides(
        server=B,
        taker=A,
        server_floor=at(draw(st.integers(0, 100))),
        own_floor=at(draw(st.integers(0, 100))),
        is_first=is_first,
        has_read_us=not is_first and draw(st.booleans()),
    )


@given(pairs(), both_sides())
def test_what_a_snapshot_changes_is_logged_under_a_newer_version(
    pair: SnapshotPair, sides: SnapshotSides
):
    """Those who read from the taker hear of a change only by its log."""
    verdict = judge_snapshot(pair, sides)

    if verdict.outcome is not Outcome.KEEP and not pair.is_same:
        assert verdict.version is not None
    if verdict.version is not None and pair.own is not None:
        assert verdict.version > pair.own.version


@given(pairs(), both_sides())
def test_a_snapshot_never_replaces_a_newer_exact_version(pair: SnapshotPair, sides: SnapshotSides):
    verdict = judge_snapshot(pair, sides)

    is_newer = pair.own is not None and pair.own.version >= max(
        pair.server.version if pair.server else THEIR_FLOOR,
        Version(sides.server_floor, sides.server),
        Version(sides.own_floor, sides.server),
    )
    if is_newer:
        assert verdict.outcome is Outcome.KEEP


@given(pairs(), both_sides())
def test_a_record_that_both_have_is_never_reported_as_lost(
    pair: SnapshotPair, sides: SnapshotSides
):
    assert not (pair.is_same and judge_snapshot(pair, sides).reports)


@pytest.mark.parametrize(
    ("is_repair", "is_same", "outcome"),
    [
        (True, False, Outcome.TAKE),
        (True, True, Outcome.KEEP),
        (False, False, Outcome.KEEP),
    ],
)
def test_a_repair_takes_what_was_changed_behind_the_log(
    is_repair: bool, is_same: bool, outcome: Outcome
):
    """Both logs have the same version, and the records differ: an operator says which is right."""
    newest = Newest(THEIR_FLOOR, is_delete=False)
    pair = SnapshotPair(
        server=newest, own=newest, server_has_record=True, own_has_record=True, is_same=is_same
    )
    floors = THEIR_FLOOR.ulid, THEIR_FLOOR.ulid
    sides = SnapshotSides(
        "http://b", "http://a", *floors, is_first=False, has_read_us=True, is_repair=is_repair
    )

    verdict = judge_snapshot(pair, sides)

    assert (verdict.outcome, verdict.version) == (outcome, None)


@pytest.mark.parametrize(
    "server", [None, Newest(THEIR_FLOOR, is_delete=False, is_approximate=True)]
)
@pytest.mark.parametrize("is_newer", [False, True])
def test_a_repair_takes_what_no_version_tells_apart(server: Newest | None, *, is_newer: bool):
    """Its op is trimmed there, and ours is only of a snapshot; all others hear of the repair."""
    mine = replace(THEIR_FLOOR, ulid=ulids.following(THEIR_FLOOR.ulid)) if is_newer else THEIR_FLOOR
    own = Newest(mine, is_delete=False, is_approximate=not is_newer)
    pair = SnapshotPair(
        server=server, own=own, server_has_record=True, own_has_record=True, is_same=False
    )
    floors = THEIR_FLOOR.ulid, THEIR_FLOOR.ulid
    sides = SnapshotSides(
        "http://b", "http://a", *floors, is_first=False, has_read_us=True, is_repair=True
    )

    verdict = judge_snapshot(pair, sides)

    if is_newer:
        assert verdict.outcome is Outcome.KEEP
    else:
        assert verdict.outcome is Outcome.TAKE
        assert verdict.version is not None
        assert verdict.version > own.version
        assert verdict.reports
