"""A release is a commit whose version and changelog agree."""

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def loaded() -> Any:
    """The script, which is in no package."""
    spec = importlib.util.spec_from_file_location("release", ROOT / "deploy/release.py")
    assert spec is not None
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = loaded()


def make_tree(tree: Path, version: str, heading: str) -> Path:
    (tree / "src/restante").mkdir(parents=True)
    (tree / "src/restante/__init__.py").write_text(f'"""X."""\n\n__version__ = "{version}"\n')
    (tree / "CHANGELOG.md").write_text(
        f"# Changelog\n\n{heading}\n\n- x\n\n## 0.0.9 (2030-01-01)\n"
    )
    return tree


@pytest.mark.parametrize("heading", ["## Unreleased: 1.2.0", "## 1.2.0 (2030-02-03)", "## 1.2.0"])
def test_the_changelog_begins_with_the_version(tmp_path: Path, heading: str):
    assert release.version_of(make_tree(tmp_path, "1.2.0", heading)) == "1.2.0"


@pytest.mark.parametrize("heading", ["## 1.2", "## 1.2.0rc1", "## 0.9.0 (2030-02-03)", ""])
def test_a_changelog_of_another_version_is_not_released(tmp_path: Path, heading: str):
    with pytest.raises(release.NotReleasable, match=r"the version is 1\.2\.0, and the changelog"):
        release.version_of(make_tree(tmp_path, "1.2.0", heading))


def test_what_is_here_could_be_released():
    assert release.version_of(ROOT)


def test_changes_that_are_not_committed_are_not_released(tmp_path: Path):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    release.refuse_changes(tmp_path)
    (tmp_path / "new.txt").touch()

    with pytest.raises(release.NotReleasable, match=r"commit or remove these first.*\n.*new\.txt"):
        release.refuse_changes(tmp_path)


def test_builds_that_differ_are_not_released(tmp_path: Path):
    (one := tmp_path / "a.whl").write_bytes(b"1")
    (two := tmp_path / "two" / "a.whl").parent.mkdir()
    two.write_bytes(b"2")

    release.same_bytes([one], [one])
    with pytest.raises(release.NotReleasable, match="two builds differ"):
        release.same_bytes([one], [two])


def test_a_program_that_fails_says_why():
    with pytest.raises(release.NotReleasable, match=r"`sh -c .*` failed:\nwhat went wrong"):
        release.run("sh", "-c", "echo what went wrong >&2; exit 3")
