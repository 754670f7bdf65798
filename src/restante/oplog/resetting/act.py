"""
Carries out a reset: cursors first, then one partition after the other, oldest first.

Each step looks again at who needs the ops.  Its state is in the catalogue and in the marks of the
tables, so a reset that was killed is finished by the next one, or by a sweep.
"""

import asyncio
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from restante.database import locks, partitions, sql
from restante.database.partitions import LOCK_TIMEOUT_MILLISECONDS, Partition, PartitionState
from restante.database.pool import Connection, Database, translated
from restante.errors import StatementTimedOut, TableBusy
from restante.oplog import positions
from restante.oplog.positions import Position
from restante.oplog.resetting import seeds
from restante.oplog.resetting.plan import held, look, passed
from restante.oplog.tables import OPS
from restante.oplog.trimming import drops, gate, picture
from restante.oplog.trimming.drops import Drop
from restante.oplog.trimming.fates import Cause, Fate
from restante.oplog.trimming.gate import Piece, Standing
from restante.oplog.trimming.picture import Log, Picture
from restante.retention import store
from restante.wire.oplog_reset import ResetPlan, ResetReport, SeededCursor

queries = sql.load("restante.oplog.resetting", "reset")

_SWEEP_SECONDS = 120.0
_TRIES = 5
_PAUSE_SECONDS = 1.0
# Ops may be written to a partition for this long after its range has ended.
_SETTLING = timedelta(seconds=5)
# Everything that has arrived.
_LATER = timedelta(days=1)


class _Refused(Exception):
    """Somebody needs the ops since the plan was made."""


@dataclass(slots=True)
class _Work:
    """The connection that holds the sweep's lock, and what was dropped with it."""

    connection: Connection
    now: datetime
    bytes: int = 0
    partitions: int = 0
    is_out_of_time: bool = False

    def moved(self, size: int) -> None:
        self.bytes -= size

    def freed(self, size: int) -> None:
        self.bytes += size
        self.partitions += 1

    async def detach_and_drop(self, partition: Partition) -> None:
        await partitions.detach(self.connection, partition)
        await self.drop(partition)

    async def drop(self, partition: Partition) -> None:
        self.freed(await partitions.drop(self.connection, partition.name))


