"""
Partitions of partitions: a table that is partitioned by kind, and each kind by time.

Only the lowest level holds rows.  A partition is detached from its own parent, not from the table
that rows are inserted into.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import asyncpg
import pytest
from factories import HOUR
from sweeps import (
    PAST,
    Stop,
    Tally,
    actions,
    attached_to,
    detach_half_way,
    end_who_waits_for,
    locked,
    make_subjects,
    reasons,
    size_of,
    state_of,
    stopped_pass,
    utc_now,
)

from restante.database import partitions
from restante.database.partitions import Partition, PartitionedTable, PartitionState
from restante.database.pool import Connection, Database
from restante.database.spans import Span
from restante.errors import DatabaseUnavailable
from restante.retention import upkeep
from restante.retention.rules import DROP_DETACHED, FINISH_DETACH
from restante.retention.space import SpaceAccount
from restante.retention.subjects import PartitionSubject, Subjects, Work
from restante.retention.sweep import Sweep
from restante.wire import HeldSpace, PlanStep

pytestmark = pytest.mark.anyio

LETTERS = PartitionedTable("letters", bound_of=datetime.isoformat, moment_of=datetime.fromisoformat)
DROP = "drop letters"
AIR, SEA = (f"letters_{kind}_{PAST:%Y%m%d_%H%M%S}" for kind in ("air", "sea"))
LATER_AIR = f"letters_air_{PAST + HOUR:%Y%m%d_%H%M%S}"


class Letters(PartitionSubject[int]):
    """Drops a partition once it is empty."""

    name = "letters"
    tables = ("letters",)
    table = LETTERS
    width = HOUR

    async def parents(self, connection: Connection) -> Sequence[str]:
        return ["letters_air", "letters_sea"]

    async def contents(
        self, connection: Connection, past: Sequence[Partition], *, now: datetime, closely: bool
    ) -> Mapping[str, int]:
        return {
            one.name: await connection.fetchval(f"select count(*) from {one.name}") for one in past
        }

    def decide(
        self, partition: Partition, contents: int | None, *, now: datetime
    ) -> Sequence[PlanStep] | HeldSpace:
        if contents:
            return HeldSpace(
                partition.name, partition.bytes, f"{contents} letters", subject="letters"
            )
        return [PlanStep(DROP, partition.name, 0, partition.bytes, "it is empty", self.name)]

    async def carry_out(self, step: PlanStep, partition: Partition, work: Work) -> str | None:
        await partitions.seal(work.connection, partition.name)
        await work.detach_and_drop(partition)
        return None


@pytest.fixture
async def db(db: Database) -> Database:
    """Two kinds of letters: an hour of each, and a second hour of air mail."""
    async with db.transaction() as tx:
        await tx.execute(
            "create table letters (kind text not null, sent_at timestamptz not null)"
            " partition by list (kind)"
        )
        for kind in ("air", "sea"):
            await tx.execute(
                f"create table letters_{kind} partition of letters for values in ('{kind}')"
                f" partition by range (sent_at)"
            )
        for parent, start in (
            ("letters_air", PAST),
            ("letters_air", PAST + HOUR),
            ("letters_sea", PAST),
        ):
            await partitions.create(tx, LETTERS, Span(start, start + HOUR), parent=parent)
    return db


@pytest.fixture
def sweep(db: Database) -> Sweep:
    return Sweep(db, Subjects(Letters()), budget_seconds=20)


async def write(connection: Any, kind: str, sent_at: datetime = PAST) -> None:
    await connection.execute("insert into letters values ($1, $2)", kind, sent_at)


async def test_the_lowest_level_is_listed_with_its_own_parent(db: Database):
    async with db.connection() as connection:
        found = await partitions.partitions_of(connection, [LETTERS])

    assert found == [
        Partition("letters", AIR, PartitionState.ATTACHED, Span(PAST, PAST + HOUR), "letters_air"),
        Partition(
            "letters",
            LATER_AIR,
            PartitionState.ATTACHED,
            Span(PAST + HOUR, PAST + 2 * HOUR),
            "letters_air",
        ),
        Partition("letters", SEA, PartitionState.ATTACHED, Span(PAST, PAST + HOUR), "letters_sea"),
    ]


async def test_the_account_counts_all_levels_for_the_table(db: Database, connection: Any):
    await write(connection, "sea")
    account = SpaceAccount(db, Subjects(*make_subjects(), Letters()))

    seen = await account.look(now=utc_now())

    (table,) = [one for one in seen.tables if one.name.startswith("letters")]
    sizes = {name: await size_of(connection, name) for name in (AIR, LATER_AIR, SEA)}
    assert (table.name, table.partitions, table.subjects) == ("letters", 3, ["letters"])
    assert table.bytes == sum(sizes.values()) > 0
    assert {
        one.name: one.bytes for one in seen.partitions if one.name.startswith("letters")
    } == sizes


async def test_a_dry_run_plans_every_level_and_changes_nothing(
    db: Database, sweep: Sweep, connection: Any
):
    await write(connection, "sea")

    plan = await sweep.plan(now=utc_now())

    assert [(step.action, step.partition, step.subject) for step in plan.steps] == [
        (DROP, AIR, "letters"),
        (DROP, LATER_AIR, "letters"),
    ]
    assert [(held.partition, held.why) for held in plan.held] == [(SEA, "1 letters")]
    for name in (AIR, LATER_AIR, SEA):
        assert await state_of(connection, name) == "attached"


async def test_a_pass_drops_empty_partitions_of_the_second_level(
    db: Database, sweep: Sweep, connection: Any
):
    await write(connection, "sea")
    plan = await sweep.plan(now=utc_now())

    report = await sweep.run(now=utc_now())

    assert (report.done, report.postponed) == (plan.steps, [])
    assert report.bytes_back == plan.bytes_to_come_back
    assert await state_of(connection, AIR) == "gone"
    assert await connection.fetchval("select kind from letters") == "sea"
    kinds = await connection.fetch("select from pg_inherits where inhparent = 'letters'::regclass")
    assert len(kinds) == 2


async def test_a_partition_is_sealed_before_it_is_detached(
    db: Database, sweep: Sweep, connection: Any, connections: Any
):
    stop = Stop("lock table only letters_air in share update exclusive mode", "sealed")
    async with stopped_pass(stop, sweep, Tally(), connections, AIR) as (passing, holder):
        found = await state_of(connection, AIR)
        with pytest.raises(asyncpg.CheckViolationError, match='"sealed"'):
            await write(connection, "air")
        await end_who_waits_for(holder)
        with pytest.raises(DatabaseUnavailable):
            await passing

    report = await sweep.run(now=utc_now())

    assert found == stop.state
    assert (actions(report), report.postponed) == ([DROP] * 3, [])


async def test_an_interrupted_detach_of_the_second_level_is_finished(
    db: Database, sweep: Sweep, connection: Any, connections: Any
):
    await detach_half_way(connections, attached_to("letters_air", AIR, LETTERS))
    found = await state_of(connection, AIR)

    plan = await sweep.plan(now=utc_now())
    report = await sweep.run(now=utc_now())

    assert found == "detaching"
    assert [(step.action, step.partition) for step in plan.steps] == [
        (FINISH_DETACH, AIR),
        (DROP, SEA),
        (DROP, LATER_AIR),
    ]
    assert (report.done, report.postponed) == (plan.steps, [])
    assert await state_of(connection, AIR) == "gone"


async def test_a_leftover_of_the_second_level_is_dropped(
    db: Database, sweep: Sweep, connection: Any
):
    await partitions.detach(connection, attached_to("letters_air", AIR, LETTERS))

    plan = await sweep.plan(now=utc_now())
    report = await sweep.run(now=utc_now())

    first, *_ = plan.steps
    assert (first.action, first.partition) == (DROP_DETACHED, AIR)
    assert report.done == plan.steps
    assert await state_of(connection, AIR) == "gone"


async def test_a_table_of_another_kind_is_not_taken_for_a_leftover(
    db: Database, sweep: Sweep, connection: Any
):
    """It has a time in its name, but the name of none of our partitioned tables before it."""
    copy = "letters_backup_20260101_000000"
    await connection.execute(f"create table {copy} ()")

    await sweep.run(now=utc_now())

    assert await connection.fetchval("select to_regclass($1) is not null", copy)


async def test_a_detach_that_cannot_end_postpones_its_own_parent_only(
    db: Database, sweep: Sweep, connection: Any, connections: Any
):
    tally = Tally()
    async with locked(await connections(), "only letters_air"):
        report = await sweep.run_observed(tally, now=utc_now())

    assert [step.partition for step in report.done] == [SEA]
    assert [one.step.partition for one in report.postponed] == [AIR, LATER_AIR]
    assert "another partition of its table" in reasons(report)[DROP]
    assert tally.left == 2
    assert actions(await sweep.run(now=utc_now())) == [FINISH_DETACH, DROP]


async def test_each_parent_gets_partitions_ahead_of_the_clock(db: Database, connection: Any):
    """A kind without a partition for the next hour would refuse its rows."""
    now = utc_now()

    await upkeep.create_partitions(db, Subjects(Letters()), now=now)

    for kind in ("air", "sea"):
        await write(connection, kind, now + 2 * HOUR)
    lead = await upkeep.lead_seconds(db, Subjects(Letters()), now=now)
    assert lead["letters"] > 2 * HOUR.total_seconds()


async def test_a_name_that_postgres_would_cut_is_refused(db: Database):
    """Two partitions with the same first 63 characters would be one table."""
    async with db.transaction() as tx:
        with pytest.raises(ValueError, match="longer than a name"):
            await partitions.create(tx, LETTERS, Span(PAST, PAST + HOUR), parent="l" * 48)
