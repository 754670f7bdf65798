"""`restante notify` and `restante send --message`: words from arguments and from pipes."""

import asyncio
import json
import os
import pty
import re
import subprocess
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import warm
from callers import ADMIN_TOKEN, Caller, registered
from impostors import http, impostor, one_after_another
from processes import RESTANTE, Outcome, clean_environment
from sites import Site

from restante.client import Credentials
from restante.client.folder import Folder
from restante.ids import WorkspaceId
from restante.wire import MAX_MESSAGE_BYTES

pytestmark = pytest.mark.anyio


@pytest.fixture
async def caller(shared_site: Site) -> Caller:
    return await registered(shared_site)


@pytest.fixture
def folder(caller: Caller, tmp_path: Path) -> Path:
    """A folder that is connected as the caller."""
    with Folder.open(tmp_path / "folder") as opened:
        opened.keep(Credentials(caller.site.url, WorkspaceId(UUID(caller.id)), caller.token))
    return tmp_path / "folder"


async def run(
    *words: object, stdin: bytes | None = None, cwd: Path | None = None, **environment: str
) -> Outcome:
    """Run a command with its output in pipes; without `stdin` there is nothing to read."""
    done = await asyncio.to_thread(
        warm.run, words, env=clean_environment(**environment), input=stdin or b"", cwd=cwd
    )
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


async def send(caller: Caller, *words: object, stdin: bytes | None = None) -> Outcome:
    """As the admin."""
    url = caller.site.url
    return await run("send", *words, stdin=stdin, RESTANTE_URL=url, RESTANTE_TOKEN=ADMIN_TOKEN)


async def texts(caller: Caller) -> list[str]:
    """What was said, oldest first."""
    rows = list(reversed(await caller.feed()))
    return [
        row["response_body"]["result"]
        if row["method"] == "notify"
        else row["request_body"]["params"]["message"]["parts"][0]["text"]
        for row in rows
        if row["method"] != "chat_upload_receive"
    ]


def error_of(outcome: Outcome) -> str:
    """The one line on standard error of a command that failed."""
    assert (outcome.code, outcome.stdout) == (1, ""), outcome
    assert re.fullmatch(r"restante: .*\n", outcome.stderr), outcome.stderr
    return outcome.stderr


# Words for the user


async def test_an_agent_tells_its_user_something(caller: Caller, folder: Path, tmp_path: Path):
    """From a connected folder, as an argument or in a pipe, with files or without."""
    names = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in names:
        path.write_text("x")

    told = [
        await run("notify", "one", cwd=folder),
        await run("notify", "two", "--file", names[0], "--file", names[1], "--dir", folder),
        await run("notify", "-", "--dir", folder, stdin=b"three\nlines\n"),
        await run("notify", "--dir", folder, stdin="fünf\r\n".encode()),
    ]

    line = f"told the user of {caller.id}"
    assert [(one.code, one.stderr) for one in told] == [(0, "")] * 4
    assert [one.stdout for one in told] == [
        f"{line}\n",
        f"sent             1 B  a.txt\nsent             1 B  b.txt\n{line}\n",
        f"{line}\n",
        f"{line}\n",
    ]
    assert await texts(caller) == ["one", "two", "three\nlines", "fünf"]
    (said,) = (row for row in await caller.feed() if row["summary"] == "Agent message: two")
    files = [part["file"]["name"] for part in said["response_body"]["parts"]]
    assert files == ["a.txt", "b.txt"]


async def test_a_workspace_and_its_token_are_enough(caller: Caller):
    words = ("notify", "hello", "--workspace", caller.id, "--url", caller.site.url)

    told = await run(*words, "--token", caller.token)
    refused = await run(*words, "--token", "another")

    assert told.code == 0, told
    assert error_of(refused)
    assert await texts(caller) == ["hello"]


async def test_what_is_no_text_is_refused(caller: Caller, folder: Path, tmp_path: Path):
    outcomes = await asyncio.gather(
        run("notify", "", "--dir", folder),
        run("notify", "--dir", folder),
        run("notify", "-", "--dir", folder, stdin=b"\xff\xfe\0"),
        run("notify", "-", "--dir", folder, stdin=b"a\0b"),
        run("notify", "-", "--dir", folder, stdin=b"x" * (MAX_MESSAGE_BYTES + 1)),
        run("notify", "hello", "--dir", tmp_path),
        run("notify", "hello", "--workspace", "laptop", "--token", "t"),
        run("notify", "hello", "--dir", folder, "--file", tmp_path / "missing"),
    )

    reasons = ["empty", "empty", "not valid UTF-8", "NUL", "more than 16777216 bytes"]
    reasons += ["is not connected", "not a workspace id", "is not there"]
    for outcome, reason in zip(outcomes, reasons, strict=True):
        assert reason in error_of(outcome)
    assert await caller.feed() == []


async def test_a_mistyped_flag_is_not_said(caller: Caller, folder: Path):
    mistyped = await run("notify", "--hlep", "--dir", folder)
    said = await run("notify", "- a list", "--dir", folder)

    assert (mistyped.code, said.code) == (2, 0)
    assert "--hlep" in mistyped.stderr
    assert await texts(caller) == ["- a list"]


