"""`restante inbox`: shows a feed and changes nothing."""

import asyncio
import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any, Self
from uuid import UUID

import pytest
import warm
from attacks import MIB
from callers import ADMIN, ADMIN_TOKEN, Caller, Part, ask, registered
from impostors import http, impostor, one_after_another
from processes import Outcome, clean_environment, restante
from sites import Site
from watchers import append

from restante.client import Credentials
from restante.client.folder import Folder
from restante.ids import WorkspaceId
from restante.text import printable

pytestmark = pytest.mark.anyio

NOBODY = "11111111-2222-3333-4444-555555555555"
EVIL = "\x1b]0;owned\x07\x1b[2Jx\x9b31m\u202e\r\n"


@pytest.fixture
async def caller(shared_site: Site) -> Caller:
    return await registered(shared_site)


async def inbox(url: str, *words: object, token: str = ADMIN_TOKEN) -> Outcome:
    """Run the command with its output in pipes."""
    return await asyncio.to_thread(
        restante, "inbox", *map(str, words), RESTANTE_URL=url, RESTANTE_TOKEN=token
    )


def lines_of(outcome: Outcome) -> list[str]:
    assert (outcome.code, outcome.stderr) == (0, ""), outcome
    return outcome.stdout.splitlines()


def message(text: str) -> dict[str, Any]:
    parts = [{"kind": "text", "text": text}, {"kind": "file", "file": {"uri": "x"}}]
    return {"jsonrpc": "2.0", "method": "message/send", "params": {"message": {"parts": parts}}}


# Output


async def test_each_row_is_a_line_oldest_first(caller: Caller):
    other = await registered(caller.site)
    await caller.staged(Part(b"12345", name="a b.txt"))
    await other.message(message("Good morning."), to=caller)

    first, second = lines_of(await inbox(caller.site.url, caller.id))

    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf" +1  {when}  canvas: file a b\.txt \(5 B\)", first)
    assert re.fullmatch(rf" +2  {when}  {other.id}: Good morning\. \[x\]", second)


async def test_both_sides_of_a_conversation_are_shown(caller: Caller):
    """What the workspace says is in its own feed; only it can write there in its name."""
    forger = await registered(caller.site)
    plan = {"uri": "platform-pending:x/y", "name": "plan.pdf"}
    canvas = {"message": {"parts": [{"kind": "text", "text": "Is it\nready?"}]}}
    await ask(caller.site, "POST", f"{caller.path}/a2a", json={"params": canvas}, headers=ADMIN)
    await caller.upload(Part(name="plan.pdf"), X_Workspace_ID=caller.id)
    await caller.ask("POST", "/notify", json={"message": "Yes." + EVIL, "attachments": [plan]})
    await forger.message(message("forged") | {"method": "notify"}, to=caller)

    lines = lines_of(await inbox(caller.site.url, caller.id))

    assert [line[29:] for line in lines] == [
        "canvas: Is it ready?",
        "agent: file plan.pdf (5 B)",
        "agent: Yes." + printable(EVIL) + " [plan.pdf]",
        f"{forger.id}: notify: forged [x]",
    ]


async def test_many_files_of_a_message_are_counted(caller: Caller):
    files = [{"kind": "file", "file": {"uri": "u", "name": f"{n}"}} for n in range(12)]
    body = {"method": "message/send", "params": {"message": {"parts": files}}}
    await caller.message(body, to=caller)

    (line,) = lines_of(await inbox(caller.site.url, caller.id))

    assert line[29:] == "agent: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 2 more]"


async def test_json_is_one_row_per_line(caller: Caller):
    await caller.staged(Part(name="a"))
    await caller.message(message(EVIL), to=caller)

    lines = lines_of(await inbox(caller.site.url, caller.id, "--json"))

    rows = [json.loads(line) for line in lines]
    assert rows == list(reversed(await caller.feed()))
    assert all(line.isprintable() for line in lines)
    assert rows[1]["request_body"]["params"]["message"]["parts"][0]["text"] == EVIL


async def test_control_characters_are_not_printed(caller: Caller):
    """Every workspace can send text to every other."""
    body = message(EVIL) | {"method": "x" + EVIL}
    assert (await caller.message(body, to=caller)).status == 200

    done = await inbox(caller.site.url, caller.id)

    (line,) = lines_of(done)
    assert line.isprintable()
    assert "owned" in line


async def test_the_newest_rows_are_shown_and_nothing_changes(caller: Caller):
    await caller.staged(*(Part(name=f"{n}") for n in range(5)))

    lines = lines_of(await inbox(caller.site.url, caller.id, "--limit", 2))

    assert [line.split()[0] for line in lines] == ["4", "5"]
    assert (await caller.read_feed()).headers["X-Restante-Acked-Seq"] == "0"
    assert len((await caller.waiting()).json["uploads"]) == 5


async def test_rows_that_do_not_fit_on_one_page_are_shown_too(caller: Caller):
    for _ in range(7):
        await append(caller, "large", b'"%b"' % (b"x" * (MIB - 2)))

    lines = lines_of(await inbox(caller.site.url, caller.id, "--limit", 6, "--json"))

    assert [json.loads(line)["seq"] for line in lines] == [2, 3, 4, 5, 6, 7]


async def test_an_empty_feed_prints_nothing(caller: Caller):
    assert lines_of(await inbox(caller.site.url, caller.id)) == []


