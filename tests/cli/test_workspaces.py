"""`restante workspaces` in a pipe and in a script, and tables on narrow terminals."""

import asyncio
import json
import re
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from callers import registered
from factories import NOW, make_upload, make_workspace
from msgspec import Raw
from processes import Outcome, restante
from rich.cells import cell_len
from sites import Site
from sweeps import utc_now
from waiting import until

from restante import wire
from restante.cli import columns, workspaces
from restante.database.pool import Database
from restante.errors import BadRequest
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

HOSTILE = [
    "x" * 1000,
    "名前" * 400,
    "\u05e2\u05d1\u05e8\u05d9\u05ea " * 50,
    "e" + "\u0301" * 900,
    "a\x1b[2J\x1b]0;title\x07\r\nb\u202ec",
    "",
    "[bold]not markup[/bold] :smile:",
]


@pytest.fixture
async def connection(db_with_partitions: Database, connections: Any) -> Any:
    return await connections()


@pytest.fixture
async def laptop(connection: Any) -> WorkspaceId:
    """A workspace with two files."""
    workspace_id = await make_workspace(connection)
    await connection.execute("update workspaces set name = 'laptop'")
    for _ in range(2):
        await make_upload(connection, workspace_id)
    return workspace_id


def run(dsn: str, *words: object) -> Outcome:
    """Run the command with its output in pipes."""
    return restante("workspaces", *map(str, words), "--database-url", dsn, seconds=60)


async def test_a_workspace_is_listed_renamed_and_removed_by_its_name(
    dsn: str, connection: Any, laptop: WorkspaceId
):
    listed = run(dsn, "list")
    renamed = run(dsn, "rename", "laptop", "phone")
    refused = run(dsn, "remove", "phone")
    removed = run(dsn, "remove", "phone", "--expire-files", "--yes")

    assert [line.split() for line in listed.stdout.splitlines()] == [
        ["seen", "files", "size", "unread", "name"],
        ["online", "2", "20", "B", "2", "laptop"],
    ]
    assert renamed == (0, f"{laptop} is named phone now.\n", "")
    assert refused.code == 1
    assert refused.stdout.startswith(f"phone ({laptop}) would be removed")
    assert "2 files (20 B) wait for it. They expire, the last at" in refused.stdout
    assert "repeat with --yes" in refused.stderr
    assert removed == (
        0,
        f"phone ({laptop}) is removed.\n2 files expired; the next sweep deletes them.\n",
        "",
    )
    swept = json.loads(restante("sweep", "--json", "--database-url", dsn).stdout)
    assert (swept["expired"], await connection.fetchval("select count(*) from uploads")) == (2, 0)


async def test_a_new_token_is_printed_alone_and_ends_what_the_old_one_has_open(shared_site: Site):
    """The command is another process, and tells the server before it exits."""
    dsn, caller = shared_site.settings.database_url or "", await registered(shared_site)
    polling = asyncio.create_task(caller.read_feed(wait=60))
    watched = shared_site.state.wakeups._waiters
    await until(lambda: UUID(caller.id) in watched)

    issued = await asyncio.to_thread(run, dsn, "token", "issue", caller.id)
    ended = (await polling).status
    token = issued.stdout.removesuffix("\n")
    headers = {"Authorization": f"Bearer {token}"}
    works = await caller.ask("GET", "/activity", headers=headers)
    revoked = await asyncio.to_thread(run, dsn, "token", "revoke", caller.id, "--json")
    stopped = await caller.ask("GET", "/activity", headers=headers)

    assert (ended, works.status, stopped.status) == (401, 200, 401)
    assert re.fullmatch(r"[\w-]{43}", token)
    assert token not in issued.stderr
    assert json.loads(revoked.stdout)["has_token"] is False


