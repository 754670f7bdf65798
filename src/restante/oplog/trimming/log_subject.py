"""The log as one of the bounded things: what a sweep would drop of it, and what must stay."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import takewhile

from restante.database import partitions
from restante.database.partitions import Partition
from restante.database.pool import Connection
from restante.oplog import positions
from restante.oplog.positions import Position
from restante.oplog.tables import LEAST_LEAD, LOG_WIDTH, OPS
from restante.oplog.trimming import drops, fates, limits, picture
from restante.oplog.trimming.drops import Drop
from restante.oplog.trimming.fates import Cause, Fate
from restante.oplog.trimming.gate import MARGIN, Hold, Piece
from restante.oplog.trimming.limits import Limits
from restante.oplog.trimming.picture import Log, Picture
from restante.retention.subjects import Account, PartitionSubject, Work
from restante.text import printable
from restante.wire import HeldSpace, PinView, PlanStep

ACTIONS = {
    Cause.RETENTION: "trim the op log",
    Cause.CAP_AGE: "trim the op log by a cap",
    Cause.CAP_BYTES: "trim the op log by a cap",
    Cause.DORMANT: "drop dormant ops",
    Cause.EMPTY: "drop an empty part of the op log",
}
_CUT = "cut the op log"

# Smaller partitions are not worth a line.
_NAMED_FROM_BYTES = 1024 * 1024
_HOLDERS_NAMED = 3
_WAY_OUT = (
    "let it read, or evict it: `restante oplog peers remove`, or `peers add --evict-after-days`"
)
# They end by themselves, or say how.
_SHORT = frozenset({MARGIN, "pinned", "taking_snapshot", "spared", "locked", "default_partition"})

# Why something that was due had to stay, one for each partition and pass.
skipped_so_far = Counter[str]()


@dataclass(frozen=True, slots=True)
class Decided:
    """A partition of the log, and what becomes of it."""

    log: Log
    piece: Piece
    fate: Fate
    rows: int = 0


class OpLog(PartitionSubject[Decided]):
    """The ops of all tracked tables."""

    name = "ops"
    tables = ("ops", "op_clock_lock", "op_era_lock")  # the locks are always empty
    table = OPS
    width = LOG_WIDTH
    least_lead = LEAST_LEAD
    is_ordered = True

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    async def parents(self, connection: Connection) -> Sequence[str]:
        """One for each tracked table."""
        return list(await picture.policies(connection, self.limits))

    async def widths(self, connection: Connection) -> Mapping[str, timedelta]:
        """Narrow enough for the retention of each table."""
        policies = await picture.policies(connection, self.limits)
        return {parent: limits.width(policy, self.width) for parent, policy in policies.items()}

    async def contents(
        self, connection: Connection, past: Sequence[Partition], *, now: datetime, closely: bool
    ) -> Mapping[str, Decided]:
        """What becomes of each partition."""
        if not closely:
            past = await partitions.with_sizes(connection, past)
        found = await picture.look(connection, past, self.limits, now=now)
        return await self.decided(connection, found, now=now)

    async def decided(
        self, connection: Connection, found: Picture, *, now: datetime
    ) -> dict[str, Decided]:
        """The decisions about a picture."""
        now = min(now, found.now)
        decided = fates.fates(
            [log.decided for log in found.logs], found.marks, self.limits, now=now
        )
        rows = await picture.estimated_rows(connection, list(decided))
        return {
            piece.name: Decided(
                log, piece, decided.get(piece.name, fates.KEPT), rows.get(piece.name, 0)
            )
            for log in found.logs
            for piece in log.decided.pieces
        }

    async def account(
        self, connection: Connection, found: Sequence[Partition], *, now: datetime
    ) -> Account:
        """Who keeps what is due."""
        ours = [one for one in found if one.table == OPS.name and one.is_attached]
        contents = await self.contents(connection, ours, now=now, closely=False)
        held = [
            (one.piece, hold)
            for one in contents.values()
            for hold in one.fate.holds
            if hold.reason not in _SHORT
        ]
        return Account(pins=_pins(held, now=now))

    def decide(
        self, partition: Partition, contents: Decided | None, *, now: datetime
    ) -> Sequence[PlanStep] | HeldSpace:
        """Drop it, cut it, or name who needs it."""
        if contents is None:
            return []
        if contents.fate.cause is None:
            return self._kept(contents, now=now)
        fate, size = contents.fate, partition.bytes
        action = ACTIONS[contents.fate.cause] if fate.until is None else _CUT
        share = 1 - fate.kept_bytes / size if size else 1.0
        rows, freed = round(contents.rows * share), size - fate.kept_bytes
        return [PlanStep(action, partition.name, rows, freed, _why(contents), self.name)]

    def rewritten_bytes(self, contents: Decided) -> int:
        """What stays of a partition that is cut."""
        return contents.fate.kept_bytes

    def _kept(self, contents: Decided, *, now: datetime) -> Sequence[PlanStep] | HeldSpace:
        piece, held = contents.piece, contents.fate.holds
        if held:
            skipped_so_far.update({one.reason for one in held})
        elif piece.bytes < _NAMED_FROM_BYTES:
            return []
        since = min((one.since for one in held if one.since), default=None)
        why = _held(contents) if held else _not_due(contents, now=now)
        return HeldSpace(piece.name, piece.bytes, why, since=since, subject=self.name)

    async def carry_out(self, step: PlanStep, partition: Partition, work: Work) -> str | None:
        """Drop it, if that is still right when it takes no more ops."""
        is_past = self.is_past(partition, now=work.now)
        if is_past:
            await partitions.seal(work.connection, partition.name)
        contents = await self._decided_now(partition, work)
        if contents is None or contents.fate.cause is None:
            return _held(contents) if contents and contents.fate.holds else "it is not due any more"
        if older := _older(contents):
            return f"{older.name} is older, and goes first"
        drop = Drop(
            contents.log, partition, contents.fate, step.rows, contents.piece.bytes, work.now
        )
        last = contents.piece.last
        if contents.fate.until is not None:
            most = await _most(contents, work.connection)
            return await drops.older_part(drop, most=most, work=work)
        if is_past:
            await drops.whole(drop, last, work)
            return None
        return await drops.contents(drop, last, work) if last is not None else None

    async def _decided_now(self, partition: Partition, work: Work) -> Decided | None:
        found = await partitions.partitions_of(work.connection, [self.table])
        looked_at = [one for one in found if one.is_attached]
        measured = await partitions.with_sizes(work.connection, looked_at)
        now = await picture.look(work.connection, measured, self.limits, now=work.now)
        decided = await self.decided(work.connection, now, now=work.now)
        return decided.get(partition.name)

    def is_looked_at(self, partition: Partition, *, now: datetime) -> bool:
        """The one in use too: it is wide, and must be named if it keeps much."""
        return partition.span is None or partition.span.start <= now


def _older(contents: Decided) -> Piece | None:
    """
    A partition whose ops arrived before.

    If they stayed, an old op of a record would pass for its newest one.
    """
    pieces, own = contents.log.decided.pieces, contents.piece.name
    before = takewhile(lambda one: one.name != own, pieces)
    return next((one for one in before if one.last is not None), None)


async def _most(contents: Decided, connection: Connection) -> Position | None:
    """The last position that may go; a cap does not ask the peers, but snapshots."""
    name, needed = contents.log.decided.name, [pin.position for pin in contents.log.decided.pins]
    if contents.fate.cause is Cause.RETENTION:
        evicted = set(contents.fate.evicts)
        needed += [
            passed
            for mark in await picture.marks(connection)
            if mark.host not in evicted and mark.evicted_at is None
            if mark.tables is None or name in mark.tables
            if (passed := positions.parsed(mark.passed)) is not None
        ]
    return min(needed, default=None)


def _pins(held: Sequence[tuple[Piece, Hold]], *, now: datetime) -> list[PinView]:
    """Each holder once, those that keep most first."""
    kept, first = Counter[str](), dict[str, Hold]()
    for piece, hold in held:
        kept[hold.who] += piece.bytes
        first.setdefault(hold.who, hold)
    return [
        PinView(
            who=f"peer {printable(who)}",
            what=f"ops that are due, and it {first[who].why}",
            way_out=_WAY_OUT,
            bytes=size,
            seconds=(now - (first[who].since or now)).total_seconds(),
        )
        for who, size in kept.most_common(_HOLDERS_NAMED)
    ]


def _why(contents: Decided) -> str:
    table, policy = printable(contents.log.decided.name), contents.log.decided.policy
    sentence = {
        Cause.RETENTION: f"ops of {table} are kept for {_days(policy.retention)}",
        Cause.CAP_AGE: f"ops of {table} may be {_days(policy.cap_age)} old at most",
        Cause.CAP_BYTES: "the op log takes more than it may",
        Cause.DORMANT: f"nothing has happened to {table} for long",
        Cause.EMPTY: "nothing is in it",
    }[contents.fate.cause or Cause.EMPTY]
    if contents.fate.until is not None:
        sentence += f"; what arrived before {contents.fate.until:%Y-%m-%d %H:%M} goes"
    if contents.fate.evicts:
        sentence += f"; evicts {', '.join(map(printable, contents.fate.evicts))}"
    return sentence


def _held(contents: Decided) -> str:
    """Who keeps it, and what can be done."""
    held = contents.fate.holds
    named = [f"{printable(one.who)} {one.why}{_since(one)}" for one in held[:_HOLDERS_NAMED]]
    more = [f"{len(held) - _HOLDERS_NAMED} more"] if len(held) > _HOLDERS_NAMED else []
    sentence = "; ".join([*named, *more])
    if any(one.reason not in _SHORT for one in held):
        sentence += f". {_WAY_OUT[0].upper()}{_WAY_OUT[1:]}"
    return sentence


def _since(one: Hold) -> str:
    return f" since {one.since:%Y-%m-%d %H:%M}" if one.since else ""


def _not_due(contents: Decided, *, now: datetime) -> str:
    table, policy = printable(contents.log.decided.name), contents.log.decided.policy
    if policy.is_off:
        return (
            f"ops of {table} are kept for ever; set RESTANTE_OPS_RETENTION_DAYS, or "
            f"`restante oplog track {table} --retention-days`"
        )
    kept = min((one for one in (policy.retention, policy.cap_age) if one), default=None)
    if kept is None:
        return f"ops of {table} are kept as long as they fit"
    due = max(contents.piece.end + kept, now)
    return f"ops of {table} are kept for {_days(kept)}, these until {due:%Y-%m-%d %H:%M}"


def _days(age: timedelta | None) -> str:
    return "ever" if age is None else f"{age / timedelta(days=1):g} days"
