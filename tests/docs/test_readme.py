"""The commands in the README and in the first steps work, one after the other, on a real server."""

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from processes import RESTANTE, Server, clean_environment, wait_until

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FIRST_STEPS = ROOT / "docs/first-steps.md"
SECTION = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:8080"
ANOTHER_MACHINE = "A laptop that is another machine"

# Not run here: the server runs already, and tests/install builds and installs the wheel.
NOT_HERE = ("make ", ".venv/bin/hatchling ", "uvx ", "pipx ", "pip ")


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The shell blocks of a page, each with the title of its section."""
    for title, text in SECTION.findall(page.read_text()):
        for block in SHELL_BLOCK.findall(text):
            yield title, block


class Terminals:
    """Those of a reader who pastes every block; what lasts gets a terminal of its own."""

    def __init__(self, server: Server, directory: Path) -> None:
        self._server = server
        self._environment = clean_environment(
            RESTANTE_URL=server.address,
            RESTANTE_DATA_DIR=str(server.data_dir),
            TOKEN=server.admin_token,
            COLUMNS="200",
        )
        self._lasting: dict[str, subprocess.Popen[bytes]] = {}
        self._output = directory / "output"

    def paste(self, block: str, directory: Path) -> None:
        """Run a block to its end; a line that lasts stays open until its like begins."""
        lasting = [line for line in block.splitlines() if _lasts(line)]
        lines = [line for line in block.splitlines() if line not in lasting]
        # Not into the file: `tee /dev/stderr` would empty it.
        with self._begun("\n".join(lines), directory, subprocess.PIPE) as process:
            said, _ = process.communicate(timeout=60)
        self._note(said)
        assert process.returncode == 0, f"{block}\n{self.said}"
        for line in lasting:
            terminal = f"{directory} {line.split()[1]}"
            self._press_ctrl_c(terminal)
            with self._output.open("ab") as output:
                self._lasting[terminal] = self._begun(f"exec {line}", directory, output)

    def _begun(
        self, commands: str, directory: Path, output: IO[bytes] | int
    ) -> "subprocess.Popen[bytes]":
        here = (
            commands.replace(ADDRESS, self._server.address)
            .replace("https://restante.example", self._server.address)
            .replace("/tmp/", f"{directory}/")
            .replace(".venv/bin/restante", str(RESTANTE))
            .replace("exec restante ", f"exec {RESTANTE} ")
        )
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", here],
            cwd=directory,
            env=self._environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def _note(self, said: bytes) -> None:
        with self._output.open("ab") as output:
            output.write(said)

    @property
    def said(self) -> str:
        return self._output.read_text()

    def _press_ctrl_c(self, terminal: str) -> None:
        if process := self._lasting.pop(terminal, None):
            process.send_signal(signal.SIGINT)
            assert process.wait(60) in {0, 130}

    def close(self) -> None:
        for terminal in list(self._lasting):
            self._press_ctrl_c(terminal)

    def wait_for(self, path: Path) -> None:
        wait_until(path.exists, seconds=60, what=f"{path.name} in {self.said}")

    def wait_for_line(self, pattern: str) -> None:
        wait_until(
            lambda: re.search(pattern, self.said, re.MULTILINE),
            seconds=60,
            what=f"{pattern} in {self.said}",
        )


def _lasts(line: str) -> bool:
    return "restante connect " in line or "--follow" in line


@contextmanager
def opened(server: Server, directory: Path) -> Iterator[Terminals]:
    terminals = Terminals(server, directory)
    try:
        yield terminals
    finally:
        terminals.close()


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_all_commands_work_one_after_the_other(server: Server, tmp_path: Path):
    """A newcomer pastes them in one session: none of them breaks a later one."""
    server.start()
    shutil.copy(README, tmp_path)
    laptop = tmp_path / "laptop"
    laptop.mkdir()

    with opened(server, tmp_path) as terminals:
        for title, block in (*blocks(README), *blocks(FIRST_STEPS)):
            if not block.startswith(NOT_HERE):
                directory = laptop if title == ANOTHER_MACHINE else tmp_path
                terminals.paste(block, directory)
                terminals.wait_for(directory / "inbox/.molecule/restante/credentials.json")

        terminals.paste(".venv/bin/restante send laptop README.md", tmp_path)
        terminals.wait_for(tmp_path / "inbox/README (2).md")
        terminals.wait_for_line(r"agent: +\d+ +\d+ +\d+$")
        terminals.wait_for_line(r"agent: I have read it\. \[README\.md\]$")

    said = terminals.said
    assert (tmp_path / "inbox/README.md").read_bytes() == README.read_bytes()
    assert (tmp_path / "fetched.md").read_bytes() == README.read_bytes()
    assert '"status":"registered"' in said
    assert '"method":"chat_upload_receive"' in said
    assert '{"acked":true}' in said
    assert "canvas: How long is this?" in said
    assert "would be freed." in said


def test_the_readme_is_short_and_shows_a_picture_that_needs_nothing_else():
    """It is read in half a minute; the picture has neither scripts nor fonts from elsewhere."""
    (picture,) = re.findall(r"!\[[^]]{40,}\]\((.*?)\)", README.read_text())
    drawn = (ROOT / picture).read_text()

    assert len(README.read_text().splitlines()) < 140
    assert "restante connect" in drawn
    for loads in ("<script", "<image", "<foreignObject", "href", "src=", "url(", "@import"):
        assert loads not in drawn
