"""
Which change wins: pure decisions about incoming ops and about the records of a snapshot.

A version is a ULID and the host that made the change.  The newest op of a key is the version of its
record; a record without an op is older than the floor of its table.  Versions from a snapshot may
be approximate: such a record is at most as new as its version says.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Literal
from uuid import UUID

from restante.oplog import ulids

# A clock that is further ahead than this is alarmed, and its ops wait.
CLOCK_SKEW = timedelta(minutes=5)

Action = Literal["c", "u", "d"]


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """When a change was made, by the hybrid clock, and where; later ones win."""

    ulid: UUID
    origin: str


OLDEST = Version(ulids.LOWEST, "")


@dataclass(frozen=True, slots=True)
class OwnName:
    """
    The name of this node, and from when on all changes in this name are in its log.

    Earlier ones may have been lost with a restore: then only the peers have them.  What a peer has
    taken from us without a version is in our name too; it is approximate.
    """

    host: str
    since: UUID = ulids.LOWEST

    def is_claimed(self, version: Version, *, is_approximate: bool, unlogged: UUID) -> bool:
        """Whether a change is in our name, and we must have it if it is real."""
        is_ours = version.origin == self.host and not is_approximate
        return is_ours and version.ulid >= max(self.since, unlogged)


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest op of a key in a log."""

    version: Version
    is_delete: bool
    is_approximate: bool = False


class Channel(StrEnum):
    """How an op came in."""

    PULL = "pull"  # from one of our own nodes, which vouches for it
    PUSH = "push"
    ULID = "ulid"  # pulled from a peer of the older protocol, which cannot vouch
    RETRY = "retry"  # it was parked


@dataclass(frozen=True, slots=True)
class Incoming:
    """One record of an incoming op, with what the sender says of it."""

    version: Version
    channel: Channel
    is_approximate: bool = False
    is_newest_there: bool = True  # whether it is still the newest of its key at the sender
    has_read_us: bool = False  # the sender's cursor on us is at or above our trimmed mark
    is_claimed: bool = False  # it is in our name, and of a time of which we know all that we made


class Verdict(StrEnum):
    """What becomes of an incoming record."""

    APPLY = "apply"
    SUPERSEDED = "superseded"  # we have the same or a newer version
    REPORT = "report"  # it lost against an approximate version: goes to the conflict log
    SKIP = "skip"  # the pull, or a newer op of the same page, brings what counts
    WAIT = "wait"  # the sender must take its snapshot of us first
    REFUSE = "own_name"  # it is in our name, and we did not make it
    PARK_FUTURE = "future"  # its clock is too far ahead
    PARK_FLOOR = "below_floor"  # the sender cannot vouch for it


def judge(incoming: Incoming, newest: Newest | None, *, floor: UUID, now: datetime) -> Verdict:
    """
    Decide about an incoming record, with its key locked and the newest op read after that.

    `floor` is the largest ULID ever dropped from the log of the table.
    """
    if incoming.is_claimed and (newest is None or incoming.version > newest.version):
        # If it were ours, it would be in the log, or have been dropped from it.
        return Verdict.REFUSE if incoming.version.ulid > floor else Verdict.SKIP
    if incoming.channel is not Channel.RETRY and is_ahead(incoming.version.ulid, now=now):
        return Verdict.PARK_FUTURE
    if newest is not None:
        return _against(incoming, newest)
    if incoming.version.ulid > floor or incoming.channel is Channel.RETRY:
        return Verdict.APPLY
    return _below_floor(incoming)


def is_ahead(ulid: UUID, *, now: datetime) -> bool:
    """Whether the clock that made it is too far ahead of ours."""
    return ulids.moment_of(ulid) > now + CLOCK_SKEW


def _against(incoming: Incoming, newest: Newest) -> Verdict:
    if incoming.version > newest.version:
        return Verdict.APPLY
    if incoming.version < newest.version and newest.is_approximate:
        return Verdict.REPORT
    return Verdict.SUPERSEDED


def _below_floor(incoming: Incoming) -> Verdict:
    """No op of the key is left here, so what we have may be newer or older."""
    match incoming.channel:
        case Channel.PUSH:
            return Verdict.SKIP
        case Channel.ULID:
            return Verdict.PARK_FLOOR
        case _ if not incoming.has_read_us:
            return Verdict.WAIT
        case _:
            return Verdict.APPLY if incoming.is_newest_there else Verdict.SKIP


@dataclass(frozen=True, slots=True)
class SnapshotPair:
    """One key of a snapshot: what the server has, and what the taker has."""

    server: Newest | None  # the newest op of the key in the server's log
    own: Newest | None
    server_has_record: bool
    own_has_record: bool
    is_same: bool  # both have the same record, or neither has one
    has_unsent: bool = False  # we have ops of the key that the server has not read
    is_unsent_on_server_record: bool = False  # the first of them changed what the server has


@dataclass(frozen=True, slots=True)
class SnapshotSides:
    """What holds for all keys of a table in one snapshot."""

    server: str  # the server's host
    taker: str
    server_floor: UUID
    own_floor: UUID
    is_first: bool  # the server has not read the table since changes of it were not logged
    has_read_us: bool  # its cursor on us is at or above our trimmed mark
    is_repair: bool = False  # an operator trusts the server's records
    has_unlogged: bool = False  # the server has changes without ops, which we have not read


class Outcome(StrEnum):
    """What the taker does with a key."""

    KEEP = "keep"
    TAKE = "take"  # the server's record or its absence, under the version
    KEEP_UNDER = "keep_under"  # our record stays, and is logged under the version
    REISSUE = "reissue"  # our last change is logged again under the version


