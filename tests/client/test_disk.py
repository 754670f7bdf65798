"""Received files on disk: complete or absent, never over a file, never through a link."""

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from restante.client.calls import Credentials
from restante.client.disk import Directory
from restante.client.fetching import WaitingFile
from restante.client.folder import HOME, OURS, UPLOADS, Folder, kept_credentials
from restante.client.places import unique_name
from restante.client.progress import Received, State
from restante.errors import FolderFull, FolderInUse, FolderUnusable
from restante.ids import FileId, WorkspaceId

NAME = "0123-a.txt"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory that must not change."""
    path = tmp_path / "outside"
    path.mkdir()
    (path / "precious").write_bytes(b"precious")
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def directory(root: Path) -> Iterator[Directory]:
    with Directory.open(root) as directory:
        yield directory


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def receive(directory: Directory, content: bytes = b"hello", name: str = NAME) -> Path:
    """Receive and place a file."""
    with directory.partial("a.part") as partial:
        partial.write(content)
        partial.sync()
    return directory.place("a.part", directory, name)


def put(path: Path, content: bytes = b"mine") -> Path:
    path.write_bytes(content)
    return path


# Placing


def test_placing_leaves_only_the_file(directory: Directory):
    path = receive(directory)

    assert path == directory.path / NAME
    assert path.read_bytes() == b"hello"
    assert directory.names() == [NAME]


def test_received_files_are_readable_by_their_owner_only(root: Path):
    """Whatever the umask."""
    before = os.umask(0)
    try:
        with Directory.open(root, "below", "further") as directory:
            path = receive(directory)
    finally:
        os.umask(before)

    assert mode_of(path) == 0o600
    assert mode_of(root / "below") == 0o700
    assert mode_of(root / "below" / "further") == 0o700


def test_a_file_is_never_replaced(directory: Directory, root: Path):
    mine = put(root / NAME)

    with pytest.raises(FolderUnusable, match="File exists"):
        receive(directory)

    assert mine.read_bytes() == b"mine"
    assert (root / "a.part").read_bytes() == b"hello"


def test_a_link_is_never_written_through(directory: Directory, root: Path, outside: Path):
    """Not even a dangling one: that would create a file elsewhere."""
    (root / NAME).symlink_to(outside / "new")

    with pytest.raises(FolderUnusable):
        receive(directory)

    assert not (outside / "new").exists()
    assert (root / NAME).is_symlink()


def test_a_partial_file_that_is_a_link_is_refused(directory: Directory, root: Path, outside: Path):
    (root / "a.part").symlink_to(outside / "precious")

    with pytest.raises(FolderUnusable):
        directory.partial("a.part")

    assert (outside / "precious").read_bytes() == b"precious"


@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_a_partial_file_that_is_not_a_regular_file_is_refused(
    directory: Directory, root: Path, kind: str
):
    """Writing to a pipe would block and lose the bytes."""
    if kind == "pipe":
        os.mkfifo(root / "a.part")
    else:
        (root / "a.part").mkdir()

    with pytest.raises(FolderUnusable):
        directory.partial("a.part")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_a_filesystem_without_hard_links_works(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, number: int
):
    """FAT and some network mounts; Linux returns EPERM."""
    monkeypatch.setattr(os, "link", failing(number))

    path = receive(directory)

    assert path.read_bytes() == b"hello"
    assert directory.names() == [NAME]


def test_a_file_is_not_replaced_without_hard_links(
    directory: Directory, root: Path, monkeypatch: pytest.MonkeyPatch
):
    mine = put(root / NAME)
    monkeypatch.setattr(os, "link", failing(errno.EPERM))

    with pytest.raises(FolderUnusable):
        receive(directory)

    assert mine.read_bytes() == b"mine"


def failing(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_placed_file_is_not_written_to(directory: Directory, root: Path):
    """After a crash between link and unlink, one file has two names."""
    path = receive(directory)
    (root / "a.part").hardlink_to(path)
    path.write_bytes(b"edited by its owner")

    with directory.partial("a.part") as partial:
        partial.write(b"other")

    assert path.read_bytes() == b"edited by its owner"
    assert (root / "a.part").read_bytes() == b"other"


def test_a_partial_file_is_locked(directory: Directory):
    with (
        directory.partial("a.part"),
        pytest.raises(FolderInUse, match=r"a\.part"),
        directory.partial("a.part"),
    ):
        pass

    with directory.partial("a.part") as partial:
        assert partial.size == 0


def test_removing_is_idempotent(directory: Directory, root: Path):
    put(root / "a")

    directory.remove("a")
    directory.remove("a")

    assert not directory.has("a")


def test_a_dangling_link_exists(directory: Directory, root: Path):
    """Otherwise its name would be used for a file."""
    (root / "a").symlink_to("nowhere")

    assert directory.has("a")
    directory.remove("a")
    assert not directory.has("a")


# Directories


@pytest.mark.parametrize("linked", [HOME, f"{HOME}/{UPLOADS}", f"{HOME}/{OURS}"])
def test_no_directory_below_the_folder_may_be_a_link(root: Path, outside: Path, linked: str):
    """Files would be written somewhere else."""
    (root / linked).parent.mkdir(parents=True)
    (root / linked).symlink_to(outside, target_is_directory=True)

    with pytest.raises(FolderUnusable, match=linked.rpartition("/")[2]):
        Folder.open(root)

    assert [path.name for path in outside.iterdir()] == ["precious"]


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
def test_the_progress_is_not_kept_behind_a_link(root: Path, outside: Path, suffix: str):
    """A planted link would let a database be created, or be written to, anywhere."""
    Folder.open(root).close()
    progress = root / HOME / OURS / ("progress.sqlite" + suffix)
    progress.unlink(missing_ok=True)
    progress.symlink_to(outside / "new")

    with pytest.raises(FolderUnusable, match=f"{progress.name} is not a regular file"):
        Folder.open(root)

    assert not (outside / "new").exists()


def test_nobody_else_can_write_beside_the_credentials(root: Path):
    """Else a link could be planted after the check."""
    Folder.open(root).close()
    (root / HOME / OURS).chmod(0o777)

    Folder.open(root).close()

    assert mode_of(root / HOME / OURS) == 0o700


@pytest.mark.parametrize("linked", [HOME, f"{HOME}/{OURS}", f"{HOME}/{OURS}/credentials.json"])
def test_credentials_behind_a_link_are_not_used(root: Path, outside: Path, linked: str):
    """They would send this folder's files to a server that somebody else chose."""
    with Folder.open(root) as folder:
        folder.keep(Credentials("http://127.0.0.1:8080", WorkspaceId(uuid4()), "t"))
    (root / linked).rename(outside / "planted")
    (root / linked).symlink_to(outside / "planted")

    with pytest.raises(FolderUnusable):
        kept_credentials(root)


