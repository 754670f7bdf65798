"""The record of received files survives crashes, damage and full disks."""

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from restante.client.calls import Cursor
from restante.client.progress import Progress, Received, State
from restante.errors import FolderFull, FolderInUse, FolderUnusable
from restante.ids import ActivityId, FileId

ROW = ActivityId(UUID("01234567-89ab-cdef-0123-456789abcdef"))

# Another process: opens the database, prints "open", then writes and prints numbers until killed.
WRITER = """
import sys
from pathlib import Path
from uuid import UUID
from restante.client.calls import Cursor
from restante.client.progress import Progress, Received, State

progress = Progress.open(Path(sys.argv[1]))
print("open", flush=True)
number = progress.cursor().seq if progress.cursor() else 0
while sys.argv[2] == "write":
    number += 1
    for state in State:
        progress.record(UUID(int=number), Received(f"name {number}", state))
    progress.keep_cursor(Cursor(number, UUID(int=number)))
    print(number, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    below = tmp_path / ".molecule" / "restante"
    below.mkdir(parents=True)
    return below / "progress.sqlite"


@pytest.fixture
def progress(path: Path) -> Iterator[Progress]:
    progress = Progress.open(path)
    yield progress
    progress.close()


@pytest.fixture
def small(path: Path) -> Iterator[Progress]:
    """A database that remembers three files."""
    with closing(Progress.open(path, max_files=3)) as progress:
        yield progress


def reopened(path: Path, progress: Progress) -> Progress:
    progress.close()
    return Progress.open(path)


def other_process(path: Path, task: str) -> "subprocess.Popen[str]":
    """A process that has the database open."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), task],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    with process:
        assert process.wait() == -signal.SIGKILL


# Records


def test_a_new_database_is_empty(progress: Progress):
    assert progress.cursor() is None
    assert progress.received(FileId(uuid4())) is None


@pytest.mark.parametrize("cursor", [Cursor(), Cursor(7), Cursor(7, ROW), Cursor(2**63 - 1, ROW)])
def test_the_cursor_is_stored(path: Path, progress: Progress, cursor: Cursor):
    progress.keep_cursor(Cursor(3, ROW))
    progress.keep_cursor(cursor)

    again = reopened(path, progress)

    assert again.cursor() == cursor
    again.close()


def test_the_last_state_of_a_file_is_stored(path: Path, progress: Progress):
    file_id = FileId(uuid4())
    for state in State:
        progress.record(file_id, Received("a.txt", state))

    again = reopened(path, progress)

    assert again.received(file_id) == Received("a.txt", State.ACKED)
    again.close()


@pytest.mark.parametrize("name", ["../../.profile", "/etc/passwd", "..", ".", ""])
def test_a_recorded_name_that_leads_elsewhere_is_ignored(progress: Progress, name: str):
    """Somebody else has written the database; the file is fetched and named again."""
    file_id = FileId(uuid4())

    progress.record(file_id, Received(name, State.PLACING))

    assert progress.received(file_id) is None


def test_a_file_that_is_received_again_gets_its_new_name(progress: Progress):
    """It was reopened on the server after its owner had moved the first copy away."""
    file_id = FileId(uuid4())
    progress.record(file_id, Received("first", State.ACKED))

    progress.record(file_id, Received("second", State.PLACING))

    assert progress.received(file_id) == Received("second", State.PLACING)


def test_only_the_newest_files_are_remembered(small: Progress):
    """The database of a folder that received millions of files stays small."""
    files = [FileId(uuid4()) for _ in range(20)]
    for file_id in files:
        small.record(file_id, Received("a", State.PLACING))
        small.record(file_id, Received("a", State.ACKED))

    known = [file_id for file_id in files if small.received(file_id)]

    assert known == files[-3:]


def test_an_old_file_that_is_received_again_is_not_forgotten_at_once(small: Progress):
    """A file that is being placed must be known after a crash."""
    files = [FileId(uuid4()) for _ in range(3)]
    for file_id in (*files, files[0]):
        small.record(file_id, Received("a", State.PLACING))

    assert all(small.received(file_id) for file_id in files)


