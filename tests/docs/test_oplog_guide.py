"""The guide to the op log works as it is written, with two server processes."""

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import RESTANTE, Server, clean_environment

from restante.postgres import binaries

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/oplog.md").read_text()
FIVE_MINUTES = re.compile(
    r"^## Connect two nodes in five minutes$(.*?)^## ", re.MULTILINE | re.DOTALL
)
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
DURATION = re.compile(r"\d+\.\d s")


def blocks() -> list[tuple[str, str]]:
    """Each block of shell commands, with the output that the guide shows for it."""
    found = FIVE_MINUTES.search(GUIDE)
    assert found
    pairs: list[tuple[str, str]] = []
    for kind, text in BLOCK.findall(found[1]):
        if kind == "sh":
            pairs.append((text, ""))
        else:
            pairs[-1] = (pairs[-1][0], text)
    return pairs


SERVE_A, SERVE_B, TRACK, INVITE, WRITE, WRITE_BACK, STATUS, EXCHANGE = blocks()


class Nodes:
    """The two servers of the guide, on free ports and in directories of the test."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.a, self.b = (Server(place / name).started_once() for name in ("node-a", "node-b"))
        for server, (command, _) in ((self.a, SERVE_A), (self.b, SERVE_B)):
            words = shlex.split(command)
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                server.port = free.getsockname()[1]
            at = words.index("--self-url")
            assert words[at + 1] == f"http://127.0.0.1:{words[words.index('--port') + 1]}"
            server.flags = ["--self-url", f"http://127.0.0.1:{server.port}"]

    def here(self, text: str) -> str:
        """The commands, or their output, at these servers."""
        return (
            text.replace("127.0.0.1:8081", f"127.0.0.1:{self.a.port}")
            .replace("127.0.0.1:8082", f"127.0.0.1:{self.b.port}")
            .replace("/tmp/node-", f"{self.place}/node-")
            .replace(".venv/bin/restante", str(RESTANTE))
        )

    def paste(self, block: tuple[str, str]) -> str:
        """Run the commands, and compare with the output that is shown."""
        programs = binaries.choose_binaries(None, major=None).bin_dir
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.here(block[0])],
            cwd=self.place,
            env=clean_environment(COLUMNS="80", PATH=f"{programs}:{os.environ['PATH']}"),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if block[1]:
            assert DURATION.sub("", done.stdout) == DURATION.sub("", self.here(block[1]))
        return done.stdout


@pytest.fixture
def nodes(place: Path) -> Iterator[Nodes]:
    nodes = Nodes(place)
    with nodes.a, nodes.b:
        nodes.a.begin()
        nodes.b.begin()
        nodes.a.until_ready()
        nodes.b.until_ready()
        yield nodes


def test_a_stranger_connects_two_nodes_as_it_is_written(nodes: Nodes):
    for block in (TRACK, INVITE, WRITE, WRITE_BACK):
        nodes.paste(block)

    status = nodes.paste(STATUS)

    assert nodes.here("This node is http://127.0.0.1:8081.") in status
    assert nodes.here("http://127.0.0.1:8082") in status
    assert "fails for" not in status


def test_two_nodes_are_joined_by_three_commands_as_it_is_written(nodes: Nodes):
    for block in (TRACK, EXCHANGE, WRITE, WRITE_BACK):
        nodes.paste(block)
