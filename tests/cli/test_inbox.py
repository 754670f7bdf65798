"""`restante inbox`: looks at a feed and leaves it as it is."""

import asyncio
import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from callers import ADMIN_TOKEN, Caller, Part, registered
from impostors import http, impostor, one_after_another
from processes import RESTANTE, Outcome, clean_environment, restante
from sites import Site

from restante.client import Credentials
from restante.client.folder import Folder
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

NOBODY = "11111111-2222-3333-4444-555555555555"
EVIL = "\x1b]0;owned\x07\x1b[2Jx\x9b31m\u202e\r\n"


@pytest.fixture
async def caller(shared_site: Site) -> Caller:
    return await registered(shared_site)


async def look(url: str, *words: object, token: str = ADMIN_TOKEN) -> Outcome:
    """What a pipe gets."""
    return await asyncio.to_thread(
        restante, "inbox", *map(str, words), RESTANTE_URL=url, RESTANTE_TOKEN=token
    )


def said_by(outcome: Outcome) -> list[str]:
    assert (outcome.code, outcome.stderr) == (0, ""), outcome
    return outcome.stdout.splitlines()


def message(text: str) -> dict[str, Any]:
    parts = [{"kind": "text", "text": text}, {"kind": "file", "file": {"uri": "x"}}]
    return {"jsonrpc": "2.0", "method": "message/send", "params": {"message": {"parts": parts}}}


# What is shown


async def test_each_row_is_a_line_oldest_first(caller: Caller):
    other = await registered(caller.site)
    await caller.staged(Part(b"12345", name="a b.txt"))
    await other.message(message("Good morning."), to=caller)

    first, second = said_by(await look(caller.site.url, caller.id))

    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf" +1  {when}  file a_b\.txt \(5 B\)", first)
    assert re.fullmatch(
        rf" +2  {when}  message message/send from {other.id}: Good morning\. \(\+1 files\)", second
    )


async def test_a_script_gets_a_row_a_line(caller: Caller):
    await caller.staged(Part(name="a"))
    await caller.message(message(EVIL), to=caller)

    lines = said_by(await look(caller.site.url, caller.id, "--json"))

    rows = [json.loads(line) for line in lines]
    assert rows == list(reversed(await caller.feed()))
    assert all(line.isprintable() for line in lines)
    assert rows[1]["request_body"]["params"]["message"]["parts"][0]["text"] == EVIL


async def test_what_others_write_cannot_steer_a_terminal(caller: Caller):
    """Anybody with a token may write to anybody."""
    body = message(EVIL) | {"method": "x" + EVIL}
    assert (await caller.message(body, to=caller)).status == 200

    done = await look(caller.site.url, caller.id)

    (line,) = said_by(done)
    assert line.isprintable()
    assert "owned" in line


async def test_the_newest_are_shown_and_nothing_is_changed(caller: Caller):
    await caller.staged(*(Part(name=f"{n}") for n in range(5)))

    lines = said_by(await look(caller.site.url, caller.id, "--limit", 2))

    assert [line.split()[0] for line in lines] == ["4", "5"]
    assert (await caller.read_feed()).headers["X-Restante-Acked-Seq"] == "0"
    assert len((await caller.waiting()).json["uploads"]) == 5


async def test_an_empty_feed_is_nothing(caller: Caller):
    assert said_by(await look(caller.site.url, caller.id)) == []


async def test_a_row_that_no_honest_server_has_is_a_sentence(caller: Caller):
    await caller.message(message("."), to=caller)
    (row,) = await caller.feed()
    broken = json.dumps([row | {"request_body": "?"}]).encode().replace(b'"?"', b'"\xff"')

    async with impostor(lambda _: http(200, broken)) as liar:
        shown, as_json = await asyncio.gather(
            look(liar.url, NOBODY), look(liar.url, NOBODY, "--json")
        )

    assert shown.code == 1
    assert "cannot be understood" in shown.stderr
    assert json.loads(as_json.stdout)["request_body"] == "\ufffd"


# Whose


async def test_a_connected_folder_shows_its_own(caller: Caller, tmp_path: Path):
    """With the token that is kept there, at the server that is kept there."""
    await caller.staged(Part(name="mine"))
    kept = Credentials(caller.site.url, WorkspaceId(UUID(caller.id)), caller.token)
    with Folder.open(tmp_path / "folder") as folder:
        folder.keep(kept)

    done = await asyncio.to_thread(restante, "inbox", "--dir", tmp_path / "folder")

    (line,) = said_by(done)
    assert "mine" in line


async def test_a_workspace_looks_at_itself_and_at_nobody_else(caller: Caller):
    other = await registered(caller.site)

    own, others = await asyncio.gather(
        look(caller.site.url, caller.id, token=caller.token),
        look(caller.site.url, other.id, token=caller.token),
    )

    assert said_by(own) == []
    assert others.code == 1


async def test_mistakes_are_sentences(caller: Caller, tmp_path: Path):
    url = caller.site.url
    outcomes = await asyncio.gather(
        look(url),
        look(url, "--dir", tmp_path),
        look(url, NOBODY),
        look(url, "no-such-name"),
        look(url, caller.id, "--limit", 501),
        look(url, caller.id, "--limit", 0),
    )

    for outcome, words in zip(
        outcomes,
        ["Say which workspace", "has not been connected", "no such workspace", "no-such-name"]
        + ["--limit"] * 2,
        strict=True,
    ):
        assert (outcome.code, outcome.stdout) == (1, "")
        assert re.fullmatch(rf"restante: .*{words}.*\n", outcome.stderr)


# Following


class Follower:
    """A command that goes on until it is told to stop."""

    def __init__(self, url: str, *words: str) -> None:
        self.process = subprocess.Popen(
            [RESTANTE, "inbox", *words, "--follow"],
            env=clean_environment(RESTANTE_URL=url, RESTANTE_TOKEN=ADMIN_TOKEN),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    async def line(self) -> str:
        assert self.process.stdout is not None
        return await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), 20)

    async def interrupted(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        _, complained = await asyncio.to_thread(self.process.communicate, timeout=10)
        return self.process.returncode, complained


async def test_following_shows_rows_as_they_come_until_ctrl_c(caller: Caller):
    await caller.staged(Part(name="old"))
    follower = Follower(caller.site.url, caller.id)

    assert (await follower.line()).rstrip().endswith("file old (5 B)")
    for name in ("new", "newer"):
        await caller.staged(Part(name=name))
        assert (await follower.line()).rstrip().endswith(f"file {name} (5 B)")

    assert await follower.interrupted() == (130, "")


async def test_following_goes_on_after_an_outage_and_a_trim(caller: Caller):
    """Whoever watches a feed over night should see in the morning what came."""
    await caller.message(message("first"), to=caller)
    (row,) = await caller.feed()
    gone = {"error": "It was trimmed.", "code": "cursor_gone", "lowest_seq": 5, "latest_seq": 5}
    answers = [
        http(200, [row], X_Restante_Latest_Seq="1"),
        *[b""] * 9,  # more often than one request is tried
        http(410, gone),
        http(200, [row | {"seq": 5}]),
        http(200, []),
    ]

    async with impostor(one_after_another(*answers)) as liar:
        follower = Follower(liar.url, NOBODY)
        shown = [await follower.line(), await follower.line()]
        code, complained = await follower.interrupted()

    assert [line.split()[0] for line in shown] == ["1", "5"]
    assert code == 130
    assert "was lost" in complained
    assert "It was trimmed." in complained
