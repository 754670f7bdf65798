"""What the planner is told of the tables, and that an idle look costs next to nothing."""

import asyncio
import itertools
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from factories import DAY, HOUR, NOW, ROOMY, Content, make_reservation, make_upload, make_workspace
from sweeps import PAST, locked, make_old, make_partition, partition_names, state_of

from restante.database import partitions as leaves
from restante.database.partitions import CHUNKS, FEED
from restante.database.pool import Database, Tx, _fact
from restante.database.spans import Span
from restante.delivery import quota_store as quotas
from restante.delivery import store as uploads
from restante.errors import TableBusy
from restante.ids import WorkspaceId
from restante.retention import store as retention
from restante.retention.rules import Leaf, LeafState, Live

pytestmark = pytest.mark.anyio

MOMENT = timedelta(microseconds=1)
MANY = 1_000_000 if "SOAK_RUNS" in os.environ else 200_000

_numbers = itertools.count()


@pytest.fixture
async def connection(db_with_partitions: Database, connections: Any) -> Any:
    connection = await connections()
    await connection.execute("set timezone = 'UTC'; set datestyle = 'ISO'")
    return connection


@pytest.fixture
async def bucket(connection: Tx) -> Leaf:
    """A bucket whose time is over."""
    name = await make_partition(connection, CHUNKS)
    return next(leaf for leaf in await leaves.all_leaves(connection) if leaf.name == name)


@pytest.fixture
async def workspace_id(connection: Tx) -> WorkspaceId:
    return await make_workspace(connection)


async def contents(connection: Tx, bucket: Leaf, *, limit: int = 100) -> Leaf:
    (found,) = await retention.with_contents(
        connection, [bucket], acked_before=NOW - HOUR, now=NOW, limit=limit
    )
    return found


async def test_every_leaf_is_listed_with_its_span_and_its_state(connection: Tx, bucket: Leaf):
    sealed = await make_partition(connection, CHUNKS, PAST + HOUR)
    detached = await make_partition(connection, FEED, PAST + HOUR)
    await retention.seal(connection, sealed)
    await retention.detach(connection, "feed", detached)

    found = {leaf.name: leaf for leaf in await leaves.all_leaves(connection)}

    assert found[bucket.name].span == Span(PAST, PAST + HOUR)
    assert (found[bucket.name].table, found[bucket.name].state) == ("chunks", LeafState.ATTACHED)
    assert found[sealed].state is LeafState.SEALED
    assert found[detached] == Leaf("feed", detached, LeafState.DETACHED, 0, None)
    assert set(found) == await partition_names(connection, CHUNKS) | await partition_names(
        connection, FEED
    )


async def test_a_table_that_only_looks_like_ours_is_left_alone(connection: Tx, bucket: Leaf):
    for name in ("chunks_backup", "chunks_20260101", "my_chunks_20260101_000000", "feeds_2026"):
        await connection.execute(f"create table {name} ()")
    await connection.execute("create schema elsewhere")
    await connection.execute("create table elsewhere.chunks_20260101_000000 ()")
    await connection.execute("create view chunks_20260101_000000 as select 1")

    assert "chunks_20260101_000000" not in {
        leaf.name for leaf in await leaves.all_leaves(connection)
    }
    assert all(leaf.state is LeafState.ATTACHED for leaf in await leaves.all_leaves(connection))


async def test_a_size_is_heap_toast_and_indexes(
    connection: Any, bucket: Leaf, workspace_id: WorkspaceId
):
    await make_old(connection, workspace_id, 4, data=os.urandom(256 * 1024))

    (found,) = await retention.with_sizes(connection, [bucket])

    assert found.bytes > 4 * 256 * 1024
    assert found.bytes == await connection.fetchval(
        "select pg_total_relation_size($1::text::regclass)", bucket.name
    )