def test_the_folder_itself_may_be_a_link(tmp_path: Path, root: Path):
    """Its owner chose it."""
    root.mkdir()
    (tmp_path / "link").symlink_to(root, target_is_directory=True)

    with Folder.open(tmp_path / "link"):
        assert (root / HOME / UPLOADS).is_dir()


@pytest.mark.parametrize("below", [[], ["below"]])
def test_a_file_in_place_of_a_directory_is_refused(root: Path, below: list[str]):
    root.joinpath(*below).parent.mkdir(exist_ok=True)
    put(root.joinpath(*below))

    with pytest.raises(FolderUnusable):
        Directory.open(root, *below)


def test_a_failed_open_leaks_no_descriptors(root: Path, outside: Path):
    """A program that retries must not run out of them."""
    (root / HOME).mkdir(parents=True)
    (root / HOME / UPLOADS).symlink_to(outside)
    before = descriptors()

    for _ in range(5):
        with pytest.raises(FolderUnusable):
            Folder.open(root)

    assert descriptors() == before


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# Partial files


def test_an_interrupted_file_is_resumed(directory: Directory):
    with directory.partial("a.part") as partial:
        partial.write(b"hello, ")

    with directory.partial("a.part") as partial:
        assert partial.size == 7
        partial.truncate(7)
        partial.write(b"world")
        assert partial.sha256 == hashlib.sha256(b"hello, world").digest()

    assert (directory.path / "a.part").read_bytes() == b"hello, world"


def test_truncating_updates_size_and_hash(directory: Directory):
    with directory.partial("a.part") as partial:
        partial.write(b"hello, moon")
        partial.truncate(5)
        partial.write(b"!")

        assert partial.size == 6
        assert partial.sha256 == hashlib.sha256(b"hello!").digest()

    assert (directory.path / "a.part").read_bytes() == b"hello!"


def test_the_hash_is_computed_from_the_disk(directory: Directory):
    """Not from what an earlier run tried to write."""
    put(directory.path / "a.part")

    with directory.partial("a.part") as partial:
        partial.truncate(partial.size)

        assert partial.sha256 == hashlib.sha256(b"mine").digest()


