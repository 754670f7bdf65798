"""
`restante connect --into`: a file appears once in the user's directory, whatever fails on the way.

A proxy holds back a request or its answer while the process is killed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from connecting import Connect, Office
from processes import restante, wait_until
from proxies import Proxy, calm, stalled_files

from restante.client import Bytes

MIB = 1024 * 1024
LETTER = Bytes("A letter, \xfc.bin", os.urandom(3 * MIB))
NOTE = Bytes("note.txt", b"n")

ACKS = "/pending-uploads/[^/]+/ack$"


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "into"


@pytest.fixture
def ana(tmp_path: Path, into: Path, proxy: Proxy) -> Iterator[Connect]:
    with Connect(tmp_path / "ana", proxy.address, "--into", into) as ana:
        yield ana.start()


def found(into: Path) -> dict[str, bytes]:
    """The files of the directory, partial ones too."""
    return {path.name: path.read_bytes() for path in into.iterdir()}


def assert_arrived_once(office: Office, at: Connect, into: Path, *files: Bytes) -> None:
    office.until_nothing_waits(at)
    assert found(into) == {file.name: file.content for file in files}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in into.iterdir())
    assert at.names() == []


def test_files_appear_under_their_own_names(office: Office, ana: Connect, into: Path):
    ana.until_said(f"Files appear in {into}")

    office.send(ana, LETTER, NOTE)

    assert_arrived_once(office, ana, into, LETTER, NOTE)
    assert ana.until_received(LETTER.name) == f"received     3.0 MiB  {LETTER.name}\n"


@pytest.mark.parametrize("answers", [False, True])
def test_a_crash_before_the_ack_makes_no_second_copy(
    office: Office, proxy: Proxy, ana: Connect, into: Path, *, answers: bool
):
    hold = proxy.hold("POST", ACKS, answers=answers)
    office.send(ana, LETTER)
    hold.until_reached()
    ana.kill()
    proxy.release()

    ana.start()

    assert_arrived_once(office, ana, into, LETTER)


def test_a_file_that_was_moved_away_before_its_ack_does_not_come_back(
    office: Office, proxy: Proxy, ana: Connect, into: Path
):
    """Nor does a file of the same name that somebody put there count as it."""
    hold = proxy.hold("POST", ACKS)
    office.send(ana, LETTER)
    hold.until_reached()
    (into / LETTER.name).rename(into.parent / "taken")
    (into / LETTER.name).write_bytes(b"mine")
    ana.kill()
    proxy.release()

    ana.start()
    office.send(ana, NOTE)
    office.until_nothing_waits(ana)

    assert found(into) == {LETTER.name: b"mine", NOTE.name: NOTE.content}


def test_a_killed_download_is_resumed(office: Office, proxy: Proxy, ana: Connect, into: Path):
    proxy.weather = stalled_files(2 * MIB)
    (file_id,) = office.send(ana, LETTER)
    partial = into / f".{file_id}.part"
    wait_until(
        lambda: partial.exists() and partial.stat().st_size == 2 * MIB, seconds=20, what="the half"
    )
    ana.kill()
    proxy.weather = calm

    ana.start()

    assert_arrived_once(office, ana, into, LETTER)
    ranges = [r.headers.get("range") for r in proxy.requests if r.path.endswith("/content")]
    assert ranges == [None, f"bytes={2 * MIB}-"]


def test_two_workspaces_receive_into_one_directory(
    office: Office, proxy: Proxy, ana: Connect, into: Path
):
    """Both have files of the same names, and none is lost."""
    both = [Bytes(f"{number}.txt", os.urandom(100)) for number in range(20)]
    with Connect(ana.root.with_name("ben"), proxy.address, "--into", into).start() as ben:
        for name in (both[:10], both[10:]):
            for to in (ana, ben):
                office.send(to, *[Bytes("same.txt", to.root.name.encode()), *name])
        office.until_nothing_waits(ana)
        office.until_nothing_waits(ben)

    contents = [path.read_bytes() for path in into.iterdir()]
    assert len(contents) == 44
    assert {contents.count(file.content) for file in both} == {2}
    assert contents.count(b"ana") == contents.count(b"ben") == 2


def test_messages_and_commands_get_the_path(office: Office, proxy: Proxy, tmp_path: Path):
    """A command that fails gets the same file again."""
    into, log = tmp_path / "into", tmp_path / "log"
    note = "import json,os,sys; open(sys.argv[1], 'a').write(json.dumps(%s) + '\\n')"
    names = "[sys.argv[2], os.environ['RESTANTE_FILE_DISPLAY_NAME']]"
    fails_once = f"{note % names}; sys.exit(open(sys.argv[1]).read().count('\\n') < 2)"
    body = "json.load(sys.stdin)['request_body']['params']['message']['parts'][0]['file']['uri']"
    with Connect(
        tmp_path / "ana",
        proxy.address,
        *("--into", into),
        *("--exec", command(fails_once, log)),
        *("--on-message", command(note % body, log)),
    ).start() as ana:
        (file_id,) = office.send(ana, LETTER)
        office.until_nothing_waits(ana)
        office.say(ana, message(f"platform-pending:{ana.credentials.workspace_id}/{file_id}"))
        ana.until_said("message message/send")

    path = str(into / LETTER.name)
    logged: list[Any] = [json.loads(line) for line in log.read_text().splitlines()]
    assert logged == [[path, LETTER.name], [path, LETTER.name], f"workspace:{path}"]
    assert list(found(into)) == [LETTER.name]


def command(code: str, log: Path) -> str:
    words = [sys.executable, "-c", code, str(log)]
    return " ".join("'" + word.replace("'", "'\"'\"'") + "'" for word in words)


def message(uri: str) -> dict[str, Any]:
    parts = [{"kind": "file", "file": {"uri": uri}}]
    return {"jsonrpc": "2.0", "method": "message/send", "params": {"message": {"parts": parts}}}


def test_a_directory_that_is_deleted_is_reported_and_used_again(
    office: Office, ana: Connect, into: Path
):
    """An unmounted disk comes back; nothing is written below its mount point in the meantime."""
    into.rmdir()
    office.send(ana, NOTE)

    assert "No such file or directory. Trying again" in ana.until_said(f"{into} cannot be used")
    assert office.waiting(ana) == {NOTE.name}
    into.mkdir()

    assert_arrived_once(office, ana, into, NOTE)


def test_the_folder_is_in_the_directory_unless_it_is_given(office: Office, tmp_path: Path):
    """One flag is enough for a newcomer."""
    into = tmp_path / "inbox"
    once = ("connect", office.server.address, "--into", into, "--once")

    first, second = (restante(*once, NO_COLOR="1") for _ in range(2))

    assert (first.code, second.code) == (0, 0)
    assert first.stdout.splitlines()[1].split()[-1] == second.stdout.splitlines()[0].split()[-1]
    assert sorted(path.name for path in into.iterdir()) == [".molecule"]


@pytest.mark.parametrize("wrong", ["a file", "read only"])
def test_a_directory_that_cannot_be_used_is_one_sentence(
    office: Office, tmp_path: Path, wrong: str
):
    (tmp_path / "a file").write_bytes(b"mine")
    (tmp_path / "read only").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", tmp_path / "read only"]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a filesystem, and not everywhere")
    try:
        done = restante(
            "connect",
            office.server.address,
            *("--dir", tmp_path / "root", "--into", tmp_path / wrong, "--once"),
        )
    finally:
        subprocess.run(["umount", "--lazy", tmp_path / "read only"], check=True)

    assert done.code == 1
    assert done.stderr.startswith(f"restante: {tmp_path / wrong} cannot be used: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "root").exists()
