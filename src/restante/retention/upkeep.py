"""Creates partitions ahead of the clock."""

from datetime import datetime, timedelta

import structlog

from restante.database import partitions
from restante.database.pool import Database
from restante.retention.subjects import Subjects

log = structlog.get_logger()

_MAX_PARTITIONS_AHEAD = 60


def lead_of(width: timedelta, least: timedelta) -> timedelta:
    """How far ahead of the clock partitions exist: the least, and at least three partitions."""
    return min(max(3 * width, least), _MAX_PARTITIONS_AHEAD * width)


def seconds_between_looks(subjects: Subjects) -> float:
    """Often enough that partitions do not run out if a few looks fail."""
    shortest = min(lead_of(one.width, one.least_lead) for one in subjects.partitions)
    return min(60.0, shortest.total_seconds() / 4)


async def create_partitions(db: Database, subjects: Subjects, *, now: datetime) -> None:
    """Create partitions for the hours to come."""
    for subject in subjects.partitions:
        async with db.connection() as connection:
            widths = await subject.widths(connection)
        for parent, width in widths.items():
            created = await partitions.create_ahead(
                db,
                subject.table,
                parent=parent,
                now=now,
                width=width,
                lead=lead_of(width, subject.least_lead),
            )
            if created:
                log.info("partitions_created", table=parent, count=len(created))


async def lead_seconds(db: Database, subjects: Subjects, *, now: datetime) -> dict[str, float]:
    """How far ahead of the clock each table has partitions."""
    async with db.connection() as connection:
        found = await partitions.partitions_of(connection, subjects.partitioned_tables)
        return await subjects.lead_seconds(connection, found, now=now)
