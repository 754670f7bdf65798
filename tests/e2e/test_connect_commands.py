"""`restante connect` for users and scripts: commands, flags, signals and output."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, Signals
from typing import Any, Self
from urllib.request import Request as HttpRequest, urlopen
from uuid import uuid4

import pytest
from connecting import Connect, Office
from listeners import reserved_port
from processes import RESTANTE, alive, children, clean_environment, restante, wait_until
from proxies import Proxy, calm, stalled_files

from restante.client import Bytes, Credentials
from restante.client.folder import Folder
from restante.ids import WorkspaceId

MIB = 1024 * 1024
LETTER = Bytes("letter.bin", os.urandom(3 * MIB))
NOTE = Bytes("note.txt", b"n", "text/plain")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "my files"


@pytest.fixture
def ana(folder: Path, office: Office) -> Connect:
    """A registered workspace that is not running; its folder has a space in the name."""
    assert restante("connect", office.server.address, "--dir", folder, "--once").code == 0
    return Connect(folder, office.server.address)


@contextmanager
def running(connect: Connect, *flags: str, **environment: str) -> Iterator[Connect]:
    with Connect(connect.root, connect.url, *flags, **environment) as begun:
        yield begun.start()


def program(path: Path, text: str) -> str:
    """Write a Python program; returns the command that runs it."""
    path.write_text(text)
    return f"{sys.executable} '{path}'"


def message(**places: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": "message/send", **places}


# Once


def test_once_receives_what_exists_and_ends(office: Office, ana: Connect):
    office.send(ana, LETTER, NOTE)

    first = restante("connect", "--dir", ana.root, "--once")
    second = restante("connect", "--dir", ana.root, "--once")

    assert (first.code, second.code) == (0, 0)
    assert "2 files received, 3.0 MiB." in first.stdout
    assert "0 files received" in second.stdout
    assert ana.names() == sorted([LETTER.name, NOTE.name])
    assert not office.waiting(ana)


def test_once_without_a_server_exits_with_1_and_a_message(folder: Path):
    with reserved_port() as port, Folder.open(folder) as opened:
        url = f"http://127.0.0.1:{port.getsockname()[1]}"
        opened.keep(Credentials(url, WorkspaceId(uuid4()), "token"))
    ended = restante("connect", "--dir", folder, "--once")

    assert ended.code == 1
    assert ended.stderr == f"restante: {url} cannot be reached: Connection refused.\n"


def test_once_reports_how_many_files_failed(office: Office, ana: Connect):
    office.send(ana, NOTE)

    ended = restante("connect", "--dir", ana.root, "--once", "--exec", "false")

    assert ended.code == 1
    assert "1 file could not be taken and still waits" in ended.stderr
    assert office.waiting(ana) == {NOTE.name}


def test_an_interrupted_once_exits_with_130(office: Office, proxy: Proxy, folder: Path):
    with Connect(folder, proxy.address).start() as ana:
        ana.stop()
        proxy.weather = stalled_files(MIB)
        office.send(ana, LETTER)
        with running(ana, "--once") as once:
            once.until_arriving(MIB)
            assert once.stop() == 130


# Commands for files


def test_a_command_gets_the_path_and_variables_of_the_file(office: Office, ana: Connect):
    text = """
import os, sys
for name in ("ID", "NAME", "TYPE"):
    print(name, os.environ["RESTANTE_FILE_" + name])
print(len(sys.argv), open(sys.argv[-1]).read(), sys.argv[-1])
"""
    command = program(ana.root / "a program.py", text)
    (file_id,) = office.send(ana, NOTE)
    with running(ana, "--exec", f"{command} 'one argument'") as connect:
        office.until_nothing_waits(ana)
        connect.until_said("received")

    path = ana.path_of(NOTE.name)
    assert f"  ID {file_id}\n  NAME note.txt\n  TYPE text/plain\n  3 n {path}\n" in connect.said


def test_a_file_is_acknowledged_after_its_command_succeeds(office: Office, ana: Connect):
    text = """
