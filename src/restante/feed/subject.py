"""
Bounds the feed: old partitions are trimmed, and what nobody needs while space is short.

The ids of messages are forgotten after a day.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from restante.database import partitions
from restante.database.partitions import Partition, PartitionedTable
from restante.database.pool import Connection, transaction
from restante.feed import store
from restante.feed.message_rules import ID_SLOT, REMEMBERED
from restante.feed.rules import CLOCK_SKEW, SHORTEST_KEPT
from restante.feed.store import Needed
from restante.feed.total import TotalLimit
from restante.ids import lowest_activity_id, moment_of
from restante.retention.subjects import Account, PartitionSubject, RowSubject, Work
from restante.wire import HeldSpace, PinView, PlanStep

FEED = PartitionedTable(
    "feed",
    bound_of=lambda moment: str(lowest_activity_id(moment)),
    moment_of=lambda bound: moment_of(UUID(bound)),
)

MESSAGE_IDS = PartitionedTable(
    "message_ids", bound_of=datetime.isoformat, moment_of=datetime.fromisoformat
)

TRIM = "trim the feed"
TRIM_EARLY = "trim the feed early"
DELETE_ROWS = "delete feed rows"
FORGET = "forget message ids"

# Few enough to plan fast, many enough to trim finely.
_PARTITIONS_PER_RETENTION = 12
_MIN_WIDTH = timedelta(minutes=1)
_DUE_COUNTED = 100_000
# Smaller partitions are not worth a line.
_NAMED_FROM_BYTES = 1024 * 1024
_PARTITIONS_NAMED = 5


class CrowdedFeeds(RowSubject):
    """
    Rows that nobody needs any more, while all feeds together hold nearly as much as they may.

    They are acknowledged, or those of a removed workspace.  Postgres reuses their space for new
    rows of the same partition; the filesystem gets it back with the partition.  So a disk that is
    almost full is no reason: deleting would only write to it.
    """

    name = "crowded feeds"
    tables = ("feed",)
    action = DELETE_ROWS
    outcomes = ("feed_rows",)
    batch_size = 1  # a batch ends at a size, so only an empty one is the last

    def __init__(self, limit: TotalLimit) -> None:
        self._limit = limit

    async def count_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        if not self._limit.is_nearly_reached(await store.total_bytes(connection)):
            return {"feed_rows": 0}
        stored_before = now - SHORTEST_KEPT
        due = await store.count_unneeded(connection, stored_before, limit=_DUE_COUNTED)
        return {"feed_rows": due}

    async def delete_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        if not self._limit.is_nearly_reached(await store.total_bytes(connection)):
            return {"feed_rows": 0}
        stored_before = now - SHORTEST_KEPT
        async with transaction(connection) as tx:
            return {"feed_rows": await store.trim_largest(tx, stored_before=stored_before)}

    def plan(self, due: Mapping[str, int]) -> list[PlanStep]:
        """It ends as soon as enough is free, so it may delete fewer rows."""
        rows = due["feed_rows"]
        why = "until the feeds hold less than three quarters of what they may; all are handled"
        return [PlanStep(self.action, None, rows, 0, why, self.name)] if rows else []


class FeedPartitions(PartitionSubject[Needed]):
    """The rows of all feeds."""

    name = "feed"
    tables = ("feed",)

    def __init__(self, *, retention: timedelta, limit: TotalLimit) -> None:
        self.table = FEED
        self._retention = retention
        self._limit = limit
        minutes = retention / _PARTITIONS_PER_RETENTION // _MIN_WIDTH
        self.width = max(minutes * _MIN_WIDTH, _MIN_WIDTH)

    @property
    def _days(self) -> str:
        return f"{self._retention / timedelta(days=1):g} days"

    async def contents(
        self, connection: Connection, past: Sequence[Partition], *, now: datetime, closely: bool
    ) -> Mapping[str, Needed]:
        """Who still needs rows of a partition; asked only while space is short."""
        if not closely or not await self._is_space_short(connection):
            return {}
        handled = [one.name for one in past if one.span and _is_handled_by(one.span.end, now)]
        before = now - SHORTEST_KEPT
        return {
            name: await store.needed_in(connection, name, removed_before=before) for name in handled
        }

    async def _is_space_short(self, connection: Connection) -> bool:
        return self._limit.is_space_short(await store.total_bytes(connection))

    def decide(
        self, partition: Partition, contents: Needed | None, *, now: datetime
    ) -> Sequence[PlanStep] | HeldSpace:
        """Drop it once its rows are older than the retention; or unneeded, while space is short."""
        if partition.span is None:
            return []
        if partition.span.end <= now - self._retention:
            why = f"its last row is older than {self._days}"
            return [PlanStep(TRIM, partition.name, 0, partition.bytes, why, self.name)]
        if contents is not None and not contents.workspaces:
            why = "space is short, and all of its rows are acknowledged"
            return [PlanStep(TRIM_EARLY, partition.name, 0, partition.bytes, why, self.name)]
        if partition.bytes < _NAMED_FROM_BYTES:
            return []
        return self._held(partition, partition.span.end + self._retention, contents)

    def _held(self, partition: Partition, until: datetime, contents: Needed | None) -> HeldSpace:
        why = f"feed rows are kept for {self._days}, these until {until:%Y-%m-%d %H:%M}"
        if contents is None:
            return HeldSpace(partition.name, partition.bytes, why, until=until, subject=self.name)
        return HeldSpace(
            partition.name,
            partition.bytes,
            f"{contents.workspaces} workspaces have not acknowledged rows in it",
            workspace_id=contents.largest_id,
            workspace_bytes=contents.largest_bytes,
            until=until,
            subject=self.name,
        )

    def is_looked_at(self, partition: Partition, *, now: datetime) -> bool:
        """The one in use too: it is wide, and the plan must name it if it keeps much."""
        return partition.span is None or partition.span.start <= now

    async def carry_out(self, step: PlanStep, partition: Partition, work: Work) -> str | None:
        """Raise the trimmed mark before the rows go, so that readers notice the gap."""
        await partitions.seal(work.connection, partition.name)
        if step.action == TRIM_EARLY:
            needed = await store.needed_in(
                work.connection, partition.name, removed_before=work.now - SHORTEST_KEPT
            )
            if needed.workspaces:
                return "a row came that is not acknowledged"
        await store.trim(work.connection, partition.name)
        await work.detach_and_drop(partition)
        return None

    async def account(
        self, connection: Connection, found: Sequence[Partition], *, now: datetime
    ) -> Account:
        total = await store.total_bytes(connection)
        return Account(
            pins=await self._pins(connection, found, now=now)
            if self._limit.is_space_short(total)
            else (),
            fields={
                "lags": await store.lags(connection),
                "writers": await store.writers(connection, now=now),
                "feed_bytes": total,
                "max_feed_bytes": self._limit.max_bytes,
            },
        )

    async def _pins(
        self, connection: Connection, found: Sequence[Partition], *, now: datetime
    ) -> list[PinView]:
        """The largest partitions, and the largest feed, whose rows keep them."""
        largest = await store.largest(connection)
        its = [one for one in found if one.table == self.table.name and one.span]
        measured = await partitions.with_sizes(connection, its)
        large = sorted(measured, key=lambda one: -one.bytes)[:_PARTITIONS_NAMED]
        return [
            PinView(
                who=f"partition {one.name}",
                what=f"feed rows, which are kept for {self._days}; the largest feed is that of "
                f"workspace {largest.largest_id} with {largest.largest_bytes} bytes",
                way_out="let workspaces acknowledge their rows, remove the largest ones, or lower "
                "RESTANTE_FEED_RETENTION_DAYS",
                bytes=one.bytes,
                seconds=max((one.span.end + self._retention - now).total_seconds(), 0),
                workspace_id=largest.largest_id,
            )
            for one in large
            if one.span and one.bytes >= _NAMED_FROM_BYTES
        ]


def _is_handled_by(end: datetime, now: datetime) -> bool:
    """Whether all rows of a range that ended then are old enough to be trimmed early."""
    return end + CLOCK_SKEW + SHORTEST_KEPT <= now


class MessageIds(PartitionSubject[None]):
    """The ids of messages, by which repetitions are found."""

    name = "message ids"
    tables = ("message_ids",)
    table = MESSAGE_IDS
    width = ID_SLOT

    def decide(
        self, partition: Partition, contents: None, *, now: datetime
    ) -> Sequence[PlanStep] | HeldSpace:
        """Drop it once all of its ids are older than they are remembered."""
        if partition.span is None or partition.span.end + CLOCK_SKEW > now - REMEMBERED:
            return []
        why = "its messages are older than a day"
        return [PlanStep(FORGET, partition.name, 0, partition.bytes, why, self.name)]

    async def carry_out(self, step: PlanStep, partition: Partition, work: Work) -> str | None:
        """Nobody looks at it any more."""
        await partitions.seal(work.connection, partition.name)
        await work.detach_and_drop(partition)
        return None
