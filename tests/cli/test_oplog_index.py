"""`restante oplog ensure-index` on a terminal, in a pipe and in a script, stopped and killed."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import warm
from oplog.captured import track
from processes import Outcome, clean_environment, on_a_terminal, restante
from waiting import until

from restante.database import locks
from restante.database.pool import Database
from restante.oplog.indexing.ensure import LOCK

pytestmark = pytest.mark.anyio


@pytest.fixture
async def app(db: Database, connections: Any) -> Any:
    """The application's connection; the index by ULID is missing."""
    connection = await connections()
    await connection.execute("create table public.pages (id text primary key)")
    await track(db)
    await connection.execute("drop index restante.ops_by_ulid")
    return connection


def run(dsn: str, *words: str) -> Outcome:
    return restante("oplog", "ensure-index", *words, "--database-url", dsn)


async def invalid(app: Any) -> list[str]:
    rows = await app.fetch(
        "select relname::text from pg_index join pg_class on oid = indexrelid"
        " where not indisvalid and relkind = 'i'"
    )
    return [row[0] for row in rows]


async def has_index(app: Any) -> bool:
    return bool(
        await app.fetchval(
            "select indisvalid from pg_index where indexrelid = to_regclass('ops_by_ulid')"
        )
    )


async def test_a_dry_run_shows_what_would_be_built_and_changes_nothing(app: Any, dsn: str):
    shown = run(dsn, "--dry-run")

    assert shown.code == 0
    assert "build ops_1_" in shown.stdout
    assert "using btree (ulid), about 16.0 KiB" in shown.stdout
    assert "would be taken while it runs" in shown.stdout
    assert not await has_index(app)


async def test_a_dry_run_has_the_numbers_as_json(app: Any, dsn: str):
    outlook = json.loads(run(dsn, "--dry-run", "--json", "--add", "arrival").stdout)

    assert "ops_by_arrival" in {step["index"] for step in outlook["steps"]}
    assert {step["action"] for step in outlook["steps"]} == {"declare", "build"}
    assert outlook["needed_bytes"] > outlook["estimated_bytes"] > 0
    assert outlook["free_bytes"] > 0


async def test_lines_in_a_pipe_and_json(app: Any, dsn: str):
    first = run(dsn, "pages")
    second = run(dsn, "--json")

    assert first.code == 0, first
    assert "built ops_1_" in first.stdout
    assert "[1/" in first.stderr
    assert "\x1b" not in first.stdout + first.stderr
    assert (second.code, second.stderr) == (0, "")
    assert json.loads(second.stdout) == {"status": "complete", "done": [], "left": [], "notes": []}
    assert await has_index(app)


async def test_a_terminal_shows_a_bar(app: Any, dsn: str):
    screen = on_a_terminal("oplog", "ensure-index", "--database-url", dsn)

    assert "built ops_1_" in screen
    assert "%" in screen


async def test_the_optional_index_is_dropped(app: Any, dsn: str):
    await app.execute("create index ops_by_arrival on ops using brin (arrived_at)")

    dropped = run(dsn, "--drop", "arrival")

    assert (dropped.code, dropped.stdout) == (0, "dropped ops_by_arrival on ops\n")


async def test_a_second_run_at_the_same_time_says_so(app: Any, dsn: str):
    async with locks.held_if_free(app, LOCK):
        second = run(dsn)

    assert second.code == 3
    assert f"Another run is active: process {app.get_server_pid()}" in second.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nothing",), "nothing is not tracked; `restante oplog tables` lists what is."),
        (("--add", "arrival", "--drop", "arrival"), "exclude each other"),
    ],
)
async def test_errors_are_sentences(app: Any, dsn: str, words: tuple[str, ...], sentence: str):
    refused = run(dsn, *words)

    assert (refused.code, refused.stdout) == (1, "")
    assert sentence in refused.stderr


@contextmanager
def started(dsn: str) -> Iterator["subprocess.Popen[str]"]:
    with warm.start(
        ["oplog", "ensure-index", "--database-url", dsn],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def is_building(app: Any, process: "subprocess.Popen[str]") -> bool:
    assert process.poll() is None, process.communicate()
    return bool(await invalid(app))


async def in_old_transaction(other: Any) -> None:
    await other.execute("begin isolation level repeatable read")
    await other.execute("select count(*) from public.pages")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
async def test_a_signal_stops_it_cleanly(app: Any, dsn: str, connections: Any, number: int):
    other = await connections()
    await in_old_transaction(other)

    with started(dsn) as process:
        await until(lambda: is_building(app, process))
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)

    assert process.returncode == 130
    assert "Stopped; the same command goes on from here." in output
    assert await invalid(app) == []


async def test_what_was_killed_is_healed_by_the_next_run(app: Any, dsn: str, connections: Any):
    other = await connections()
    await in_old_transaction(other)

    with started(dsn) as process:
        await until(lambda: is_building(app, process))
        process.kill()
    await until(lambda: is_free(app))
    left = await invalid(app)
    await other.execute("rollback")
    healed = run(dsn)

    assert len(left) == 1
    assert f"replaced {left[0]}" in healed.stdout
    assert healed.code == 0
    assert await invalid(app) == []
    assert await has_index(app)


async def is_free(app: Any) -> bool:
    """Whether Postgres has noticed that the process is gone."""
    async with locks.held_if_free(app, LOCK) as is_held:
        return is_held
