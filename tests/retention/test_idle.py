"""An idle sweep costs next to nothing, whatever the number of uploads."""

import itertools
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from factories import HOUR
from sweeps import CHUNKS, PAST, make_partition

from restante.delivery import buckets

pytestmark = pytest.mark.anyio

MANY = 1_000_000 if "SOAK_RUNS" in os.environ else 200_000
LONG_AGO, SOON = "now() - interval '1 hour'", "now()"

_numbers = itertools.count()


@pytest.fixture
async def many(connection: Any) -> Any:
    """Many live uploads in a day of buckets; a tenth is acknowledged and can be reopened."""
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
        MANY,
    )
    await connection.execute(
        "insert into feeds (workspace_id, waiting_bytes, waiting_files)"
        " select workspace_id, sum(size), count(*) from uploads group by 1"
    )
    await connection.execute("vacuum analyze uploads")
    return connection


async def plan_of(
    connection: Any, query: str, types: str, *values: str, first_time: bool = False
) -> dict[str, Any]:
    """The plan of a session at first, or the one that it keeps after a while."""
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


def full_scans(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        node
        for node in nodes(plan)
        if node["Node Type"] == "Seq Scan" and node.get("Relation Name") == "uploads"
    ]


def ranges() -> tuple[str, str]:
    begins = ", ".join(f"'{PAST + hour * HOUR}'" for hour in range(24))
    ends = ", ".join(f"'{PAST + (hour + 1) * HOUR}'" for hour in range(24))
    return f"array[{begins}]::timestamptz[]", f"array[{ends}]::timestamptz[]"


def looks() -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """The statements of an idle pass: text, types and values."""
    queries, stamp = buckets.queries, "timestamptz"
    empty = (f"'{PAST - HOUR}'", f"'{PAST}'")
    return {
        "due_uploads": (
            queries.due_uploads,
            f"{stamp}, {stamp}, bigint",
            (LONG_AGO, SOON, "100000"),
        ),
        "live_in": (
            queries.live_in,
            f"{stamp}[], {stamp}[], {stamp}, {stamp}, int",
            (*ranges(), LONG_AGO, SOON, "1"),
        ),
        "delete_due": (queries.delete_due, f"{stamp}, {stamp}, int", (LONG_AGO, SOON, "1000")),
        "is_bucket_in_use": (queries.is_bucket_in_use, f"{stamp}, {stamp}", empty),
        "files_in": (queries.files_in, f"{stamp}, {stamp}, int", (*empty, "100")),
    }


@pytest.mark.soak
async def test_an_idle_sweep_reads_indexes_only(many: Any):
    """Without the index on acked_at it reads the whole table, every five minutes."""
    for name, (query, types, values) in looks().items():
        plan = await plan_of(many, query, types, *values)

        touched = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        assert full_scans(plan) == [], name
        # The table has thousands of pages; a look at the ends of indexes touches a few of each.
        assert touched < 400, (name, touched)


@pytest.mark.soak
async def test_a_sweep_with_a_few_due_rows_reads_indexes_only(many: Any):
    """With the plan that a new session makes for its first sweep."""
    await many.execute(
        "update uploads set expires_at = now() - interval '1 minute'"
        " where ctid = any (array(select ctid from uploads where acked_at is null limit 300))"
    )
    query, types, values = looks()["delete_due"]

    plan = await plan_of(many, query, types, *values, first_time=True)

    assert full_scans(plan) == []
    assert await many.fetchval("select count(*) from uploads") == MANY - 300
