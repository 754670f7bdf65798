"""`restante sweep` and `restante status` on a terminal, in a pipe and in a script."""

import json
import re
from typing import Any

import asyncpg
import pytest
from factories import HOUR, make_workspace
from processes import Outcome, Server, on_a_terminal, restante, wait_until
from sweeps import (
    CHUNKS,
    PAST,
    expire,
    locked,
    make_old,
    make_partition,
    partition_names,
    utc_now,
)

from restante.database import locks
from restante.database.pool import SCHEMA, Database
from restante.delivery import store as uploads

pytestmark = pytest.mark.anyio

BUCKET = f"chunks_{PAST:%Y%m%d_%H%M%S}"
HELD = f"chunks_{PAST + HOUR:%Y%m%d_%H%M%S}"
COLOUR = re.compile(r"\x1b\[[0-9;]*(3[0-7]|9[0-7])[0-9;]*m")


@pytest.fixture
async def connection(db_with_partitions: Database, connections: Any) -> Any:
    """Three expired files in one bucket, and two unacknowledged ones in another."""
    connection = await connections()
    workspace_id = await make_workspace(connection)
    await make_partition(connection, CHUNKS)
    await make_partition(connection, CHUNKS, PAST + HOUR)
    await make_old(connection, workspace_id, 3)
    await expire(connection)
    waiting, _ = await make_old(connection, workspace_id, 2, bucket=PAST + HOUR)
    await uploads.mark_fetched(connection, workspace_id, waiting, now=utc_now())
    return connection


async def counted(connection: Any) -> tuple[int, bool]:
    """How many uploads there are, and whether the bucket of the expired ones exists."""
    count = await connection.fetchval("select count(*) from uploads")
    return count, BUCKET in await partition_names(connection, CHUNKS)


def run(dsn: str, *words: str, **environment: str) -> Outcome:
    return restante(*words, "--database-url", dsn, seconds=60, **environment)


def output_of(outcome: Outcome) -> str:
    """The output of a command that succeeded, without line breaks."""
    assert outcome.code == 0, outcome
    assert "\x1b" not in outcome.stdout + outcome.stderr
    return " ".join(outcome.stdout.split())


async def test_a_dry_run_shows_the_plan_and_changes_nothing(dsn: str, connection: Any):
    outcome = run(dsn, "sweep", "--dry-run")

    output = output_of(outcome)
    assert outcome.stderr == ""
    assert "delete uploads 3" in output
    assert f"drop a bucket {BUCKET}" in output
    assert re.search(r"[0-9.]+ KiB would be freed\.", output)
    assert f"{HELD} keeps" in output
    assert "most of it belongs to workspace a workspace since" in output
    assert await counted(connection) == (5, True)


async def test_a_dry_run_as_json(dsn: str, connection: Any):
    outcome = run(dsn, "sweep", "--dry-run", "--json")

    plan = json.loads(outcome.stdout)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert [(step["action"], step["leaf"]) for step in plan["steps"]] == [
        ("delete uploads", None),
        ("drop a bucket", BUCKET),
    ]
    (held,) = plan["held"]
    assert (held["leaf"], held["workspace_bytes"]) == (HELD, 2 * 64 * 1024)
    assert plan["bytes_to_come_back"] == plan["steps"][1]["bytes"] > 3 * 64 * 1024
    assert await counted(connection) == (5, True)


async def test_a_sweep_executes_the_plan_and_prints_each_step(dsn: str, connection: Any):
    outcome = run(dsn, "sweep")

    output = output_of(outcome)
    assert re.match(
        r"Deleted 0 acknowledged and 3 expired uploads; [0-9.]+ KiB freed in [0-9.]+ s\.", output
    )
    assert "delete uploads : done" in outcome.stderr
    assert f"drop a bucket {BUCKET}: done" in outcome.stderr
    assert await counted(connection) == (2, False)
    assert "0 B would be freed." in output_of(run(dsn, "sweep", "--dry-run"))


async def test_a_sweep_reports_a_step_that_a_lock_postponed(
    dsn: str, connection: Any, connections: Any
):
    async with locked(await connections(), BUCKET):
        outcome = run(dsn, "sweep", "--json")

    report = json.loads(outcome.stdout)
    assert (outcome.code, outcome.stderr, report["expired"]) == (0, "", 3)
    (postponed,) = report["postponed"]
    assert postponed["step"]["leaf"] == BUCKET
    assert "holds a lock" in postponed["reason"]
    assert "freed in" in output_of(run(dsn, "sweep"))
    assert await counted(connection) == (2, False)


async def test_a_sweep_reports_that_another_server_is_sweeping(
    dsn: str, connection: Any, connections: Any
):
    async with locks.held_if_free(await connections(), "sweep"):
        outcome = run(dsn, "sweep")

    output = output_of(outcome)
    assert "3 expired uploads" in output
    assert (
        f"Postponed to the next sweep: drop a bucket {BUCKET}: another server is sweeping" in output
    )
    assert await counted(connection) == (2, True)


async def test_the_retention_can_be_set_for_one_sweep(dsn: str, connection: Any):
    """An operator with a full disk cannot wait for an hour."""
    await connection.execute("update uploads set acked_at = now()")

    kept = json.loads(run(dsn, "sweep", "--dry-run", "--json").stdout)
    given = run(dsn, "sweep", "--dry-run", "--json", "--ack-retention-seconds", "0")

    assert kept["steps"] == []
    assert json.loads(given.stdout)["steps"][0]["why"] == "5 acked, 0 expired"


