"""`restante sweep` and `restante status`, as a person, a pipe and a script meet them."""

import json
import os
import pty
import re
import subprocess
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest
from factories import make_workspace
from processes import RESTANTE, Outcome, Server, clean_environment, restante, wait_until
from sweeps import HOUR, PAST, expire, leaf_names, locked, make_leaf, make_old

from restante.database import locks
from restante.database.partitions import CHUNKS
from restante.database.pool import SCHEMA, Database
from restante.delivery import store as uploads

pytestmark = pytest.mark.anyio

BUCKET = f"chunks_{PAST:%Y%m%d_%H%M%S}"
HELD = f"chunks_{PAST + HOUR:%Y%m%d_%H%M%S}"
COLOUR = re.compile(r"\x1b\[[0-9;]*(3[0-7]|9[0-7])[0-9;]*m")


@pytest.fixture
async def connection(db_with_leaves: Database, connections: Any) -> Any:
    """Three expired files in one bucket, and two that are waited for in another."""
    connection = await connections()
    workspace_id = await make_workspace(connection)
    await make_leaf(connection, CHUNKS)
    await make_leaf(connection, CHUNKS, PAST + HOUR)
    await make_old(connection, workspace_id, 3)
    await expire(connection)
    waiting, _ = await make_old(connection, workspace_id, 2, bucket=PAST + HOUR)
    await uploads.mark_fetched(connection, workspace_id, waiting, now=datetime.now(UTC))
    return connection


async def counted(connection: Any) -> tuple[int, bool]:
    """How many uploads there are, and whether the bucket of the expired ones is."""
    count = await connection.fetchval("select count(*) from uploads")
    return count, BUCKET in await leaf_names(connection, CHUNKS)


def run(dsn: str, *words: str, **environment: str) -> Outcome:
    return restante(*words, "--database-url", dsn, seconds=60, **environment)


def said_by(outcome: Outcome) -> str:
    """What a successful command printed; words without the wrapping."""
    assert outcome.code == 0, outcome
    assert "\x1b" not in outcome.stdout + outcome.stderr
    return " ".join(outcome.stdout.split())


async def test_a_dry_run_shows_the_plan_and_changes_nothing(dsn: str, connection: Any):
    outcome = run(dsn, "sweep", "--dry-run")

    said = said_by(outcome)
    assert outcome.stderr == ""
    assert "delete uploads 3" in said
    assert f"drop a bucket {BUCKET}" in said
    assert re.search(r"[0-9.]+ KiB would come back\.", said)
    assert f"{HELD} keeps" in said
    workspace_id = await connection.fetchval("select id from workspaces")
    assert f"most of it is workspace {workspace_id}'s since" in said
    assert await counted(connection) == (5, True)


async def test_a_dry_run_prints_json_for_scripts(dsn: str, connection: Any):
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


async def test_a_sweep_does_what_the_plan_said_and_tells_each_step(dsn: str, connection: Any):
    outcome = run(dsn, "sweep")

    said = said_by(outcome)
    assert re.match(
        r"Deleted 0 acknowledged and 3 expired uploads; [0-9.]+ KiB came back in [0-9.]+ s\.", said
    )
    assert "delete uploads : done" in outcome.stderr
    assert f"drop a bucket {BUCKET}: done" in outcome.stderr
    assert await counted(connection) == (2, False)
    assert "0 B would come back." in said_by(run(dsn, "sweep", "--dry-run"))


async def test_a_sweep_with_somebody_in_the_way_says_what_is_left(
    dsn: str, connection: Any, connections: Any
):
    async with locked(await connections(), BUCKET):
        outcome = run(dsn, "sweep", "--json")

    report = json.loads(outcome.stdout)
    assert (outcome.code, outcome.stderr, report["expired"]) == (0, "", 3)
    (postponed,) = report["postponed"]
    assert postponed["step"]["leaf"] == BUCKET
    assert "in the way" in postponed["reason"]
    assert "came back" in said_by(run(dsn, "sweep"))
    assert await counted(connection) == (2, False)


async def test_a_sweep_beside_a_server_that_sweeps_says_so(
    dsn: str, connection: Any, connections: Any
):
    async with locks.held_if_free(await connections(), "sweep"):
        outcome = run(dsn, "sweep")

    said = said_by(outcome)
    assert "3 expired uploads" in said
    assert f"Left for the next pass: drop a bucket {BUCKET}: another server is sweeping" in said
    assert await counted(connection) == (2, True)


