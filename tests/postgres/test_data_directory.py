"""The data directory: made private, owned by one process at a time."""

import os
import stat
from pathlib import Path

import pytest

from restante.errors import DataDirectoryInUse, DataDirectoryUnusable
from restante.postgres import DataDirectory


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_we_make_is_closed_to_others(place: Path) -> None:
    """Root's is passed through by Postgres's account, so it has the x bit and nothing more."""
    directory = DataDirectory.open(place / "above" / "data")

    assert mode(directory.path) == (0o711 if os.geteuid() == 0 else 0o700)


def test_what_existed_keeps_its_mode(place: Path) -> None:
    """An operator's directory is the operator's to open or close."""
    path = place / "data"
    path.mkdir()
    path.chmod(0o750)

    DataDirectory.open(path)

    assert mode(path) == 0o750


def test_a_file_in_its_place_is_refused_with_a_sentence(place: Path) -> None:
    (place / "data").write_text("not a directory")

    with pytest.raises(DataDirectoryUnusable, match=r"data cannot be used: .*\. Choose another"):
        DataDirectory.open(place / "data")


def test_a_place_that_cannot_be_made_is_refused_with_a_sentence() -> None:
    with pytest.raises(DataDirectoryUnusable, match="cannot be used"):
        DataDirectory.open(Path("/proc/restante"))


def test_a_second_owner_is_told_who_the_first_is(directory: DataDirectory) -> None:
    with (
        directory.claim(),
        pytest.raises(DataDirectoryInUse, match=rf"Another Restante \(process {os.getpid()}\) is"),
        directory.claim(),
    ):
        pass


def test_an_owner_that_left_is_followed_by_the_next(directory: DataDirectory) -> None:
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
