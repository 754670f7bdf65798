"""An exception of a progress callback ends the transfer and reaches the caller as it is."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NoReturn
from uuid import UUID

import pytest
from callers import Caller, Part, pattern, registered
from impostors import Impostor, impostor, relay
from sites import Site

from restante.client import AsyncClient, BlockingFile, Bytes, Client, FileItem
from restante.errors import FileUnreadable, ServerUnreachable, UploadGone

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_delays")]

CONTENT = pattern(300_000)

# Most of these are also raised for a lost connection, a refusal or an unreadable file.
ERRORS: list[BaseException] = [
    ValueError("a bug in the callback"),
    TimeoutError("no answer from the display"),
    ConnectionResetError(104, "the display is gone"),
    ServerUnreachable("another server"),
    FileUnreadable("another file"),
    UploadGone("another upload"),
]
# These end the event loop that they are raised in; the blocking client runs one in a thread.
EXITS = [SystemExit(3), KeyboardInterrupt()]


def type_name(error: BaseException) -> str:
    return type(error).__name__


@pytest.fixture
async def caller(shared_site: Site) -> Caller:
    return await registered(shared_site)


@pytest.fixture
async def line(caller: Caller) -> AsyncIterator[Impostor]:
    """The way to the server; it records the requests that arrive whole."""
    async with impostor(relay(caller.site)) as line:
        yield line


@pytest.fixture
async def client(caller: Caller, line: Impostor) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(line.url, token=caller.token, workspace_id=UUID(caller.id)) as client:
        yield client


def blocking(caller: Caller, line: Impostor) -> Client:
    return Client(line.url, token=caller.token, workspace_id=UUID(caller.id))


def raising(error: BaseException, calls: list[int]) -> Callable[[int], None]:
    """Raises at the first call, and records all of them."""

    def progress(size: int) -> NoReturn:
        calls.append(size)
        raise error

    return progress


async def first_file(client: AsyncClient) -> FileItem:
    async for item in client.inbox():
        assert isinstance(item, FileItem)
        return item
    raise AssertionError


def contents(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def pending(caller: Caller) -> int:
    return len((await caller.waiting()).json["uploads"])


@pytest.mark.parametrize("error", ERRORS, ids=type_name)
async def test_sending_ends_with_the_exception_of_the_callback(
    client: AsyncClient, caller: Caller, error: BaseException
):
    """It is not retried, and the server stores nothing."""
    calls: list[int] = []
    files = [Bytes("a", CONTENT), Bytes("b", CONTENT)]

    with pytest.raises(type(error)) as caught:
        await client.send_files(client.workspace_id, files, progress=raising(error, calls))

    assert caught.value is error
    assert error.__cause__ is None
    assert calls == [len(CONTENT)]
    assert await pending(caller) == 0
    await client.send_files(client.workspace_id, files)
    assert await pending(caller) == 2


@pytest.mark.parametrize("error", ERRORS, ids=type_name)
async def test_fetching_ends_with_the_exception_of_the_callback(
    client: AsyncClient, caller: Caller, line: Impostor, tmp_path: Path, error: BaseException
):
    """It is not retried, and the next download resumes after what was received."""
    await caller.staged(Part(CONTENT))
    item = await first_file(client)
    calls: list[int] = []

    with pytest.raises(type(error)) as caught:
        await item.save(tmp_path, progress=raising(error, calls))

    assert caught.value is error
    assert error.__cause__ is None
    assert len(calls) == 1
    assert (await item.save(tmp_path)).read_bytes() == CONTENT
    ranges = [asked.headers.get("Range") for asked in line.asked if "content" in asked.path]
    assert ranges == [None, f"bytes={calls[0]}-"]


@pytest.mark.parametrize("error", [*ERRORS, *EXITS], ids=type_name)
async def test_the_blocking_client_sends_in_the_same_way(
    caller: Caller, line: Impostor, error: BaseException
):
    calls: list[int] = []

    def program() -> None:
        with blocking(caller, line) as client:
            me, files = client.workspace_id, [Bytes("a", CONTENT)]
            with pytest.raises(type(error)) as caught:
                client.send_files(me, files, progress=raising(error, calls))
            assert caught.value is error
            client.heartbeat()

    await asyncio.to_thread(program)

    assert calls == [len(CONTENT)]
    assert await pending(caller) == 0


@pytest.mark.parametrize("error", [*ERRORS, *EXITS], ids=type_name)
async def test_the_blocking_client_fetches_in_the_same_way(
    caller: Caller, line: Impostor, tmp_path: Path, error: BaseException
):
    await caller.staged(Part(CONTENT))
    calls: list[int] = []

    def program() -> Path:
        with blocking(caller, line) as client:
            item = next(iter(client.inbox()))
            assert isinstance(item, BlockingFile)
            with pytest.raises(type(error)) as caught:
                item.save(tmp_path, progress=raising(error, calls))
            assert caught.value is error
            return item.save(tmp_path)

    path = await asyncio.to_thread(program)

    assert len(calls) == 1
    assert path.read_bytes() == CONTENT
    assert contents(tmp_path) == [path]


@pytest.mark.parametrize("error", [TimeoutError("mine"), ConnectionError("mine")], ids=repr)
async def test_an_exception_inside_an_open_download_is_not_translated(
    client: AsyncClient, caller: Caller, error: Exception
):
    """Code in `async with client.fetch(...)` may talk to other servers."""
    await caller.staged(Part(CONTENT))
    item = await first_file(client)

    with pytest.raises(type(error)) as caught:
        async with client.fetch(item.file.file_id):
            raise error

    assert caught.value is error
