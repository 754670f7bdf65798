"""A backup has its name when it is complete, and otherwise leaves nothing behind."""

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disks import MIB, OtherProgram, small_disk

from restante.backup import destination
from restante.errors import BackupFailed


def write(
    path: Path, *pieces: bytes, meanwhile: Callable[[], object] = list, **chosen: Any
) -> None:
    """Write a file on another disk than the cluster, unless `chosen` says so."""
    given: dict[str, Any] = {"overwrite": False, "cluster": Path("/proc"), "reserve": MIB}
    with destination.opened(path, **(given | chosen)) as file:
        for piece in pieces:
            file.write(piece)
        meanwhile()


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_the_file_appears_when_it_is_complete(tmp_path: Path):
    path = tmp_path / "backup.tar"
    before: list[bool] = []

    write(path, b"first ", b"second", meanwhile=lambda: before.append(path.exists()))

    assert before == [False]
    assert path.read_bytes() == b"first second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [BackupFailed("because"), KeyboardInterrupt()], ids=repr)
def test_what_fails_leaves_nothing(tmp_path: Path, error: BaseException):
    with pytest.raises(type(error)):
        write(tmp_path / "backup.tar", b"some", meanwhile=failing(error))

    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_replaced_unless_that_is_wanted(tmp_path: Path):
    path = tmp_path / "backup.tar"
    path.write_bytes(b"precious")

    with pytest.raises(BackupFailed, match="exists"):
        write(path, b"newer")

    assert path.read_bytes() == b"precious"
    write(path, b"newer", overwrite=True)
    assert path.read_bytes() == b"newer"


def test_a_failed_backup_leaves_the_file_that_it_would_have_replaced(tmp_path: Path):
    path = tmp_path / "backup.tar"
    path.write_bytes(b"precious")

    with pytest.raises(BackupFailed, match="because"):
        write(path, b"some", meanwhile=failing(BackupFailed("because")), overwrite=True)

    assert path.read_bytes() == b"precious"


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path):
    path = tmp_path / "backup.tar"

    with pytest.raises(BackupFailed, match="exists"):
        write(path, b"mine", meanwhile=lambda: path.write_bytes(b"theirs"))

    assert path.read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_a_sentence_and_leaves_nothing(place: Path):
    with small_disk(place, 4) as disk:
        with pytest.raises(BackupFailed, match="no space left in"):
            write(disk / "backup.tar", *[bytes(MIB)] * 5)

        assert list(disk.iterdir()) == []


def test_on_the_disk_of_the_database_the_reserve_stays_free(place: Path):
    with small_disk(place, 8) as disk:
        OtherProgram(disk).take(4 * MIB)
        pieces = bytes(512 * 1024), bytes(MIB)

        with pytest.raises(BackupFailed, match="Write it to another disk"):
            write(disk / "backup.tar", *pieces, cluster=disk, reserve=3 * MIB)

        assert [file.name for file in disk.iterdir()] == ["somebody-else"]


@pytest.mark.parametrize("name", ["", "missing/backup.tar"], ids=["a directory", "no directory"])
def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path, name: str):
    with pytest.raises(BackupFailed):
        write(tmp_path / name)


def test_a_long_name_leaves_room_for_that_of_the_unfinished_file(tmp_path: Path):
    path = tmp_path / ("n" * 250)

    write(path, b"x")

    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_the_file_that_it_leads_to_is_written(tmp_path: Path):
    link, target = tmp_path / "newest.tar", tmp_path / "elsewhere.tar"
    link.symlink_to(target)

    write(link, b"x")

    assert link.is_symlink()
    assert target.read_bytes() == b"x"
    with pytest.raises(BackupFailed, match="exists"):
        write(link, b"y")


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_file_is_never_replaced(tmp_path: Path, overwrite: bool):
    """As root, it would be /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with pytest.raises(BackupFailed, match="is not a file"):
        write(pipe, b"x", overwrite=overwrite)

    assert pipe.is_fifo()


def test_standard_output_that_was_closed_is_no_place_for_a_backup(
    monkeypatch: pytest.MonkeyPatch,
):
    with Path(os.devnull).open("w") as instead:
        monkeypatch.setattr(sys, "stdout", instead)
        with pytest.raises(BackupFailed, match="closed"):
            write(destination.STANDARD_STREAM, b"x")


def test_links_in_a_circle_and_names_that_are_too_long_are_sentences(tmp_path: Path):
    (tmp_path / "a").symlink_to(tmp_path / "a")
    for name in ("a", "n" * 256):
        with pytest.raises(BackupFailed, match="cannot be written"):
            write(tmp_path / name, b"x")
