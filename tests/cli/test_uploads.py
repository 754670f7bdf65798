"""`restante uploads`, as an operator, a pipe and a script meet it."""

import asyncio
import json
import os
import pty
import re
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from factories import NOW, Content, make_upload, make_workspace
from processes import RESTANTE, Outcome, Server, clean_environment, restante
from senders import File, Request, registered, session_with
from sweeps import expire, put_back_acks

from restante.database.pool import Database
from restante.delivery import store as uploads
from restante.ids import FileId, WorkspaceId

pytestmark = pytest.mark.anyio

LONG_NAME = "a-name-that-is-as-long-as-names-may-be-" + "x" * 57 + ".pdf"
NOBODY = "11111111-2222-3333-4444-555555555555"


class Yard(NamedTuple):
    """One upload in each state, oldest first, and a way to look at them."""

    connection: Any
    workspace_id: WorkspaceId
    waiting: FileId
    fetched: FileId
    acked: FileId
    expired: FileId

    @property
    def ids(self) -> list[FileId]:
        return [self.waiting, self.fetched, self.acked, self.expired]

    async def row(self, file_id: FileId) -> Any:
        return await self.connection.fetchrow("select * from uploads where file_id = $1", file_id)


@pytest.fixture
async def yard(db_with_leaves: Database, connections: Any) -> Yard:
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
    return Yard(connection, workspace_id, *ids)


def run(dsn: str, *words: object, **environment: str) -> Outcome:
    """What a pipe gets."""
    return restante("uploads", *map(str, words), "--database-url", dsn, seconds=60, **environment)


def said_by(outcome: Outcome) -> str:
    assert (outcome.code, outcome.stderr) == (0, ""), outcome
    assert "\x1b" not in outcome.stdout
    return outcome.stdout


def told_by(outcome: Outcome) -> str:
    """The one sentence of a refusal."""
    assert (outcome.code, outcome.stdout) == (1, ""), outcome
    assert re.fullmatch(r"restante: .*\n", outcome.stderr), outcome.stderr
    return outcome.stderr.strip()


# Listing


async def test_the_list_is_oldest_first_and_a_pipe_gets_whole_lines(dsn: str, yard: Yard):
    """Ids and names are what one goes on with: nothing is cut or wrapped at any width."""
    head, *lines = said_by(run(dsn, "list", COLUMNS="40")).splitlines()

    assert head.split()[:4] == ["file", "id", "workspace", "state"]
    assert [line.split()[:3] for line in lines] == [
        [str(file_id), str(yard.workspace_id), state]
        for file_id, state in zip(yard.ids, ("waiting", "fetched", "acked", "expired"), strict=True)
    ]
    for line, verb in zip(lines, ("expires", "expires", "acked", "expired"), strict=True):
        assert re.search(rf" 10 B  +\d{{4}}-[\d-]+ [\d:]+  {verb} +\d{{4}}-", line)
        assert line.endswith(f"  {LONG_NAME}")


async def test_the_list_can_be_narrowed(dsn: str, yard: Yard):
    other = await make_workspace(yard.connection)

    for state, file_id in zip(("waiting", "fetched", "acked", "expired"), yard.ids, strict=True):
        _, line = said_by(run(dsn, "list", "--state", state)).splitlines()
        assert line.startswith(str(file_id))
    assert said_by(run(dsn, "list", "--workspace", other)) == "There are no such uploads.\n"
    assert len(said_by(run(dsn, "list", "--workspace", yard.workspace_id)).splitlines()) == 5


async def test_a_list_that_is_not_whole_says_how_to_go_on(dsn: str, yard: Yard):
    *first, more = said_by(run(dsn, "list", "--limit", 3)).splitlines()
    assert more == f"There are more; go on with --after {yard.acked}"

    rest = said_by(run(dsn, "list", "--limit", 3, "--after", yard.acked)).splitlines()

    assert [line.split()[0] for line in (*first[1:], *rest[1:])] == list(map(str, yard.ids))


