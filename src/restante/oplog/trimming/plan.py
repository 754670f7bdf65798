"""The plan for the op log as the operator sees it: what would go, what stays, because of whom."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from restante.database import partitions
from restante.database.pool import Connection
from restante.oplog import ulids
from restante.oplog.tables import OPS
from restante.oplog.trimming import fates, gate, picture
from restante.oplog.trimming.fates import Cause
from restante.oplog.trimming.gate import MARGIN, Mark, Standing
from restante.oplog.trimming.limits import Limits
from restante.oplog.trimming.log_subject import Decided, OpLog
from restante.oplog.trimming.picture import Log, Picture
from restante.wire.oplog_plan import Holder, OplogPlan, PeerMark, PlannedRemoval, PlannedTable


async def look(connection: Connection, limits: Limits, *, now: datetime) -> OplogPlan:
    """The same decisions as a sweep would make now; writes nothing."""
    found = await partitions.partitions_of(connection, [OPS])
    attached = [one for one in found if one.is_attached]
    measured = await partitions.with_sizes(connection, attached)
    seen = await picture.look(connection, measured, limits, now=now)
    decided = await OpLog(limits).decided(connection, seen, now=now)
    return _plan(seen, decided, limits, now=now)


def _plan(
    seen: Picture, decided: Mapping[str, Decided], limits: Limits, *, now: datetime
) -> OplogPlan:
    tables = [_table(log, _of(log, decided), seen.marks, limits, now=now) for log in seen.logs]
    held = Counter[str]()
    for table in tables:
        for holder in table.holders:
            if holder.reason != MARGIN:  # that goes by itself
                held[holder.who] += holder.bytes
    return OplogPlan(
        tables=tables,
        peers=[_peer(mark, held[mark.host], now=now) for mark in seen.marks],
        bytes_to_come_back=sum(one.bytes for table in tables for one in table.removals),
    )


def _of(log: Log, decided: Mapping[str, Decided]) -> list[Decided]:
    return [decided[piece.name] for piece in log.decided.pieces if piece.name in decided]


def _table(
    log: Log, decided: Sequence[Decided], marks: Sequence[Mark], limits: Limits, *, now: datetime
) -> PlannedTable:
    policy, last_at = log.decided.policy, log.decided.last_at
    dormant_after = limits.dormant_after
    return PlannedTable(
        name=log.decided.name,
        bytes=log.decided.bytes,
        retention_days=_days(policy.retention),
        cap_days=_days(policy.cap_age),
        cap_bytes=policy.cap_bytes,
        floor="" if log.floor == ulids.LOWEST else ulids.text_of(log.floor),
        floor_at=picture.floor_moment(log.floor),
        cut_off=fates.cut_off(log.decided, marks, limits, now=now),
        last_op_at=last_at,
        is_dormant=bool(dormant_after and last_at and last_at <= now - dormant_after),
        removals=_removals(decided),
        holders=_holders(decided),
        dropped_ops=log.dropped_ops,
        dropped_bytes=log.dropped_bytes,
        dropped_at=log.dropped_at,
    )


def _removals(decided: Sequence[Decided]) -> list[PlannedRemoval]:
    by_cause = defaultdict[Cause, list[Decided]](list)
    for one in decided:
        if one.fate.cause is not None:
            by_cause[one.fate.cause].append(one)
    return [
        PlannedRemoval(
            cause=cause.value,
            partitions=len(some),
            rows=sum(one.rows for one in some),
            bytes=sum(one.piece.bytes - one.fate.kept_bytes for one in some),
            evicts=sorted({host for one in some for host in one.fate.evicts}),
        )
        for cause, some in by_cause.items()
    ]


def _holders(decided: Sequence[Decided]) -> list[Holder]:
    """Each of them once for each reason, with all that it keeps."""
    found = dict[tuple[str, str], Holder]()
    for one in decided:
        for hold in one.fate.holds if one.fate.cause is None else ():
            known = found.get((hold.who, hold.reason))
            found[hold.who, hold.reason] = Holder(
                who=hold.who,
                reason=hold.reason,
                why=hold.why,
                since=known.since if known else hold.since,
                bytes=one.piece.bytes + (known.bytes if known else 0),
            )
    return list(found.values())


def _peer(mark: Mark, held_bytes: int, *, now: datetime) -> PeerMark:
    worth = gate.standing(mark, now=now)
    return PeerMark(
        host=mark.host,
        standing=worth.value,
        passed=mark.passed if worth is Standing.READABLE else "",
        behind_since=mark.reached_at,
        seen_at=mark.seen_at,
        evicted_at=mark.evicted_at,
        held_bytes=held_bytes,
    )


def _days(age: timedelta | None) -> float | None:
    return None if age is None else age / timedelta(days=1)
