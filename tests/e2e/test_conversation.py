"""A conversation in both directions: real commands, a real server, and a network that fails."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request as HttpRequest, urlopen

import pytest
from connecting import Connect, Office
from listeners import Request
from processes import Outcome, restante, wait_until
from proxies import CALM, Fault, Proxy, Weather

from restante.cli.conversation import line_of
from restante.client import Bytes, Client, Credentials
from restante.client.folder import Folder
from restante.ids import WorkspaceId

# Answers a message with its text in capitals, and counts how often it ran.
SHOUT = """
import json, pathlib, sys
parts = json.load(sys.stdin)["request_body"]["params"]["message"]["parts"]
with pathlib.Path(__file__).with_name("runs").open("a") as runs:
    print("ran", file=runs)
print("on standard error", file=sys.stderr)
print(" ".join(part["text"] for part in parts if part["kind"] == "text").upper())
"""


@contextmanager
def connected(folder: Path, url: str, *flags: str) -> Iterator[Connect]:
    with Connect(folder, url, *flags) as connect:
        yield connect.start()


def program(folder: Path, text: str) -> str:
    """Write a Python program; returns the command that runs it."""
    folder.mkdir(exist_ok=True)
    path = folder / "program.py"
    path.write_text(text)
    return f"{sys.executable} '{path}'"


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines())


def as_user(office: Office, *words: str | Path) -> Outcome:
    """Run a command with the admin token."""
    url, token = office.server.address, office.server.admin_token
    return restante(*words, RESTANTE_URL=url, RESTANTE_TOKEN=token)


def ask(office: Office, at: Connect, text: str) -> None:
    """The user's message, without the proxy."""
    office.sender.send_message(at.credentials.workspace_id, text)


def conversation(office: Office, at: WorkspaceId) -> list[str]:
    """What `restante inbox` shows to the user, without numbers and times."""
    rows = office.sender.feed(of=at).rows
    return [line_of(row, agent="agent").split("  ")[-1] for row in rows]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "my agent"


@pytest.fixture
def bob(office: Office) -> Iterator[Client]:
    """Another workspace, which is a program."""
    with Client(office.server.address) as client:
        client.register("bob")
        yield client


@pytest.fixture
def ana(office: Office, proxy: Proxy, folder: Path) -> Connect:
    """A registered folder that is not connected, behind the proxy."""
    with Folder.open(folder) as opened, Client(office.server.address) as client:
        kept = client.register("ana")
        opened.keep(Credentials(proxy.address, kept.workspace_id, kept.token))
    return Connect(folder, proxy.address)


def test_a_user_asks_and_the_command_of_connect_answers(office: Office, folder: Path):
    """By the name of the workspace, without any JSON; both sides are in the inbox."""
    flags = ("--on-message", program(folder, SHOUT), "--reply", "--name", f"talker {folder}")
    with connected(folder, office.server.address, *flags) as ana:
        sent = as_user(office, "send", f"talker {folder}", "--message", "hello")
        assert sent == (0, "queued the message\n", "")
        ana.until_said("answered: HELLO")

    seen = as_user(office, "inbox", f"talker {folder}")
    own = restante("inbox", "--dir", folder)
    assert "  on standard error\n" in ana.said
    assert [line[29:] for line in seen.stdout.splitlines()] == ["canvas: hello", "agent: HELLO"]
    assert [line[29:] for line in own.stdout.splitlines()] == ["canvas: hello", "you: HELLO"]


def test_two_workspaces_talk_and_do_not_answer_answers(
    office: Office, ana: Connect, tmp_path: Path
):
    """Both would otherwise go on for ever."""
    shout = [program(ana.root, SHOUT), program(tmp_path / "eve", SHOUT)]
    with (
        connected(ana.root, ana.url, "--on-message", shout[0], "--reply"),
        connected(tmp_path / "eve", ana.url, "--on-message", shout[1], "--reply") as eve,
    ):
        to = str(ana.credentials.workspace_id)
        done = restante("send", to, "--message", "hello", "--dir", eve.root)
        assert done == (0, "queued the message\n", "")
        eve.until_said("message message/send: HELLO")
        wait_until(lambda: office.acked_seq(eve) == 1, seconds=20, what="the end of the answer")

    anas, eves = ana.credentials.workspace_id, eve.credentials.workspace_id
    assert conversation(office, anas) == [f"{eves}: hello"]
    assert conversation(office, eves) == [f"{anas}: HELLO"]
    assert (runs(ana.root), runs(eve.root)) == (1, 1)


# Files


