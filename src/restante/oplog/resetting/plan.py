"""
What a reset would do: compares the tables, and finds who still needs the ops that would go.

Ops go up to where the reference has read our log, in the tables that are equal, once this node has
read what the reference had written by then.  Nothing is written here.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from uuid import UUID

from restante.database import partitions, sql
from restante.database.pool import Connection, Database
from restante.errors import BadRequest
from restante.oplog import cursors, peers, positions
from restante.oplog.peers import Peer
from restante.oplog.positions import START, Position
from restante.oplog.remote import Remote
from restante.oplog.resetting import seeds
from restante.oplog.serving import log as serving
from restante.oplog.tables import OPS
from restante.oplog.trimming import gate, picture
from restante.oplog.trimming.gate import Mark, Standing
from restante.oplog.trimming.limits import Limits
from restante.oplog.trimming.picture import Log, Picture
from restante.oplog.verifying import comparison, digests
from restante.oplog.verifying.comparison import Here, Progress
from restante.oplog.verifying.verify import There, verify
from restante.text import printable
from restante.wire.oplog_digests import TableReport, VerifyReport
from restante.wire.oplog_reset import (
    CURSORS_PATH,
    CursorsAnswer,
    CursorsRequest,
    PeerLoss,
    ResetPlan,
    ResetTable,
    SeededCursor,
)

queries = sql.load("restante.oplog.resetting", "reset")

_LOOK_SECONDS = 0.25
_MAX_COUNTED = 10_000
# A peer that has asked so recently is reading, and is waited for.
_IS_READING = timedelta(seconds=90)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the operator asks for."""

    tables: Sequence[str] = ()  # none: all that both nodes have
    evicts: bool = False  # peers that still need ops are evicted
    wait_seconds: float = 60.0


