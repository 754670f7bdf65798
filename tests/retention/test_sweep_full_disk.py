"""A sweep on a full disk: a step that cannot write does not stop those that free space."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from factories import HOUR
from sweeps import (
    CHUNKS,
    PAST,
    actions,
    expire,
    make_old,
    make_partition,
    make_subjects,
    partition_names,
    reasons,
    utc_now,
)

from restante.database.pool import Database
from restante.ids import WorkspaceId
from restante.postgres import Ballast
from restante.retention.disk import Disk
from restante.retention.rules import DROP_DETACHED
from restante.retention.sweep import DISK_FULL, Sweep

pytestmark = pytest.mark.anyio

MORE_THAN_ANY_DISK = 1 << 62
BUCKETS = [PAST - number * HOUR for number in range(3)]


@pytest.fixture
async def buckets(connection: Any) -> list[str]:
    return [await make_partition(connection, CHUNKS, start) for start in BUCKETS]


def sweep_on(disk: Disk, db: Database) -> Sweep:
    return Sweep(db, make_subjects(), budget_seconds=20, disk=disk)


async def low_disk(db: Database) -> Disk:
    disk = Disk(db, reserve_bytes=MORE_THAN_ANY_DISK)
    async with db.connection() as connection:
        await disk.locate(connection)
    return disk


async def fill_the_disk_for(connection: Any, table: str, *, times: int = 1 << 30) -> None:
    """Deleting from this table fails so often, as Postgres fails when it cannot write."""
    await connection.execute("create sequence failures")
    await connection.execute(
        "create function fail() returns trigger language plpgsql as"
        f" $$ begin if nextval('failures') <= {times} then raise sqlstate '53100'; end if;"
        " return old; end $$"
    )
    await connection.execute(
        f"create trigger fail before delete on {table} for each row execute function fail()"
    )


async def test_rows_that_cannot_be_deleted_do_not_keep_an_empty_bucket(
    db: Database, connection: Any, workspace_id: WorkspaceId, buckets: list[str]
):
    """The bucket that is dropped frees the space that the rows need."""
    await make_old(connection, workspace_id, bucket=BUCKETS[0])
    await expire(connection)
    await fill_the_disk_for(connection, "uploads")

    report = await sweep_on(Disk(db), db).run(now=utc_now())

    assert reasons(report)["delete uploads"] == DISK_FULL
    assert set(buckets) & await partition_names(connection, CHUNKS) == {buckets[0]}


async def test_with_ballast_the_same_pass_deletes_them_too(
    db: Database, connection: Any, workspace_id: WorkspaceId, buckets: list[str], tmp_path: Path
):
    """An operator's `restante sweep` is a single pass."""
    await make_old(connection, workspace_id, bucket=BUCKETS[0])
    await expire(connection)
    await fill_the_disk_for(connection, "uploads", times=1)

    report = await sweep_on(Disk(db, ballast=Ballast(tmp_path, 40_000)), db).run(now=utc_now())

    assert (report.expired, report.postponed) == (1, [])
    assert not set(buckets) & await partition_names(connection, CHUNKS)


async def test_a_low_disk_gets_leftovers_and_the_largest_buckets_first(
    db: Database, connection: Any, workspace_id: WorkspaceId, buckets: list[str]
):
    small, large, left_over = buckets
    await make_old(connection, workspace_id, bucket=BUCKETS[0])
    await make_old(connection, workspace_id, 9, bucket=BUCKETS[1])
    await expire(connection)
    await connection.execute(f"alter table chunks detach partition {left_over}")
    await connection.execute(
        "insert into answers (workspace_id, idempotency_key, fingerprint, answer, expires_at)"
        " values ($1, 'k', '\\x00', '{}', now() - interval '1 hour')",
        workspace_id,
    )

    report = await sweep_on(await low_disk(db), db).run(now=utc_now())

    assert actions(report) == [
        DROP_DETACHED,
        "delete uploads",
        "drop a bucket",
        "drop a bucket",
        "delete answers",
    ]
    assert [step.partition for step in report.done if step.partition] == [left_over, large, small]


async def test_a_full_disk_moves_no_files_and_says_so(
    db: Database, connection: Any, workspace_id: WorkspaceId, buckets: list[str]
):
    """Moving writes before it frees."""
    await make_old(connection, workspace_id, 9, bucket=BUCKETS[0])
    await expire(connection)
    later = utc_now() + timedelta(days=1)
    await make_old(connection, workspace_id, bucket=BUCKETS[0], expires_at=later)
    disk = Disk(db)
    db.disk_full_at = float("inf")

    plan = await sweep_on(disk, db).plan(now=utc_now())

    (held,) = [one for one in plan.held if one.partition == buckets[0]]
    assert "cannot be moved" in held.why
    assert "move live files" not in {step.action for step in plan.steps}
