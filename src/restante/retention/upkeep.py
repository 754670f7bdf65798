"""Background passes that keep the tables in shape: leaves ahead of the clock, room given back."""

from datetime import UTC, datetime, timedelta

import structlog

from restante.database import partitions as leaves
from restante.database.pool import Database
from restante.delivery.fetch import Delivery
from restante.workspaces import store as workspaces

log = structlog.get_logger()

# In a whole retention period: few enough to plan fast, many enough to trim finely.
_FEED_LEAVES = 12
_LEAST_FEED_WIDTH = timedelta(minutes=1)
_LEAST_LEAD = timedelta(hours=6)
_MOST_LEAVES_AHEAD = 60
_FORGOTTEN_AT_ONCE = 1000


class Upkeep:
    """Work that nobody asks for and everybody needs."""

    def __init__(
        self, db: Database, delivery: Delivery, *, bucket: timedelta, feed_retention: timedelta
    ) -> None:
        self._db = db
        self._delivery = delivery
        self._feed_retention = feed_retention
        minutes = feed_retention / _FEED_LEAVES // _LEAST_FEED_WIDTH
        self._widths = {
            leaves.CHUNKS: bucket,
            leaves.FEED: max(minutes * _LEAST_FEED_WIDTH, _LEAST_FEED_WIDTH),
        }

    @property
    def seconds_between_looks(self) -> float:
        """Often enough that the leaves never run out, should a few looks fail."""
        shortest = min(_lead(width) for width in self._widths.values())
        return min(60.0, shortest.total_seconds() / 4)

    async def create_leaves(self) -> None:
        """Make sure that rows find a leaf for hours to come, should nobody look again."""
        for table, width in self._widths.items():
            lead = _lead(width)
            created = await leaves.create_ahead(
                self._db, table, now=datetime.now(UTC), width=width, lead=lead
            )
            if created:
                log.info("leaves_created", table=table.name, count=len(created))

    async def lead_seconds(self) -> dict[str, float]:
        """How far ahead of the clock each table has leaves."""
        async with self._db.connection() as connection:
            found = await leaves.all_leaves(connection)
        return leaves.lead_seconds(found, now=datetime.now(UTC))

    async def forget_expired(self) -> None:
        """Give back the room of uploads that never ended, and forget old keys."""
        forgotten = await self._delivery.forget_expired(now=datetime.now(UTC))
        if forgotten:
            log.info("expired_forgotten", count=forgotten)

    async def forget_removed(self) -> None:
        """Forget workspaces that were removed so long ago that nothing of them is kept."""
        seen_before = datetime.now(UTC) - self._feed_retention
        async with self._db.connection() as connection:
            forgotten = await workspaces.forget_removed(
                connection, seen_before=seen_before, limit=_FORGOTTEN_AT_ONCE
            )
        if forgotten:
            log.info("workspaces_forgotten", count=forgotten)


def _lead(width: timedelta) -> timedelta:
    """How far ahead of the clock leaves exist: hours, and never fewer than three."""
    return min(max(3 * width, _LEAST_LEAD), _MOST_LEAVES_AHEAD * width)