@dataclass(slots=True)
class Planner:
    """Plans the reset of this node's log, with a peer as the reference."""

    db: Database
    remote: Remote
    reference: Peer
    wanted: Wanted
    clock: Callable[[], datetime]
    progress: Progress = field(default_factory=Progress)
    on_wait: Callable[[str], None] = lambda _: None

    async def plan(self) -> ResetPlan:
        """Compare, wait until the peers have read what they can, and look; raises BadRequest."""
        await self._check_reference()
        verified = await self._verified()
        equal = [one.table for one in verified.tables if _is_equal(one)]
        told = await self._caught_up(equal) if _may_go(verified) else None
        limit = await self._limit(told) if told else None
        refusals = [*_inequalities(verified), *await self._obstacles(equal, limit)]
        if told is None and _may_go(verified):
            refusals.append(await self._why_behind())
        if not equal and not refusals:
            refusals.append(f"{self.reference.host} tracks none of the tables of this node.")
        losses = await self._losses(equal, limit) if limit else []
        refusals += [_refused(one) for one in losses if not one.is_accepted]
        return ResetPlan(
            peer=self.reference.host,
            verified=verified,
            up_to=str(limit) if limit else "",
            tables=await self._tables(verified),
            peers=losses,
            cursors=await self._cursors(told, equal) if told else [],
            refusals=refusals,
        )

    def _deadline(self) -> float:
        """Of one wait: what was waited for before does not shorten it."""
        return time.monotonic() + self.wanted.wait_seconds

    async def _check_reference(self) -> None:
        """It must be one of our nodes; which is known once something was read from it."""
        deadline = self._deadline()
        while self.reference.protocol is None and time.monotonic() < deadline:
            self.on_wait(f"until this node has read from {self.reference.host}")
            await asyncio.sleep(_LOOK_SECONDS)
            async with self.db.connection() as connection:
                found = await peers.find(connection, self.reference.host)
            self.reference = found or self.reference
        if self.reference.protocol != "restante":
            raise BadRequest(
                f"{self.reference.host} cannot be the reference: this node has not read from it "
                "yet, or it speaks the older protocol."
            )

    async def _verified(self) -> VerifyReport:
        return await verify(
            Here(self.db, self.reference.id, self.reference.tables),
            There(self.remote, self.reference),
            self.reference.host,
            only=self.wanted.tables,
            limits=comparison.Limits(wait_seconds=self.wanted.wait_seconds),
            progress=self.progress,
        )

    async def _caught_up(self, equal: Sequence[str]) -> CursorsAnswer | None:
        """
        What the reference says once it has read our log as it is now, and we have read its log.

        Its log must be read as it was when it said how far it is, so that what it had written
        before it knew our ops is known here.  None if that takes too long.
        """
        deadline, last = self._deadline(), await self._last(equal)
        told = await self._told()
        while True:
            if _position(told.cursor_on_you) < last:
                self.on_wait(f"until {self.reference.host} has read the log of this node")
                told = await self._told()
            elif await self._own_cursor() < _position(told.head):
                self.on_wait(f"until this node has read the log of {self.reference.host}")
            else:
                return told
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(_LOOK_SECONDS)

    async def _told(self) -> CursorsAnswer:
        async with self.db.connection() as connection:
            hosts = [peer.host for peer in await peers.all_peers(connection)]
        others = [host for host in hosts if host != self.reference.host]
        asked = CursorsRequest(others)
        return await self.remote.asked(self.reference, CURSORS_PATH, asked, CursorsAnswer)

    async def _own_cursor(self) -> Position:
        async with self.db.connection() as connection:
            text = await peers.read_from(connection, self.reference.id)
        return cursors.loaded(text, now=self.clock()).position or START

    async def _last(self, equal: Sequence[str]) -> Position:
        """The last op of these tables that peers can read."""
        async with self.db.connection() as connection:
            below = await serving.horizon(connection)
            ids = await _ids(connection, equal)
            row = await connection.fetchrow(queries.last_below, ids, below.era, below.xid)
        return Position(*row) if row else START

    async def _limit(self, told: CursorsAnswer) -> Position:
        """Up to where ops may go; nothing that can still arrive."""
        async with self.db.connection() as connection:
            below = await serving.horizon(connection)
        return min(_position(told.cursor_on_you), Position(below.era, below.xid, UUID(int=0), 0))

    async def _why_behind(self) -> str:
        told, own = await self._told(), await self._own_cursor()
        host = self.reference.host
        if own < _position(told.head):
            return (
                f"This node has not read the log of {host} within "
                f"{self.wanted.wait_seconds:g} s. `restante oplog status` says why; a server of "
                "this node must run."
            )
        return (
            f"{host} has not read the log of this node within {self.wanted.wait_seconds:g} s. "
            "`restante oplog status` on that node says why."
        )

    async def _obstacles(self, equal: Sequence[str], limit: Position | None) -> list[str]:
        there = await There(self.remote, self.reference).describe()
        paused_there = [one.name for one in there.tables if one.state == "paused"]
        async with self.db.connection() as connection:
            here = await digests.comparable(connection, frozenset(equal))
            parked = await connection.fetch(queries.parked, list(equal))
            seen = await look(connection, now=self.clock())
        return [
            *(f"{one.name} is paused here." for one in here if one.state == "paused"),
            *(
                f"{name} is paused on {self.reference.host}."
                for name in paused_there
                if name in equal
            ),
            *(
                f"{row['ops']} parked ops of {row['table_name']} could not be applied here: "
                "`restante oplog parked list`."
                for row in parked
            ),
            *(why for one in seen.logs if one.decided.name in equal for why in held(one, limit)),
        ]

    async def _losses(self, equal: Sequence[str], limit: Position) -> list[PeerLoss]:
        """What each other peer would lose; one that is reading is waited for."""
        deadline = self._deadline()
        while True:
            now = self.clock()
            async with self.db.connection() as connection:
                protocols = {one.host: one.protocol for one in await peers.all_peers(connection)}
                marks = await picture.marks(connection)
                found = [
                    await self._loss(connection, mark, protocols.get(mark.host), equal, limit)
                    for mark in marks
                    if mark.host != self.reference.host
                ]
            reading = {one.host for one in marks if one.seen_at and one.seen_at > now - _IS_READING}
            losses = [one for one in found if one is not None]
            slow = [one.host for one in losses if one.host in reading and _may_catch_up(one)]
            if not slow or time.monotonic() > deadline:
                return losses
            self.on_wait(f"until {', '.join(slow)} has read the log of this node")
            await asyncio.sleep(_LOOK_SECONDS)

    async def _loss(
        self,
        connection: Connection,
        mark: Mark,
        protocol: str | None,
        equal: Sequence[str],
        limit: Position,
    ) -> PeerLoss | None:
        now = self.clock()
        seen = [name for name in equal if mark.tables is None or name in mark.tables]
        ids = await _ids(connection, seen)
        at = passed(mark, now=now)
        row = await connection.fetchrow(
            queries.unread, ids, *_values(at), *_values(limit), _MAX_COUNTED + 1
        )
        assert row is not None  # noqa: S101 - a count
        worth = gate.standing(mark, now=now)
        if not row["ops"]:
            return None
        is_spared = mark.spared_until is not None and mark.spared_until > now
        is_gone = worth in {Standing.EVICTED, Standing.AWAY}
        return PeerLoss(
            host=mark.host,
            standing=worth.value,
            tables=seen,
            ops=min(row["ops"], _MAX_COUNTED),
            bytes=row["bytes"],
            is_more=row["ops"] > _MAX_COUNTED,
            since=row["since"],
            has_read=mark.confirmed >= str(limit),
            takes_snapshot=protocol != "ulid",
            is_accepted=is_gone or (self.wanted.evicts and not is_spared),
            spared_until=mark.spared_until if is_spared and not is_gone else None,
        )

    async def _tables(self, verified: VerifyReport) -> list[ResetTable]:
        async with self.db.connection() as connection:
            seen = await look(connection, now=self.clock())
            names = [piece.name for log in seen.logs for piece in log.decided.pieces]
            rows = await picture.estimated_rows(connection, names)
        logs = {log.decided.name: log for log in seen.logs}
        return [_table(one, logs[one.table], rows) for one in verified.tables if one.table in logs]

    async def _cursors(self, told: CursorsAnswer, equal: Sequence[str]) -> list[SeededCursor]:
        by_host = {one.host: one for one in told.cursors}
        async with self.db.connection() as connection:
            own = await seeds.own_cursors(connection, by_host)
        found = [
            seeds.seeded(one, by_host[one.host], self.reference, equal, now=self.clock())
            for one in own
        ]
        return [one for one in found if one is not None]


