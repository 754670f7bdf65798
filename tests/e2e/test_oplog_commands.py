"""`restante oplog verify`, `resync` and `status` beside two real servers."""

import json
import socket
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest
from processes import Outcome, Server, restante, wait_until

from restante.database.pool import Database
from restante.oplog import peers
from restante.oplog.peers import Changes

PAGES = "create table public.pages (id text primary key, title text)"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def execute(server: Server, *statements: str) -> None:
    async def run() -> None:
        connection = await asyncpg.connect(server.dsn, server_settings={"search_path": "public"})
        for statement in statements:
            await connection.execute(statement)
        await connection.close()

    anyio.run(run)


def fetchval(server: Server, query: str) -> Any:
    async def run() -> Any:
        connection = await asyncpg.connect(server.dsn, server_settings={"search_path": "public"})
        try:
            return await connection.fetchval(query)
        finally:
            await connection.close()

    return anyio.run(run)


def join(server: Server, other: Server) -> None:
    """Let the first one read from the second."""
    token = peers.new_token()

    async def run() -> None:
        now = datetime.now(UTC)
        for one, host, changes in (
            (other, server.address, Changes(shown_token=token)),
            (server, other.address, Changes(token=token)),
        ):
            db = await Database.open(
                one.dsn, pool_size=2, acquire_timeout_seconds=5, statement_timeout_seconds=5
            )
            async with db.connection() as connection:
                await peers.add(connection, host, changes, now=now)
            await db.close()

    anyio.run(run)


def oplog(server: Server, *words: str) -> Outcome:
    return restante("oplog", *words, "--data-dir", server.data_dir, COLUMNS="80")


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Server, Server]]:
    """Two servers that read each other, with an empty tracked table."""
    with (
        tempfile.TemporaryDirectory(prefix="restante-", ignore_cleanup_errors=True) as name,
        Server(Path(name) / "a") as a,
        Server(Path(name) / "b") as b,
    ):
        Path(name).chmod(0o711)
        for server in (a, b):
            server.port = free_port()
            server.environment["RESTANTE_SELF_URL"] = f"http://127.0.0.1:{server.port}"
            server.started_once().begin()
        for server in (a, b):
            server.until_ready()
            execute(server, PAGES)
            assert oplog(server, "track", "pages").code == 0
        join(a, b)
        join(b, a)
        yield a, b


def fill(nodes: tuple[Server, Server], count: int) -> None:
    a, b = nodes
    execute(
        a,
        f"insert into pages select n::text, 'x' from generate_series(1, {count}) n"
        " on conflict do nothing",
    )
    wait_until(
        lambda: fetchval(b, "select count(*) from pages") == count, seconds=30, what="the copy"
    )


def test_equal_nodes_end_with_0_different_ones_with_3_and_a_resync_mends_them(
    nodes: tuple[Server, Server],
):
    a, b = nodes
    fill(nodes, 2000)

    equal = oplog(a, "verify", b.address)
    unseen = "select set_config('restante.applying', id::text, false) from restante.op_tables"
    execute(a, unseen, "delete from pages where id = '7'")
    different = oplog(a, "verify", b.address)
    listed = oplog(a, "verify", f"{b.address}/", "--table", "pages", "--json")
    mended = oplog(a, "resync", b.address, "pages")
    after = oplog(a, "verify", b.address)

    assert equal.code == 0, equal
    assert equal.stdout.startswith("pages: equal, 2000 records\n")
    assert different.code == 3
    assert 'missing here  ["7"]' in different.stdout
    assert json.loads(listed.stdout)["tables"][0]["keys"] == [
        {"key": '["7"]', "what": "missing_here"}
    ]
    assert listed.stderr == ""
    assert (mended.code, after.code) == (0, 0), mended