def test_unacknowledged_files_are_never_forgotten_and_are_bounded(small: Progress):
    """A forgotten one would be fetched again under another name, on every pass."""
    stuck = [FileId(uuid4()) for _ in range(3)]
    for file_id in stuck:
        small.check_room()
        small.record(file_id, Received("a", State.PLACING))
    for _ in range(10):
        small.record(FileId(uuid4()), Received("a", State.ACKED))

    with pytest.raises(FolderFull, match="command"):
        small.check_room()

    assert all(small.received(file_id) for file_id in stuck)
    small.record(stuck[0], Received("a", State.ACKED))
    small.check_room()


# Locking


def test_only_one_process_can_open_it(path: Path):
    """Two processes with one folder would both fetch every file."""
    other = other_process(path, "hold")

    with pytest.raises(FolderInUse, match=str(path.parent.parent.parent)):
        Progress.open(path)

    kill(other)
    Progress.open(path).close()


def test_closing_releases_the_lock(path: Path, progress: Progress):
    progress.close()
    other = other_process(path, "hold")
    kill(other)


# Crashes and damage


def test_records_survive_kill_9(path: Path):
    """Five times in a row, while it writes."""
    for lines in (1, 2, 3, 5, 8):
        other = other_process(path, "write")
        assert other.stdout is not None
        last = [int(other.stdout.readline()) for _ in range(lines)][-1]
        kill(other)

        progress = Progress.open(path)
        cursor = progress.cursor()
        assert cursor is not None
        assert cursor.seq >= last
        assert cursor.id == UUID(int=cursor.seq)
        for number in range(1, cursor.seq + 1):
            received = progress.received(FileId(UUID(int=number)))
            assert received == Received(f"name {number}", State.ACKED)
        progress.close()


def test_a_file_that_is_not_a_database_is_reported(path: Path):
    path.write_bytes(b"not a database, and long enough to be one" * 100)

    with pytest.raises(FolderUnusable, match="move it away") as caught:
        Progress.open(path)

    assert str(path) in str(caught.value)


def test_a_truncated_database_is_reported(path: Path, progress: Progress):
    progress.keep_cursor(Cursor(1, ROW))
    progress.close()
    path.write_bytes(path.read_bytes()[:-4096])

    with pytest.raises(FolderUnusable, match="move it away"):
        _read_all(path, FileId(uuid4()))


def _read_all(path: Path, file_id: FileId) -> None:
    with closing(Progress.open(path)) as damaged:
        damaged.cursor()
        damaged.received(file_id)


@pytest.mark.parametrize(
    "damage", ["update cursor set id = 'no uuid'", "update files set state = 'lost'"]
)
def test_an_invalid_row_is_reported(path: Path, progress: Progress, damage: str):
    """SQLite does not detect every flipped bit."""
    file_id = FileId(uuid4())
    progress.keep_cursor(Cursor(1, ROW))
    progress.record(file_id, Received("a", State.ACKED))
    progress.close()
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(damage)
    connection.close()

    with pytest.raises(FolderUnusable, match="move it away"):
        _read_all(path, file_id)


def test_a_damaged_file_can_be_moved_away(path: Path):
    path.write_bytes(b"x" * 4096)

    path.rename(path.with_suffix(".old"))

    assert Progress.open(path).cursor() is None


def test_a_missing_directory_is_reported(tmp_path: Path):
    with pytest.raises(FolderUnusable):
        Progress.open(tmp_path / "missing" / "progress.sqlite")


def test_a_full_disk_is_reported_and_loses_nothing(small_disk: Path):
    """No record is half written, and writing works again once there is space."""
    recorded: list[FileId] = []

    def record(count: int) -> None:
        for _ in range(count):
            file_id = FileId(uuid4())
            progress.record(file_id, Received("x" * 200, State.PLACING))
            recorded.append(file_id)

    with closing(Progress.open(small_disk / "progress.sqlite")) as progress:
        (small_disk / "filler").write_bytes(bytes(128 * 1024))
        with pytest.raises(FolderFull, match="free some space"):
            record(10_000)
        (small_disk / "filler").unlink()
        record(1)

        assert len(recorded) > 1
        assert all(progress.received(file_id) for file_id in recorded)
