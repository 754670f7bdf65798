"""
One pass of the sweep: look, plan, and carry the plan out.

Rows are deleted first, in batches that skip what a client holds, so any number of servers may do it
at once.  Leaves are handled by one of them at a time.  A step that finds somebody in its way gives
up in time, says so, and is planned again by the next pass; a step that was interrupted is found
and finished.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Protocol

import structlog

from restante.database import locks
from restante.database import partitions as leaves
from restante.database.pool import Database, Tx, translated
from restante.delivery.fetch import Delivery
from restante.delivery.rules import Swept, bucket_of
from restante.errors import TableBusy
from restante.retention import rules
from restante.retention import store as retention
from restante.retention.rules import Kind, Leaf, LeafState, Picture, Plan, Policy, Step
from restante.retention.store import LEAF_LOCK_MILLISECONDS

log = structlog.get_logger()

_COUNT_LIMIT = 10_000
_FILES_PER_LOOK = 100

_TIME_IS_OVER = "the time of this pass is over"
ELSEWHERE = "another server is sweeping"

Tell = Callable[[Step, str], None]
Detach = Callable[[Tx, str, str], Awaitable[None]]


def _unheard(_step: Step, _outcome: str) -> None:
    """For those who wait for the report."""


@dataclass(slots=True)
class Report:
    """What one pass did, and what it had to leave for the next."""

    swept: Swept = field(default_factory=Swept)
    done: list[Step] = field(default_factory=list[Step])
    postponed: list[tuple[Step, str]] = field(default_factory=list[tuple[Step, str]])
    bytes_dropped: int = 0
    bytes_moved: int = 0  # written again, into another bucket
    began: float = field(default_factory=time.monotonic)

    @property
    def bytes_back(self) -> int:
        """As the filesystem sees it: below 0 if files were moved out of what could not go yet."""
        return self.bytes_dropped - self.bytes_moved

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began

    @property
    def obstacles(self) -> list[tuple[Step, str]]:
        """What had to be left, but for what another server is at: that gets done."""
        return [(step, why) for step, why in self.postponed if why != ELSEWHERE]

    @property
    def did_something(self) -> bool:
        on_leaves = any(step.leaf for step in self.done)
        return bool(self.swept.total or on_leaves or self.obstacles)


class Observer(Protocol):
    """Hears how each pass ended."""

    def swept(self, acked: int, expired: int) -> None: ...
    def gave_back(self, dropped: int, moved: int) -> None: ...
    def postponed(self, steps: int) -> None: ...
    def sweep_failed(self) -> None: ...


class Sweeping:
    """Looks at the tables and gives space back."""

    def __init__(
        self,
        db: Database,
        delivery: Delivery,
        policy: Policy,
        *,
        budget_seconds: float,
    ) -> None:
        self._db = db
        self._delivery = delivery
        self._policy = policy
        self._budget_seconds = budget_seconds
        # The past leaves of which a close look has found that they have to stay.
        self._settled = frozenset[str]()

    async def one_pass(self, observer: Observer, *, closely: bool = False) -> Report:
        """One pass, counted, and logged if it did something, be it that it failed after that."""
        report = Report()
        try:
            await self._run(report, _unheard, closely=closely)
        except BaseException:  # one that was cut at its deadline has failed too
            observer.sweep_failed()
            raise
        finally:
            _account(report, observer)
        return report

    async def plan(self) -> Plan:
        """What a sweep would do now.  Reads only, and says so to the database."""
        async with self._db.transaction(readonly=True) as tx:
            return rules.plan(await self._picture(tx, closely=True), self._policy)

    async def sweep(self, tell: Tell = _unheard) -> Report:
        """Carry out what `plan` would show now; returns what it did."""
        report = Report()
        await self._run(report, tell, closely=True)
        return report

    async def _run(self, report: Report, tell: Tell, *, closely: bool) -> None:
        async with self._db.connection() as connection:
            picture = await self._picture(connection, closely=closely)
        plan = rules.plan(picture, self._policy)
        # Look closely again until a close look finds nothing left to do.
        self._settled = frozenset()
        delete = partial(self._delete, stop_at=report.began + self._budget_seconds / 2)
        for step in plan.steps_on_rows:
            await self._try(step, report, tell, delete)
        is_done = await self._sweep_leaves(plan.steps_on_leaves, report, tell)
        if is_done and not report.postponed:
            self._settled = frozenset(leaf.name for leaf in picture.leaves if not leaf.is_locked)

    async def _picture(self, connection: Tx, *, closely: bool) -> Picture:
        """
        Look at the tables.

        What lives in the buckets is counted only when something may have changed: a row is due, or
        a bucket's time is over.  An idle pass asks of each no more than whether anything does.
        """
        now = datetime.now(UTC)
        acked_before = now - max(self._policy.ack_retention, timedelta(0))
        acked, expired = await retention.due_uploads(
            connection, acked_before=acked_before, expired_before=now
        )
        found = await leaves.all_leaves(connection)
        past = [leaf for leaf in found if self._is_past(leaf, now)]
        is_new = any(leaf.name not in self._settled for leaf in past)
        closely = closely or bool(acked or expired) or is_new
        if closely or any(leaf.state is not LeafState.ATTACHED for leaf in past):
            past = await retention.with_sizes(connection, past)
        buckets = [leaf for leaf in past if leaf.table == "chunks" and leaf.span]
        counted = await retention.with_contents(
            connection,
            buckets,
            acked_before=acked_before,
            now=now,
            limit=_COUNT_LIMIT if closely else 1,
        )
        others = [leaf for leaf in past if leaf not in buckets]
        return Picture(now, acked, expired, [*others, *counted])

    def _is_past(self, leaf: Leaf, now: datetime) -> bool:
        return leaf.span is None or leaf.span.end + self._policy.settling <= now

    async def _try(
        self,
        step: Step,
        report: Report,
        tell: Tell,
        act: Callable[[Step, Report], Awaitable[str | None]],
    ) -> None:
        """Carry a step out; somebody in its way postpones it, anything else is a failed pass."""
        try:
            with translated():
                postponed = await act(step, report)
        except TableBusy as error:
            postponed = str(error)
        if postponed:
            _postpone(step, postponed, report, tell)
        else:
            report.done.append(step)
            tell(step, "done")

    async def _delete(self, _step: Step, report: Report, *, stop_at: float) -> str | None:
        async for batch in self._delivery.sweep_by_batches(now=datetime.now(UTC)):
            report.swept += batch
            if time.monotonic() >= stop_at:
                return _TIME_IS_OVER
        return None

    async def _sweep_leaves(self, steps: Sequence[Step], report: Report, tell: Tell) -> bool:
        """The steps on leaves, as far as the time allows; False if another server is at them."""
        if not steps:
            return True
        async with (
            self._db.session() as connection,
            locks.held_if_free(connection, "sweep") as is_ours,
            retention.patient(connection, LEAF_LOCK_MILLISECONDS),
        ):
            if not is_ours:
                log.debug("sweep_elsewhere")
                for step in steps:
                    _postpone(step, ELSEWHERE, report, tell)
                return False
            # Another server may have done some of it since we looked.
            found = {(leaf.name, leaf.state) for leaf in await leaves.all_leaves(connection)}
            left = [s for s in steps if s.leaf and (s.leaf.name, s.leaf.state) in found]
            work = _LeafWork(connection, stop_at=report.began + self._budget_seconds)
            for step in left:
                await self._try(step, report, tell, work.carry_out)
        return len(left) == len(steps)


def _postpone(step: Step, why: str, report: Report, tell: Tell) -> None:
    report.postponed.append((step, why))
    tell(step, why)


def _account(report: Report, observer: Observer) -> None:
    swept = report.swept
    observer.swept(swept.acked, swept.expired)
    observer.gave_back(report.bytes_dropped, report.bytes_moved)
    observer.postponed(len(report.obstacles))
    if not report.did_something:
        return
    log.info(
        "swept",
        acked=swept.acked,
        expired=swept.expired,
        bytes_back=report.bytes_back,
        dropped=[
            step.leaf.name for step in report.done if step.leaf and step.kind is not Kind.MOVE_FILES
        ],
        postponed=[f"{step.kind}: {why}" for step, why in report.postponed],
        seconds=round(report.seconds, 3),
    )


class _LeafWork:
    """The steps on leaves, on one connection that holds the lock for all of them."""

    def __init__(self, connection: Tx, stop_at: float) -> None:
        self._connection = connection
        self._stop_at = stop_at
        # Postgres detaches one leaf of a table at a time; one that is half-way has to end first.
        self._half_way = set[str]()

    @property
    def _out_of_time(self) -> bool:
        return time.monotonic() >= self._stop_at

    async def carry_out(self, step: Step, report: Report) -> str | None:
        """Do it; returns why not, if it has to wait for the next pass."""
        if self._out_of_time:
            return _TIME_IS_OVER
        leaf = step.leaf
        assert leaf is not None  # noqa: S101 - only steps on leaves come here
        if leaf.table in self._half_way and step.kind is not Kind.DROP_DETACHED:
            return "another leaf of its table is being detached"
        match step.kind:
            case Kind.FINISH_DETACH:
                await self._detach(leaf, retention.finish_detaching)
            case Kind.DROP_DETACHED:
                pass
            case Kind.MOVE_FILES:
                return await self._move_files(leaf, report)
            case Kind.DROP_BUCKET:
                if not await self._detach_bucket(leaf):
                    return "something still lives in it"
            case _:
                await self._detach_trimmed(leaf)
        report.bytes_dropped += await retention.drop(self._connection, leaf.name)
        return None

    async def _detach_bucket(self, leaf: Leaf) -> bool:
        """Seal first: from then on nothing can come in, and a look says for good what is there."""
        assert leaf.span is not None  # noqa: S101 - it is attached
        await retention.seal(self._connection, leaf.name)
        if await retention.is_in_use(self._connection, leaf.span):
            return False
        await self._detach(leaf, retention.detach)
        return True

    async def _detach_trimmed(self, leaf: Leaf) -> None:
        """The mark is raised before the rows go: a reader hears of the gap, or has no gap."""
        await retention.seal(self._connection, leaf.name)
        await retention.trim_feeds(self._connection, leaf.name)
        await self._detach(leaf, retention.detach)

    async def _detach(self, leaf: Leaf, how: Detach) -> None:
        self._half_way.add(leaf.table)
        await how(self._connection, leaf.table, leaf.name)
        self._half_way.remove(leaf.table)

    async def _move_files(self, leaf: Leaf, report: Report) -> str | None:
        assert leaf.span is not None  # noqa: S101 - it is attached
        while found := await retention.files_in(self._connection, leaf.span, _FILES_PER_LOOK):
            before = report.bytes_moved
            for workspace_id, file_id in found:
                if self._out_of_time:
                    return _TIME_IS_OVER
                to = bucket_of(datetime.now(UTC))
                size = await retention.move_file(self._connection, workspace_id, file_id, to=to)
                report.bytes_moved += size or 0
            if report.bytes_moved == before:
                return "clients hold what is left in it"
        return None
