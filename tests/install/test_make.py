"""`make` installs what a command needs, once, and nothing else."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVING, TOOLS = "requirements.lock", "requirements-dev.lock"

# Stands for Python, in a clone and in its environment: notes what it was asked to install.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
    "-m venv --clear .venv") echo anew >>done; rm -rf .venv ;;
    "-m pip "*)
        echo "$*" | grep -o '[a-z-]*[.]lock$\\|--editable .$' >>done
        test ! -e broken || exit 1 ;;
esac
mkdir -p .venv/bin && cp "$0" .venv/bin/python 2>/dev/null
printf '#!/bin/sh\\necho "$@" >>done' >.venv/bin/restante && chmod +x .venv/bin/restante
"""


class Clone:
    """A clone of the repository, as far as installing it is concerned."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("Makefile", "pyproject.toml", SERVING, TOOLS):
            shutil.copy(ROOT / name, directory)
        (directory / "python").write_text(FAKE_PYTHON)
        (directory / "python").chmod(0o755)

    def make(self, target: str, *, exits_with: int = 0) -> list[str]:
        """Run a command; what it has installed and run."""
        done = self.directory / "done"
        done.write_text("")
        ended = subprocess.run(
            ["make", "--silent", target, f"PYTHON={self.directory}/python"],
            cwd=self.directory,
            env={"PATH": os.environ["PATH"]},
            check=False,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == exits_with, ended.stderr
        return done.read_text().splitlines()

    def change(self, name: str) -> None:
        """Make a file newer than all that was installed."""
        newest = max(path.stat().st_mtime for path in (self.directory / ".venv").iterdir())
        os.utime(self.directory / name, (newest + 1, newest + 1))


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    (tmp_path / "clone").mkdir()
    return Clone(tmp_path / "clone")


def test_serving_installs_no_tools(clone: Clone):
    assert clone.make("serve") == ["anew", SERVING, "--editable .", "serve"]
    assert clone.make("serve") == ["serve"]


def test_an_environment_for_serving_gets_the_tools_later(clone: Clone):
    clone.make("serve")

    assert clone.make("setup") == [TOOLS]
    assert clone.make("setup") == []
    assert clone.make("serve") == ["serve"]


@pytest.mark.parametrize(
    ("changed", "installed"),
    [(SERVING, [SERVING, "--editable .", TOOLS]), (TOOLS, [TOOLS])],
    ids=["for serving", "with the tools"],
)
def test_a_changed_lock_file_is_installed_again(clone: Clone, changed: str, installed: list[str]):
    clone.make("setup")

    clone.change(changed)

    assert clone.make("setup") == installed


def test_an_installation_that_failed_begins_anew(clone: Clone):
    (clone.directory / "broken").touch()
    clone.make("serve", exits_with=2)
    (clone.directory / "broken").unlink()

    assert clone.make("setup") == ["anew", SERVING, "--editable .", TOOLS]


def test_a_moved_environment_is_made_anew(clone: Clone):
    """Its programs begin with the path that it had."""
    clone.make("setup")

    clone.directory = clone.directory.rename(clone.directory.with_name("moved"))

    assert clone.make("setup") == ["anew", SERVING, "--editable .", TOOLS]
