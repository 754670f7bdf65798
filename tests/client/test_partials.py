"""Partial files in the directory of a program: resumed, or removed when nobody will resume them."""

import base64
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from callers import Caller, Part, pattern, registered
from impostors import Asked, http, impostor, relay
from sites import Site

from restante.client import AsyncClient, FileItem
from restante.errors import FileCorrupt, NotReady, ServerUnreachable, UploadGone

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_delays")]

CONTENT = pattern(300_000)
DAY = 24 * 3600
OTHER = UUID("11111111-2222-3333-4444-555555555555")

# Another program: opens a partial file, says so, and keeps it open.
RECEIVER = """
import sys
from pathlib import Path
from restante.client.disk import Directory

with Directory.open(Path(sys.argv[1])) as directory, directory.partial(sys.argv[2]):
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
async def caller(shared_site: Site) -> Caller:
    return await registered(shared_site)


@pytest.fixture
async def client(caller: Caller) -> AsyncIterator[AsyncClient]:
    async with client_at(caller.site.url, caller) as client:
        yield client


def client_at(url: str, caller: Caller) -> AsyncClient:
    return AsyncClient(url, token=caller.token, workspace_id=UUID(caller.id))


@pytest.mark.parametrize("original_name", [False, True])
async def test_a_program_can_ask_for_the_original_name(
    client: AsyncClient, caller: Caller, tmp_path: Path, *, original_name: bool
):
    """Saved twice, nothing is replaced; nothing else is left in the directory."""
    await caller.staged(Part(CONTENT, name="A letter, \xfc.txt"))
    (item,) = [item async for item in client.inbox(once=True)]
    assert isinstance(item, FileItem)
    assert (item.name, item.display_name) == ("A_letter___.txt", "A letter, \xfc.txt")

    paths = [await item.save(tmp_path, original_name=original_name) for _ in range(2)]

    assert entries(tmp_path) == set(paths)
    assert all(path.read_bytes() == CONTENT for path in paths)
    if original_name:
        assert [path.name for path in paths] == ["A letter, \xfc.txt", "A letter, \xfc (2).txt"]


async def staged(client: AsyncClient, caller: Caller) -> FileItem:
    """The item of a file that was just uploaded."""
    await caller.staged(Part(CONTENT))
    *_, item = [item async for item in client.inbox(once=True)]
    assert isinstance(item, FileItem)
    return item


def left_behind(directory: Path, name: str | None = None, *, days: float = 0) -> Path:
    """A partial file that was last written to some days ago."""
    path = directory / (name or f".{uuid4()}.part")
    path.write_bytes(CONTENT[:1000])
    written_at = time.time() - days * DAY
    os.utime(path, (written_at, written_at))
    return path


def partial_of(item: FileItem) -> str:
    return f".{item.file.file_id}.part"


def entries(directory: Path) -> set[Path]:
    return set(directory.iterdir())


# Failures that cannot be resumed


async def test_the_partial_file_of_an_upload_that_is_gone_is_removed(
    client: AsyncClient, caller: Caller, tmp_path: Path
):
    """It expired after the first attempt was interrupted; nothing will ever resume it."""
    item = await staged(client, caller)
    left_behind(tmp_path, partial_of(item))
    await client.acknowledge(item.file.file_id)

    with pytest.raises(UploadGone):
        await item.save(tmp_path)

    assert entries(tmp_path) == set()


async def test_corrupt_bytes_leave_no_partial_file(
    client: AsyncClient, caller: Caller, tmp_path: Path
):
    item = await staged(client, caller)
    digest = base64.b64encode(bytes(32)).decode()
    lie = http(200, CONTENT, Repr_Digest=f"sha-256=:{digest}:")

    with pytest.raises(FileCorrupt):
        await saved_through(lie, caller, item, tmp_path)

    assert entries(tmp_path) == set()


@pytest.mark.parametrize(
    ("answer", "error"),
    [(None, ServerUnreachable), (http(503, {"error": "No.", "code": "not_ready"}), NotReady)],
    ids=["lost", "refused"],
)
async def test_a_download_that_received_nothing_leaves_no_partial_file(
    client: AsyncClient, caller: Caller, tmp_path: Path, answer: Any, error: type[Exception]
):
    item = await staged(client, caller)

    with pytest.raises(error):
        await saved_through(answer, caller, item, tmp_path)

    assert entries(tmp_path) == set()


async def test_an_interrupted_download_keeps_its_partial_file(
    client: AsyncClient, caller: Caller, tmp_path: Path
):
    """The other failures can be retried, and then only the rest is fetched."""
    item = await staged(client, caller)
    partial = left_behind(tmp_path, partial_of(item))

    with pytest.raises(ServerUnreachable):
        await saved_through(None, caller, item, tmp_path)

    assert entries(tmp_path) == {partial}
    assert partial.read_bytes() == CONTENT[:1000]


async def saved_through(said: Any, caller: Caller, item: FileItem, directory: Path) -> None:
    """Save over a line on which each download gets this answer."""
    pass_on = relay(caller.site)

    async def answer(asked: Asked) -> Any:
        return said if asked.path.endswith("/content") else await pass_on(asked)

    async with impostor(answer) as line, client_at(line.url, caller) as client:
        await FileItem(client, item.row, item.file).save(directory)


# Partial files of other uploads


async def test_saving_removes_old_partial_files(
    client: AsyncClient, caller: Caller, tmp_path: Path
):
    """A program that crashed and skipped the file never asks for it again."""
    item = await staged(client, caller)
    left_behind(tmp_path, days=8)
    recent = left_behind(tmp_path, days=6)

    path = await item.save(tmp_path)

    assert entries(tmp_path) == {recent, path}


async def test_saving_resumes_its_own_partial_file_however_old(
    client: AsyncClient, caller: Caller, tmp_path: Path
):
    item = await staged(client, caller)
    left_behind(tmp_path, partial_of(item), days=100)
    sizes: list[int] = []

    path = await item.save(tmp_path, progress=sizes.append)

    assert sizes[0] > 1000
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("name", [".part", ".notes.part", f"{OTHER}.part", f".{OTHER.hex}.part"])
async def test_saving_removes_no_other_files(
    client: AsyncClient, caller: Caller, tmp_path: Path, name: str
):
    """The directory belongs to the program, and so do the names that are not ours."""
    item = await staged(client, caller)
    other = left_behind(tmp_path, name, days=100)

    path = await item.save(tmp_path)

    assert entries(tmp_path) == {other, path}


async def test_saving_follows_no_link_and_removes_no_directory(
    client: AsyncClient, caller: Caller, tmp_path: Path
):
    item = await staged(client, caller)
    outside = left_behind(tmp_path, "precious", days=100)
    directory = tmp_path / "in"
    make_odd_entries(directory, outside)
    before = entries(directory)

    path = await item.save(directory)

    assert entries(directory) == before | {path}
    assert outside.read_bytes() == CONTENT[:1000]


def make_odd_entries(directory: Path, target: Path) -> None:
    """Entries with names of partial files that are no files."""
    directory.mkdir()
    (directory / f".{uuid4()}.part").symlink_to(target)
    (directory / f".{uuid4()}.part").mkdir()
    os.mkfifo(directory / f".{uuid4()}.part")


async def test_the_partial_file_of_a_running_process_is_not_removed(
    client: AsyncClient, caller: Caller, tmp_path: Path
):
    """A download that has stalled for days still has its file open."""
    item = await staged(client, caller)
    stalled = left_behind(tmp_path, days=8)

    with receiving_elsewhere(stalled):
        path = await item.save(tmp_path)
        assert entries(tmp_path) == {stalled, path}

    again = await item.save(tmp_path)
    assert entries(tmp_path) == {path, again}


@contextmanager
def receiving_elsewhere(partial: Path) -> Iterator[None]:
    """Another process has this partial file open."""
    with subprocess.Popen(
        [sys.executable, "-c", RECEIVER, partial.parent, partial.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield
        process.communicate("")
