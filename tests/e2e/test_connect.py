"""
A file that the server accepted arrives exactly once, whatever fails on the way.

Each test creates one moment at which a crash could lose or duplicate a file.  A proxy holds back a
request or its answer while `restante connect` is killed, or the test creates the state that a crash
leaves in the folder.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from connecting import Connect, Office
from listeners import Request
from processes import wait_until
from proxies import Fault, Proxy, calm, files_with, stalled_files

from restante.client import Bytes

MIB = 1024 * 1024
LETTER = Bytes("letter.bin", os.urandom(3 * MIB))
NOTE = Bytes("note.txt", b"n")

ACKS = "/pending-uploads/[^/]+/ack$"


@pytest.fixture
def ana(tmp_path: Path, proxy: Proxy) -> Iterator[Connect]:
    with Connect(tmp_path / "ana", proxy.address) as ana:
        yield ana.start()


def contents(proxy: Proxy) -> list[Request]:
    """The download requests."""
    return [request for request in proxy.requests if request.path.endswith("/content")]


def assert_arrived_once(office: Office, at: Connect, *files: Bytes) -> None:
    """Each file exists once with its content, nothing else exists, and nothing is pending."""
    office.until_nothing_waits(at)
    wait_until(lambda: not at.partials(), seconds=10, what="removing the partial files")
    assert at.names() == sorted(file.name for file in files)
    for file in files:
        found = at.path_of(file.name)
        assert sha256(found.read_bytes()) == sha256(file.content)
        assert found.stat().st_mode & 0o777 == 0o600


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_each_workspace_gets_its_own_files(office: Office, proxy: Proxy, ana: Connect):
    with Connect(ana.root.with_name("ben"), proxy.address).start() as ben:
        office.send(ana, LETTER)
        office.send(ben, NOTE)

        assert_arrived_once(office, ana, LETTER)
        assert_arrived_once(office, ben, NOTE)


def test_a_file_whose_ack_was_never_sent_is_not_placed_again(
    office: Office, proxy: Proxy, ana: Connect
):
    hold = proxy.hold("POST", ACKS)
    office.send(ana, LETTER)
    hold.until_reached()
    ana.kill()
    proxy.release()

    ana.start()

    assert_arrived_once(office, ana, LETTER)
    assert len(contents(proxy)) == 1


def test_a_file_whose_ack_was_not_answered_is_not_placed_again(
    office: Office, proxy: Proxy, ana: Connect
):
    hold = proxy.hold("POST", ACKS, answers=True)
    office.send(ana, LETTER)
    hold.until_reached()
    ana.kill()
    proxy.release()

    ana.start()

    assert_arrived_once(office, ana, LETTER)
    assert len(contents(proxy)) == 1


@pytest.mark.parametrize("answers", [False, True])
def test_a_file_that_was_moved_away_before_its_ack_does_not_come_back(
    office: Office, proxy: Proxy, ana: Connect, *, answers: bool
):
    """A program that watches the folder may be faster than the network."""
    hold = proxy.hold("POST", ACKS, answers=answers)
    office.send(ana, LETTER)
    hold.until_reached()
    taken = ana.path_of(LETTER.name).rename(ana.root / "taken")
    ana.kill()
    proxy.release()

    ana.start()
    office.send(ana, NOTE)

    assert_arrived_once(office, ana, NOTE)
    assert sha256(taken.read_bytes()) == sha256(LETTER.content)


def test_a_file_that_has_its_name_reserved_is_placed_without_another_fetch(
    office: Office, proxy: Proxy, ana: Connect
):
    """A crash between recording the name and placing; the missing directory makes placing fail."""
    ana.uploads.rmdir()
    office.send(ana, LETTER)
    ana.until_said("chat-uploads/")
    ana.kill()

    ana.start()

    assert_arrived_once(office, ana, LETTER)
    assert len(contents(proxy)) == 1


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_file_with_both_its_names_appears_once(
    office: Office, proxy: Proxy, ana: Connect, *, is_taken: bool
):
    """A crash between link and unlink."""
    hold = proxy.hold("POST", ACKS)
    (file_id,) = office.send(ana, LETTER)
    hold.until_reached()
    ana.kill()
    placed = ana.path_of(LETTER.name)
    (ana.arriving / f"{file_id}.part").hardlink_to(placed)
    if is_taken:
        placed.rename(ana.root / "taken")
    proxy.release()

    ana.start()

    assert_arrived_once(office, ana, *([] if is_taken else [LETTER]))
    assert len(contents(proxy)) == 1


def test_a_complete_file_that_was_not_recorded_is_verified_and_not_sent_again(
    office: Office, proxy: Proxy, ana: Connect
):
    """A crash between the last byte and the record; one byte is fetched, for the hash."""
    ana.kill()
    (file_id,) = office.send(ana, LETTER)
    ana.left_behind(file_id, LETTER.content)

    ana.start()

    assert_arrived_once(office, ana, LETTER)
    assert [request.headers.get("range") for request in contents(proxy)] == [
        f"bytes={len(LETTER.content) - 1}-"
    ]


def test_a_corrupt_partial_file_is_discarded(office: Office, proxy: Proxy, ana: Connect):
    """After a power cut a file may have its length and lose its content."""
    ana.kill()
    (file_id,) = office.send(ana, LETTER)
    ana.left_behind(file_id, bytes(2 * MIB))

    ana.start()

    assert_arrived_once(office, ana, LETTER)


def test_a_killed_download_is_resumed(office: Office, proxy: Proxy, ana: Connect):
    proxy.weather = stalled_files(2 * MIB)
    office.send(ana, LETTER)
    ana.until_arriving(2 * MIB)
    ana.kill()
    proxy.weather = calm

    ana.start()

    assert_arrived_once(office, ana, LETTER)
    assert [request.headers.get("range") for request in contents(proxy)] == [
        None,
        f"bytes={2 * MIB}-",
    ]


def test_a_download_that_is_interrupted_repeatedly_is_resumed(
    office: Office, proxy: Proxy, ana: Connect
):
    """Each attempt receives some bytes, so it finishes."""
    proxy.weather = files_with(Fault(answer_bytes=MIB))
    office.send(ana, LETTER)

    assert_arrived_once(office, ana, LETTER)
    assert [request.headers.get("range") for request in contents(proxy)] == [
        None,
        f"bytes={MIB}-",
        f"bytes={2 * MIB}-",
    ]


def test_it_reconnects_after_a_network_outage(office: Office, proxy: Proxy, ana: Connect):
    proxy.weather = stalled_files(MIB)
    office.send(ana, LETTER, NOTE)
    ana.until_arriving(MIB)

    proxy.cut()
    proxy.weather = calm
    ana.until_said("cannot be reached: Connection refused. Trying again")
    proxy.restore()

    ana.until_said("Online again.")
    assert_arrived_once(office, ana, LETTER, NOTE)


def test_a_feed_ack_that_was_lost_is_sent_later(office: Office, proxy: Proxy, ana: Connect):
    hold = proxy.hold("POST", "/activity/ack$")
    office.send(ana, NOTE)
    hold.until_reached()
    ana.kill()
    proxy.release()

    ana.start()
    office.send(ana, LETTER)

    assert_arrived_once(office, ana, NOTE, LETTER)
    wait_until(lambda: office.acked_seq(ana) == 2, seconds=10, what="the feed ack")


def test_without_its_database_a_folder_receives_what_is_pending(
    office: Office, proxy: Proxy, ana: Connect
):
    """It starts after the acknowledged row, and the list of pending uploads has the rest."""
    office.send(ana, NOTE)
    assert_arrived_once(office, ana, NOTE)
    wait_until(lambda: office.acked_seq(ana) == 1, seconds=10, what="the feed ack")
    ana.kill()
    for path in ana.arriving.parent.glob("progress.sqlite*"):
        path.unlink()
    office.send(ana, LETTER)

    ana.start()

    assert_arrived_once(office, ana, NOTE, LETTER)


def test_memory_does_not_grow_with_the_number_of_files(office: Office, fast_disk: Path):
    with Connect(fast_disk / "ana", office.server.address).start() as ana:
        receive(office, ana, 200)
        after_some = ana.memory_mib()
        receive(office, ana, 800)
        grown = ana.memory_mib() - after_some

    print(f"{after_some:.1f} MiB after 200 files, {grown:+.1f} MiB after 1,000")
    assert grown < 10
    assert len(ana.names()) == 1000


def receive(office: Office, at: Connect, count: int) -> None:
    """Send files, most of them small, and wait for them."""
    for first in range(0, count, 50):
        sizes = [MIB if number % 25 == 0 else 1000 + number for number in range(50)]
        files = [Bytes(f"{first + n}.bin", bytes([n]) * size) for n, size in enumerate(sizes)]
        office.send(at, *files)
    office.until_nothing_waits(at, 90)


@pytest.fixture
def fast_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory: the speed of fsync does not matter here."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as name:
        yield Path(name)


def test_several_pages_of_pending_files_arrive(office: Office, proxy: Proxy, ana: Connect):
    """They are acknowledged while the list is read."""
    ana.kill()
    for path in ana.arriving.parent.glob("progress.sqlite*"):
        path.unlink()
    sent = [Bytes(f"{number}.txt", str(number).encode()) for number in range(120)]
    office.send(ana, *sent[:60])
    office.send(ana, *sent[60:])
    owner = office.owner(ana)
    owner.acknowledge_feed(120)

    ana.start()

    assert_arrived_once(office, ana, *sent)
