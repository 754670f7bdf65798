"""Bounds the feed: partitions older than the retention are trimmed."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

from restante.database import partitions
from restante.database.partitions import Partition, PartitionedTable
from restante.database.pool import Connection
from restante.feed import store
from restante.ids import lowest_activity_id, moment_of
from restante.retention.subjects import Account, PartitionSubject, Work
from restante.wire import HeldSpace, PlanStep

FEED = PartitionedTable(
    "feed",
    bound_of=lambda moment: str(lowest_activity_id(moment)),
    moment_of=lambda bound: moment_of(UUID(bound)),
)

TRIM = "trim the feed"

# Few enough to plan fast, many enough to trim finely.
_PARTITIONS_PER_RETENTION = 12
_MIN_WIDTH = timedelta(minutes=1)


class FeedPartitions(PartitionSubject[None]):
    """The rows of all feeds."""

    name = "feed"
    tables = ("feed",)

    def __init__(self, *, retention: timedelta) -> None:
        self.table = FEED
        self._retention = retention
        minutes = retention / _PARTITIONS_PER_RETENTION // _MIN_WIDTH
        self.width = max(minutes * _MIN_WIDTH, _MIN_WIDTH)

    def decide(
        self, partition: Partition, contents: None, *, now: datetime
    ) -> Sequence[PlanStep] | HeldSpace:
        """Drop it once its newest possible row is older than the retention."""
        if partition.span is None or partition.span.end > now - self._retention:
            return []
        why = f"its last row is older than {self._retention / timedelta(days=1):g} days"
        return [PlanStep(TRIM, partition.name, 0, partition.bytes, why, self.name)]

    async def carry_out(self, step: PlanStep, partition: Partition, work: Work) -> str | None:
        """Raise the trimmed mark before the rows go, so that readers notice the gap."""
        await partitions.seal(work.connection, partition.name)
        await store.trim(work.connection, partition.name)
        await work.detach_and_drop(partition)
        return None

    async def account(
        self, connection: Connection, found: Sequence[Partition], *, now: datetime
    ) -> Account:
        lags, writers = await store.lags(connection), await store.writers(connection, now=now)
        return Account(fields={"lags": lags, "writers": writers})