async def test_a_leaf_that_went_meanwhile_has_no_size(connection: Tx, bucket: Leaf):
    await connection.execute(f"drop table {bucket.name}")

    (found,) = await retention.with_sizes(connection, [bucket])

    assert found.bytes == 0


async def test_what_lives_is_what_is_not_due(
    connection: Tx, bucket: Leaf, workspace_id: WorkspaceId
):
    """At both borders it agrees with what the sweep deletes."""
    times = {
        "waiting": (None, NOW + DAY),
        "expiring now": (None, NOW),
        "expired": (None, NOW - MOMENT),
        "acknowledged": (NOW - HOUR, NOW + DAY),
        "acknowledged long ago": (NOW - HOUR - MOMENT, NOW + DAY),
        "acknowledged and past its time": (NOW - MOMENT, NOW - DAY),
    }
    for number, (acked_at, expires_at) in enumerate(times.values()):
        content = Content(bytes(10**number))
        await make_upload(connection, workspace_id, content, bucket=PAST, expires_at=expires_at)
        await connection.execute(
            "update uploads set acked_at = $2 where file_id = $1", content.id, acked_at
        )

    found = await contents(connection, bucket)
    due = await retention.due_uploads(connection, acked_before=NOW - HOUR, expired_before=NOW)
    await uploads.sweep(connection, acked_before=NOW - HOUR, expired_before=NOW)

    assert (found.live.files, found.live.bytes) == (4, 101_011)
    assert due == (1, 1)
    assert (await contents(connection, bucket)).live == found.live


async def test_the_workspace_with_most_bytes_is_named(
    connection: Tx, bucket: Leaf, workspace_id: WorkspaceId
):
    hoarder = await make_workspace(connection)
    await make_old(connection, workspace_id, 5, data=bytes(10))
    await make_old(connection, hoarder, 2, data=bytes(100), now=NOW - DAY, expires_at=NOW + HOUR)

    live = (await contents(connection, bucket)).live

    assert (live.files, live.bytes) == (7, 250)
    assert live.holder
    assert (live.holder.workspace_id, live.holder.bytes, live.holder.files) == (hoarder, 200, 2)
    assert (live.holder.since, live.holder.until) == (NOW - DAY, NOW + HOUR)


async def test_more_than_the_limit_is_not_counted(
    connection: Tx, bucket: Leaf, workspace_id: WorkspaceId
):
    await make_old(connection, workspace_id, 5, data=b"x")

    assert (await contents(connection, bucket, limit=6)).live.counted
    assert not (await contents(connection, bucket, limit=5)).live.counted
    assert (await contents(connection, bucket, limit=1)).live.files == 1


async def test_each_bucket_is_told_apart(connection: Tx, bucket: Leaf, workspace_id: WorkspaceId):
    """The first moment of the next bucket is not in this one; one without anything is empty."""
    names = [await make_partition(connection, CHUNKS, PAST + n * HOUR) for n in (1, 2)]
    await make_old(connection, workspace_id, 1, data=b"x", bucket=PAST + HOUR)
    await make_old(
        connection, workspace_id, 2, data=b"x", bucket=PAST + HOUR - timedelta(seconds=1)
    )
    promise = make_reservation(workspace_id, bucket=PAST + 2 * HOUR)
    await quotas.reserve(connection, promise, ROOMY)
    all_three = [
        leaf for leaf in await leaves.all_leaves(connection) if leaf.name in {bucket.name, *names}
    ]

    found = await retention.with_contents(
        connection, all_three, acked_before=NOW - HOUR, now=NOW, limit=10
    )

    assert [(leaf.live.files, leaf.arriving) for leaf in found] == [(2, 0), (1, 0), (0, 1)]
    assert found[2].live == Live(0, 0)


