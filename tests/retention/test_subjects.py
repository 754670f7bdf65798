"""Everything that grows has a subject, is planned when it is due, and is gone after a pass."""

from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from factories import (
    DAY,
    HOUR,
    ROOMY,
    make_answer,
    make_message,
    make_reservation,
    make_upload,
    make_workspace,
)
from sites import settings_for
from sweeps import (
    CHUNKS,
    FEED,
    PAST,
    Tally,
    expire,
    make_old,
    make_partition,
    make_subjects,
    make_sweep,
    partition_names,
    utc_now,
)

from restante.database.partitions import Partition, PartitionState
from restante.database.pool import Database
from restante.delivery import quotas
from restante.delivery.rules import bucket_of
from restante.feed import store as feed
from restante.feed.subject import MESSAGE_IDS
from restante.ids import WorkspaceId
from restante.retention import store as retention
from restante.retention.sweep import Sweep
from restante.server import parts
from restante.workspaces import store as workspaces

pytestmark = pytest.mark.anyio

# Tables of a bounded size: one row each, or one row for each migration, for each table or peer that
# the operator has added, or for each of at most a thousand hosts.
DO_NOT_GROW = {
    "schema_migrations",
    "schema_compatibility",
    "chosen_retention",
    "op_node",
    "op_tables",
    "op_peers",
    "op_hosts",
}


@pytest.fixture
def sweep(db: Database) -> Sweep:
    return make_sweep(db)


# Registration ------------------------------------------------------------------------------------


async def test_every_table_belongs_to_a_registered_subject(connection: Any, tmp_path: Path):
    """A new table needs a subject, or a reason why it does not grow."""
    subjects = parts.subjects_of(settings_for("", tmp_path))
    tables = await connection.fetch(
        "select relname from pg_class where relnamespace = 'restante'::regnamespace"
        " and relkind in ('r', 'p') and not relispartition"
    )

    without = {row["relname"] for row in tables if not subjects.of_table(row["relname"])}

    assert without == DO_NOT_GROW


async def test_a_subject_names_only_tables_that_exist(connection: Any, tmp_path: Path):
    subjects = parts.subjects_of(settings_for("", tmp_path))
    named = [table for subject in subjects for table in subject.tables]

    missing = await connection.fetch(
        "select name from unnest($1::text[]) as name where to_regclass(name) is null", named
    )

    assert missing == []


def test_the_subjects_of_the_tests_are_those_of_a_server(tmp_path: Path):
    of_server = parts.subjects_of(settings_for("", tmp_path))

    assert [one.name for one in make_subjects()] == [one.name for one in of_server]


def test_a_partition_of_an_unknown_table_is_an_error():
    unknown = Partition("letters", "letters_1", PartitionState.ATTACHED, None)

    with pytest.raises(LookupError, match=r"no subject is registered for .* letters"):
        make_subjects().of_partition(unknown)


def test_a_partition_belongs_to_the_subject_of_its_table():
    bucket = Partition("chunks", "chunks_1", PartitionState.DETACHED, None)

    assert make_subjects().of_partition(bucket).name == "buckets"


# What is due -------------------------------------------------------------------------------------

Make = Callable[[Any, WorkspaceId], Awaitable[object]]


async def make_expired_upload(connection: Any, workspace_id: WorkspaceId) -> None:
    (file_id,) = await make_old(connection, workspace_id, bucket=bucket_of(utc_now()))
    await expire(connection, file_id)


async def make_expired_reservation(connection: Any, workspace_id: WorkspaceId) -> None:
    assert await quotas.reserve(connection, make_reservation(workspace_id, lasts=-HOUR), ROOMY)


async def make_expired_answer(connection: Any, workspace_id: WorkspaceId) -> None:
    await make_upload(connection, workspace_id, answer=make_answer(expires_at=PAST))


async def make_removed_workspace(connection: Any, _workspace_id: WorkspaceId) -> None:
    removed = await make_workspace(connection)
    assert await workspaces.remove(connection, removed)
    await connection.execute(
        "update workspaces set last_seen_at = $2 where id = $1", removed, PAST - 60 * DAY
    )