async def test_the_retention_can_be_given_for_once(dsn: str, connection: Any):
    """An operator whose disk is full tonight does not wait for the hour."""
    await connection.execute("update uploads set acked_at = now()")

    kept = json.loads(run(dsn, "sweep", "--dry-run", "--json").stdout)
    given = run(dsn, "sweep", "--dry-run", "--json", "--ack-retention-seconds", "0")

    assert kept["steps"] == []
    assert json.loads(given.stdout)["steps"][0]["why"] == "5 acknowledged, 0 expired"


async def test_the_status_fits_on_a_screen_and_names_everything(dsn: str, connection: Any):
    outcome = run(dsn, "status", COLUMNS="80")

    said = said_by(outcome)
    assert outcome.stderr == ""
    assert "of files that live" in said
    assert "1 never fetched, 1 fetched but not acknowledged, 0 acknowledged, 3 expired" in said
    for table in ("chunks", "feed", "uploads"):
        assert re.search(rf"^{table}\s", outcome.stdout, re.MULTILINE)
    workspace_id = await connection.fetchval("select id from workspaces")
    assert str(workspace_id) in outcome.stdout
    assert outcome.stdout.count("\n") <= 24


async def test_the_status_prints_json_for_scripts(dsn: str, connection: Any):
    outcome = run(dsn, "status", "--json")

    status = json.loads(outcome.stdout)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert status["uploads"] == {"never_fetched": 1, "fetched": 1, "acked": 0, "expired": 3}
    assert status["live_bytes"] == 5 * 64 * 1024
    assert await connection.fetchval("select count(*) from space_samples") == 0


def on_a_terminal(*words: str, **environment: str) -> str:
    """What a terminal of 100 columns receives."""
    keyboard, screen = pty.openpty()
    environ = clean_environment(TERM="xterm-256color", COLUMNS="100", **environment)
    with subprocess.Popen(
        [RESTANTE, *words], env=environ, stdin=screen, stdout=screen, stderr=screen
    ) as process:
        os.close(screen)
        received = b""
        while chunk := _read(keyboard):
            received += chunk
        assert process.wait(30) == 0, received
    os.close(keyboard)
    return received.decode()


def _read(keyboard: int) -> bytes:
    try:
        return os.read(keyboard, 4096)
    except OSError:  # how a terminal says that the other side has gone
        return b""


async def test_a_terminal_without_colours_gets_none(dsn: str, connection: Any):
    for words in (["status"], ["sweep"]):
        received = on_a_terminal(*words, "--database-url", dsn, NO_COLOR="1")

        assert not COLOUR.search(received)
        assert "KiB" in received


async def test_a_database_that_is_not_there_is_one_sentence():
    for command in ("sweep", "status"):
        outcome = run("postgresql://restante@127.0.0.1:1/restante", command)

        assert (outcome.code, outcome.stdout) == (1, "")
        assert re.fullmatch(r"restante: The database cannot be reached: .*\.\n", outcome.stderr)


async def test_a_database_that_was_never_used_is_one_sentence(empty_dsn: str):
    outcome = run(empty_dsn, "sweep", "--dry-run")

    assert (outcome.code, outcome.stdout) == (1, "")
    assert outcome.stderr.count("\n") == 1
    assert "Traceback" not in outcome.stderr


@pytest.mark.slow
async def test_the_commands_find_the_database_of_a_server_that_runs_or_does_not(server: Server):
    """A dry run writes nothing, says the log of a Postgres that nobody else uses."""
    here = ("--data-dir", server.data_dir)
    server.start()
    postgres = server.postgres_pid()
    first_pass = b'molecule_loop_passes_total{loop="sweep",outcome="ok"} 1.0'
    wait_until(lambda: first_pass in server.get("/metrics")[1], seconds=20, what="the first sweep")
    connection = await asyncpg.connect(server.dsn, server_settings={"search_path": SCHEMA})
    await make_leaf(connection, CHUNKS)
    await make_old(connection, await make_workspace(connection), 3)
    await expire(connection)
    await connection.execute("checkpoint")
    written, planned = list[int](), ""
    # Postgres itself writes now and then, so one quiet run of a few is enough.
    while len(written) < 5 and 0 not in written:
        before = await position(connection)
        planned = said_by(restante("sweep", "--dry-run", *here))
        written.append(await position(connection) - before)
    await connection.close()

    assert f"drop a bucket {BUCKET}" in planned
    assert 0 in written
    assert "3 expired" in said_by(restante("status", *here))
    assert (server.postgres_pid(), server.get("/ready")[0]) == (postgres, 200)
    server.stop()
    assert "3 expired uploads" in said_by(restante("sweep", *here))
    assert "0 expired" in said_by(restante("status", *here))
    assert not server.processes()


async def position(connection: Any) -> int:
    """How much has been written to the log of all databases."""
    return await connection.fetchval("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