import pathlib, sys
tries = pathlib.Path(__file__).with_name("tries")
with tries.open("a") as file:
    print(sys.argv[1], file=file)
sys.exit(len(tries.read_text().splitlines()) < 3)
"""
    command = program(ana.root / "fail.py", text)
    with running(ana, "--exec", command) as connect:
        office.send(ana, NOTE)

        connect.until_said("not taken: note.txt:")
        assert office.waiting(ana) == {NOTE.name}
        office.until_nothing_waits(ana)
        connect.until_received("note.txt")

    assert f"{sys.executable} ended with status 1." in connect.said
    tries = (ana.root / "tries").read_text().splitlines()
    assert tries == [str(ana.path_of(NOTE.name))] * 3


def test_a_missing_command_is_reported_and_the_file_stays_pending(office: Office, ana: Connect):
    with running(ana, "--exec", "no-such-command --now") as connect:
        office.send(ana, NOTE)

        said = connect.until_said("not taken: note.txt")

    assert "no-such-command cannot be run: No such file or directory." in said
    assert office.waiting(ana) == {NOTE.name}


def test_a_command_may_move_the_file(office: Office, ana: Connect):
    (ana.root / "taken").mkdir()
    with running(ana, "--exec", f"mv -t '{ana.root / 'taken'}'"):
        office.send(ana, NOTE, LETTER)
        office.until_nothing_waits(ana)

    assert ana.names() == []
    assert len(list((ana.root / "taken").iterdir())) == 2


def test_a_file_that_a_failing_command_moved_is_fetched_again(office: Office, ana: Connect):
    """The command has not succeeded yet, and needs the file to be run again."""
    text = """
import pathlib, sys
path = pathlib.Path(sys.argv[1])
taken = pathlib.Path(__file__).with_name("taken")
failed_before = taken.exists()
path.rename(taken)
sys.exit(not failed_before)
"""
    command = program(ana.root / "take.py", text)
    with running(ana, "--exec", command) as connect:
        office.send(ana, NOTE)

        connect.until_said("not taken: note.txt:")
        office.until_nothing_waits(ana)

    assert ana.names() == []
    assert (ana.root / "taken").read_bytes() == NOTE.content


def test_a_command_may_leave_a_process_running(office: Office, ana: Connect):
    with running(ana, "--exec", "sh -c 'sleep 60 & echo $! >&2; exit 0'") as connect:
        office.send(ana, NOTE)
        connect.until_received("note.txt")
        left = int(next(line for line in connect.said.splitlines() if line.strip().isdigit()))
        os.kill(left, SIGKILL)


def test_a_running_command_is_terminated_on_shutdown(office: Office, ana: Connect):
    """The next run starts the command again for the same file."""
    with running(ana, "--exec", "sh -c 'echo begun; exec sleep 300'") as connect:
        office.send(ana, NOTE)
        connect.until_said("begun")
        (child,) = children(connect.pid)
        assert connect.stop() == 0

    assert not alive(child)
    assert office.waiting(ana) == {NOTE.name}


# Commands for messages


def test_file_uris_in_messages_are_rewritten(office: Office, ana: Connect):
    (file_id,) = office.send(ana, NOTE)
    kept = ana.credentials
    sent = {"kind": "file", "file": {"uri": f"platform-pending:{kept.workspace_id}/{file_id}"}}
    unknown = {"kind": "file", "file": {"uri": f"platform-pending:{kept.workspace_id}/unknown"}}
    parts = [sent, unknown, {"kind": "text", "text": "here"}]
    one, two, three = ({"messageId": name, "role": "user"} for name in ("a", "b", "c"))
    office.say(ana, message(parts=parts, **one))
    office.say(ana, message(params={"parts": parts, **two}))
    office.say(ana, message(params={"message": {"parts": parts, **three}}))
    keep = ana.root / "rows"

    ended = restante(
        "connect",
        "--dir",
        ana.root,
        "--once",
        "--on-message",
        f'sh -c \'cat >> "{keep}"; echo >> "{keep}"\'',
    )

    assert ended.code == 0, ended
    rows = [json.loads(row) for row in keep.read_text().splitlines()]
    here = {"kind": "file", "file": {"uri": f"workspace:{ana.path_of(NOTE.name)}"}}
    expected = [here, unknown, {"kind": "text", "text": "here"}]
    assert [row["request_body"] for row in rows] == [
        message(parts=expected, **one),
        message(params={"parts": expected, **two}),
        message(params={"message": {"parts": expected, **three}}),
    ]
    assert [row["seq"] for row in rows] == [2, 3, 4]


def test_a_failing_message_blocks_later_messages_but_not_files(office: Office, ana: Connect):
    text = """
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
if not (here / "open").exists():
    sys.exit("closed for now")
