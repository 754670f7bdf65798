"""A full disk: only stored files are acknowledged, and free space is enough to continue."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from connecting import Connect, Office
from processes import wait_until
from proxies import Proxy

from restante.client import Bytes

MIB = 1024 * 1024
PAGE = 4096
LETTER = Bytes("letter.bin", os.urandom(2 * MIB))
NOTE = Bytes("note.txt", os.urandom(16 * PAGE))

NO_SPACE = "There is no space left for "


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of four mebibytes."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small filesystem, and not everywhere")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


@pytest.fixture
def ana(disk: Path, proxy: Proxy) -> Iterator[Connect]:
    with Connect(disk / "ana", proxy.address) as ana:
        yield ana.start()


class Filler:
    """A file that fills the disk, except for some bytes.

    It is allocated in one piece: if the disk were full for a moment before the rest is given back,
    whatever connect writes then would fail.
    """

    def __init__(self, disk: Path, *, leave: int = 0) -> None:
        self._path = disk / "filler"
        while not self._fill(shutil.disk_usage(disk).free - leave):
            pass

    def _fill(self, size: int) -> bool:
        with self._path.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:  # connect wrote something since we looked
                if error.errno != errno.ENOSPC:
                    raise
                return False
        return True

    def remove(self) -> None:
        self._path.unlink()


def assert_arrived_once(office: Office, at: Connect, file: Bytes) -> None:
    office.until_nothing_waits(at)
    assert at.names() == [file.name]
    assert at.path_of(file.name).read_bytes() == file.content
    wait_until(lambda: not at.partials(), seconds=10, what="removing the partial files")


def test_a_file_without_space_is_received_once_there_is_some(
    office: Office, disk: Path, ana: Connect
):
    filler = Filler(disk, leave=MIB)
    office.send(ana, LETTER)

    said = ana.until_said(NO_SPACE)
    assert "/arriving/" in said
    assert f"it needs {2 * MIB} bytes, and " in said
    assert office.waiting(ana) == {LETTER.name}
    assert ana.names() == []

    filler.remove()
    assert_arrived_once(office, ana, LETTER)
    assert ana.is_running()


def test_a_file_that_does_not_fit_does_not_stop_smaller_ones(
    office: Office, disk: Path, ana: Connect
):
    """Else a sender could stop a workspace with one large file."""
    Filler(disk, leave=MIB)
    office.send(ana, LETTER, NOTE)

    ana.until_received("note.txt")

    assert ana.names() == [NOTE.name]
    assert office.waiting(ana) == {LETTER.name}
    assert not any(partial.stat().st_size for partial in ana.partials())


def test_a_file_that_cannot_be_recorded_is_not_placed(
    office: Office, disk: Path, proxy: Proxy, ana: Connect
):
    """There is space for the bytes, but not for the record of their name."""
    hold = proxy.hold("GET", "/content$")
    office.send(ana, NOTE)
    hold.until_reached()
    filler = Filler(disk, leave=len(NOTE.content))
    proxy.release()

    assert "progress.sqlite" in ana.until_said(NO_SPACE)
    assert office.waiting(ana) == {NOTE.name}
    assert ana.names() == []

    filler.remove()
    assert_arrived_once(office, ana, NOTE)


def test_an_ack_that_cannot_be_recorded_is_repeated(
    office: Office, disk: Path, proxy: Proxy, ana: Connect
):
    hold = proxy.hold("POST", "/pending-uploads/[^/]+/ack$")
    office.send(ana, NOTE)
    hold.until_reached()
    filler = Filler(disk)
    proxy.release()

    assert "progress.sqlite" in ana.until_said(NO_SPACE)

    filler.remove()
    ana.until_received("note.txt")
    assert_arrived_once(office, ana, NOTE)


def test_a_crash_on_a_full_disk_loses_nothing(office: Office, disk: Path, ana: Connect):
    """It starts on the full disk, reports it, and continues once there is space."""
    filler = Filler(disk, leave=MIB)
    office.send(ana, LETTER)
    ana.until_said(NO_SPACE)
    ana.kill()
    filler.remove()
    filler = Filler(disk)

    ana.start()
    ana.until_said(NO_SPACE)
    assert office.waiting(ana) == {LETTER.name}
    filler.remove()

    assert_arrived_once(office, ana, LETTER)


def test_the_rest_arrives_when_a_large_file_does_not_fit(office: Office, disk: Path, ana: Connect):
    """A user frees space by moving received files away."""
    letters = [Bytes(f"{number}.bin", os.urandom(MIB + MIB // 2)) for number in range(4)]
    office.send(ana, *letters)
    ana.until_said(NO_SPACE)
    kept: dict[str, bytes] = {}

    def take_away() -> bool:
        for path in list(ana.uploads.iterdir()):
            kept[path.name[33:]] = path.read_bytes()
            path.unlink()
        return len(kept) == len(letters)

    wait_until(take_away, seconds=30, what="all four")
    assert kept == {letter.name: letter.content for letter in letters}
    office.until_nothing_waits(ana)