def test_files_go_with_a_message_and_arrive_as_paths(office: Office, ana: Connect, tmp_path: Path):
    (tmp_path / "plan.txt").write_text("the plan")
    read = """
import json, sys
text, file = json.load(sys.stdin)["request_body"]["params"]["message"]["parts"]
path = file["file"]["uri"].removeprefix("workspace:")
print(text["text"], file["file"]["name"], open(path).read())
"""
    flags = ("--on-message", program(ana.root, read), "--reply")
    with connected(ana.root, ana.url, *flags) as connect:
        words = (str(ana.credentials.workspace_id), tmp_path / "plan.txt", "--message", "See")
        sent = as_user(office, "send", *words)
        connect.until_said("answered: See plan.txt the plan")

    assert sent.code == 0, sent
    shown = ["canvas: file plan.txt (8 B)", "canvas: See [plan.txt]"]
    assert conversation(office, ana.credentials.workspace_id)[:2] == shown


def test_files_of_an_answer_wait_for_the_user(office: Office, ana: Connect, tmp_path: Path):
    """The workspace that uploaded them neither fetches nor acknowledges them, also later."""
    (tmp_path / "result.txt").write_text("the result")
    with connected(ana.root, ana.url) as connect:
        told = restante("notify", "Done.", "--file", tmp_path / "result.txt", "--dir", ana.root)
        assert told.code == 0, told
        office.send(ana, Bytes("for-ana.txt", b"n"))
        connect.until_received("for-ana.txt")

    assert restante("connect", "--dir", ana.root, "--once").code == 0
    assert ana.names() == ["for-ana.txt"]
    assert office.waiting(ana) == {"result.txt"}
    shown = ["agent: file result.txt (10 B)", "agent: Done. [result.txt]"]
    assert conversation(office, ana.credentials.workspace_id)[:2] == shown


def test_files_of_an_answer_wait_for_the_user_after_the_progress_was_lost(
    office: Office, ana: Connect, tmp_path: Path
):
    """Their rows are acknowledged and never read again: the list of waiting files says whose."""
    (tmp_path / "result.txt").write_text("the result")
    told = restante("notify", "Done.", "--file", tmp_path / "result.txt", "--dir", ana.root)
    first = restante("connect", "--dir", ana.root, "--once")
    for left in ana.root.rglob("progress.sqlite*"):
        left.unlink()

    second = restante("connect", "--dir", ana.root, "--once")

    assert [told.code, first.code, second.code] == [0, 0, 0], (told, first, second)
    assert "result.txt" not in second.stdout
    assert ana.names() == []
    assert office.waiting(ana) == {"result.txt"}


def test_behind_a_failing_message_it_does_not_fetch_its_own_files(office: Office, ana: Connect):
    """Other files there are received from the list of those that wait."""
    with connected(ana.root, ana.url, "--on-message", "false") as connect:
        ask(office, ana, "hello")
        connect.until_said("false ended with status 1")
        office.owner(ana).notify("Done.", files=[Bytes("result.txt", b"r")])
        office.send(ana, Bytes("for-ana.txt", b"n"))
        connect.until_received("for-ana.txt")

    assert ana.names() == ["for-ana.txt"]
    assert office.waiting(ana) == {"result.txt"}


# Lost answers


def lost_once(end: str) -> Weather:
    """The server acts on the first such request, and its answer is lost."""
    lost: list[str] = []

    def weather(request: Request) -> Fault:
        if request.path.endswith(end) and not lost:
            lost.append(request.path)
            return Fault(is_unanswered=True)
        return CALM

    return weather


def requests_to(proxy: Proxy, end: str) -> int:
    return sum(request.path.endswith(end) for request in proxy.requests)


def test_words_for_the_user_whose_answer_was_lost_are_there_once(
    office: Office, proxy: Proxy, ana: Connect
):
    proxy.weather = lost_once("/notify")

    told = [restante("notify", "Done.", "--dir", ana.root) for _ in range(2)]

    at = ana.credentials.workspace_id
    assert told == [(0, f"told the user of {at}\n", "")] * 2
    assert conversation(office, at) == ["agent: Done."] * 2
    assert requests_to(proxy, "/notify") == 2


def test_words_for_the_user_that_did_not_arrive_are_an_error(proxy: Proxy, ana: Connect):
    """They are not repeated blindly: the server may still be busy with them."""
    proxy.weather = lambda request: Fault(is_dropped=request.path.endswith("/notify"))

    told = restante("notify", "Done.", "--dir", ana.root)

    assert (told.code, told.stdout) == (1, "")
    assert "was lost" in told.stderr
    assert requests_to(proxy, "/notify") == 1


