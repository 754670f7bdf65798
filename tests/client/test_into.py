"""
Files in a directory of the user: placed once, under their own names, over nothing.

A crash leaves the record, the partial file and the placed file in one of a few states.  Each test
creates one of them and runs the steps again.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from restante.client.disk import Directory
from restante.client.fetching import WaitingFile
from restante.client.folder import Folder
from restante.client.places import hidden_partial
from restante.client.progress import Received, State
from restante.errors import FolderUnusable
from restante.ids import FileId

NAME = "My letter.txt"


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "into"


@pytest.fixture
def folder(tmp_path: Path, into: Path) -> Iterator[Folder]:
    with Folder.open(tmp_path / "root", into) as folder:
        yield folder


def waiting(name: str = NAME) -> WaitingFile:
    return WaitingFile(FileId(uuid4()), "wire_name.txt", "", 5, name)


def fetched(folder: Folder, name: str = NAME) -> WaitingFile:
    """A file whose bytes are complete."""
    file = waiting(name)
    with folder.new_files.partial(file.file_id) as partial:
        partial.write(b"hello")
        partial.sync()
    return file


def deliver(folder: Folder, file: WaitingFile, *, has_command: bool = False) -> Path | None:
    """What a run does with a pending file before the acknowledgement; None if it would fetch it."""
    received = folder.progress.received(file.file_id)
    place = folder.place_of(received)
    if received and place.is_missing(file.file_id, received, has_command=has_command):
        return None
    received = place.place(file, received)
    place.settle(file.file_id, received, has_command=has_command)
    return place.path / received.name


def names(path: Path) -> list[str]:
    return sorted(found.name for found in path.iterdir())


def recorded(folder: Folder, file: WaitingFile, name: str = NAME) -> Received:
    """A record as it is before the file gets its name."""
    placing = Received(name, State.PLACING, str(folder.new_files.path))
    return folder.progress.record(file.file_id, placing)


def partial_of(into: Path, file: WaitingFile) -> Path:
    return into / hidden_partial(file.file_id)


# Placing


def test_a_file_gets_its_own_name_and_leaves_nothing_else(folder: Folder, into: Path):
    deliver(folder, fetched(folder))

    path = into / NAME
    assert path.read_bytes() == b"hello"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_nlink == 1
    assert names(into) == [NAME]


def test_without_a_name_for_people_the_other_is_used(folder: Folder, into: Path):
    """Earlier servers do not send it."""
    deliver(folder, fetched(folder, name=""))

    assert names(into) == ["wire_name.txt"]


@pytest.mark.parametrize("kind", ["file", "directory", "link", "pipe", "other case"])
def test_what_is_there_stays_as_it_is(folder: Folder, into: Path, tmp_path: Path, kind: str):
    """A dangling link must not become a file elsewhere."""
    there = into / (NAME.upper() if kind == "other case" else NAME)
    create: dict[str, Callable[[], object]] = {
        "directory": there.mkdir,
        "link": lambda: there.symlink_to(tmp_path / "elsewhere"),
        "pipe": lambda: os.mkfifo(there),
    }
    create.get(kind, lambda: there.write_bytes(b"mine"))()
    before = there.lstat()

    path = deliver(folder, fetched(folder))

    assert path == into / "My letter (2).txt"
    assert there.lstat().st_ino == before.st_ino
    assert not (tmp_path / "elsewhere").exists()
    if there.is_file():
        assert there.read_bytes() == b"mine"


def test_a_name_that_is_taken_in_the_last_moment_is_not_overwritten(
    folder: Folder, into: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another process received a file of the same name after we looked."""
    seen = iter([[], [NAME]])

    def names_seen(_directory: Directory) -> list[str]:
        return next(seen)

    monkeypatch.setattr(Directory, "names", names_seen)
    (into / NAME).write_bytes(b"mine")

    path = deliver(folder, fetched(folder))

    assert path == into / "My letter (2).txt"
    assert (into / NAME).read_bytes() == b"mine"