with (here / "taken").open("a") as file:
    print(json.load(sys.stdin)["seq"], os.environ["RESTANTE_METHOD"], file=file)
"""
    command = program(ana.root / "take.py", text)
    with running(ana, "--on-message", command) as connect:
        office.say(ana, message(parts=[]))
        connect.until_said("closed for now")
        office.say(ana, message(parts=[]))
        office.send(ana, NOTE)
        office.until_nothing_waits(ana)
        office.say(ana, message(parts=[]))
        (ana.root / "open").touch()
        wait_until(lambda: office.acked_seq(ana) == 4, seconds=30, what="the last message")

    taken = (ana.root / "taken").read_text().splitlines()
    assert taken == ["1 message/send", "2 message/send", "4 message/send"]
    assert ana.names() == [NOTE.name]


def test_once_receives_the_files_behind_a_failing_message(office: Office, ana: Connect):
    office.say(ana, message(parts=[]))
    office.send(ana, NOTE)

    ended = restante("connect", "--dir", ana.root, "--once", "--on-message", "false")

    assert ended.code == 1
    assert ended.stderr == "restante: false ended with status 1.\n"
    assert ana.names() == [NOTE.name]
    assert not office.waiting(ana)
    assert office.acked_seq(ana) == 0


# Signals


@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
def test_a_signal_interrupts_a_download_that_is_resumed_later(
    office: Office, proxy: Proxy, folder: Path, number: Signals
):
    proxy.weather = stalled_files(2 * MIB)
    with Connect(folder, proxy.address).start() as ana:
        office.send(ana, LETTER)
        ana.until_arriving(2 * MIB)
        assert ana.stop(number) == 0
        assert ana.lines[-1] == "0 files received, 0 B.\n"
        assert "Traceback" not in ana.said
        proxy.weather = calm

        ana.start()
        office.until_nothing_waits(ana)

    asked = [r.headers.get("range") for r in proxy.requests if r.path.endswith("/content")]
    assert asked == [None, f"bytes={2 * MIB}-"]
    assert ana.path_of(LETTER.name).read_bytes() == LETTER.content


def test_a_signal_interrupts_the_wait_for_a_lost_server(proxy: Proxy, folder: Path):
    with Connect(folder, proxy.address).start() as ana:
        proxy.cut()
        ana.until_said("Trying again")
        assert ana.stop() == 0
        proxy.restore()


# Errors


def test_a_folder_that_is_in_use_is_refused(ana: Connect):
    with running(ana):
        second = restante("connect", ana.url, "--dir", ana.root)

    assert second.code == 1
    assert second.stderr == (
        f"restante: Another program is receiving into {ana.root}: stop it, or use another folder.\n"
    )


def test_a_folder_of_another_server_is_refused(ana: Connect):
    ended = restante("connect", "http://127.0.0.1:1", "--dir", ana.root)

    assert ended.code == 1
    assert f"{ana.root} belongs to a workspace at {ana.url}" in ended.stderr


def test_a_revoked_token_ends_it_and_a_new_one_continues(office: Office, ana: Connect):
    path = f"/admin/workspaces/{ana.credentials.workspace_id}/token"
    with running(ana) as connect:
        admin(office, "DELETE", path)
        office.say(ana, message(parts=[]))
        office.send(ana, NOTE)
        assert connect.wait() == 1

    assert f"restante: {ana.url} no longer accepts the token of this workspace" in connect.said
    found = re.search(r"If you have a new token, run `(.+)`", connect.said)
    assert found is not None

    _, *words = shlex.split(found[1])
    token = admin(office, "POST", path)["auth_token"]
    assert restante(*words, "--once", RESTANTE_NEW_TOKEN=token).code == 0
    assert ana.names() == [NOTE.name]
    assert ana.credentials.token == token


def test_it_starts_while_the_server_is_unreachable(office: Office, proxy: Proxy, folder: Path):
    """A laptop boots before its network is up; --name must not make that fail."""
    with Connect(folder, proxy.address, "--name", "laptop") as ana:
        ana.start().stop()
        proxy.cut()
        ana.start()
        ana.until_said("Trying again")
        office.send(ana, NOTE)
        proxy.restore()
        office.until_nothing_waits(ana)


def admin(office: Office, method: str, path: str) -> Any:
    request = HttpRequest(
        office.server.address + path,
        method=method,
        headers={"Authorization": f"Bearer {office.server.admin_token}"},
    )
    with urlopen(request) as answer:
        return json.loads(answer.read() or b"null")


# Output


class Terminal:
    """A `restante connect` process on a terminal with 80 columns."""

    def __init__(self, at: Connect, **environment: str) -> None:
        self.shown = ""
        self._changed = threading.Condition()
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [RESTANTE, "connect", at.url, "--dir", at.root],
            env=clean_environment(**{"TERM": "xterm-256color", "COLUMNS": "80"} | environment),
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(SIGINT)
        self.process.wait(10)
        self._reader.join(10)
        os.close(self._master)

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._master, 65536)
            except OSError:  # the process has closed its end
                return
            with self._changed:
                self.shown += piece.decode(errors="replace")
                self._changed.notify_all()

    def until_shown(self, text: str, seconds: float = 20) -> None:
        with self._changed:
            shown = self._changed.wait_for(lambda: text in self.shown, seconds)
        assert shown, f"{text!r} was not shown:\n{self.shown!r}"


COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-8][0-9;]*m")


def test_a_terminal_shows_a_live_line_that_goes_away(office: Office, proxy: Proxy, folder: Path):
    with Connect(folder, proxy.address).start() as ana:
        ana.stop()
    proxy.weather = stalled_files(2 * MIB)
    with Terminal(ana) as terminal:
        office.send(ana, LETTER)
        terminal.until_shown("receiving 1 of 1 file · 66 % · 2.0 MiB of 3.0 MiB")
        proxy.weather = calm
        proxy.drop()
        terminal.until_shown("3.0 MiB  letter.bin")
        terminal.until_shown("waiting · 1 file, 3.0 MiB received")

    assert COLOUR.search(terminal.shown)
    # It is erased: the summary is where it was.
    assert terminal.shown.endswith("\x1b[2K1 file received, 3.0 MiB.\r\n")
    assert "\x1b[?25h" in terminal.shown  # the cursor is back


def test_no_color_is_respected(office: Office, ana: Connect):
    with Terminal(ana, NO_COLOR="1") as terminal:
        office.send(ana, NOTE)
        terminal.until_shown("1 B  note.txt")

    assert not COLOUR.search(terminal.shown)


def test_a_dumb_terminal_gets_plain_lines(office: Office, ana: Connect):
    with Terminal(ana, TERM="dumb") as terminal:
        office.send(ana, NOTE)
        terminal.until_shown("1 B  note.txt")

    assert "\x1b" not in terminal.shown


def test_a_pipe_gets_plain_lines(office: Office, ana: Connect):
    with running(ana) as connect:
        office.send(ana, NOTE)
        office.say(ana, message(parts=[{"kind": "text", "text": "\x1b[31mred\r\nalert"}]))
        connect.until_received("note.txt")
        connect.until_said("message message/send")

    assert "\x1b" not in connect.said
    assert "message message/send:  [31mred  alert\n" in connect.said
