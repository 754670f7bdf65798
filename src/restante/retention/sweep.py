"""
One pass of the sweep: look, plan, and carry the plan out.

Rows are deleted first, in batches that skip locked rows, so any number of servers may do it.
Partitions are handled by one server at a time, under an advisory lock.  A step that meets a lock
times out, is reported, and is planned again by the next pass; a step that was interrupted is found
in the catalogue and finished.

A step that meets a full disk does not stop the others: one of them may free what it needs.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import Protocol

import structlog

from restante.database import locks, partitions
from restante.database.partitions import LOCK_TIMEOUT_MILLISECONDS, Partition, PartitionState
from restante.database.pool import Connection, Database, translated
from restante.errors import DatabaseFull, TableBusy
from restante.retention import rules, store
from restante.retention.disk import Disk
from restante.retention.rules import Picture
from restante.retention.subjects import OUT_OF_TIME, Subjects
from restante.wire import HeldSpace, PlanStep, PostponedStep, RetentionPlan, SweepReport

log = structlog.get_logger()

SWEPT_ELSEWHERE = "another server is sweeping"
DISK_FULL = "the disk is full"

# Each needs ballast to be given up, and has freed something or found room.
_PASSES_ON_A_FULL_DISK = 5

OnStep = Callable[[PlanStep, str], None]


def _ignore(_step: PlanStep, _outcome: str) -> None:
    """For callers that only want the report."""


class Observer(Protocol):
    """Is told how each pass ended."""

    def deleted(self, rows: Counter[str]) -> None: ...
    def gave_back(self, dropped: int, moved: int) -> None: ...
    def postponed(self, steps: int) -> None: ...
    def sweep_failed(self) -> None: ...


class Pass:
    """What one pass has done so far, and what it leaves for the next."""

    def __init__(self, on_step: OnStep = _ignore) -> None:
        self._on_step = on_step
        self._started = time.monotonic()
        self.deleted = Counter[str]()
        self.done: list[PlanStep] = []
        self.postponed: list[PostponedStep] = []
        self.bytes_dropped = 0
        self.bytes_moved = 0  # rewritten into another partition

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def obstacles(self) -> list[PostponedStep]:
        """What had to be left, except for what another server is doing."""
        return [one for one in self.postponed if one.reason != SWEPT_ELSEWHERE]

    def did_something(self, routine: Collection[str]) -> bool:
        """Whether it is worth a log line; rows of these outcomes are due at every pass."""
        rows = any(count for kind, count in self.deleted.items() if kind not in routine)
        on_partitions = any(step.partition for step in self.done)
        return bool(rows or on_partitions or self.obstacles)

    def finish(self, step: PlanStep) -> None:
        self.done.append(step)
        self._on_step(step, "done")

    def postpone(self, step: PlanStep, reason: str) -> None:
        self.postponed.append(PostponedStep(step, reason))
        self._on_step(step, reason)

    @property
    def met_a_full_disk(self) -> bool:
        return any(one.reason == DISK_FULL for one in self.postponed)

    def postpone_held(self, held: HeldSpace) -> None:
        """A step that a lock prevents already when the plan is made."""
        step = PlanStep(held.action, held.partition, 0, held.bytes, held.why, held.subject)
        self.postpone(step, held.why)

    def report(self) -> SweepReport:
        return SweepReport(
            acked=self.deleted["acked"],
            expired=self.deleted["expired"],
            bytes_back=self.bytes_dropped - self.bytes_moved,
            seconds=round(self.seconds, 3),
            done=self.done,
            postponed=self.postponed,
            deleted=dict(self.deleted),
        )


class Sweep:
    """Looks at the tables and frees space."""

    def __init__(
        self,
        db: Database,
        subjects: Subjects,
        *,
        budget_seconds: float,
        disk: Disk | None = None,
    ) -> None:
        self._db = db
        self._subjects = subjects
        self._disk = disk or Disk(db)
        self._budget_seconds = budget_seconds
        # Past partitions that a close look has found must stay.
        self._settled = frozenset[str]()

    async def now(self) -> datetime:
        """
        The time by the database's clock.

        Rows go into partitions by that clock.  By the clock of a server that is ahead, a sweep
        would seal partitions that the others still write to.
        """
        async with self._db.connection() as connection:
            return await store.clock(connection)

    async def plan(self, *, now: datetime) -> RetentionPlan:
        """What a sweep would do now, in a read-only transaction."""
        async with self._db.transaction(readonly=True) as tx:
            return self._planned(await self._picture(tx, now=now, closely=True))

    async def run(self, *, now: datetime, on_step: OnStep = _ignore) -> SweepReport:
        """Carry out what `plan` would return now."""
        one = Pass(on_step)
        await self._run(one, now=now, closely=True)
        return one.report()

    async def run_observed(
        self, observer: Observer, *, now: datetime, closely: bool = False
    ) -> SweepReport:
        """The same, counted and logged, also if it fails half-way."""
        one = Pass()
        try:
            await self._run(one, now=now, closely=closely)
        except BaseException:  # a pass that is cancelled at its deadline has failed too
            observer.sweep_failed()
            raise
        finally:
            self._observe(one, observer)
        return one.report()

    async def run_prompt(self, observer: Observer, *, now: datetime) -> None:
        """Delete the due rows that must not wait for the next sweep."""
        one = Pass()
        async with self._db.connection() as connection:
            for subject in self._subjects.rows:
                if subject.is_prompt:
                    one.deleted.update(await subject.delete_due(connection, now=now))
        self._observe(one, observer)

    def _observe(self, one: Pass, observer: Observer) -> None:
        observer.deleted(one.deleted)
        observer.gave_back(one.bytes_dropped, one.bytes_moved)
        observer.postponed(len(one.obstacles))
        routine = {
            kind for found in self._subjects.rows if found.is_routine for kind in found.outcomes
        }
        if not one.did_something(routine):
            return
        report = one.report()
        log.info(
            "swept",
            **{"acked": 0, "expired": 0, **report.deleted},
            bytes_back=report.bytes_back,
            steps=[f"{step.action} {step.partition}" for step in one.done if step.partition],
            postponed=[f"{left.step.action}: {left.reason}" for left in one.postponed],
            seconds=report.seconds,
        )

    def _planned(self, picture: Picture) -> RetentionPlan:
        return rules.plan(picture, self._subjects, scarce_bytes=self._disk.scarce_bytes)

    async def _run(self, one: Pass, *, now: datetime, closely: bool) -> None:
        """Look, plan and act; again if the disk was full and room could be made."""
        await self._run_once(one, now=now, closely=closely)
        for _ in range(_PASSES_ON_A_FULL_DISK):
            if not one.met_a_full_disk or not self._disk.make_room_for_sweep():
                return
            one.postponed.clear()
            await self._run_once(one, now=now, closely=True)

    async def _run_once(self, one: Pass, *, now: datetime, closely: bool) -> None:
        async with self._db.connection() as connection:
            picture = await self._picture(connection, now=now, closely=closely)
        plan = self._planned(picture)
        # Look closely again until a close look finds nothing left to do.
        self._settled = frozenset()
        for held in plan.held:
            if held.action:
                one.postpone_held(held)
        is_done = True
        for on_partitions, steps in groupby(plan.steps, key=lambda step: bool(step.partition)):
            if on_partitions:
                is_done &= await self._sweep_partitions(list(steps), one, now=now)
                continue
            for step in steps:
                await _attempt(step, one, partial(self._delete, one=one, now=now))
        if is_done and not one.postponed:
            self._settled = frozenset(
                found.name
                for found in picture.partitions
                if not found.is_locked and self._is_past(found, now=now)
            )

    def _is_past(self, partition: Partition, *, now: datetime) -> bool:
        return self._subjects.of_partition(partition).is_past(partition, now=now)

    async def _picture(self, connection: Connection, *, now: datetime, closely: bool) -> Picture:
        """
        Look at the tables.

        Sizes and contents are looked at closely only when something may have changed: uploads are
        due, or a partition's range has ended.
        """
        due = [
            (subject, await subject.count_due(connection, now=now))
            for subject in self._subjects.rows
        ]
        found = await partitions.partitions_of(connection, self._subjects.partitioned_tables)
        past = [one for one in found if self._subjects.of_partition(one).is_looked_at(one, now=now)]
        is_new = any(one.name not in self._settled for one in past if self._is_past(one, now=now))
        is_emptied = any(
            subject.empties_partitions and sum(counts.values()) for subject, counts in due
        )
        closely = closely or is_new or is_emptied
        if closely or any(one.state is not PartitionState.ATTACHED for one in past):
            past = await partitions.with_sizes(connection, past)
        contents = await self._contents(connection, past, now=now, closely=closely)
        return Picture(now, due, past, contents)

    async def _contents(
        self, connection: Connection, past: Sequence[Partition], *, now: datetime, closely: bool
    ) -> dict[str, object]:
        contents: dict[str, object] = {}
        for subject in self._subjects.partitions:
            its = [one for one in past if one.table == subject.table.name and one.is_attached]
            contents |= await subject.contents(connection, its, now=now, closely=closely)
        return contents

    async def _delete(self, step: PlanStep, *, one: Pass, now: datetime) -> str | None:
        """Delete in batches until a batch is not full or half of the time is used up."""
        subject = next(found for found in self._subjects.rows if found.name == step.subject)
        while True:
            async with self._db.connection() as connection:
                batch = await subject.delete_due(connection, now=now)
            one.deleted.update(batch)
            if sum(batch.values()) < subject.batch_size:
                return None
            if one.seconds >= self._budget_seconds / 2:
                return OUT_OF_TIME

    async def _sweep_partitions(
        self, steps: Sequence[PlanStep], one: Pass, *, now: datetime
    ) -> bool:
        """The steps on partitions; False if another server has done, or is doing, some of them."""
        async with (
            self._db.session() as connection,
            locks.held_if_free(connection, "sweep") as is_ours,
            locks.lock_timeout(connection, LOCK_TIMEOUT_MILLISECONDS),
        ):
            if not is_ours:
                log.debug("sweep_elsewhere")
                for step in steps:
                    one.postpone(step, SWEPT_ELSEWHERE)
                return False
            work = _PartitionWork(connection, self._subjects, one, now, self._budget_seconds)
            left = await work.still_planned(steps)
            for step in left:
                await _attempt(step, one, work.carry_out)
        return len(left) == len(steps)


async def _attempt(
    step: PlanStep, one: Pass, act: Callable[[PlanStep], Awaitable[str | None]]
) -> None:
    """Carry a step out; a lock or a full disk postpones it, any other error fails the pass."""
    try:
        with translated():
            reason = await act(step)
    except TableBusy as error:
        reason = str(error)
    except DatabaseFull:
        reason = DISK_FULL
    if reason:
        one.postpone(step, reason)
    else:
        one.finish(step)


class _PartitionWork:
    """Steps on partitions, on one connection that holds the lock for all of them."""

    def __init__(
        self,
        connection: Connection,
        subjects: Subjects,
        one: Pass,
        now: datetime,
        budget_seconds: float,
    ) -> None:
        self.connection = connection
        self.now = now
        self._subjects = subjects
        self._pass = one
        self._budget_seconds = budget_seconds
        self._found: dict[str, Partition] = {}
        # Postgres detaches one partition of a parent at a time; an interrupted one must end first.
        self._detaching = set[str | None]()

    @property
    def is_out_of_time(self) -> bool:
        return self._pass.seconds >= self._budget_seconds

    def moved(self, size: int) -> None:
        self._pass.bytes_moved += size

    def freed(self, size: int) -> None:
        self._pass.bytes_dropped += size

    async def still_planned(self, steps: Sequence[PlanStep]) -> list[PlanStep]:
        """The steps whose partition is still there, in the state that they were planned for."""
        found = await partitions.partitions_of(self.connection, self._subjects.partitioned_tables)
        self._found = {partition.name: partition for partition in found}
        return [step for step in steps if self._is_current(step)]

    def _is_current(self, step: PlanStep) -> bool:
        partition = self._found.get(step.partition or "")
        if partition is None:
            return False
        match step.action:
            case rules.FINISH_DETACH:
                return partition.state is PartitionState.DETACHING
            case rules.DROP_DETACHED:
                return partition.state is PartitionState.DETACHED
            case _:
                return partition.is_attached

    async def carry_out(self, step: PlanStep) -> str | None:
        """Carry out one step; returns why, and because of whom, it must wait for the next pass."""
        try:
            with translated():
                return await self._carry_out(step)
        except TableBusy as error:
            found = self._found[step.partition or ""]
            names = [found.name, *([found.parent] if found.parent else [])]
            who = await store.in_the_way(self.connection, names)
            return f"{error} In the way: {who}." if who else str(error)

    async def _carry_out(self, step: PlanStep) -> str | None:
        partition = self._found[step.partition or ""]
        if self.is_out_of_time:
            return OUT_OF_TIME
        if step.action == rules.DROP_DETACHED:
            await self._drop(partition)
            return None
        if partition.parent in self._detaching:
            return "another partition of its table is being detached"
        if step.action == rules.FINISH_DETACH:
            self._detaching.add(partition.parent)
            await partitions.finish_detaching(self.connection, partition)
            self._detaching.remove(partition.parent)
            await self._drop(partition)
            return None
        return await self._subjects.of_partition(partition).carry_out(step, partition, self)

    async def detach_and_drop(self, partition: Partition) -> None:
        self._detaching.add(partition.parent)
        await partitions.detach(self.connection, partition)
        self._detaching.remove(partition.parent)
        await self._drop(partition)

    async def _drop(self, partition: Partition) -> None:
        self._pass.bytes_dropped += await partitions.drop(self.connection, partition.name)