async def test_the_list_prints_json_for_scripts(dsn: str, yard: Yard):
    page = json.loads(said_by(run(dsn, "list", "--limit", 2, "--json")))

    assert page["next_after"] == str(yard.fetched)
    assert [one["file_id"] for one in page["uploads"]] == [str(yard.waiting), str(yard.fetched)]
    assert page["uploads"][0]["state"] == "waiting"
    assert "next_after" not in json.loads(said_by(run(dsn, "list", "--json")))


async def test_a_terminal_is_never_told_what_to_do(dsn: str, yard: Yard):
    """Names are cleaned when files come in; whatever got into the table, it stays text."""
    await yard.connection.execute("alter table uploads drop constraint uploads_name_check")
    await yard.connection.execute(
        "update uploads set name = E'a\\x1b[2J\\u009b1m\\rb', mimetype = E'x/\\x07y'"
    )

    for words in (("list",), ("show", yard.waiting), ("expire", yard.waiting)):
        received = on_a_terminal("uploads", *map(str, words), "--database-url", dsn)

        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", received.replace("\r\n", "\n"))
        assert "a\N{REPLACEMENT CHARACTER}[2J" in received


def on_a_terminal(*words: str) -> str:
    """What a terminal receives."""
    keyboard, screen = pty.openpty()
    with subprocess.Popen(
        [RESTANTE, *words], env=clean_environment(), stdin=screen, stdout=screen, stderr=screen
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


# Showing


async def test_one_upload_is_shown_with_all_its_facts(dsn: str, yard: Yard):
    row = await yard.row(yard.acked)

    said = said_by(run(dsn, "show", yard.acked, COLUMNS="40"))

    facts = dict(re.split(r"  +", line, maxsplit=1) for line in said.splitlines())
    until = row["acked_at"] + timedelta(hours=1)
    assert facts["file id"] == str(yard.acked)
    assert facts["workspace"] == str(yard.workspace_id)
    assert (facts["name"], facts["type"], facts["size"]) == (LONG_NAME, "text/plain", "10 bytes")
    assert facts["sha256"] == row["sha256"].hex()
    assert (facts["state"], facts["fetched"]) == ("acked", "-")
    assert facts["reopen until"] == f"{until:%Y-%m-%d %H:%M:%S} UTC"
    assert facts["leaf"] == await yard.connection.fetchval(
        "select tableoid::regclass::text from chunks where file_id = $1", yard.acked
    )


async def test_a_server_s_own_retention_counts(dsn: str, yard: Yard):
    """As for a sweep by hand: a bare shell does not know what the servers were told."""
    await yard.connection.execute("insert into chosen_retention values (true, 7200, 864000)")

    shown = json.loads(said_by(run(dsn, "show", yard.acked, "--json")))

    assert shown["reopenable_until"].startswith(f"{NOW + timedelta(hours=2):%Y-%m-%dT%H:%M:%S}")
    assert (shown["mimeType"], shown["leaf"][:7]) == ("text/plain", "chunks_")


@pytest.mark.parametrize("command", ["show", "reopen", "expire"])
async def test_wrong_ids_are_one_sentence(dsn: str, yard: Yard, command: str):
    unknown = uuid4()

    assert f"no upload {unknown} here" in told_by(run(dsn, command, unknown))
    assert "letter.pdf is not a file id" in told_by(run(dsn, command, "letter.pdf"))
    assert f"no workspace {NOBODY}" in told_by(run(dsn, command, yard.acked, "--workspace", NOBODY))
    assert "not the id of a workspace" in told_by(
        run(dsn, command, yard.acked, "--workspace", "mine")
    )


async def test_wrong_ids_of_a_list_are_one_sentence(dsn: str, yard: Yard):
    assert f"no workspace {NOBODY}" in told_by(run(dsn, "list", "--workspace", NOBODY))
    assert f"no upload {NOBODY} here" in told_by(run(dsn, "list", "--after", NOBODY))
    assert "is not a file id" in told_by(run(dsn, "list", "--after", "3"))


@pytest.mark.parametrize("words", [["--limit", "0"], ["--limit", "10001"], ["--state", "lost"]])
async def test_what_cannot_be_listed_is_refused_before_the_database_is_asked(words: list[str]):
    outcome = run("postgresql://restante@127.0.0.1:1/restante", "list", *words)

    assert outcome.code == 2
    assert words[0] in outcome.stdout + outcome.stderr


# Reopening


@pytest.fixture
async def server_process(dsn: str, place: Path) -> Any:
    """A real server on the test's database."""
    with Server(place / "data", "--database-url", dsn) as server:
        yield server.start()


async def test_a_poll_that_waits_at_a_running_server_is_woken_by_a_reopening(
    dsn: str, server_process: Server
):
    """The command is another process: it must not end before it has told the servers."""
    async with session_with(server_process) as session:
        mailbox = await registered(session)
        await mailbox.send(Request([File("lost.pdf", b"some bytes")], key=None))
        (first,) = await mailbox.rows()
        file_id = first["request_body"]["file_id"]
        await acknowledge(session, mailbox, file_id)
        polling = asyncio.create_task(mailbox.rows(since_id=first["id"], wait="60"))

        outcome = await asyncio.to_thread(run, dsn, "reopen", file_id)

        assert f"lost.pdf ({file_id}) of workspace {mailbox.id} waits again" in said_by(outcome)
        async with asyncio.timeout(15):
            (again,) = await polling
    assert (again["seq"], again["request_body"]["file_id"]) == (2, file_id)


async def acknowledge(session: Any, mailbox: Any, file_id: str) -> None:
    path = f"{mailbox.path}/pending-uploads/{file_id}/ack"
    async with session.post(path, headers=mailbox.headers) as answer:
        assert answer.status == 200


async def test_a_reopened_file_is_shown_for_scripts(dsn: str, yard: Yard):
    reopened = json.loads(said_by(run(dsn, "reopen", yard.acked, "--json")))

    assert (reopened["file_id"], reopened["state"]) == (str(yard.acked), "waiting")
    assert (await yard.row(yard.acked))["acked_at"] is None


async def test_what_cannot_be_reopened_is_one_sentence(dsn: str, yard: Yard):
    assert "was never acknowledged" in told_by(run(dsn, "reopen", yard.waiting))
    await put_back_acks(yard.connection)
    assert "could be reopened until" in told_by(run(dsn, "reopen", yard.acked))


# Expiring


async def test_a_file_expires_once_and_a_sweep_takes_it(dsn: str, yard: Yard):
    first = said_by(run(dsn, "expire", yard.waiting))
    since = (await yard.row(yard.waiting))["expires_at"]
    second = said_by(run(dsn, "expire", yard.waiting))

    named = f"{LONG_NAME} ({yard.waiting}) of workspace {yard.workspace_id}"
    assert first == f"{named} has expired now; the next sweep deletes it.\n"
    assert second == (
        f"{named} had expired already, at {since:%Y-%m-%d %H:%M:%S} UTC;"
        " the next sweep deletes it.\n"
    )
    assert (await yard.row(yard.waiting))["expires_at"] == since
    swept = json.loads(restante("sweep", "--json", "--database-url", dsn).stdout)
    assert swept["expired"] == 2
    assert await yard.row(yard.waiting) is None


async def test_an_expired_file_is_shown_for_scripts(dsn: str, yard: Yard):
    expired = json.loads(said_by(run(dsn, "expire", yard.fetched, "--json")))

    assert (expired["file_id"], expired["state"]) == (str(yard.fetched), "expired")


async def test_an_acknowledged_file_does_not_expire(dsn: str, yard: Yard):
    before = await yard.row(yard.acked)

    assert "Its workspace acknowledged the file" in told_by(run(dsn, "expire", yard.acked))

    assert await yard.row(yard.acked) == before


async def test_a_database_that_is_not_there_is_one_sentence():
    outcome = run("postgresql://restante@127.0.0.1:1/restante", "list")

    assert "The database cannot be reached" in told_by(outcome)
