"""The data directory is private and owned by one process at a time."""

import os
import stat
from pathlib import Path

import pytest

from restante.errors import DataDirectoryInUse, DataDirectoryUnusable
from restante.postgres import DataDirectory


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_directory_is_closed_to_others(place: Path) -> None:
    """As root, others get the x bit alone, so that the Postgres account can pass through."""
    directory = DataDirectory.open(place / "above" / "data")

    assert mode(directory.path) == (0o711 if os.geteuid() == 0 else 0o700)


def test_an_existing_directory_keeps_its_mode(place: Path) -> None:
    """The operator decides who may enter it."""
    path = place / "data"
    path.mkdir()
    path.chmod(0o750)

    DataDirectory.open(path)

    assert mode(path) == 0o750


def test_a_file_in_its_place_is_refused(place: Path) -> None:
    (place / "data").write_text("not a directory")

    with pytest.raises(DataDirectoryUnusable, match=r"data cannot be used: .*\. Choose another"):
        DataDirectory.open(place / "data")


def test_a_directory_that_cannot_be_created_is_refused() -> None:
    with pytest.raises(DataDirectoryUnusable, match="cannot be used"):
        DataDirectory.open(Path("/proc/restante"))


def test_a_second_owner_gets_the_pid_of_the_first(directory: DataDirectory) -> None:
    with (
        directory.claim(),
        pytest.raises(DataDirectoryInUse, match=rf"Another Restante \(process {os.getpid()}\) is"),
        directory.claim(),
    ):
        pass


def test_a_released_directory_can_be_claimed_again(directory: DataDirectory) -> None:
    with directory.claim():
        pass

    with directory.claim():
        assert int((directory.path / "lock").read_text()) == os.getpid()


def test_the_default_for_a_user_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", "/home/ada/data")

    assert DataDirectory.default() == Path("/home/ada/data/restante")


def test_the_default_without_xdg_is_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)

    assert DataDirectory.default() == Path("/home/ada/.local/share/restante")
