"""Partitions are created ahead of the clock, for every registered table."""

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from factories import DAY, HOUR, NOW
from sweeps import CHUNKS, make_subjects

from restante.database import partitions
from restante.database.pool import Database
from restante.delivery.subject import Buckets
from restante.retention import upkeep
from restante.retention.subjects import Subjects

pytestmark = pytest.mark.anyio

# No table is tracked, so the op log needs no partition.
NO_LEAD = {"chunks": 0, "feed": 0, "message_ids": 0, "ops": 30 * 86_400}
LEAST = Buckets.least_lead
WIDTHS = [timedelta(seconds=1), timedelta(minutes=10), HOUR, DAY, 8 * DAY]


@pytest.fixture
async def empty_db(dsn: str) -> AsyncIterator[Database]:
    """A database without any partition."""
    db = await Database.open(
        dsn, pool_size=2, acquire_timeout_seconds=5, statement_timeout_seconds=20
    )
    yield db
    await db.close()


async def test_every_table_gets_partitions_for_its_lead(empty_db: Database):
    subjects = make_subjects()

    await upkeep.create_partitions(empty_db, subjects, now=NOW)

    lead = await upkeep.lead_seconds(empty_db, subjects, now=NOW)
    for subject in subjects.partitions:
        if subject.table.name == "ops":  # no table is tracked
            continue
        assert (
            lead[subject.table.name]
            > upkeep.lead_of(subject.width, subject.least_lead).total_seconds()
        )


async def test_the_lead_is_the_time_to_the_end_of_the_last_partition(
    db: Database,
):
    subjects = make_subjects()
    async with db.connection() as connection:
        found = await partitions.partitions_of(connection, [CHUNKS])
    end = max(one.span.end for one in found if one.span)

    lead = await upkeep.lead_seconds(db, subjects, now=end - HOUR)

    assert lead["chunks"] == pytest.approx(3600)
    assert set(lead) == set(NO_LEAD)


async def test_without_partitions_there_is_no_lead(empty_db: Database):
    assert await upkeep.lead_seconds(empty_db, make_subjects(), now=NOW) == NO_LEAD


async def test_past_partitions_give_no_lead(db: Database):
    later = NOW + 30 * DAY

    lead = await upkeep.lead_seconds(db, make_subjects(), now=later)

    assert lead == NO_LEAD


@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_partitions_do_not_run_out_if_a_few_looks_fail(width: timedelta):
    subjects = Subjects(Buckets(width=width, ack_retention=HOUR))

    lead = upkeep.lead_of(width, LEAST)

    assert 0 < 3 * upkeep.seconds_between_looks(subjects) < lead.total_seconds()


@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_a_lead_is_never_more_than_some_dozens_of_partitions(width: timedelta):
    """Each costs a lock in every statement that cannot rule it out."""
    assert width <= upkeep.lead_of(width, LEAST) <= 100 * width
