"""Streams that are closed: a reader that is gone ends a command with 141, a closed one is empty."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

import pytest

from restante.cli.main import main


@contextmanager
def closed_pipe() -> Iterator[TextIOWrapper]:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        yield pipe


def run(monkeypatch: pytest.MonkeyPatch, closed: str, *words: str) -> int:
    """Run a command in this process, with one of its streams closed; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["restante", *words])
    with closed_pipe() as pipe, Path(os.devnull).open("w") as nothing:
        monkeypatch.setattr(sys, "stdout", nothing)
        monkeypatch.setattr(sys, "stderr", nothing)
        monkeypatch.setattr(sys, closed, pipe)
        with pytest.raises(SystemExit) as ended:
            main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["connect", "--help"], ["completion", "bash"]],
    ids=" ".join,
)
def test_standard_output(monkeypatch: pytest.MonkeyPatch, words: list[str]):
    assert run(monkeypatch, "stdout", *words) == 141


@pytest.mark.parametrize(
    "words",
    [["send"], ["connect", "--nosuch"], ["swerve"], ["send", "laptop"], ["inbox", "--limit", "0"]],
    ids=" ".join,
)
def test_standard_error(monkeypatch: pytest.MonkeyPatch, words: list[str]):
    """The refusal of a wrong command line, and the sentence of an error."""
    assert run(monkeypatch, "stderr", *words) == 141


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--version"], 0),
        (["connect", "--new-token", "--dir", "/proc/nowhere"], 1),
        (["send", "laptop", "--message", "-"], 1),
        (["restore", "-", "--check"], 1),
    ],
    ids=str,
)
def test_streams_that_the_caller_has_closed_are_empty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], code: int
):
    """Python has None in their place."""
    monkeypatch.setenv("RESTANTE_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["restante", *words])
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as ended:
        main()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()

    assert (ended.value.code or 0) == code