async def test_an_invalid_row_is_an_error(caller: Caller):
    await caller.message(message("."), to=caller)
    (row,) = await caller.feed()
    broken = json.dumps([row | {"request_body": "?"}]).encode().replace(b'"?"', b'"\xff"')

    async with impostor(lambda _: http(200, broken)) as liar:
        shown, as_json = await asyncio.gather(
            inbox(liar.url, NOBODY), inbox(liar.url, NOBODY, "--json")
        )

    assert shown.code == 1
    assert "cannot be understood" in shown.stderr
    assert json.loads(as_json.stdout)["request_body"] == "\ufffd"


# Which workspace


async def test_a_connected_folder_shows_its_own_feed(caller: Caller, tmp_path: Path):
    """With the URL and the token stored in the folder."""
    await caller.staged(Part(name="mine"))
    kept = Credentials(caller.site.url, WorkspaceId(UUID(caller.id)), caller.token)
    with Folder.open(tmp_path / "folder") as folder:
        folder.keep(kept)

    done = await asyncio.to_thread(restante, "inbox", "--dir", tmp_path / "folder")

    (line,) = lines_of(done)
    assert "mine" in line


async def test_a_workspace_can_read_only_its_own_feed(caller: Caller):
    other = await registered(caller.site)

    own, others = await asyncio.gather(
        inbox(caller.site.url, caller.id, token=caller.token),
        inbox(caller.site.url, other.id, token=caller.token),
    )

    assert lines_of(own) == []
    assert others.code == 1


async def test_mistakes_are_one_line_errors(caller: Caller, tmp_path: Path):
    url = caller.site.url
    outcomes = await asyncio.gather(
        inbox(url),
        inbox(url, "--dir", tmp_path),
        inbox(url, NOBODY),
        inbox(url, "no-such-name"),
        inbox(url, caller.id, "--limit", 501),
        inbox(url, caller.id, "--limit", 0),
    )

    for outcome, words in zip(
        outcomes,
        ["Say which workspace", "is not connected", "no such workspace", "no-such-name"]
        + ["--limit"] * 2,
        strict=True,
    ):
        assert (outcome.code, outcome.stdout) == (1, "")
        assert re.fullmatch(rf"restante: .*{words}.*\n", outcome.stderr)


# Following


class Follower:
    """A running `restante inbox --follow`; killed at the end of the context."""

    def __init__(self, url: str, *words: str) -> None:
        self.process = warm.start(
            ["inbox", *words, "--follow"],
            env=clean_environment(RESTANTE_URL=url, RESTANTE_TOKEN=ADMIN_TOKEN),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.kill()

    async def line(self) -> str:
        assert self.process.stdout is not None
        return await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), 60)

    async def interrupted(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        _, complained = await asyncio.to_thread(self.process.communicate, timeout=60)
        return self.process.returncode, complained


async def test_follow_shows_new_rows_until_ctrl_c(caller: Caller):
    await caller.staged(Part(name="old"))

    with Follower(caller.site.url, caller.id) as follower:
        assert (await follower.line()).rstrip().endswith("file old (5 B)")
        for name in ("new", "newer"):
            await caller.staged(Part(name=name))
            assert (await follower.line()).rstrip().endswith(f"file {name} (5 B)")

        assert await follower.interrupted() == (130, "")


async def test_follow_continues_after_an_outage_and_a_trim(caller: Caller):
    """A feed followed overnight shows in the morning what arrived."""
    await caller.message(message("first"), to=caller)
    (row,) = await caller.feed()
    gone = {"error": "It was trimmed.", "code": "cursor_gone", "lowest_seq": 5, "latest_seq": 5}
    answers = [
        http(200, [row], X_Restante_Latest_Seq="1"),
        *[b""] * 9,  # more than the client retries one request
        http(410, gone),
        http(200, [row | {"seq": 5}]),
        http(200, []),
    ]

    async with impostor(one_after_another(*answers)) as liar:
        with Follower(liar.url, NOBODY) as follower:
            shown = [await follower.line(), await follower.line()]
            code, complained = await follower.interrupted()

    assert [line.split()[0] for line in shown] == ["1", "5"]
    assert code == 130
    assert "was lost" in complained
    assert "It was trimmed." in complained


async def test_follow_shows_the_newest_rows_of_a_restored_feed_again(caller: Caller):
    """Its end is before the last row shown; rows that are shown twice are announced."""
    await caller.message(message("first"), to=caller)
    (row,) = await caller.feed()
    gone = {"error": "Outside.", "code": "cursor_gone", "lowest_seq": 1, "latest_seq": 50}
    answers = [
        http(200, [row | {"seq": 90}], X_Restante_Latest_Seq="90", X_Restante_Lowest_Seq="90"),
        http(410, gone),
        http(200, [row | {"seq": 50}]),
        http(200, []),
    ]

    async with impostor(one_after_another(*answers)) as liar:
        with Follower(liar.url, NOBODY, "--limit", "2") as follower:
            shown = [await follower.line(), await follower.line()]
            _, complained = await follower.interrupted()

    assert [line.split()[0] for line in shown] == ["90", "50"]
    assert "restored from a backup; its newest rows are shown again" in complained
    assert [asked.query.get("since_seq") for asked in liar.asked[:3]] == [None, None, "48"]