@dataclass(frozen=True, slots=True)
class SnapshotVerdict:
    """The decision about one key; without a version nothing is logged."""

    outcome: Outcome
    version: Version | None = None
    is_approximate: bool = False
    reports: bool = False  # what loses goes to the conflict log


_KEEP = SnapshotVerdict(Outcome.KEEP)


def judge_snapshot(pair: SnapshotPair, sides: SnapshotSides) -> SnapshotVerdict:
    """Decide about one key of a snapshot, with the key locked."""
    verdict = _judge_snapshot(pair, sides)
    if sides.is_repair and pair.own and verdict.outcome is Outcome.KEEP and not pair.is_same:
        return _repair(pair.server, pair.own, sides) or verdict
    return verdict


def _judge_snapshot(pair: SnapshotPair, sides: SnapshotSides) -> SnapshotVerdict:
    if pair.server is None:
        return _without_server_op(pair, sides)
    if pair.own is None:
        return _without_own_op(pair, pair.server, sides)
    if pair.server.version <= pair.own.version:
        return SnapshotVerdict(Outcome.KEEP, reports=pair.own.is_approximate and not pair.is_same)
    if pair.server.is_approximate and not pair.is_same:
        # It says no more than "older than the floor".
        return _both_unsure(pair, sides)
    return _take(pair, sides)


def _repair(server: Newest | None, own: Newest, sides: SnapshotSides) -> SnapshotVerdict | None:
    """
    Take the server's record although our version is not older; None if ours is surely newer.

    With the same version, one of the records was changed behind the log, and nobody else has to
    hear of the repair.  Otherwise nobody knows which is newer, and all take the server's.
    """
    is_exact = not own.is_approximate
    theirs = server.version if server else Version(sides.server_floor, sides.server)
    if is_exact and own.version > theirs:
        return None
    if is_exact and server and not server.is_approximate and own.version == theirs:
        return SnapshotVerdict(Outcome.TAKE)
    newer = Version(ulids.following(max(own.version, theirs).ulid), sides.taker)
    return SnapshotVerdict(Outcome.TAKE, newer, is_approximate=True, reports=True)


def _without_own_op(pair: SnapshotPair, server: Newest, sides: SnapshotSides) -> SnapshotVerdict:
    is_newer = server.version.ulid > sides.own_floor and not server.is_approximate
    if is_newer or sides.has_read_us:
        return _take(pair, sides)
    if pair.is_same:
        ulid = max(server.version.ulid, sides.own_floor)
        return SnapshotVerdict(Outcome.KEEP_UNDER, Version(ulid, sides.taker), is_approximate=True)
    return _take(pair, sides, reports=True)


def _without_server_op(pair: SnapshotPair, sides: SnapshotSides) -> SnapshotVerdict:
    if pair.own is None:
        if pair.is_same:
            return _KEEP
        if sides.is_first and not pair.server_has_record:
            return _reissue(pair, sides)
        return _take(pair, sides, reports=not sides.has_read_us)
    if pair.own.version > Version(sides.server_floor, sides.server):
        return SnapshotVerdict(Outcome.KEEP, reports=pair.own.is_approximate and not pair.is_same)
    return _both_unsure(pair, sides)


def _both_unsure(pair: SnapshotPair, sides: SnapshotSides) -> SnapshotVerdict:
    """We have an op, and the server's record may be older or newer than it."""
    assert pair.own is not None  # noqa: S101 - the callers have checked it
    if not pair.has_unsent:
        return _take(pair, sides)
    if pair.is_same and (pair.server_has_record or pair.own.is_delete):
        return _take(pair, sides)
    if sides.has_read_us and pair.is_unsent_on_server_record:
        # The record may have come here anew.  Or it was deleted there: without an op, or, if
        # somebody else made the change, by one that was dropped there and did not reach us yet.
        is_doubtful = sides.has_unlogged or pair.own.version.origin != sides.taker
        may_revive = is_doubtful and not pair.server_has_record and not pair.is_same
        return replace(_reissue(pair, sides), reports=may_revive)
    if sides.is_first and pair.server is None and not pair.server_has_record:
        # More likely it never had the record than that it had it from others and deleted it.
        return replace(_reissue(pair, sides), reports=True)
    return replace(_take(pair, sides), reports=not pair.is_same)


def _take(pair: SnapshotPair, sides: SnapshotSides, *, reports: bool = False) -> SnapshotVerdict:
    """
    The server's record, under its version or, without one, under the server's floor.

    If the loss is reported, the version must also beat what we have dropped ourselves.  A record
    never changes without a newer version in the log: those behind us would not hear of it.
    """
    floor = Version(sides.server_floor, sides.server)
    version = pair.server.version if pair.server else floor
    if reports:
        version = max(version, Version(sides.own_floor, sides.server))
    if pair.own is not None and version <= pair.own.version:
        return SnapshotVerdict(Outcome.KEEP, reports=not pair.is_same)
    is_logged = pair.server is not None or not pair.is_same or pair.own is not None
    return SnapshotVerdict(
        Outcome.TAKE,
        version if is_logged else None,
        is_approximate=pair.server is None or pair.server.is_approximate or reports,
        reports=reports and not pair.is_same,
    )


def _reissue(pair: SnapshotPair, sides: SnapshotSides) -> SnapshotVerdict:
    """Just above everything that the server can compare it with."""
    highest = max(sides.server_floor, pair.server.version.ulid if pair.server else ulids.LOWEST)
    return SnapshotVerdict(Outcome.REISSUE, Version(ulids.following(highest), sides.taker))
