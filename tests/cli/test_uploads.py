"""`restante uploads` on a terminal, in a pipe and in a script."""

import asyncio
import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from factories import NOW, Content, make_upload, make_workspace
from processes import Outcome, Server, on_a_terminal, restante
from senders import File, Request, registered, session_with
from sweeps import expire, put_back_acks

from restante.database.pool import Database
from restante.delivery import store as uploads
from restante.ids import FileId, WorkspaceId

pytestmark = pytest.mark.anyio

LONG_NAME = "a-name-that-is-as-long-as-names-may-be-" + "x" * 57 + ".pdf"
NAME = "a workspace"
NOBODY = "11111111-2222-3333-4444-555555555555"


class Examples(NamedTuple):
    """One upload in each state, oldest first, and a connection to read them."""

    connection: Any
    workspace_id: WorkspaceId
    never_fetched: FileId
    fetched: FileId
    acked: FileId
    expired: FileId

    @property
    def ids(self) -> list[FileId]:
        return [self.never_fetched, self.fetched, self.acked, self.expired]

    async def row(self, file_id: FileId) -> Any:
        return await self.connection.fetchrow("select * from uploads where file_id = $1", file_id)


@pytest.fixture
async def examples(db_with_partitions: Database, connections: Any) -> Examples:
    connection = await connections()
    workspace_id = await make_workspace(connection)
    ids = [
        await make_upload(
            connection,
            workspace_id,
            Content(name=LONG_NAME),
            now=NOW + timedelta(seconds=number),
        )
        for number in range(4)
    ]
    await uploads.mark_fetched(connection, workspace_id, ids[1], now=NOW)
    await uploads.acknowledge(connection, workspace_id, ids[2], now=NOW)
    await expire(connection, ids[3])
    return Examples(connection, workspace_id, *ids)


def run(dsn: str, *words: object, **environment: str) -> Outcome:
    """Run the command with its output in pipes."""
    return restante("uploads", *map(str, words), "--database-url", dsn, seconds=60, **environment)


def output_of(outcome: Outcome) -> str:
    assert (outcome.code, outcome.stderr) == (0, ""), outcome
    assert "\x1b" not in outcome.stdout
    return outcome.stdout


def error_of(outcome: Outcome) -> str:
    """The one line on standard error of a command that failed."""
    assert (outcome.code, outcome.stdout) == (1, ""), outcome
    assert re.fullmatch(r"restante: .*\n", outcome.stderr), outcome.stderr
    return outcome.stderr.strip()


# Listing


async def test_the_list_is_oldest_first_and_never_truncated(dsn: str, examples: Examples):
    """Ids and names are copied into other commands, whatever the width of the terminal."""
    head, *lines = output_of(run(dsn, "list", COLUMNS="40")).splitlines()

    assert head.split()[:4] == ["file", "id", "state", "size"]
    assert [line.split()[:2] for line in lines] == [
        [str(file_id), state]
        for file_id, state in zip(
            examples.ids, ("never_fetched", "fetched", "acked", "expired"), strict=True
        )
    ]
    for line, verb in zip(lines, ("expires", "expires", "acked", "expired"), strict=True):
        assert re.search(rf" 10 B  +\d{{4}}-[\d-]+ [\d:]+  {verb} +\d{{4}}-", line)
        assert line.endswith(f"  a workspace  {LONG_NAME}")


async def test_the_list_can_be_filtered(dsn: str, examples: Examples):
    other = await make_workspace(examples.connection)
    await examples.connection.execute("update workspaces set name = 'other' where id = $1", other)

    for state, file_id in zip(
        ("never_fetched", "fetched", "acked", "expired"), examples.ids, strict=True
    ):
        _, line = output_of(run(dsn, "list", "--state", state)).splitlines()
        assert line.startswith(str(file_id))
    assert output_of(run(dsn, "list", "--workspace", "other")) == "No uploads match.\n"
    assert len(output_of(run(dsn, "list", "--workspace", examples.workspace_id)).splitlines()) == 5


async def test_an_incomplete_list_says_how_to_continue(dsn: str, examples: Examples):
    *first, more = output_of(run(dsn, "list", "--limit", 3)).splitlines()
    assert more == f"There are more: continue with --after {examples.acked}"

    rest = output_of(run(dsn, "list", "--limit", 3, "--after", examples.acked)).splitlines()

    assert [line.split()[0] for line in (*first[1:], *rest[1:])] == list(map(str, examples.ids))


