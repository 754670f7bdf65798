"""The sweep, its plan and the status over HTTP, in the background, and in the metrics."""

import asyncio
import os
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
import structlog
from callers import ADMIN, Caller, Part, ask, bearer, everything, pattern, registered
from factories import HOUR, make_workspace
from prometheus_client.parser import text_string_to_metric_families
from sites import Site, SiteFactory
from sweeps import (
    PAST,
    expire,
    grow_older,
    locked,
    make_old_feed,
    make_partition,
    partition_names,
    put_back_acks,
)
from waiting import until

from restante import wire
from restante.database import locks
from restante.delivery.subject import CHUNKS
from restante.feed.subject import FEED

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
PLAN, SWEEP, STATUS = "/admin/retention/plan", "/admin/retention/sweep", "/admin/status"


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


@pytest.fixture
async def connection(connections: Any) -> Any:
    return await connections()


async def asked(site: Site, method: str, path: str) -> Any:
    answer = await ask(site, method, path, headers=ADMIN)
    assert answer.status == 200, answer.body
    return answer.json


async def metrics(site: Site) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels, in the order of their names."""
    page = (await ask(site, "GET", "/metrics", headers=ADMIN)).body.decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


SWEPT = "molecule_pending_uploads_swept_total"


# On request of the operator


@pytest.mark.parametrize(("method", "path"), [("GET", PLAN), ("POST", SWEEP), ("GET", STATUS)])
async def test_only_the_operator_may_call_these_routes(caller: Caller, method: str, path: str):
    for headers in ({}, bearer(caller.token), bearer("x" * 32)):
        answer = await ask(caller.site, method, path, headers=headers)
        assert (answer.status, answer.json["code"]) == (401, "not_authenticated")


async def test_the_sweep_does_what_the_plan_says(caller: Caller, connection: Any):
    acked, *_ = await caller.staged(*[Part(pattern(MIB))] * 3)
    await caller.ack(acked)
    await grow_older(connection)
    before = await everything(connection)

    plan = await asked(caller.site, "GET", PLAN)
    unchanged = await everything(connection)
    report = await asked(caller.site, "POST", SWEEP)

    assert unchanged == before
    rows, bucket = plan["steps"]
    assert (rows["action"], rows["leaf"], rows["rows"]) == ("delete uploads", None, 3)
    assert rows["why"] == "1 acked, 2 expired"
    assert bucket["action"] == "drop a bucket"
    assert plan["bytes_to_come_back"] == bucket["bytes"] > 3 * MIB
    assert plan["held"] == []
    assert report["done"] == plan["steps"]
    assert (report["acked"], report["expired"], report["postponed"]) == (1, 2, [])
    assert report["bytes_back"] == plan["bytes_to_come_back"]
    assert (await asked(caller.site, "GET", PLAN))["steps"] == []
    assert bucket["leaf"] not in await partition_names(connection, CHUNKS)


async def test_the_plan_names_who_holds_space_since_when_and_until_when(
    caller: Caller, connection: Any
):
    await caller.staged(Part(pattern(MIB)))
    await grow_older(connection)
    await connection.execute("update uploads set expires_at = now() + interval '1 day'")
    row = await connection.fetchrow("select created_at, expires_at from uploads")

    (held,) = (await asked(caller.site, "GET", PLAN))["held"]

    assert held["workspace_id"] == caller.id
    assert held["workspace_bytes"] == MIB
    assert held["bytes"] > MIB
    assert held["why"] == "1 live files are in it"
    for name, moment in (("since", row["created_at"]), ("until", row["expires_at"])):
        assert held[name].startswith(f"{moment:%Y-%m-%dT%H:%M:%S}")


async def test_a_step_that_another_session_locks_out_is_postponed_with_the_reason(
    caller: Caller, connection: Any, connections: Any
):
    await caller.staged()
    await grow_older(connection)
    _, drop = (await asked(caller.site, "GET", PLAN))["steps"]

    async with locked(await connections(), drop["leaf"]):
        report = await asked(caller.site, "POST", SWEEP)

    (postponed,) = report["postponed"]
    assert postponed["step"]["leaf"] == drop["leaf"]
    assert "holds a lock" in postponed["reason"]
    assert (await metrics(caller.site))["molecule_sweep_steps_postponed_total",] == 1


async def test_a_sweep_while_another_server_sweeps_is_postponed_with_the_reason(
    caller: Caller, connection: Any, connections: Any
):
    await caller.staged()
    await grow_older(connection)
    async with locks.held_if_free(await connections(), "sweep"):
        report = await asked(caller.site, "POST", SWEEP)

    assert report["expired"] == 1
    assert {one["reason"] for one in report["postponed"]} == {"another server is sweeping"}
    assert (await metrics(caller.site))["molecule_sweep_steps_postponed_total",] == 0


async def test_the_status_shows_tables_uploads_and_workspaces(caller: Caller, connection: Any):
    fetched, acked, _ = await caller.staged(*[Part(pattern(1000))] * 3)
    await caller.fetch(fetched)
    await until(lambda: connection.fetchval("select count(fetched_at) from uploads"))
    await caller.ack(acked)
    await caller.ask("POST", "/activity/ack", json={"acked_seq": 1})

    status = await asked(caller.site, "GET", STATUS)

    states = {"never_fetched": 1, "fetched": 1, "acked": 1, "expired": 0}
    assert status["uploads"] == states
    (workspace,) = status["workspaces"]
    assert workspace["workspace_id"] == caller.id
    assert workspace["uploads"] == states
    assert workspace["waiting_bytes"] == 2000
    assert status["live_bytes"] == 3000
    assert status["total_bytes"] == sum(table["bytes"] for table in status["tables"])
    chunks = next(table for table in status["tables"] if table["name"] == "chunks")
    assert chunks["leaves"] == len(await partition_names(connection, CHUNKS))
    assert status["dead_bytes"] == max(chunks["bytes"] - 3000, 0)
    assert status["lags"] == [{"workspace_id": caller.id, "behind": 2}]
    assert min(status["lead_seconds"].values()) > 3600
    assert status["workspaces_active"] == 1


# In the background


async def test_every_outcome_is_shown_as_zero_from_the_start(run_site: SiteFactory):
    async with run_site() as site:
        found = await metrics(site)

    for outcome in ("acked", "expired", "error"):
        assert found[SWEPT, outcome] == 0
    assert found["molecule_phantom_busy_resets_total",] == 0
    assert found["molecule_space_given_back_bytes_total",] == 0
    for state in ("never_fetched", "fetched", "acked", "expired"):
        assert found["molecule_uploads", state] == 0


async def test_what_became_due_while_no_server_ran_is_swept_at_the_start(
    run_site: SiteFactory, connection: Any
):
    async with run_site() as site:
        caller = await registered(site)
        acked, _ = await caller.staged(Part(), Part())
        await caller.ack(acked)
    await put_back_acks(connection)
    await expire(connection)

    async with run_site() as site:
        await until(lambda: is_empty(connection, "uploads"))
        await until(lambda: sample_is(site, 1, SWEPT, "expired"))
        found = await metrics(site)

    assert (found[SWEPT, "acked"], found[SWEPT, "error"]) == (1, 0)


async def is_empty(connection: Any, table: str) -> bool:
    return not await connection.fetchval(f"select exists (select from {table})")


async def sample_is(site: Site, least: float, *sample: str) -> bool:
    return (await metrics(site))[sample] >= least


async def test_a_pass_that_fails_is_counted_and_the_next_one_sweeps(
    run_site: SiteFactory, connection: Any
):
    with structlog.testing.capture_logs():
        async with run_site(sweep_interval_seconds=0.1) as site:
            caller = await registered(site)
            await caller.staged()
            await connection.execute("alter table reservations rename to elsewhere")
            await grow_older(connection)
            await until(lambda: sample_is(site, 2, SWEPT, "error"))
            await connection.execute("alter table elsewhere rename to reservations")

            await until(lambda: is_empty(connection, "uploads"))
            await until(lambda: sample_is(site, 1, SWEPT, "expired"))
            assert (await ask(site, "GET", "/ready")).status == 200


async def test_a_silent_busy_workspace_is_reset_and_counted(run_site: SiteFactory, connection: Any):
    busy = await make_workspace(connection)
    await connection.execute("update workspaces set active_tasks = 5, current_task = 'digging'")

    with structlog.testing.capture_logs() as logged:
        async with run_site() as site:
            await until(lambda: sample_is(site, 1, "molecule_phantom_busy_resets_total"))

    row = await connection.fetchrow("select active_tasks, current_task from workspaces")
    assert tuple(row) == (0, "")
    lines = [line for line in logged if line["event"] == "phantom_busy_reset"]
    assert [line["workspace"] for line in lines] == [str(busy)]


async def test_the_space_account_is_in_the_metrics(run_site: SiteFactory, connection: Any):
    async with run_site() as site:
        caller = await registered(site)
        first, second, _ = await caller.staged(*[Part(pattern(1000))] * 3)
        await caller.ack(first)
        await connection.execute("update uploads set fetched_at = now() where file_id = $1", second)
    await connection.execute(
        "insert into space_samples values (now() - interval '1 day', 0), (now(), 1000000)"
    )

    async with run_site() as site:
        await until(lambda: sample_is(site, 3000, "molecule_space_live_bytes"))
        found = await metrics(site)
        status = await asked(site, "GET", STATUS)

    for state in ("never_fetched", "fetched", "acked"):
        assert found["molecule_uploads", state] == 1
    assert found["molecule_workspace_uploads", "never_fetched", caller.id] == 1
    assert found["molecule_workspace_feed_lag_rows", caller.id] == 3
    assert found["molecule_space_bytes", "chunks"] > 0
    assert found["molecule_space_growth_bytes_per_day",] > 0
    assert min(found["molecule_leaf_lead_seconds", table] for table in ("chunks", "feed")) > 3600
    if status["free_bytes"] is not None:
        assert found["molecule_space_seconds_until_full",] > 0


async def test_the_number_of_workspaces_in_the_metrics_is_bounded(site: Site):
    """One label value per workspace would be too many for Prometheus and for the dashboard."""
    for _ in range(25):
        await (await registered(site)).staged()

    site.state.metrics.saw_space(await site.state.space.look(now=datetime.now(UTC)))

    named = {key[2] for key in await metrics(site) if key[0] == "molecule_workspace_uploads"}
    assert len(named) == 20


# The feed


async def test_a_cursor_in_a_trimmed_partition_is_a_410_and_one_after_it_goes_on(
    run_site: SiteFactory, connection: Any
):
    async with run_site(feed_retention_days=30, with_jobs=False) as site:
        caller = await registered(site)
        await caller.staged(*[Part()] * 5)
        partition = await make_old_feed(connection, UUID(caller.id), up_to=3)
        ids = [row["id"] for row in reversed(await caller.feed())]

        report = await asked(site, "POST", SWEEP)

        assert [step["leaf"] for step in report["done"]] == [partition]
        answers = [await caller.read_feed(since_id=row_id) for row_id in ids]
        whole = await caller.read_feed()
    assert partition not in await partition_names(connection, FEED)
    assert [answer.status for answer in answers] == [410, 410, 410, 200, 200]
    assert [row["seq"] for row in answers[3].json] == [5]
    assert [row["seq"] for row in whole.json] == [5, 4]
    assert whole.headers[wire.LOWEST_SEQ] == "4"


async def test_a_follower_sees_every_row_or_a_410_while_partitions_are_dropped(
    run_site: SiteFactory, connection: Any
):
    """Rows are appended, made older and trimmed while a reader follows by small pages."""
    async with run_site(feed_retention_days=30, with_jobs=False) as site:
        caller = await registered(site)
        await caller.staged(*[Part()] * 40)
        ids = {row["seq"]: row["id"] for row in await caller.feed(limit=100)}
        before = 1
        following = asyncio.create_task(follow(caller, ids[before], 60))
        for days, up_to in ((90, 5), (80, 12), (70, 20)):
            await make_old_feed(connection, UUID(caller.id), days=days, up_to=up_to)
            await asked(site, "POST", SWEEP)
            await caller.staged(*[Part()] * 5)
        await caller.staged(*[Part()] * 5)
        pages = await following

    for page, started_over in pages:
        assert page == list(range(page[0], page[0] + len(page)))
        assert started_over or page[0] == before + 1
        before = page[-1]
    assert before == 60


async def follow(caller: Caller, since_id: str, last: int) -> list[tuple[list[int], bool]]:
    """Pages of seqs, each with whether the reader had to start over before it."""
    pages: list[tuple[list[int], bool]] = []
    async with asyncio.timeout(30):
        while not (pages and pages[-1][0][-1] >= last):
            answer = await caller.read_feed(since_id=since_id, limit=3, wait=1)
            started_over = answer.status == 410
            assert answer.status in {200, 410}, answer.body
            rows = list(reversed(await caller.feed(limit=500))) if started_over else answer.json
            if rows:
                pages.append(([row["seq"] for row in rows], started_over))
                since_id = rows[-1]["id"]
    return pages


# Fetching while buckets move


@pytest.mark.slow
async def test_fetches_are_complete_while_buckets_are_moved_and_dropped(
    run_site: SiteFactory, connection: Any
):
    """
    Readers fetch without a pause while their files are moved from one bucket to the next.

    In each round all files are put into an old bucket that is mostly dead; the sweep moves them out
    of it and drops it while they are read.
    """
    rounds, sizes = (50, (5, 20, 25)) if "SOAK_RUNS" in os.environ else (8, (1, 2, 5))
    async with run_site(pool_size=20) as site:
        caller = await registered(site)
        contents = [pattern(size * MIB - size, seed=size) for size in sizes]
        ids = [(await caller.staged(Part(content)))[0] for content in contents]
        ended = asyncio.Event()
        readers = [
            asyncio.create_task(fetch_until(ended, caller, file_id, content))
            for file_id, content in [*zip(ids, contents, strict=True)] * 2
        ]
        for number in range(rounds):
            partition = await make_mostly_dead(connection, PAST - number * HOUR)
            report = await asked(site, "POST", SWEEP)
            done = [(step["action"], step["leaf"]) for step in report["done"]]
            assert (done, report["postponed"]) == (
                [("move live files", partition), ("drop a bucket", partition)],
                [],
            )
        ended.set()
        fetched = await asyncio.gather(*readers)
        found = await metrics(site)

    assert min(fetched) >= 3
    assert {key[3] for key in found if is_a_fetch(key) and found[key]} == {"200"}


def is_a_fetch(key: tuple[str, ...]) -> bool:
    return key[:2] == ("molecule_http_requests_total", "GET") and key[2].endswith("/content")


async def make_mostly_dead(connection: Any, bucket: datetime) -> str:
    """Move all files, in one commit, to an old bucket that is four fifths dead; its partition."""
    partition = await make_partition(connection, CHUNKS, bucket)
    async with connection.transaction():
        await connection.execute(
            f"insert into {partition} select $1, chunks.workspace_id,"
            "        case copy when 0 then file_id else gen_random_uuid() end, seq, bytes"
            "   from chunks join uploads using (bucket, workspace_id, file_id),"
            "        generate_series(0, 4) as copy",
            bucket,
        )
        await connection.execute("delete from chunks where bucket <> $1", bucket)
        await connection.execute("update uploads set bucket = $1", bucket)
    return partition


async def fetch_until(ended: asyncio.Event, caller: Caller, file_id: str, content: bytes) -> int:
    """Fetch again and again; returns how often."""
    count = 0
    while not ended.is_set():
        answer = await caller.fetch(file_id)
        assert (answer.status, len(answer.body)) == (200, len(content))
        assert answer.body == content
        count += 1
    return count