@dataclass(slots=True)
class Reset:
    """Empties the logs of a plan that nothing is in the way of."""

    db: Database
    plan: ResetPlan
    clock: Callable[[], datetime]
    on_step: Callable[[str], None] = lambda _: None
    _ops: int = 0
    _evicted: set[str] = field(default_factory=set[str])
    _left: list[str] = field(default_factory=list[str])

    async def run(self) -> ResetReport:
        """
        Seed the cursors and drop the ops; what could not be done is in the report.

        Raises DatabaseUnavailable if a sweep does not end.
        """
        assert not self.plan.refusals  # noqa: S101 - the caller has looked
        started, before = time.monotonic(), await self._free_bytes()
        seeded = await self._seed()
        async with (
            self.db.session() as connection,
            locks.held(connection, "sweep", wait_seconds=_SWEEP_SECONDS),
            locks.lock_timeout(connection, LOCK_TIMEOUT_MILLISECONDS),
        ):
            work = _Work(connection, self.clock())
            for name in await self._names(connection):
                if reason := await self._attempt(name, work):
                    self._left.append(f"{name}: {reason}")
        after = await self._free_bytes()
        return ResetReport(
            peer=self.plan.peer,
            tables=self._tables,
            ops=self._ops,
            partitions=work.partitions,
            bytes=work.bytes,
            filesystem_bytes=None if before is None or after is None else after - before,
            evicted=sorted(self._evicted),
            seeded=seeded,
            left=self._left,
            seconds=round(time.monotonic() - started, 3),
        )

    @property
    def _tables(self) -> list[str]:
        return [table.name for table in self.plan.tables if table.is_reset]

    @property
    def _limit(self) -> Position:
        limit = positions.parsed(self.plan.up_to)
        assert limit is not None  # noqa: S101 - it was planned
        return limit

    async def _seed(self) -> list[SeededCursor]:
        wanted = {one.host: one for one in self.plan.cursors if not one.why_not}
        done = list[SeededCursor]()
        async with self.db.connection() as connection:
            for own in await seeds.own_cursors(connection, wanted):
                one = wanted[own.host]
                if await seeds.seed(connection, own, one, now=self.clock()):
                    done.append(one)
        return done

    async def _free_bytes(self) -> int | None:
        """Of the filesystem with our tables; None if it cannot be seen from here."""
        async with self.db.connection() as connection:
            found = await store.directories(connection)
        if not found:
            return None
        data, _, *tablespace = found
        try:
            disk = os.statvfs(tablespace[0] if tablespace else data)
        except OSError:
            return None
        return disk.f_bavail * disk.f_frsize

    async def _names(self, connection: Connection) -> list[str]:
        """What earlier passes have left half-done, and then the partitions, the oldest first."""
        seen = await look(connection, now=self.clock())
        parents = {one.parent for one in seen.logs if one.decided.name in self._tables}
        found = await partitions.partitions_of(connection, [OPS])
        halves = [one.name for one in found if not one.is_attached]
        ours = [one for one in found if one.is_attached and one.parent in parents]
        self._left += [f"{one.name}: It has no range of time." for one in ours if one.span is None]
        dated = sorted(
            (one.span.start, one.name)
            for one in ours
            if one.span and one.span.start <= self.clock()
        )
        return [*halves, *(name for _, name in dated)]

    async def _attempt(self, name: str, work: _Work) -> str | None:
        """Try often and never for long; returns why it could not be done."""
        reason = ""
        for _ in range(_TRIES):
            work.now = self.clock()
            try:
                with translated():
                    await self._step(name, work)
            except _Refused as error:
                return str(error)
            except (TableBusy, StatementTimedOut) as error:
                reason = str(error)
                self.on_step(f"{name}: {reason}")
            else:
                return None
            await asyncio.sleep(_PAUSE_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
        return reason

    async def _step(self, name: str, work: _Work) -> None:
        found = await partitions.partitions_of(work.connection, [OPS])
        partition = next((one for one in found if one.name == name), None)
        if partition is None:
            return
        if partition.state is PartitionState.DETACHING:
            await partitions.finish_detaching(work.connection, partition)
        if not partition.is_attached:
            await work.drop(partition)
            return
        await self._trim(partition, work)

    async def _trim(self, partition: Partition, work: _Work) -> None:
        """Drop what may go of a partition, in the way that holds up writers least."""
        assert partition.span is not None  # noqa: S101 - it is attached
        is_past = partition.span.end + _SETTLING <= work.now
        if is_past:
            await partitions.seal(work.connection, partition.name)
        seen = await look(work.connection, now=work.now, parent=partition.parent)
        its_log = seen.of_parent(partition.parent)
        if its_log is None:  # it is no longer tracked
            return
        piece = _piece(its_log, partition)
        drop = await self._drop(seen, its_log, piece, work)
        if piece.last is None or piece.last <= self._limit:
            if is_past:
                await drops.whole(drop, piece.last, work)
                self._note(drop)
                return
            if piece.last is None:
                return
            if await drops.contents(drop, piece.last, work) is None:
                self._note(drop)
                return
        await self._cut(drop, work)

    async def _cut(self, drop: Drop, work: _Work) -> None:
        """Keep what came after the plan was made."""
        name, at = sql.quoted(drop.partition.name), self._limit
        statement = queries.has_until.format(partition=name)
        if not await work.connection.fetchval(statement, at.era, at.xid, at.ulid, at.n):
            return
        rest = replace(drop, fate=replace(drop.fate, until=work.now + _LATER))
        if reason := await drops.older_part(rest, most=at, work=work):
            raise TableBusy(reason)
        self._note(rest)

    async def _drop(self, seen: Picture, its_log: Log, piece: Piece, work: _Work) -> Drop:
        """What goes, with those whom it evicts; raises _Refused if the plan did not name them."""
        evicts = list[str]()
        if piece.last is not None:
            if reasons := held(its_log, self._limit):
                raise _Refused(" ".join(reasons))
            evicts = self._evicts(seen, its_log, min(piece.last, self._limit), now=work.now)
        rows = await picture.estimated_rows(work.connection, [piece.name])
        fate = Fate(Cause.RESET, evicts=evicts)
        return Drop(its_log, piece.partition, fate, rows.get(piece.name, 0), piece.bytes, work.now)

    def _evicts(self, seen: Picture, its_log: Log, last: Position, *, now: datetime) -> list[str]:
        needed = [
            mark
            for mark in seen.marks
            if mark.host != self.plan.peer
            and (mark.tables is None or its_log.decided.name in mark.tables)
            and gate.standing(mark, now=now) is not Standing.EVICTED
            and passed(mark, now=now) < last
        ]
        if unnamed := {mark.host for mark in needed} - self._named:
            raise _Refused(f"{', '.join(sorted(unnamed))} still needs ops of it.")
        return [mark.host for mark in needed if mark.confirmed < str(last)]

    @property
    def _named(self) -> set[str]:
        return {one.host for one in self.plan.peers if one.is_accepted}

    def _note(self, drop: Drop) -> None:
        self._ops += drop.rows
        self._evicted.update(drop.fate.evicts)
        self.on_step(f"{drop.partition.name}: dropped")


def _piece(its_log: Log, partition: Partition) -> Piece:
    for one in its_log.decided.pieces:
        if one.name == partition.name:
            return one
    raise TableBusy("Another session has locked it.")