def test_failures_are_sentences_and_end_with_1(nodes: tuple[Server, Server]):
    a, b = nodes

    stranger = oplog(a, "verify", "http://127.0.0.1:1")
    unknown = oplog(a, "verify", b.address, "--table", "nothing")
    unnamed = oplog(a, "verify", b.address, "--after", "[1]")
    untracked = oplog(a, "resync", b.address, "nothing")

    assert [one.code for one in (stranger, unknown, unnamed, untracked)] == [1, 1, 1, 1]
    assert "is not a peer of this node" in stranger.stderr
    assert "no tracked table nothing" in unknown.stderr
    assert "--table" in unnamed.stderr
    assert "nothing is not tracked" in untracked.stderr
    assert all("Traceback" not in one.stderr for one in (stranger, unknown, unnamed, untracked))


def test_a_reset_shows_its_plan_refuses_unequal_tables_and_empties_the_log(
    nodes: tuple[Server, Server],
):
    a, b = nodes
    fill(nodes, 2000)
    unseen = "select set_config('restante.applying', id::text, false) from restante.op_tables"

    planned = oplog(a, "reset", "--from", b.address)
    ops_then = fetchval(a, "select count(*) from restante.ops")
    execute(a, unseen, "update pages set title = 'y' where id = '9'")
    different = oplog(a, "reset", "--from", b.address, "--yes")
    execute(a, unseen, "update pages set title = 'x' where id = '9'")
    ops_before = fetchval(a, "select count(*) from restante.ops")
    done = oplog(a, "reset", "--from", b.address, "--yes")
    ops_after = fetchval(a, "select count(*) from restante.ops")
    again = oplog(a, "reset", "--from", b.address, "--yes", "--json")
    execute(a, "update pages set title = 'after the reset' where id = '5'")

    assert planned.code == 0, planned
    assert planned.stdout.startswith("pages: about ")
    assert planned.stdout.endswith(f"To do it: restante oplog reset --from {b.address} --yes\n")
    assert different.code == 3, different
    assert 'different     ["9"]' in different.stdout
    assert ops_then == ops_before > 0
    assert done.code == 0, done
    assert done.stdout.startswith("Dropped about ")
    assert "The filesystem has " in done.stdout
    assert ops_after == 0
    assert json.loads(again.stdout)["left"] == []
    wait_until(
        lambda: fetchval(b, "select title from pages where id = '5'") == "after the reset",
        seconds=30,
        what="the next change",
    )


def test_numbers_under_which_nothing_is_parked_end_with_1(nodes: tuple[Server, Server]):
    a, _ = nodes

    retried = oplog(a, "parked", "retry", "99999", "99998")
    discarded = oplog(a, "parked", "discard", "99999")
    listed = [oplog(a, *words, "--json") for words in (("parked", "list"), ("conflicts",))]

    assert (retried.code, discarded.code) == (1, 1)
    assert retried.stderr == "restante: Nothing is parked under 99998, 99999.\n"
    assert discarded.stderr == "restante: Nothing is parked under 99999.\n"
    assert [list(json.loads(one.stdout)) for one in listed] == [["parked"], ["conflicts"]]


def test_what_the_database_refuses_is_a_sentence(nodes: tuple[Server, Server]):
    a, _ = nodes

    refused = oplog(a, "parked", "retry", str(2**70))

    assert refused.code == 1
    assert refused.stderr.startswith("restante: The database refused a statement: ")
    assert refused.stderr.count("\n") == 1


def test_the_status_shows_both_directions(nodes: tuple[Server, Server]):
    a, b = nodes
    fill(nodes, 2000)

    shown = oplog(a, "status")
    found = json.loads(oplog(a, "status", "--json").stdout)

    assert shown.code == 0, shown
    assert f"This node is {a.address}." in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    (peer,) = found["peers"]
    assert peer["host"] == b.address
    assert peer["protocol"] == "restante"
    assert peer["failing_since"] is None


def test_a_server_that_stops_does_not_wait_for_the_long_polls_of_its_peers(
    nodes: tuple[Server, Server],
):
    a, b = nodes
    fill(nodes, 2000)

    assert b.stop() == 0
    said = b.said
    b.start()

    assert "graceful shutdown exceeded" not in said
    wait_until(
        lambda: fetchval(a, "select failing_since from restante.op_peers") is None,
        seconds=60,
        what="the next pull",
    )
