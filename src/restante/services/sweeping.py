"""
One pass of the sweep: look, plan, and carry the plan out.

Rows are deleted in batches that skip what a client holds, so any number of servers may do it at
once.  Leaves are handled by one of them at a time.  A step that finds somebody in its way gives up
in time, says so, and is planned again by the next pass; a step that was interrupted is found and
finished.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Protocol

import structlog

from restante.core import retention as rules
from restante.core.retention import Kind, Leaf, LeafState, Picture, Plan, Policy, Step
from restante.core.uploads import Swept, bucket_of
from restante.errors import TableBusy
from restante.services.delivery import Delivery
from restante.store import locks, retention
from restante.store.database import Database, Tx
from restante.store.retention import LEAF_LOCK_MILLISECONDS

log = structlog.get_logger()

_COUNT_LIMIT = 10_000
_FILES_PER_LOOK = 100

Tell = Callable[[Step, str], None]


@dataclass(slots=True)
class Report:
    """What one pass did, and what it had to leave for the next."""

    swept: Swept = field(default_factory=Swept)
    done: list[Step] = field(default_factory=list[Step])
    postponed: list[tuple[Step, str]] = field(default_factory=list[tuple[Step, str]])
    bytes_back: int = 0
    seconds: float = 0.0

    @property
    def did_something(self) -> bool:
        return bool(self.done or self.postponed)


class Observer(Protocol):
    """Hears how each pass ended."""

    def swept(self, acked: int, expired: int, bytes_back: int, postponed: int) -> None: ...
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
        self._looked_closely = False

    async def one_pass(self, observer: Observer) -> Report:
        """One pass, counted, and logged if it did something."""
        try:
            report = await self.sweep()
        except Exception:
            observer.sweep_failed()
            raise
        swept = report.swept
        observer.swept(swept.acked, swept.expired, report.bytes_back, len(report.postponed))
        if report.did_something:
            log.info(
                "swept",
                acked=swept.acked,
                expired=swept.expired,
                bytes_back=report.bytes_back,
                dropped=[step.leaf.name for step in report.done if step.leaf],
                postponed=[f"{step.kind}: {why}" for step, why in report.postponed],
                seconds=round(report.seconds, 3),
            )
        return report

    async def plan(self) -> Plan:
        """What a sweep would do now.  Reads only, and says so to the database."""
        async with self._db.transaction(readonly=True) as tx:
            return rules.plan(await self._picture(tx, closely=True), self._policy)

    async def sweep(self, tell: Tell = lambda _step, _outcome: None) -> Report:
        """Carry out one pass; returns what it did."""
        began, report = time.monotonic(), Report()
        async with self._db.connection() as connection:
            plan = rules.plan(await self._picture(connection, closely=False), self._policy)
        for step in plan.steps:
            if step.kind is Kind.DELETE_UPLOADS:
                await self._try(step, report, tell, self._delete)
        await self._sweep_leaves(plan, report, tell, began + self._budget_seconds)
        report.seconds = time.monotonic() - began
        return report

    async def _picture(self, connection: Tx, *, closely: bool) -> Picture:
        """
        Look at the tables.

        What lives in the buckets is counted only when something may have changed; an idle pass asks
        of each past bucket no more than whether anything does.
        """
        now = datetime.now(UTC)
        acked_before = now - max(self._policy.ack_retention, timedelta(0))
        acked, expired = await retention.due_uploads(
            connection, acked_before=acked_before, expired_before=now
        )
        closely = closely or bool(acked or expired) or not self._looked_closely
        found = await retention.all_leaves(connection)
        past = [leaf for leaf in found if self._is_past(leaf, now)]
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
            postponed = await act(step, report)
        except TableBusy as error:
            postponed = str(error)
        if postponed:
            report.postponed.append((step, postponed))
        else:
            report.done.append(step)
        tell(step, postponed or "done")

    async def _delete(self, _step: Step, report: Report) -> str | None:
        report.swept += await self._delivery.sweep(now=datetime.now(UTC))
        return None

    async def _sweep_leaves(self, plan: Plan, report: Report, tell: Tell, stop_at: float) -> None:
        """The steps on leaves, one server at a time, as far as the time allows."""
        steps = [step for step in plan.steps if step.kind is not Kind.DELETE_UPLOADS]
        if not steps:
            self._looked_closely = True
            return
        async with (
            self._db.connection() as connection,
            locks.held_if_free(connection, "sweep") as is_ours,
            retention.patient(connection, LEAF_LOCK_MILLISECONDS),
        ):
            if not is_ours:
                log.debug("sweep_elsewhere")
                return
            work = _LeafWork(connection, stop_at)
            for step in steps:
                await self._try(step, report, tell, work.carry_out)
        # Look closely again until a close look finds nothing left to do.
        self._looked_closely = not report.postponed


class _LeafWork:
    """The steps on leaves, on one connection that holds the lock for all of them."""

    def __init__(self, connection: Tx, stop_at: float) -> None:
        self._connection = connection
        self._stop_at = stop_at

    @property
    def _out_of_time(self) -> bool:
        return time.monotonic() >= self._stop_at

    async def carry_out(self, step: Step, report: Report) -> str | None:
        """Do it; returns why not, if it has to wait for the next pass."""
        if self._out_of_time:
            return "the time of this pass is over"
        leaf = step.leaf
        assert leaf is not None  # noqa: S101 - only steps on leaves come here
        match step.kind:
            case Kind.FINISH_DETACH:
                await retention.finish_detaching(self._connection, leaf.table, leaf.name)
            case Kind.DROP_DETACHED:
                pass
            case Kind.MOVE_FILES:
                return await self._move_files(leaf)
            case Kind.DROP_BUCKET:
                if not await self._detach_bucket(leaf):
                    return "something came into it meanwhile"
            case _:
                await self._detach_trimmed(leaf)
        report.bytes_back += await retention.drop(self._connection, leaf.name)
        return None

    async def _detach_bucket(self, leaf: Leaf) -> bool:
        """Seal first: from then on nothing can come in, and a look says for good what is there."""
        assert leaf.span is not None  # noqa: S101 - it is attached
        await retention.seal(self._connection, leaf.name)
        if await retention.is_in_use(self._connection, leaf.span, now=datetime.now(UTC)):
            return False
        await retention.detach(self._connection, leaf.table, leaf.name)
        return True

    async def _detach_trimmed(self, leaf: Leaf) -> None:
        """The mark is raised before the rows go: a reader hears of the gap, or has no gap."""
        await retention.seal(self._connection, leaf.name)
        await retention.trim_feeds(self._connection, leaf.name)
        await retention.detach(self._connection, leaf.table, leaf.name)

    async def _move_files(self, leaf: Leaf) -> str | None:
        assert leaf.span is not None  # noqa: S101 - it is attached
        while found := await retention.files_in(self._connection, leaf.span, _FILES_PER_LOOK):
            moved = 0
            for workspace_id, file_id in found:
                if self._out_of_time:
                    return "the time of this pass is over"
                to = bucket_of(datetime.now(UTC))
                moved += (
                    await retention.move_file(self._connection, workspace_id, file_id, to=to)
                    is not None
                )
            if not moved:
                return "clients hold what is left in it"
        return None