@pytest.mark.parametrize(
    ("words", "environment", "is_due"),
    [
        ((), {}, False),
        (("--ack-retention-seconds", "3600"), {}, True),
        ((), {"RESTANTE_ACK_RETENTION_SECONDS": "3600"}, True),
        ((), {"RESTANTE_ACK_RETENTION_SECONDS": ""}, False),
    ],
    ids=["neither", "flag", "variable", "empty variable"],
)
async def test_a_given_retention_wins_over_the_servers_even_if_it_is_the_default(
    dsn: str, connection: Any, words: tuple[str, ...], environment: dict[str, str], is_due: bool
):
    """The servers keep acknowledged files for two hours; these were acknowledged 90 minutes ago."""
    await connection.execute("insert into chosen_retention values (true, 7200, 864000)")
    await connection.execute("update uploads set acked_at = now() - interval '90 minutes'")

    plan = json.loads(run(dsn, "sweep", "--dry-run", "--json", *words, **environment).stdout)

    assert ("delete uploads" in [step["action"] for step in plan["steps"]]) is is_due


async def test_the_status_fits_on_one_screen(dsn: str, connection: Any):
    outcome = run(dsn, "status", COLUMNS="80")

    output = output_of(outcome)
    assert outcome.stderr == ""
    assert "1 never fetched, 1 fetched but not acknowledged, 0 acknowledged, 3 expired" in output
    for table in ("chunks", "feed", "uploads"):
        assert re.search(rf"\s{table}$", outcome.stdout, re.MULTILINE)
    assert re.search(r"^Most is kept for\n.*\n.* a workspace$", outcome.stdout, re.MULTILINE)
    assert outcome.stdout.count("\n") <= 28


async def test_the_status_agrees_with_the_dry_run(dsn: str, connection: Any):
    """What the next sweep frees, and what must stay and why, are of one plan."""
    planned, shown = (run(dsn, *words).stdout for words in (("sweep", "--dry-run"), ("status",)))

    (freed,) = re.findall(r"^(.*) would be freed\.$", planned, re.MULTILINE)
    (kept,) = re.findall(rf"^{HELD} keeps .*$", planned, re.MULTILINE)
    assert re.search(rf"^Next sweep  frees {freed}; .* that nothing uses", shown, re.MULTILINE)
    assert kept in shown


async def test_the_status_as_json(dsn: str, connection: Any):
    outcome = run(dsn, "status", "--json")

    status = json.loads(outcome.stdout)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert status["uploads"] == {"never_fetched": 1, "fetched": 1, "acked": 0, "expired": 3}
    assert status["live_bytes"] == 5 * 64 * 1024
    assert await connection.fetchval("select count(*) from space_samples") == 0


async def test_no_color_is_honoured(dsn: str, connection: Any):
    for words in (["status"], ["sweep"]):
        received = on_a_terminal(*words, "--database-url", dsn, COLUMNS="100", NO_COLOR="1")

        assert not COLOUR.search(received)
        assert "KiB" in received


async def test_an_unreachable_database_is_one_line():
    for command in ("sweep", "status"):
        outcome = run("postgresql://restante@127.0.0.1:1/restante", command)

        assert (outcome.code, outcome.stdout) == (1, "")
        assert re.fullmatch(r"restante: The database cannot be reached: .*\.\n", outcome.stderr)


async def test_a_database_without_our_schema_is_one_line(empty_dsn: str):
    outcome = run(empty_dsn, "sweep", "--dry-run")

    assert (outcome.code, outcome.stdout) == (1, "")
    assert outcome.stderr.count("\n") == 1
    assert "Traceback" not in outcome.stderr


@pytest.mark.slow
async def test_the_commands_use_the_database_of_a_running_or_a_stopped_server(server: Server):
    """A dry run writes nothing to the WAL."""
    here = ("--data-dir", server.data_dir)
    server.start()
    postgres = server.postgres_pid()
    first_pass = b'molecule_loop_passes_total{loop="sweep",outcome="ok"} 1.0'
    wait_until(lambda: first_pass in server.get("/metrics")[1], seconds=60, what="the first sweep")
    connection = await asyncpg.connect(server.dsn, server_settings={"search_path": SCHEMA})
    await make_partition(connection, CHUNKS)
    await make_old(connection, await make_workspace(connection), 3)
    await expire(connection)
    await connection.execute("checkpoint")
    written, planned = list[int](), ""
    # Postgres writes WAL of its own now and then, so one run without any is enough.
    while len(written) < 5 and 0 not in written:
        before = await wal_bytes(connection)
        planned = output_of(restante("sweep", "--dry-run", *here))
        written.append(await wal_bytes(connection) - before)
    await connection.close()

    assert f"drop a bucket {BUCKET}" in planned
    assert 0 in written
    assert "3 expired" in output_of(restante("status", *here))
    assert (server.postgres_pid(), server.get("/ready")[0]) == (postgres, 200)
    server.stop()
    assert "3 expired uploads" in output_of(restante("sweep", *here))
    assert "0 expired" in output_of(restante("status", *here))
    assert not server.processes()


async def wal_bytes(connection: Any) -> int:
    """The current WAL position, as a number of bytes."""
    return await connection.fetchval("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