async def test_everything_about_one_workspace(dsn: str, laptop: WorkspaceId):
    shown, as_json = run(dsn, "show", laptop), run(dsn, "show", "laptop", "--json")

    details = dict(re.split(r"  +", line, maxsplit=1) for line in shown.stdout.splitlines())
    assert (details["name"], details["id"]) == ("laptop", str(laptop))
    assert (details["waiting"], details["token"], details["mode"]) == (
        "2 files, 20 B",
        "yes",
        "poll",
    )
    view = json.loads(as_json.stdout)
    assert (view["id"], view["waiting_files"], view["agent_card"]) == (str(laptop), 2, {})
    assert "token_hash" not in as_json.stdout


@pytest.mark.parametrize(
    ("typed", "is_yes"),
    [("y", True), (" YES ", True), ("", False), ("no", False), ("laptop", False), (None, False)],
    ids=["y", "yes", "nothing", "no", "another word", "end of input"],
)
def test_a_removal_on_a_terminal_needs_a_yes(
    *,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: str | None,
    is_yes: bool,
):
    def asked(_prompt: str) -> str:
        if typed is None:
            raise EOFError
        return typed

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr(workspaces.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(columns, "terminal_width", lambda: 60)
    given: dict[str, Any] = msgspec.structs.asdict(entry("laptop"))
    del given["agent_card"]
    view = wire.WorkspaceView(agent_card=Raw(b"{}"), **given)
    held = wire.HeldFiles(waiting_files=3, waiting_bytes=10**9, waiting_until=NOW)

    with nullcontext() if is_yes else pytest.raises(BadRequest, match="Nothing was removed"):
        workspaces._ask(view, held, expires=False)

    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert "3 files (953.7 MiB) wait for it." in " ".join(lines)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("show", "nobody"), "no workspace with the id or name nobody"),
        (("remove", "laptop", "--json"), "needs --yes"),
    ],
    ids=["show", "remove"],
)
async def test_wrong_input_is_one_line(
    dsn: str, laptop: WorkspaceId, words: tuple[str, ...], why: str
):
    outcome = run(dsn, *words)

    assert (outcome.code, outcome.stdout) == (1, "")
    assert outcome.stderr.count("\n") == 1
    assert why in outcome.stderr


# Narrow terminals


def entry(name: str, **other: Any) -> wire.WorkspaceEntry:
    given: dict[str, Any] = {
        "id": uuid4(),
        "name": name,
        "delivery_mode": "poll",
        "url": None,
        "parent_id": None,
        "status": "active",
        "has_token": True,
        "active_tasks": 0,
        "current_task": "",
        "created_at": NOW,
        "last_seen_at": utc_now() - timedelta(days=400),
        "waiting_files": 9999,
        "waiting_bytes": 1023 * 1024**3,
        "unread_rows": 99_999,
    }
    return wire.WorkspaceEntry(**(given | other))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_hostile_names_leave_the_list_in_its_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
):
    monkeypatch.setattr(columns, "terminal_width", lambda: width)
    found = [entry(name) for name in ("laptop", *HOSTILE)]

    workspaces._print_list(found, now=utc_now())

    lines = capsys.readouterr().out.splitlines()
    assert all(cell_len(line) <= width for line in lines)
    assert all(line.isprintable() for line in lines)
    rows = [line for line in lines if line.startswith("400")]
    assert len(rows) == len(found)
    assert len({line.index("99999") for line in rows}) == 1


def test_the_id_of_an_ambiguous_name_is_never_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It is copied into other commands."""
    monkeypatch.setattr(columns, "terminal_width", lambda: 60)
    one, two, alone = entry("laptop"), entry("laptop"), entry("phone")

    workspaces._print_list([one, two, alone], now=utc_now())

    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in (lines[2], lines[4])] == [str(one.id), str(two.id)]
    assert lines[5].endswith("phone")
    assert len(lines) == 6


def test_a_long_name_is_whole_in_a_pipe(capsys: pytest.CaptureFixture[str]):
    workspaces._print_list([entry("x" * 1000)], now=utc_now())

    assert "x" * 1000 in capsys.readouterr().out