def test_two_folders_share_a_directory(folder: Folder, into: Path, tmp_path: Path):
    with Folder.open(tmp_path / "other", into) as other:
        placed = {deliver(here, fetched(here)) for here in (folder, other, folder)}

    assert placed == {into / name for name in (NAME, "My letter (2).txt", "My letter (3).txt")}
    assert len(names(into)) == 3


def test_without_hard_links_a_file_is_moved_to_its_name(
    folder: Folder, into: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a memory stick with FAT."""
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    (into / NAME).write_bytes(b"mine")

    path = deliver(folder, fetched(folder))

    assert path == into / "My letter (2).txt"
    assert names(into) == ["My letter (2).txt", NAME]
    assert (into / NAME).read_bytes() == b"mine"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EILSEQ, errno.ENAMETOOLONG])
def test_a_name_that_the_filesystem_refuses_is_replaced_by_the_plain_one(
    folder: Folder, into: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    """Else one name could stop everything."""
    link = os.link

    def ascii_only(source: str, target: str, **flags: object) -> None:
        if not target.isascii():
            raise OSError(number, os.strerror(number))
        link(source, target, **flags)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(os, "link", ascii_only)

    assert deliver(folder, fetched(folder, "\xdc.txt")) == into / "wire_name.txt"


def failing(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


# After a crash


def test_a_file_that_was_about_to_be_placed_is_placed(folder: Folder, into: Path):
    file = fetched(folder)
    recorded(folder, file)

    assert deliver(folder, file) == into / NAME
    assert names(into) == [NAME]


def test_a_file_of_another_program_is_not_taken_for_ours(folder: Folder, into: Path):
    """It appeared under the recorded name before we could use it."""
    file = fetched(folder)
    recorded(folder, file)
    (into / NAME).write_bytes(b"mine")

    assert deliver(folder, file) == into / "My letter (2).txt"
    assert (into / NAME).read_bytes() == b"mine"


@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("has_command", [False, True])
def test_a_placed_file_that_was_not_recorded_as_placed_appears_once(
    folder: Folder, into: Path, tmp_path: Path, *, is_taken: bool, has_command: bool
):
    """Between link and record; its owner may have taken it away, and a command needs it again."""
    file = fetched(folder)
    recorded(folder, file)
    (into / NAME).hardlink_to(partial_of(into, file))
    if is_taken:
        (into / NAME).rename(tmp_path / "taken")

    path = deliver(folder, file, has_command=has_command)

    if is_taken and has_command:
        assert path is None
    else:
        assert path == into / NAME
        assert names(into) == ([] if is_taken else [NAME])


@pytest.mark.parametrize("has_partial", [False, True])
def test_a_file_that_is_recorded_as_placed_does_not_come_back(
    folder: Folder, into: Path, *, has_partial: bool
):
    """Its owner took it to another disk, before or after we removed the partial file."""
    file = fetched(folder)
    received = recorded(folder, file).now(State.HANDLED)
    folder.progress.record(file.file_id, received)
    if not has_partial:
        partial_of(into, file).unlink()

    deliver(folder, file)

    assert names(into) == []


def test_a_file_that_was_moved_to_its_name_is_recognised(
    folder: Folder, into: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without hard links there is no partial file after the move."""
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    file = fetched(folder)
    recorded(folder, file)
    partial_of(into, file).rename(into / NAME)

    assert deliver(folder, file) == into / NAME
    assert names(into) == [NAME]


def test_a_file_without_any_trace_is_fetched_again(folder: Folder, into: Path):
    """After a crash its owner removed the hidden file too; it may not have been placed."""
    file = fetched(folder)
    recorded(folder, file)
    partial_of(into, file).unlink()

    assert deliver(folder, file) is None


def test_a_file_is_finished_where_it_was_begun(folder: Folder, into: Path, tmp_path: Path):
    """Even if the next run has another directory."""
    file = fetched(folder)
    recorded(folder, file)
    folder.close()

    with Folder.open(tmp_path / "root", tmp_path / "new") as again:
        assert deliver(again, file) == into / NAME

    assert names(into) == [NAME]
    assert names(tmp_path / "new") == []


@pytest.mark.parametrize("state", [State.PLACING, State.HANDLED])
def test_a_directory_that_is_gone_stops_nothing(
    folder: Folder, into: Path, tmp_path: Path, state: State
):
    """What was placed is acknowledged, what may not have been is fetched into the new one."""
    file = fetched(folder)
    folder.progress.record(file.file_id, recorded(folder, file).now(state))
    folder.close()
    partial_of(into, file).unlink()
    into.rmdir()

    with Folder.open(tmp_path / "root", tmp_path / "new") as again:
        placed = deliver(again, file)

    assert (placed is None) is (state is State.PLACING)
    assert not into.exists()


def test_a_file_that_is_pending_again_is_recognised_by_its_size(folder: Folder, into: Path):
    """Another file may have got its name since."""
    file = fetched(folder)
    path = deliver(folder, file)
    received = folder.progress.received(file.file_id)
    assert received
    assert path
    place = folder.place_of(received)
    assert place.has_unchanged(received, file.size)

    path.write_bytes(b"another")

    assert not place.has_unchanged(received, file.size)


def test_messages_get_the_path_of_the_file(folder: Folder, into: Path, tmp_path: Path):
    """Also in later runs, with or without the directory."""
    file = fetched(folder)
    recorded(folder, file)
    assert folder.uri_of(file.file_id) is None

    deliver(folder, file)
    assert folder.uri_of(file.file_id) == f"workspace:{into / NAME}"
    folder.close()

    with Folder.open(tmp_path / "root") as again:
        assert again.uri_of(file.file_id) == f"workspace:{into / NAME}"


# The directory


def test_a_missing_directory_is_created_for_its_owner_only(folder: Folder, into: Path):
    assert stat.S_IMODE(into.stat().st_mode) == 0o700


def test_the_directory_may_be_a_link(tmp_path: Path, into: Path):
    """Its owner chose it."""
    into.mkdir()
    (tmp_path / "link").symlink_to(into)

    with Folder.open(tmp_path / "root", tmp_path / "link") as folder:
        deliver(folder, fetched(folder))

    assert names(into) == [NAME]


def test_a_directory_that_is_deleted_can_be_created_again(folder: Folder, into: Path):
    into.rmdir()
    with pytest.raises(FolderUnusable, match=f"{into} cannot be used: No such file"):
        fetched(folder)

    into.mkdir()

    assert deliver(folder, fetched(folder)) == into / NAME


def test_old_partial_files_are_removed_and_new_ones_stay(folder: Folder, into: Path):
    """Another process may be receiving the new ones."""
    old, new = fetched(folder), fetched(folder)
    os.utime(partial_of(into, old), (0, 0))

    folder.remove_partials(keep=set())

    assert names(into) == [partial_of(into, new).name]


def test_a_database_of_an_earlier_release_is_used(tmp_path: Path, into: Path):
    """Its table has no column for the directory; its files are in the folder's own."""
    earlier = FileId(uuid4())
    with Folder.open(tmp_path / "root") as folder:
        database = folder.progress._connection
        database.execute("alter table files drop column directory")
        insert = "insert into files (file_id, name, state) values (?, 'a', 'acked')"
        database.execute(insert, (str(earlier),))

    with Folder.open(tmp_path / "root", into) as folder:
        assert folder.progress.received(earlier) == Received("a", State.ACKED)
        assert folder.uri_of(earlier) == f"workspace:{tmp_path}/root/.molecule/chat-uploads/a"
        assert deliver(folder, fetched(folder)) == into / NAME