def asked_by(office: Office, ana: Connect, bob: Client | None) -> WorkspaceId:
    """A message of the user or of another workspace; returns whose feed gets the answer."""
    if bob is None:
        ask(office, ana, "hello")
        return ana.credentials.workspace_id
    bob.send_message(ana.credentials.workspace_id, "hello")
    return bob.workspace_id


@pytest.mark.parametrize("is_from_bob", [False, True])
def test_an_answer_whose_own_answer_was_lost_is_there_once(
    office: Office, proxy: Proxy, ana: Connect, bob: Client, is_from_bob: bool
):
    """To the user thanks to the feed, to a workspace thanks to the message's id."""
    with connected(ana.root, ana.url, "--on-message", program(ana.root, SHOUT), "--reply") as one:
        proxy.weather = lost_once("/a2a" if is_from_bob else "/notify")
        at = asked_by(office, ana, bob if is_from_bob else None)
        one.until_said("answered: HELLO")

    shown = [line.split(": ")[-1] for line in conversation(office, at)]
    assert shown == (["HELLO"] if is_from_bob else ["hello", "HELLO"])
    assert runs(ana.root) == 1


@pytest.mark.parametrize("is_from_bob", [False, True])
def test_a_crash_after_an_answer_repeats_neither_it_nor_the_command(
    office: Office, proxy: Proxy, ana: Connect, bob: Client, is_from_bob: bool
):
    flags = ("--on-message", program(ana.root, SHOUT), "--reply")
    hold = proxy.hold("POST", "/a2a" if is_from_bob else "/notify", answers=True)
    with connected(ana.root, ana.url, *flags) as one:
        at = asked_by(office, ana, bob if is_from_bob else None)
        hold.until_reached()
        one.kill()
        proxy.release()
        assert office.acked_seq(ana) == 0

        one.start()
        one.until_said("answered: HELLO")
        wait_until(lambda: office.acked_seq(ana) > 0, seconds=20, what="the acknowledgement")

    shown = [line.split(": ")[-1] for line in conversation(office, at)]
    assert shown == (["HELLO"] if is_from_bob else ["hello", "HELLO"])
    assert runs(ana.root) == 1


# No answer


def test_what_cannot_be_an_answer_is_reported_and_does_not_block(office: Office, ana: Connect):
    """Nothing, too much, and what is not text; a message whose command fails is not answered."""
    say = """
import json, sys
text = json.load(sys.stdin)["request_body"]["params"]["message"]["parts"][0]["text"]
said = {"nothing": b"\\n", "much": b"x" * 2_000_000, "binary": b"\\xff\\0", "end": b"THE END"}
sys.stdout.buffer.write(said[text])
"""
    flags = ("--on-message", program(ana.root, say), "--reply")
    with connected(ana.root, ana.url, *flags) as one:
        for text in ("nothing", "much", "binary", "end"):
            ask(office, ana, text)
        one.until_said("answered: THE END")
        ask(office, ana, "unknown")
        one.until_said("ended with status 1")

    assert "answer to message 2: The command printed more than 1048576 bytes" in one.said
    assert "answer to message 3: The text is not valid UTF-8" in one.said
    shown = [line.split(": ")[-1] for line in conversation(office, ana.credentials.workspace_id)]
    assert shown == ["nothing", "much", "binary", "end", "THE END", "unknown"]


def test_an_answer_to_a_workspace_that_is_gone_is_given_up(
    office: Office, ana: Connect, bob: Client
):
    """It would otherwise end the program, or block the messages of all others."""
    bob.send_message(ana.credentials.workspace_id, "hello")
    removed(office, bob.workspace_id)
    ask(office, ana, "still there?")

    flags = ("--once", "--on-message", program(ana.root, SHOUT), "--reply")
    ended = restante("connect", "--dir", ana.root, *flags)

    assert ended.code == 0, ended
    assert "answer to message 1: There is no such workspace." in ended.stdout
    assert conversation(office, ana.credentials.workspace_id)[-1] == "agent: STILL THERE?"


def removed(office: Office, workspace_id: WorkspaceId) -> None:
    request = HttpRequest(
        f"{office.server.address}/workspaces/{workspace_id}?confirm=true",
        method="DELETE",
        headers={"Authorization": f"Bearer {office.server.admin_token}"},
    )
    with urlopen(request) as answer:
        assert answer.status == 200


def test_reply_needs_a_command(folder: Path):
    done = restante("connect", "http://127.0.0.1:1", "--dir", folder, "--reply")

    assert done.code == 1
    assert "--on-message" in done.stderr
    assert not folder.exists()