async def make_crowded_feed(connection: Any, workspace_id: WorkspaceId) -> None:
    """One row, two hours old and acknowledged, that counts as much as all feeds may hold."""
    await feed.append(connection, workspace_id, make_message(), now=utc_now())
    await feed.acknowledge(connection, workspace_id, 2**31)  # all of them
    await connection.execute("update feed set created_at = created_at - interval '2 hours'")
    await connection.execute(
        "update feeds set feed_bytes = $2 where workspace_id = $1", workspace_id, 2**34
    )


async def make_old_sample(connection: Any, _workspace_id: WorkspaceId) -> None:
    await retention.take_sample(connection, 1000, now=PAST - 30 * DAY)


async def make_empty_bucket(connection: Any, _workspace_id: WorkspaceId) -> None:
    await make_partition(connection, CHUNKS)


async def make_old_feed_partition(connection: Any, _workspace_id: WorkspaceId) -> None:
    await make_partition(connection, FEED, PAST - 60 * DAY, DAY)


async def make_old_message_ids(connection: Any, _workspace_id: WorkspaceId) -> None:
    await make_partition(connection, MESSAGE_IDS, PAST - 2 * DAY, 6 * HOUR)


async def make_old_parked_op(connection: Any, _workspace_id: WorkspaceId) -> None:
    await connection.execute(
        "insert into op_parked (peer_id, table_name, ulid, origin, action, data, data_hash, reason,"
        " sentence, parked_at, tried_at)"
        " values (1, 'pages', gen_random_uuid(), 'a', 'c', '{}', 1, 'type', '', $1, $1)",
        PAST - 30 * DAY,
    )


async def make_old_conflict(connection: Any, _workspace_id: WorkspaceId) -> None:
    await connection.execute(
        "insert into op_conflicts (noticed_at, table_name, key, reason, kept_ulid, kept_origin,"
        " lost_ulid, lost_origin)"
        " values ($1, 'pages', '[1]', '', gen_random_uuid(), 'a', gen_random_uuid(), 'b')",
        PAST - 30 * DAY,
    )


async def make_expired_pin(connection: Any, _workspace_id: WorkspaceId) -> None:
    await connection.execute("insert into op_pins values (1, 1, '', $1)", PAST)


async def make_unsettled_delete(connection: Any, _workspace_id: WorkspaceId) -> None:
    await connection.execute("insert into op_unsettled values (1, 1, '[1]', 1, '{}')")


async def make_leftover_log(connection: Any, _workspace_id: WorkspaceId) -> None:
    """A partition that an interrupted pass of another release has detached."""
    await connection.execute(
        "create table ops_1 (like ops including all) partition by range (arrived_at)"
    )
    await connection.execute("alter table ops attach partition ops_1 for values in (1)")
    await connection.execute("create table ops_1_20240101_000000 (like ops)")


MAKE_DUE: dict[str, Make] = {
    "uploads": make_expired_upload,
    "reservations": make_expired_reservation,
    "answers": make_expired_answer,
    "removed workspaces": make_removed_workspace,
    "samples": make_old_sample,
    "parked ops": make_old_parked_op,
    "conflicts": make_old_conflict,
    "ended snapshots": make_expired_pin,
    "unsettled deletes": make_unsettled_delete,
    "crowded feeds": make_crowded_feed,
    "ops": make_leftover_log,
    "buckets": make_empty_bucket,
    "feed": make_old_feed_partition,
    "message ids": make_old_message_ids,
}


def test_every_subject_is_tested_here():
    assert list(MAKE_DUE) == [subject.name for subject in make_subjects()]


@pytest.mark.parametrize("subject", MAKE_DUE)
async def test_what_is_due_is_planned_and_gone_after_a_pass(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId, subject: str
):
    before = await sweep.plan(now=utc_now())
    await MAKE_DUE[subject](connection, workspace_id)

    plan = await sweep.plan(now=utc_now())
    report = await sweep.run(now=utc_now())
    after = await sweep.plan(now=utc_now())

    assert before.steps == []
    assert [step.subject for step in plan.steps] == [subject]
    assert report.done == plan.steps
    assert after.steps == []