async def test_a_bucket_is_in_use_by_an_upload_or_a_promise_however_late(
    connection: Tx, bucket: Leaf, workspace_id: WorkspaceId
):
    """A promise that has run out can be published until it is taken back."""
    assert bucket.span
    late = make_reservation(
        workspace_id, bucket=PAST + HOUR - timedelta(seconds=1), expires_at=PAST
    )
    await quotas.reserve(connection, late, ROOMY)
    await quotas.reserve(connection, make_reservation(workspace_id, bucket=PAST + HOUR), ROOMY)

    promised = await retention.is_in_use(connection, bucket.span)
    await quotas.release(connection, late.id)
    released = await retention.is_in_use(connection, bucket.span)
    await make_old(connection, workspace_id, expires_at=PAST)

    assert (promised, released) == (True, False)
    assert await retention.is_in_use(connection, bucket.span)


async def test_a_leaf_that_somebody_has_locked_is_marked_and_hardly_waited_for(
    connection: Any, bucket: Leaf, connections: Any
):
    """Neither for its bounds nor for its size; the others are measured all the same."""
    other = await make_partition(connection, CHUNKS, PAST + HOUR)
    async with locked(await connections(), bucket.name, "access exclusive"), asyncio.timeout(1):
        found = await leaves.all_leaves(connection)
        measured = {leaf.name: leaf for leaf in await retention.with_sizes(connection, found)}

    assert bucket in found
    assert (measured[bucket.name].bytes, measured[bucket.name].is_locked) == (0, True)
    assert (measured[other].bytes > 0, measured[other].is_locked) == (True, False)
    assert await connection.fetchval("show lock_timeout") == "0"


async def test_a_leaf_that_an_older_release_has_sealed_is_sealed(connection: Any, bucket: Leaf):
    """It did so with a constraint; sealing it once more is no mistake."""
    await connection.execute(
        f"alter table {bucket.name} add constraint sealed check (false) not valid"
    )
    found = {leaf.name: leaf for leaf in await leaves.all_leaves(connection)}
    await retention.seal(connection, bucket.name)
    await retention.detach(connection, "chunks", bucket.name)

    assert found[bucket.name].state is LeafState.SEALED
    assert await state_of(connection, bucket.name) == "detached"


async def test_a_sealed_leaf_takes_no_row_and_can_be_sealed_again(
    connection: Any, bucket: Leaf, workspace_id: WorkspaceId
):
    await make_old(connection, workspace_id, data=b"x")
    await retention.seal(connection, bucket.name)
    await retention.seal(connection, bucket.name)

    assert await state_of(connection, bucket.name) == "sealed"
    with pytest.raises(asyncpg.CheckViolationError, match='"sealed"') as refused:
        await make_old(connection, workspace_id, data=b"y")
    assert isinstance(_fact(refused.value), TableBusy)
    assert await connection.fetchval("select bytes from chunks") == b"x"


async def test_a_file_moves_once_and_only_where_it_is_not(
    connection: Any, bucket: Leaf, workspace_id: WorkspaceId
):
    (file_id,) = await make_old(connection, workspace_id, data=b"four")
    to = NOW.replace(microsecond=0)

    moved = [await retention.move_file(connection, workspace_id, file_id, to=to) for _ in range(2)]

    assert moved == [4, None]
    assert await connection.fetchval("select bucket from uploads") == to
    assert await connection.fetchval("select bytes from chunks where bucket = $1", to) == b"four"


async def test_a_file_that_is_gone_does_not_move(
    connection: Any, bucket: Leaf, workspace_id: WorkspaceId
):
    (file_id,) = await make_old(connection, workspace_id)
    await connection.execute("delete from uploads")

    assert await retention.move_file(connection, workspace_id, file_id, to=NOW) is None


# An idle sweep


@pytest.fixture
async def many(connection: Any) -> Any:
    """Many uploads that live, in a day of buckets; a tenth is acknowledged and can be reopened."""
    await make_generated(connection, MANY)
    return connection