async def look(connection: Connection, *, now: datetime, parent: str | None = None) -> Picture:
    """The logs as they are now, or that of one table."""
    found = await partitions.partitions_of(connection, [OPS])
    attached = [one for one in found if one.is_attached and parent in {None, one.parent}]
    measured = await partitions.with_sizes(connection, attached)
    return await picture.look(connection, measured, Limits(), now=now)


def held(log: Log, limit: Position | None) -> list[str]:
    """What forbids to drop anything of a log now."""
    name = log.decided.name
    taking = log.decided.taking_from
    return [
        *([f"A snapshot of {name} is being taken from {taking}."] if taking else []),
        *(
            f"{pin.host} is taking a snapshot of {name} from this node."
            for pin in log.decided.pins
            if limit is None or pin.position < limit
        ),
    ]


def passed(mark: Mark, *, now: datetime) -> Position:
    """Up to where a peer needs nothing any more; one whose mark is worth nothing needs all."""
    if gate.standing(replace(mark, evicted_at=None, evict_after=None), now=now) is (
        Standing.READABLE
    ):
        return positions.parsed(mark.passed) or START
    return START


async def _ids(connection: Connection, names: Sequence[str]) -> list[int]:
    return [table.id for table in await digests.comparable(connection, frozenset(names))]


def _position(text: str) -> Position:
    return positions.parsed(text) or START


def _values(position: Position) -> tuple[int, int, UUID, int]:
    return position.era, position.xid, position.ulid, position.n


def _may_catch_up(loss: PeerLoss) -> bool:
    return loss.standing in {Standing.READABLE, Standing.MISSING}


def _is_equal(report: TableReport) -> bool:
    return report.outcome == "equal" and not report.schema


def _may_go(verified: VerifyReport) -> bool:
    return not _inequalities(verified) and any(_is_equal(one) for one in verified.tables)


def _inequalities(verified: VerifyReport) -> list[str]:
    found = list[str]()
    for one in verified.tables:
        if one.outcome == "differs":
            found.append(f"{one.table} is not equal to that of {verified.peer}.")
        elif one.outcome == "changing":
            found.append(f"{one.table} could not be compared to the end: {one.reason}")
        elif one.outcome == "equal" and one.schema:
            found.append(f"{one.table} has other columns on {verified.peer}.")
    return found


def _table(one: TableReport, log: Log, rows: Mapping[str, int]) -> ResetTable:
    pieces = [piece for piece in log.decided.pieces if piece.last is not None]
    return ResetTable(
        name=one.table,
        is_reset=_is_equal(one),
        why_not="" if _is_equal(one) else one.reason or "It is not equal.",
        ops=sum(rows.get(piece.name, 0) for piece in pieces),
        bytes=sum(piece.bytes for piece in log.decided.pieces),
        partitions=len(pieces),
    )


def _refused(loss: PeerLoss) -> str:
    count = f"{'more than ' if loss.is_more else ''}{loss.ops}"
    host = printable(loss.host)
    if loss.spared_until is not None:
        return (
            f"{host} has just taken a snapshot, and needs {count} ops since then. It is not "
            f"evicted before {loss.spared_until:%Y-%m-%d %H:%M}."
        )
    if loss.has_read:
        return (
            f"{host} has read everything, but this node has not read what it wrote before that. "
            "`restante oplog status` says why; with --evict the ops go all the same."
        )
    then = "takes a snapshot" if loss.takes_snapshot else "never gets them"
    return (
        f"{host} still needs {count} ops. Let it read them, or give --evict: then they go, and it "
        f"{then}."
    )