async def test_a_plan_has_the_order_of_registration(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    for make in MAKE_DUE.values():
        await make(connection, workspace_id)

    plan = await sweep.plan(now=utc_now())

    assert [step.subject for step in plan.steps] == list(MAKE_DUE)


async def test_a_dry_run_changes_no_row_and_no_partition(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    for make in MAKE_DUE.values():
        await make(connection, workspace_id)
    before = await everything(connection)

    await sweep.plan(now=utc_now())

    assert await everything(connection) == before


async def everything(connection: Any) -> dict[str, list[str]]:
    """Every row of every table and partition, as text."""
    tables = await connection.fetch(
        "select relname from pg_class"
        " where relnamespace = 'restante'::regnamespace and relkind = 'r'"
    )
    return {
        row["relname"]: [
            str(found[0])
            for found in await connection.fetch(f"select t::text from {row['relname']} as t")
        ]
        for row in tables
    }


async def test_nothing_is_due_before_its_time(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    """A reservation, an answer, an upload, a removed workspace and a sample, all of today."""
    await make_upload(connection, workspace_id, answer=make_answer())
    await quotas.reserve(connection, make_reservation(workspace_id), ROOMY)
    await workspaces.remove(connection, await make_workspace(connection))
    await retention.take_sample(connection, 1000, now=utc_now())

    plan = await sweep.plan(now=utc_now())

    assert (plan.steps, plan.held) == ([], [])


# Locks -------------------------------------------------------------------------------------------

ROWS = {subject.name: subject for subject in make_subjects().rows}


@pytest.mark.parametrize(
    ("subject", "table"),
    [
        (name, table)
        for name, one in ROWS.items()
        for table in sorted({*one.tables, "feeds"})
        if table != "feed"  # nobody locks its rows
    ],
)
async def test_deleting_rows_waits_for_no_lock(
    *, connection: Any, workspace_id: WorkspaceId, connections: Any, subject: str, table: str
):
    """Any number of servers delete at once, while clients change the same rows and counters."""
    holder, deleting = await connections(), ROWS[subject]
    await MAKE_DUE[subject](connection, workspace_id)
    await connection.execute("set lock_timeout = '100ms'")
    async with holder.transaction():
        await holder.execute(f"select from {table} for update")
        meanwhile = await deleting.delete_due(connection, now=utc_now())

    afterwards = await deleting.delete_due(connection, now=utc_now())

    assert sum(meanwhile.values()) + sum(afterwards.values()) == 1


# Prompt ------------------------------------------------------------------------------------------


async def test_the_prompt_pass_deletes_expired_reservations_and_answers_only(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    """They take room and keys from senders; everything else waits for the next sweep."""
    for make in MAKE_DUE.values():
        await make(connection, workspace_id)
    partitions = await partition_names(connection, CHUNKS), await partition_names(connection, FEED)
    tally = Tally()

    await sweep.run_prompt(tally, now=utc_now())

    assert tally == Tally(rows=Counter(reservations=1, answers=1))
    left = await sweep.plan(now=utc_now())
    assert [step.subject for step in left.steps] == [
        name for name in MAKE_DUE if name not in {"reservations", "answers"}
    ]
    assert partitions == (
        await partition_names(connection, CHUNKS),
        await partition_names(connection, FEED),
    )


async def test_the_prompt_pass_keeps_what_has_not_expired(
    sweep: Sweep, connection: Any, workspace_id: WorkspaceId
):
    soon = utc_now() + timedelta(minutes=1)
    await make_upload(connection, workspace_id, answer=make_answer(expires_at=soon))
    reservation = make_reservation(workspace_id)
    await quotas.reserve(connection, reservation, ROOMY)
    tally = Tally()

    await sweep.run_prompt(tally, now=utc_now())
    kept = tally == Tally()
    await sweep.run_prompt(tally, now=soon + HOUR)

    assert kept
    assert tally.rows == Counter(reservations=1, answers=1)
