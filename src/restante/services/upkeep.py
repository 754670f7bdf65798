"""Background passes that keep the tables in shape: leaves ahead of the clock, room given back."""

from datetime import UTC, datetime, timedelta

import structlog

from restante.services.delivery import Delivery
from restante.store import leaves
from restante.store.database import Database

log = structlog.get_logger()

_FEED_LEAVES = (
    12  # in a whole retention period: few enough to plan fast, many enough to trim finely
)
_LEAD = 3  # leaves that exist ahead of the clock, whatever their width
_LEAST_LEAD = timedelta(hours=6)


class Upkeep:
    """Work that nobody asks for and everybody needs."""

    def __init__(
        self, db: Database, delivery: Delivery, *, bucket: timedelta, feed_retention: timedelta
    ) -> None:
        self._db = db
        self._delivery = delivery
        hours = max(1, round(feed_retention / _FEED_LEAVES / timedelta(hours=1)))
        self._widths = {leaves.CHUNKS: bucket, leaves.FEED: timedelta(hours=hours)}

    async def create_leaves(self) -> None:
        """Make sure that rows find a leaf for hours to come, should nobody look again."""
        for table, width in self._widths.items():
            lead = max(_LEAD * width, _LEAST_LEAD)
            created = await leaves.create_ahead(
                self._db, table, now=datetime.now(UTC), width=width, lead=lead
            )
            if created:
                log.info("leaves_created", table=table.name, count=len(created))

    async def forget_expired(self) -> None:
        """Give back the room of uploads that never ended, and forget old keys."""
        forgotten = await self._delivery.forget_expired(now=datetime.now(UTC))
        if forgotten:
            log.info("expired_forgotten", count=forgotten)
