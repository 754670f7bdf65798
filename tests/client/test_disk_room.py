"""What is received leaves a reserve on the disk, however many files arrive at once."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from restante.client.disk import Directory
from restante.errors import NoRoomForFile

MIB = 1024**2
GIB = 1024**3


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A disk of 10 GiB with 2 GiB free; a reserve of 512 MiB stays."""
    found = SimpleNamespace(f_blocks=10 * GIB, f_frsize=1, f_bavail=2 * GIB)

    def measured(_descriptor: int) -> Any:
        return found

    monkeypatch.setattr(os, "fstatvfs", measured)
    return found


def test_a_file_must_leave_the_reserve(disk: Any, tmp_path: Path):
    with Directory.open(tmp_path) as folder, folder.partial("a.part") as partial:
        partial.check_room(2 * GIB - 512 * MIB)

        with pytest.raises(NoRoomForFile) as caught:
            partial.check_room(2 * GIB - 512 * MIB + 1)

    assert caught.value.facts["free"] == 2 * GIB - 512 * MIB


def test_the_reserve_of_a_large_disk_is_bounded(disk: Any, tmp_path: Path):
    disk.f_blocks = 1000 * GIB
    with Directory.open(tmp_path) as folder, folder.partial("a.part") as partial:
        partial.check_room(GIB)


def test_two_files_are_not_promised_the_same_space(disk: Any, tmp_path: Path):
    with Directory.open(tmp_path) as folder, folder.partial("b.part") as second:
        with folder.partial("a.part") as first:
            first.check_room(GIB)
            with pytest.raises(NoRoomForFile):
                second.check_room(GIB)

        second.check_room(GIB)


def test_what_is_written_is_not_counted_twice(disk: Any, tmp_path: Path):
    with Directory.open(tmp_path) as folder, folder.partial("a.part") as first:
        first.check_room(MIB)
        first.write(bytes(MIB))
        with folder.partial("b.part") as second:
            second.check_room(2 * GIB - 512 * MIB)


def test_a_download_stops_when_others_use_the_space_up_to_the_reserve(disk: Any, tmp_path: Path):
    """Another process may have been promised the same space."""
    with Directory.open(tmp_path) as folder, folder.partial("a.part") as partial:
        partial.check_room(GIB)
        partial.write(bytes(4 * MIB))
        disk.f_bavail = 511 * MIB

        with pytest.raises(NoRoomForFile):
            partial.write(bytes(4 * MIB))

        assert partial.size == 8 * MIB  # it can be resumed


def test_a_disk_without_sizes_is_not_judged(disk: Any, tmp_path: Path):
    disk.f_blocks = disk.f_bavail = 0
    with Directory.open(tmp_path) as folder, folder.partial("a.part") as partial:
        partial.check_room(GIB)
        partial.write(bytes(4 * MIB))