async def test_the_list_as_json(dsn: str, examples: Examples):
    page = json.loads(output_of(run(dsn, "list", "--limit", 2, "--json")))

    assert page["next_after"] == str(examples.fetched)
    assert [one["file_id"] for one in page["uploads"]] == [
        str(examples.never_fetched),
        str(examples.fetched),
    ]
    assert page["uploads"][0]["state"] == "never_fetched"
    assert "next_after" not in json.loads(output_of(run(dsn, "list", "--json")))


async def test_control_characters_are_not_printed(dsn: str, examples: Examples):
    """Names are cleaned at upload; the commands do not rely on it."""
    await examples.connection.execute("alter table uploads drop constraint uploads_name_check")
    await examples.connection.execute(
        "update uploads set name = E'a\\x1b[2J\\u009b1m\\rb', mimetype = E'x/\\x07y'"
    )

    for words in (("list",), ("show", examples.never_fetched), ("expire", examples.never_fetched)):
        received = on_a_terminal("uploads", *words, "--database-url", dsn)

        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", received.replace("\r\n", "\n"))
        assert "a [2J" in received


async def test_the_name_for_people_is_listed_and_shown_beside_the_name(
    dsn: str, examples: Examples
):
    await examples.connection.execute(
        "update uploads set display_name = 'Übersicht 2030.pdf' where file_id = $1",
        examples.fetched,
    )

    listed = output_of(run(dsn, "list")).splitlines()
    shown = output_of(run(dsn, "show", examples.fetched))
    as_json = json.loads(output_of(run(dsn, "show", examples.fetched, "--json")))

    assert listed[1].endswith(f"  {LONG_NAME}")
    assert listed[2].endswith("  Übersicht 2030.pdf")
    assert re.search(rf"^name +{LONG_NAME}$", shown, re.MULTILINE)
    assert re.search(r"^display name +Übersicht 2030.pdf$", shown, re.MULTILINE)
    assert (as_json["name"], as_json["display_name"]) == (LONG_NAME, "Übersicht 2030.pdf")


# Showing


async def test_one_upload_is_shown_with_all_details(dsn: str, examples: Examples):
    row = await examples.row(examples.acked)

    shown = output_of(run(dsn, "show", examples.acked, COLUMNS="40"))

    details = dict(re.split(r"  +", line, maxsplit=1) for line in shown.splitlines())
    until = row["acked_at"] + timedelta(hours=1)
    assert details["file id"] == str(examples.acked)
    assert (details["workspace"], details[""]) == (NAME, str(examples.workspace_id))
    assert (details["name"], details["type"], details["size"]) == (
        LONG_NAME,
        "text/plain",
        "10 bytes",
    )
    assert details["sha256"] == row["sha256"].hex()
    assert (details["state"], details["fetched"]) == ("acked", "-")
    assert details["reopen until"] == f"{until:%Y-%m-%d %H:%M:%S} UTC"
    assert details["partition"] == await examples.connection.fetchval(
        "select tableoid::regclass::text from chunks where file_id = $1", examples.acked
    )


async def test_the_retention_of_the_servers_applies(dsn: str, examples: Examples):
    """The operator's shell does not have the environment of the servers."""
    await examples.connection.execute("insert into chosen_retention values (true, 7200, 864000)")

    shown = json.loads(output_of(run(dsn, "show", examples.acked, "--json")))

    assert shown["reopenable_until"].startswith(f"{NOW + timedelta(hours=2):%Y-%m-%dT%H:%M:%S}")
    assert (shown["mimeType"], shown["leaf"][:7]) == ("text/plain", "chunks_")


@pytest.mark.parametrize("command", ["show", "reopen", "expire"])
async def test_an_unknown_id_is_an_error(dsn: str, examples: Examples, command: str):
    unknown = uuid4()

    assert f"no upload {unknown} here" in error_of(run(dsn, command, unknown))


async def test_a_wrong_id_or_workspace_is_an_error(dsn: str, examples: Examples):
    assert "letter.pdf is not a file id" in error_of(run(dsn, "show", "letter.pdf"))
    assert f"no workspace with the id {NOBODY}" in error_of(
        run(dsn, "reopen", examples.acked, "--workspace", NOBODY)
    )
    assert "no workspace with the id or name mine" in error_of(
        run(dsn, "expire", examples.acked, "--workspace", "mine")
    )


