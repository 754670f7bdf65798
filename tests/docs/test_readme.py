"""The commands in the README work on a real server."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from processes import RESTANTE, Server, clean_environment

README = Path(__file__).parents[2] / "README.md"
TRY_IT = re.compile(r"^## Try it by hand$(.*?)^## ", re.MULTILINE | re.DOTALL)
SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
CONNECT = re.compile(r"^## Connect a laptop$(.*?)^## ", re.MULTILINE | re.DOTALL)
TALK = re.compile(r"^## Have a conversation$(.*?)^## ", re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:8080"


def first_blocks(directory: Path, server: Server) -> list[str]:
    """The try-out and the operator's commands, at this server and with files of our own."""
    found = TRY_IT.search(README.read_text())
    assert found
    blocks = SHELL_BLOCK.findall(found[1])[:2]
    assert all(ADDRESS in block or ".venv/bin/restante" in block for block in blocks)
    return [
        block.replace(ADDRESS, server.address)
        .replace("/tmp/", f"{directory}/")
        .replace(".venv/bin/restante", str(RESTANTE))
        for block in blocks
    ]


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_the_try_out_works_as_it_is_written(server: Server, tmp_path: Path):
    """A reader pastes it; the file comes back whole and is acknowledged, and the status knows."""
    server.start()
    shutil.copy(README, tmp_path / "README.md")

    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(first_blocks(tmp_path, server))],
        cwd=tmp_path,
        env=clean_environment(RESTANTE_DATA_DIR=str(server.data_dir), COLUMNS="200"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    registered, feed = (json.loads(line) for line in done.stderr.splitlines() if line)
    assert registered["status"] == "registered"
    assert [row["method"] for row in feed] == ["chat_upload_receive"]
    assert (tmp_path / "fetched.md").read_bytes() == README.read_bytes()
    assert '{"acked":true}' in done.stdout
    assert "0 never fetched, 0 fetched but not acknowledged, 1 acknowledged" in done.stdout
    assert "would be freed." in done.stdout


def test_a_laptop_is_connected_and_sent_to_as_it_is_written(server: Server, tmp_path: Path):
    """The newcomer's first minute: two commands, and a file is there."""
    server.start()
    shutil.copy(README, tmp_path / "README.md")
    found = CONNECT.search(README.read_text())
    assert found
    connect, send = (
        block.replace(ADDRESS, server.address).replace(".venv/bin/restante", str(RESTANTE))
        for block in SHELL_BLOCK.findall(found[1])
    )
    environment = clean_environment(
        RESTANTE_URL=server.address, RESTANTE_DATA_DIR=str(server.data_dir)
    )

    with subprocess.Popen(
        connect.split(), cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as connected:
        assert connected.stdout is not None
        until_said(connected.stdout, "Files appear in")
        subprocess.run(send.split(), cwd=tmp_path, env=environment, check=True, timeout=60)
        assert until_said(connected.stdout, "received").endswith("B  README.md\n")
        connected.terminate()

    assert (tmp_path / "inbox" / "README.md").read_bytes() == README.read_bytes()


def test_a_conversation_works_as_it_is_written(server: Server, tmp_path: Path):
    """A question, the answer of the agent's command, and something that it says by itself."""
    server.start()
    shutil.copy(README, tmp_path / "README.md")
    found = TALK.search(README.read_text())
    assert found
    connect, ask_and_look, notify = (
        block.replace(".venv/bin/restante", str(RESTANTE))
        for block in SHELL_BLOCK.findall(found[1])
    )
    ask, look = map(shlex.split, ask_and_look.splitlines())
    environment = clean_environment(
        RESTANTE_URL=server.address, RESTANTE_DATA_DIR=str(server.data_dir)
    )
    first = [RESTANTE, "connect", server.address, "--dir", "inbox", "--name", "laptop", "--once"]
    subprocess.run(first, cwd=tmp_path, env=environment, check=True, timeout=60)

    with (
        begun(shlex.split(connect), tmp_path, environment) as connected,
        begun(look, tmp_path, environment) as inbox,
    ):
        subprocess.run(ask, cwd=tmp_path, env=environment, check=True, timeout=60)
        subprocess.run(shlex.split(notify), cwd=tmp_path, env=environment, check=True, timeout=60)
        shown = [inbox.readline()[29:].strip() for _ in range(4)]
        until_said(connected, "answered: ")

    assert shown[0] == "canvas: How long is this?"
    agents = sorted(line for line in shown[1:])
    assert re.fullmatch(r"agent: +\d+ +\d+ +\d+", agents[0])
    assert agents[1] == "agent: I have read it. [README.md]"
    assert agents[2].startswith("agent: file README.md (")


@contextmanager
def begun(words: list[str], directory: Path, environment: dict[str, str]) -> Iterator[IO[str]]:
    """The output of a command that runs until the end of the context."""
    with subprocess.Popen(
        words, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.terminate()


def until_said(lines: IO[str], beginning: str) -> str:
    return next(line for line in lines if line.startswith(beginning))