# A full disk


def test_a_full_disk_is_reported_and_the_file_can_be_resumed(small_disk: Path):
    kib_200 = b"x" * 200 * 1024
    with Directory.open(small_disk) as directory, directory.partial("a.part") as partial:
        filler = put(small_disk / "filler", kib_200)
        with pytest.raises(FolderFull, match="free some space"):
            partial.write(kib_200)

        filler.unlink()
        partial.truncate(partial.size)
        partial.write(kib_200)

        assert partial.sha256 == hashlib.sha256(kib_200).digest()
        assert (small_disk / "a.part").read_bytes() == kib_200


# The folder of a workspace


@pytest.fixture
def folder(root: Path) -> Iterator[Folder]:
    with Folder.open(root) as folder:
        yield folder


def arrived(folder: Folder) -> tuple[WaitingFile, Received]:
    """A complete file whose name has been recorded."""
    file = WaitingFile(FileId(uuid4()), "a.txt", "", 5)
    with folder.new_files.partial(file.file_id) as partial:
        partial.write(b"hello")
    recorded = Received(unique_name(file.name), State.PLACING)
    return file, folder.progress.record(file.file_id, recorded)


def placed(folder: Folder, file: WaitingFile, received: Received | None) -> Path:
    place = folder.place_of(received)
    return place.path / place.place(file, received).name


def names_in(folder: Folder) -> list[str]:
    return [path.name for path in folder.new_files.path.iterdir()]


def partials(folder: Folder) -> list[str]:
    return [path.name for path in (folder.root / HOME / OURS / "arriving").iterdir()]


def test_names_start_with_random_digits(folder: Folder):
    file, _ = arrived(folder)

    digits, _, rest = placed(folder, file, None).name.partition("-")
    assert len(digits) == 32
    assert int(digits, 16)
    assert rest == "a.txt"


def test_placing_a_file_again_is_idempotent(folder: Folder):
    """After a crash between link and unlink, both names exist."""
    file, received = arrived(folder)
    arriving = folder.root / HOME / OURS / "arriving" / f"{file.file_id}.part"
    os.link(arriving, folder.new_files.path / received.name)

    path = placed(folder, file, received)

    assert names_in(folder) == [received.name]
    assert path.read_bytes() == b"hello"
    assert path.stat().st_nlink == 1
    assert partials(folder) == []


def test_a_placed_file_that_was_moved_away_does_not_reappear(folder: Folder):
    """Its owner moved it and does not expect a second copy."""
    file, received = arrived(folder)
    placed(folder, file, received).unlink()

    placed(folder, file, received)

    assert names_in(folder) == []


def test_partial_files_of_other_uploads_are_removed(folder: Folder, root: Path):
    kept, _ = arrived(folder)
    arrived(folder)
    put(root / HOME / OURS / "arriving" / "junk")

    folder.remove_partials(keep={kept.file_id})

    assert partials(folder) == [f"{kept.file_id}.part"]


def test_a_file_has_a_uri_once_it_is_placed(folder: Folder):
    """A message may arrive before the file that it refers to is placed."""
    file, received = arrived(folder)
    assert folder.uri_of(file.file_id) is None

    path = placed(folder, file, received)
    assert folder.uri_of(file.file_id) == f"workspace:{path}"

    path.unlink()
    folder.progress.record(file.file_id, received.now(State.ACKED))
    assert folder.uri_of(file.file_id) == f"workspace:{path}"
    assert folder.uri_of(FileId(uuid4())) is None


def test_credentials_are_readable_by_their_owner_only(folder: Folder, root: Path):
    first, second = (
        Credentials("http://127.0.0.1:8080", WorkspaceId(uuid4()), token) for token in "ab"
    )

    folder.keep(first)
    folder.keep(second)

    path = root / HOME / OURS / "credentials.json"
    assert kept_credentials(root) == second
    assert mode_of(path) == 0o600
    assert mode_of(path.parent) == 0o700


def test_a_folder_without_credentials_has_none(root: Path):
    assert kept_credentials(root) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"url": "\xff"}', b"[" * 99_999])
def test_damaged_credentials_are_reported_with_their_path(
    folder: Folder, root: Path, content: bytes
):
    path = put(root / HOME / OURS / "credentials.json", content)

    with pytest.raises(FolderUnusable) as caught:
        kept_credentials(root)

    assert str(path) in str(caught.value)