async def test_on_a_terminal_it_does_not_wait_for_a_text(folder: Path):
    ours, terminal = pty.openpty()
    try:
        done = await asyncio.to_thread(
            subprocess.run,
            [RESTANTE, "notify", "--dir", folder],
            env=clean_environment(),
            stdin=terminal,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(terminal)

    assert "Say something" in error_of(Outcome(done.returncode, done.stdout, done.stderr))


# Messages


async def test_a_message_needs_no_file(caller: Caller):
    sent = [
        await send(caller, caller.id, "--message", "one"),
        await send(caller, caller.id, "--message", "-", stdin=b"two\n"),
    ]

    assert sent == [(0, "queued the message\n", "")] * 2
    assert await texts(caller) == ["one", "two"]


async def test_a_message_follows_its_files(caller: Caller, tmp_path: Path):
    paths = [tmp_path / f"{number}.txt" for number in range(2)]
    for path in paths:
        path.write_text("x")

    sent = await send(caller, caller.id, *paths, "--message", "See", "--json")

    message, *files = await caller.feed()
    assert sent.code == 0, sent
    shown = json.loads(sent.stdout)
    uris = [row["request_body"]["uri"] for row in reversed(files)]
    assert [file["uri"] for file in shown["files"]] == uris
    assert shown["answer"]["status"] == "queued"
    _, *parts = message["request_body"]["params"]["message"]["parts"]
    assert [part["file"]["uri"] for part in parts] == uris


async def test_an_empty_message_sends_no_file_either(caller: Caller, tmp_path: Path):
    (tmp_path / "a").write_text("x")

    outcomes = await asyncio.gather(
        send(caller, caller.id, tmp_path / "a", "--message", " "),
        send(caller, caller.id, tmp_path / "a", "--message", "-"),
        send(caller, caller.id),
    )

    for outcome, reason in zip(outcomes, ["empty", "empty", "--message"], strict=True):
        assert reason in error_of(outcome)
    assert await caller.feed() == []


@pytest.mark.parametrize(
    ("answer", "code", "shown"),
    [
        ({"result": {"parts": [{"text": "hi\x1b"}]}}, 0, "answered: hi \n"),
        ({"result": {"status": {"message": {"parts": [{"text": "busy"}]}}}}, 0, "answered: busy\n"),
        ({"result": {"artifacts": [{"parts": [{"text": "a"}]}]}}, 0, "answered: a\n"),
        ({"result": 7}, 0, "answered: (no text)\n"),
        ({"error": {"code": -1, "message": "no such skill"}}, 1, "no such skill"),
        ({"error": "broken"}, 1, "broken"),
    ],
    ids=str,
)
async def test_a_push_workspace_answers_at_once(
    caller: Caller, answer: dict[str, Any], code: int, shown: str
):
    async with impostor(one_after_another(http(200, {"jsonrpc": "2.0", **answer}))) as other:
        words = ("send", caller.id, "--message", "hello", "--url", other.url, "--token", "t")
        done = await run(*words)

    assert done.code == code
    assert shown in (done.stderr if code else done.stdout)


# Files from pipes and directories


async def test_a_directory_and_standard_input_are_sent(caller: Caller, tmp_path: Path):
    photos = tmp_path / "photos"
    (photos / "2026").mkdir(parents=True)
    for name in ("a.jpg", "2026/a.jpg", ".env"):
        (photos / name).write_text(name)
    os.mkfifo(photos / "pipe")

    sent = await send(caller, caller.id, photos, "-", "--name", "a.jpg", stdin=b"piped")

    assert (sent.code, sent.stderr) == (0, "restante: skipped 1 hidden, 1 special.\n")
    assert sent.stdout.splitlines() == [
        "sent             5 B  a.jpg",
        "sent            10 B  2026/a.jpg as 2026_a.jpg",
        "sent             5 B  a.jpg as a (2).jpg",
        "3 files sent, 20 B.",
    ]
    announced = [row["request_body"]["display_name"] for row in await caller.feed()]
    assert sorted(announced) == ["2026_a.jpg", "a (2).jpg", "a.jpg"]


async def test_mistakes_with_standard_input_and_names_send_nothing(caller: Caller, tmp_path: Path):
    (tmp_path / "a").write_text("x")
    (tmp_path / "nothing").mkdir()

    outcomes = await asyncio.gather(
        send(caller, caller.id, "-", stdin=b"x"),
        send(caller, caller.id, "-", "--name", "x", "--message", "-", stdin=b"x"),
        send(caller, caller.id, "-", "--name", "x"),
        send(caller, caller.id, tmp_path / "a", tmp_path / "a", "--name", "x"),
        send(caller, caller.id, tmp_path / "nothing"),
        send(caller, caller.id, "laptop", tmp_path / "a"),
    )
    mistyped = await send(caller, caller.id, "--nmae", "x")

    reasons = ["what to call", "only once", "is empty", "for one file", "no files to send"]
    for outcome, reason in zip(outcomes, [*reasons, "One workspace comes first"], strict=True):
        assert reason in error_of(outcome)
    assert (mistyped.code, await caller.feed()) == (2, [])
