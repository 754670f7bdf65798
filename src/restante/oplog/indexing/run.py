"""
One run: it takes the steps of the plan, one after the other, beside readers and writers.

`create index concurrently` waits for every older transaction, but nobody waits behind it.  What
changes a partitioned table, or attaches to it, takes a lock for a moment, and gives up soon: a
session that waits for such a lock blocks every writer behind it.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from restante.database import driver_errors, locks, sql
from restante.database.pool import Connection, translated
from restante.errors import BadRequest, DatabaseRefused, DiskLow, RestanteError, TableBusy
from restante.oplog.indexing import catalogue, plan
from restante.oplog.indexing.catalogue import Index
from restante.oplog.indexing.plan import Action, Optional, Step, Wanted
from restante.text import shown_bytes

queries = sql.load("restante.oplog.indexing", "catalogue")

# The server's own limit is off, and so must be the driver's.
_ANY_SECONDS = 30 * 86_400.0
_LOCK_MILLISECONDS = 100
_LOCK_TRIES = 100
_LOCK_PAUSE_SECONDS = 0.4
_LOOK_SECONDS = 1.0
_CANCEL_TRIES = 10
_CLEAN_UP = "10s"

# Where a build is when a phase begins, and when it ends, as part of the whole.
_PHASES = {
    "building index: scanning table": (0.0, 0.4),
    "building index: sorting live tuples": (0.4, 0.5),
    "building index: loading tuples in tree": (0.5, 0.7),
    "waiting for writers before validation": (0.7, 0.7),
    "index validation: scanning index": (0.7, 0.8),
    "index validation: sorting tuples": (0.8, 0.8),
    "index validation: scanning table": (0.8, 1.0),
    "waiting for old snapshots": (1.0, 1.0),
}

FreeBytes = Callable[[], int | None]


class Watcher(Protocol):
    """Is told how far the run is."""

    def began(self, step: Step, number: int, count: int) -> None: ...
    def progress(self, part: float) -> None: ...
    def waits(self, who: str) -> None: ...
    def ended(self, outcome: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Left:
    """What is not as it should be, and why."""

    table: str
    index: str
    why: str


@dataclass(slots=True)
class Report:
    """What a run has done."""

    status: Literal["complete", "incomplete", "interrupted", "busy"]
    done: list[Step] = field(default_factory=list[Step])
    left: list[Left] = field(default_factory=list[Left])
    notes: list[str] = field(default_factory=list[str])


class _Stopped(Exception):
    """The operator has stopped the run."""


@dataclass(slots=True)
class Run:
    """One run; `session` has no statement timeout, and `pid` is its process."""

    session: Connection
    observer: Connection
    pid: int
    stop: asyncio.Event
    watcher: Watcher
    free_bytes: FreeBytes | None  # None: not looked at
    report: Report = field(default_factory=lambda: Report("complete"))
    _tried: set[tuple[Action, str, str]] = field(default_factory=set[tuple[Action, str, str]])

    async def ensure(self, wanted: Wanted) -> Report:
        """Take all steps.  What is wrong with one partition does not keep the others from it."""
        try:
            while steps := await self._next(wanted):
                for number, step in enumerate(steps, start=1):
                    await self._take(step, number, len(steps))
        except _Stopped:
            self.report.status = "interrupted"
            return self.report
        self.report.status = "incomplete" if self.report.left else "complete"
        return self.report

    async def drop(self, name: Optional, logs: tuple[str, ...] | None) -> Report:
        """Drop an optional index; what waits for a lock gives up and tries again."""
        found = plan.optional_indexes(await catalogue.read(self.session), name, logs)
        if any(index.parent for index in found):
            raise BadRequest(
                f"The index {name} belongs to all logs. Drop it without naming a table."
            )
        try:
            for number, index in enumerate(found, start=1):
                await self._drop(index, number, len(found))
        except _Stopped:
            self.report.status = "interrupted"
        return self.report

    async def _drop(self, index: Index, number: int, count: int) -> None:
        step = Step(Action.DROP, index.table, index.name, index.definition)
        self.watcher.began(step, number, count)
        await self._briefly(f"drop index if exists {sql.quoted(index.name)}", index.table)
        self._done(step)

    async def _next(self, wanted: Wanted) -> list[Step]:
        """
        What is left to do: first the indexes of partitioned tables, which hold no rows.

        The catalogue is read again after each round, because partitions come and go.
        """
        steps = plan.planned(await catalogue.read(self.session), wanted)
        todo = [step for step in steps if step.action is not Action.LEAVE]
        todo = [step for step in todo if step.key not in self._tried]
        if not todo:
            self._note(steps)
        return [step for step in todo if step.action is Action.DECLARE] or todo

    def _note(self, steps: Sequence[Step]) -> None:
        """What is left at the end."""
        for step in steps:
            if step.action is Action.LEAVE:
                self.report.left.append(Left(step.table, step.index, step.why))
            elif step.action is Action.VALIDATE and step in self.report.done:
                self.report.done.remove(step)
                self.report.notes.append(
                    f"{step.parent_index} is still marked INVALID: this Postgres does not look "
                    "again. Every partition has its index, and new ones get it, so nothing is "
                    "slower for it."
                )

    async def _take(self, step: Step, number: int, count: int) -> None:
        self._check_stop()
        self._tried.add(step.key)
        self.watcher.began(step, number, count)
        try:
            self._check_room(step)
            await self._carry_out(step)
        except (TableBusy, DatabaseRefused, DiskLow) as error:
            if await self._is_gone(step):
                self.watcher.ended("the partition was dropped meanwhile")
                return
            self.report.left.append(Left(step.table, step.index, str(error)))
            self.watcher.ended(f"not done: {error}")
        else:
            self._done(step)

    def _done(self, step: Step) -> None:
        self.report.done.append(step)
        self.watcher.ended("done")

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise _Stopped

    def _check_room(self, step: Step) -> None:
        """Others write too while this runs, so there may be less than at its beginning."""
        estimated = plan.bytes_for([step])
        free = self.free_bytes() if self.free_bytes and estimated else None
        if free is not None and free < plan.needed(estimated):
            raise DiskLow(
                f"{shown_bytes(free)} are free by now, and {shown_bytes(plan.needed(estimated))} "
                "must be."
            )

    async def _is_gone(self, step: Step) -> bool:
        return step.table not in (await catalogue.read(self.observer)).tables

    async def _carry_out(self, step: Step) -> None:
        match step.action:
            case Action.DECLARE:
                await self._briefly(_create(step, on="on only"), step.table)
            case Action.BUILD | Action.REPLACE:
                await self._build(step)
                await self._attach(step)
            case Action.REBUILD:
                await self._rebuild(step)
                await self._attach(step)
            case _:
                await self._attach(step)

    async def _build(self, step: Step) -> None:
        for leftover in step.leftovers:
            await self._watched(f"drop index concurrently if exists {sql.quoted(leftover)}")
        try:
            await self._watched(_create(step, on="on", concurrently="concurrently"))
        except BaseException:
            await self._clean_up(step.table, step.index)
            raise

    async def _rebuild(self, step: Step) -> None:
        """An index that is attached cannot be dropped; Postgres swaps it for a new one."""
        before = (await catalogue.read(self.session)).indexes_of(step.table)
        try:
            await self._watched(f"reindex index concurrently {sql.quoted(step.index)}")
        except BaseException:
            # The new one has a name that Postgres chose.
            for index in (await catalogue.read(self.observer)).indexes_of(step.table):
                if index.name not in {one.name for one in before}:
                    await self._clean_up(step.table, index.name)
            raise

    async def _attach(self, step: Step) -> None:
        """Attach an index; if it is attached, newer Postgres looks whether its parent is valid."""
        if step.parent_index is not None:
            parent, index = sql.quoted(step.parent_index), sql.quoted(step.index)
            await self._briefly(f"alter index {parent} attach partition {index}", step.table)

    async def _briefly(self, statement: str, table: str) -> None:
        """Run what takes a strong lock, in many short tries; raises TableBusy."""
        for _ in range(_LOCK_TRIES):
            self._check_stop()
            try:
                async with locks.lock_timeout(self.session, _LOCK_MILLISECONDS):
                    await self._execute(statement)
            except TableBusy:
                self.watcher.waits(await self._holders(table))
                await self._pause()
            else:
                return
        raise TableBusy(
            f"{table} is locked all the time, by {await self._holders(table)}. End that, and run "
            "this again."
        )

    async def _holders(self, table: str) -> str:
        rows = await self.observer.fetch(queries.holders, sql.quoted(table), [self.pid])
        return ", ".join(map(catalogue.named, rows)) or "short transactions"

    async def _pause(self) -> None:
        seconds = _LOCK_PAUSE_SECONDS * random.uniform(0.5, 1.5)  # noqa: S311 - jitter
        try:
            await asyncio.wait_for(self.stop.wait(), timeout=seconds)
        except TimeoutError:
            return

    async def _watched(self, statement: str) -> None:
        """Run what may take hours, tell how far it is, and cancel it when the run is stopped."""
        async with locks.lock_timeout(self.session, 0):
            work = asyncio.ensure_future(self._execute(statement))
            stopping = asyncio.ensure_future(self.stop.wait())
            try:
                while not work.done():
                    await asyncio.wait(
                        {work, stopping},
                        timeout=_LOOK_SECONDS,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    if not work.done():
                        self._check_stop()
                        await self._look()
            finally:
                stopping.cancel()
                await self._cancel(work)
            await work

    async def _look(self) -> None:
        """Tell how far the build is, and who it waits for."""
        blockers = await self.observer.fetch(queries.blockers, self.pid)
        if blockers:
            self.watcher.waits(", ".join(map(catalogue.named, blockers)))
        row = await self.observer.fetchrow(queries.progress, self.pid)
        if row is not None and row["phase"] in _PHASES:
            begin, end = _PHASES[row["phase"]]
            self.watcher.progress(begin + (end - begin) * (row["part"] or 0))

    async def _cancel(self, work: "asyncio.Future[None]") -> None:
        """End the statement if it still runs.  Afterwards it has ended, or its session has."""
        for _ in range(_CANCEL_TRIES):
            if work.done():
                break
            # A request can arrive before the statement that it is meant for, so it is repeated.
            await self.observer.execute(queries.cancel, self.pid)
            await asyncio.wait({work}, timeout=_LOOK_SECONDS)
        else:
            self.session.terminate()
            await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # seen; whoever awaits the work gets it too

    async def _clean_up(self, table: str, index: str) -> None:
        """Drop what a build has left over; if that is not possible, the next run does it."""
        try:
            await self._execute(f"set statement_timeout = '{_CLEAN_UP}'")
            await self._execute(f"drop index concurrently if exists {sql.quoted(index)}")
            await self._execute("set statement_timeout = 0")
        except RestanteError as error:
            why = f"it is INVALID and could not be dropped; the next run does it. {error}"
            self.report.left.append(Left(table, index, why))

    async def _execute(self, statement: str) -> None:
        with driver_errors.refusal_named(), translated():
            await self.session.execute(statement, timeout=_ANY_SECONDS)


def _create(step: Step, *, on: str, concurrently: str = "") -> str:
    unique = "unique" if step.is_unique else ""
    return (
        f"create {unique} index {concurrently} {sql.quoted(step.index)} "
        f"{on} {sql.quoted(step.table)} using {step.definition}"
    )