async def make_generated(connection: Any, count: int) -> None:
    for hour in range(24):
        await make_partition(connection, CHUNKS, PAST + hour * HOUR)
    await connection.execute("alter table uploads set (autovacuum_enabled = off)")
    await connection.execute(
        "insert into uploads"
        " select md5((n % 500)::text)::uuid, gen_random_uuid(),"
        "        $1::timestamptz + n % 24 * interval '1 hour', 'a.txt', '', 1000,"
        "        decode(repeat('00', 32), 'hex'), now(), null,"
        "        case when n % 10 = 0 then now() end, now() + interval '1 day'"
        "   from generate_series(1, $2::int) as n",
        PAST,
        count,
    )
    await connection.execute(
        "insert into feeds (workspace_id, waiting_bytes, waiting_files)"
        " select workspace_id, sum(size), count(*) from uploads group by 1"
    )
    await connection.execute("vacuum analyze uploads")


async def plan_of(
    connection: Any, query: str, types: str, *values: str, first_time: bool = False
) -> dict[str, Any]:
    """The plan that a session of ours has at first, or ends up with after a while."""
    name = f"prepared_{next(_numbers)}"
    execute = f"execute {name} ({', '.join(values)})"
    await connection.execute(f"prepare {name} ({types}) as {query}")
    for _ in range(0 if first_time else 7):
        await connection.execute(execute)
    explained = await connection.fetchval(f"explain (analyze, buffers, format json) {execute}")
    return json.loads(explained)[0]["Plan"]


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def scans_of_everything(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        node
        for node in nodes(plan)
        if node["Node Type"] == "Seq Scan" and node.get("Relation Name") == "uploads"
    ]


LONG_AGO, SOON = "now() - interval '1 hour'", "now()"


def buckets() -> tuple[str, str]:
    begins = ", ".join(f"'{PAST + hour * HOUR}'" for hour in range(24))
    ends = ", ".join(f"'{PAST + (hour + 1) * HOUR}'" for hour in range(24))
    return f"array[{begins}]::timestamptz[]", f"array[{ends}]::timestamptz[]"


async def assert_idle_looks_are_cheap(connection: Any) -> None:
    queries, stamp = retention.queries, "timestamptz"
    looks = {
        "due_uploads": await plan_of(
            connection, queries.due_uploads, f"{stamp}, {stamp}, bigint", LONG_AGO, SOON, "100000"
        ),
        "live_in": await plan_of(
            connection,
            queries.live_in,
            f"{stamp}[], {stamp}[], {stamp}, {stamp}, int",
            *buckets(),
            LONG_AGO,
            SOON,
            "1",
        ),
        "sweep": await plan_of(
            connection, uploads.queries.sweep, f"{stamp}, {stamp}, int", LONG_AGO, SOON, "1000"
        ),
        "is_in_use": await plan_of(
            connection,
            queries.is_in_use,
            f"{stamp}, {stamp}",
            f"'{PAST - HOUR}'",
            f"'{PAST}'",
        ),
        "files_in": await plan_of(
            connection,
            queries.files_in,
            f"{stamp}, {stamp}, int",
            f"'{PAST - HOUR}'",
            f"'{PAST}'",
            "100",
        ),
    }
    for name, plan in looks.items():
        touched = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        assert scans_of_everything(plan) == [], name
        # The table has thousands of pages; a look at the ends of indexes touches a few of each.
        assert touched < 400, (name, touched)


@pytest.mark.soak
async def test_an_idle_sweep_looks_at_indexes_only(many: Any):
    """Without the index on acked_at it reads the whole table, every five minutes."""
    await assert_idle_looks_are_cheap(many)

    # And so does one that has a few to delete among many.
    await many.execute(
        "update uploads set expires_at = now() - interval '1 minute'"
        " where ctid = any (array(select ctid from uploads where acked_at is null limit 300))"
    )
    due = "timestamptz, timestamptz, int"
    plan = await plan_of(many, uploads.queries.sweep, due, LONG_AGO, SOON, "1000", first_time=True)
    assert scans_of_everything(plan) == []
    assert await many.fetchval("select count(*) from uploads") == MANY - 300