async def test_a_wrong_id_for_the_list_is_an_error(dsn: str, examples: Examples):
    assert f"with the id {NOBODY}" in error_of(run(dsn, "list", "--workspace", NOBODY))
    assert f"no upload {NOBODY} here" in error_of(run(dsn, "list", "--after", NOBODY))
    assert "is not a file id" in error_of(run(dsn, "list", "--after", "3"))


@pytest.mark.parametrize("words", [["--limit", "0"], ["--limit", "10001"], ["--state", "lost"]])
async def test_wrong_filters_are_refused_before_connecting_to_the_database(words: list[str]):
    outcome = run("postgresql://restante@127.0.0.1:1/restante", "list", *words)

    assert outcome.code == 2
    assert words[0] in outcome.stdout + outcome.stderr


# Reopening


@pytest.fixture
async def server_process(dsn: str, place: Path) -> Any:
    """A real server on the test's database."""
    with Server(place / "data", "--database-url", dsn) as server:
        yield server.start()


async def test_reopening_wakes_a_poll_at_a_running_server(dsn: str, server_process: Server):
    """The command is another process and must notify the servers before it exits."""
    async with session_with(server_process) as session:
        mailbox = await registered(session)
        await mailbox.send(Request([File("lost.pdf", b"some bytes")], key=None))
        (first,) = await mailbox.rows()
        file_id = first["request_body"]["file_id"]
        await acknowledge(session, mailbox, file_id)
        polling = asyncio.create_task(mailbox.rows(since_id=first["id"], wait="60"))

        outcome = await asyncio.to_thread(run, dsn, "reopen", file_id)

        assert f"lost.pdf ({file_id}) of test is available again" in output_of(outcome)
        (again,) = await polling
    assert (again["seq"], again["request_body"]["file_id"]) == (2, file_id)


async def acknowledge(session: Any, mailbox: Any, file_id: str) -> None:
    path = f"{mailbox.path}/pending-uploads/{file_id}/ack"
    async with session.post(path, headers=mailbox.headers) as answer:
        assert answer.status == 200


async def test_a_reopened_file_as_json(dsn: str, examples: Examples):
    reopened = json.loads(output_of(run(dsn, "reopen", examples.acked, "--json")))

    assert (reopened["file_id"], reopened["state"]) == (str(examples.acked), "never_fetched")
    assert (await examples.row(examples.acked))["acked_at"] is None


async def test_reopening_is_refused_with_the_reason(dsn: str, examples: Examples):
    assert "was never acknowledged" in error_of(run(dsn, "reopen", examples.never_fetched))
    await put_back_acks(examples.connection)
    assert "could be reopened until" in error_of(run(dsn, "reopen", examples.acked))


# Expiring


async def test_a_file_expires_once_and_a_sweep_deletes_it(dsn: str, examples: Examples):
    first = output_of(run(dsn, "expire", examples.never_fetched))
    since = (await examples.row(examples.never_fetched))["expires_at"]
    second = output_of(run(dsn, "expire", examples.never_fetched))

    named = f"{LONG_NAME} ({examples.never_fetched}) of {NAME}"
    assert first == f"{named} is expired now; the next sweep deletes it.\n"
    assert second == (
        f"{named} expired earlier, at {since:%Y-%m-%d %H:%M:%S} UTC; the next sweep deletes it.\n"
    )
    assert (await examples.row(examples.never_fetched))["expires_at"] == since
    swept = json.loads(restante("sweep", "--json", "--database-url", dsn).stdout)
    assert swept["expired"] == 2
    assert await examples.row(examples.never_fetched) is None


async def test_an_expired_file_as_json(dsn: str, examples: Examples):
    expired = json.loads(output_of(run(dsn, "expire", examples.fetched, "--json")))

    assert (expired["file_id"], expired["state"]) == (str(examples.fetched), "expired")


async def test_an_acknowledged_file_does_not_expire(dsn: str, examples: Examples):
    before = await examples.row(examples.acked)

    assert "The file was acknowledged" in error_of(run(dsn, "expire", examples.acked))

    assert await examples.row(examples.acked) == before


async def test_an_unreachable_database_is_one_line():
    outcome = run("postgresql://restante@127.0.0.1:1/restante", "list")

    assert "The database cannot be reached" in error_of(outcome)
