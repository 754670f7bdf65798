"""The blocking client: what the asyncio client does, wherever it is called from."""

import asyncio
import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from anyio.from_thread import start_blocking_portal
from callers import ADMIN_TOKEN, Caller, Part, pattern, registered
from impostors import Answering, Asked, Impostor, http, impostor
from processes import clean_environment
from sites import Site

from restante.client import (
    AsyncClient,
    BlockingFile,
    BlockingInbox,
    BlockingMessage,
    Bytes,
    Client,
    Cursor,
    FileItem,
    Inbox,
    MessageItem,
)
from restante.errors import BadRequest, NotAuthenticated, ServerUnreachable, UploadGone

pytestmark = pytest.mark.anyio

OK = http(200, {"status": "ok"})


@pytest.fixture
async def caller(shared_site: Site) -> Caller:
    return await registered(shared_site)


def client_of(caller: Caller) -> Client:
    return Client(caller.site.url, token=caller.token, workspace_id=UUID(caller.id))


@contextmanager
def served_elsewhere(answering: Answering) -> Iterator[Impostor]:
    """An impostor with a thread of its own: the test's may block."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(impostor(answering)) as other,
    ):
        yield other


# One surface


def surface(item: type) -> dict[str, Any]:
    """Its public names, and how its methods are called."""
    names = [name for name in vars(item) if not name.startswith("_")]
    return {name: _called(vars(item)[name]) for name in names}


def _called(member: Any) -> Any:
    if not inspect.isfunction(member):
        return type(member).__name__
    parameters = inspect.signature(member).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


def test_both_clients_have_the_same_methods():
    """So that what is written for one can be read for the other."""
    blocking, other = surface(Client), surface(AsyncClient)
    # Raw calls and raw bytes are for those who have a loop.
    del other["send"], other["fetch"]
    # Here it is an attribute, there it belongs to the other client.
    assert blocking.pop("url") == "property"

    assert blocking == other


@pytest.mark.parametrize(
    ("blocking", "other"),
    [(BlockingFile, FileItem), (BlockingMessage, MessageItem), (BlockingInbox, Inbox)],
)
def test_what_arrives_looks_the_same(blocking: type, other: type):
    ours, theirs = surface(blocking), surface(other)

    shared = ours.keys() & theirs.keys()
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    assert {"save", "ack", "is_file"} & theirs.keys() <= shared


# What it does


async def test_a_program_without_a_loop_sends_and_receives(shared_site: Site, tmp_path: Path):
    def program() -> None:
        with Client(shared_site.url) as client:
            assert not client.is_registered
            kept = client.register("a script")
            assert (client.url, client.workspace_id) == (kept.url, kept.workspace_id)
            client.send_files(client.workspace_id, [Bytes("a.txt", pattern(300_000))])
            client.send_message(client.workspace_id, {"method": "message/send", "params": [7]})

        with Client.of(kept) as client:
            inbox = client.inbox(once=True)
            file, message = list(inbox)
            assert isinstance(file, BlockingFile)
            assert isinstance(message, BlockingMessage)
            assert (file.name, file.seq, file.file.size) == ("a.txt", 1, 300_000)
            assert file.save(tmp_path).read_bytes() == pattern(300_000)
            file.ack()
            assert message.body["params"] == [7]
            assert (message.method, message.seq) == ("message/send", 2)
            message.ack()
            assert (inbox.cursor, inbox.missed) == (Cursor(2, message.row.id), 0)  # pyright: ignore[reportArgumentType]

    await asyncio.to_thread(program)


async def test_the_rest_of_the_protocol(caller: Caller):
    await caller.staged(Part(), Part())

    def program() -> None:
        with client_of(caller) as client:
            client.rename("script")
            client.heartbeat(active_tasks=1)
            assert [row.seq for row in client.feed(Cursor(1)).rows] == [2]
            client.acknowledge_feed(1)
            first, _second = client.pending()
            client.acknowledge(first.file_id)
            assert len(list(client.pending())) == 1
            client.reopen(first.file_id)
            assert len(list(client.pending())) == 2
            with pytest.raises(UploadGone):
                client.acknowledge(uuid4())
            with pytest.raises(NotAuthenticated):
                list(client.workspaces())

    await asyncio.to_thread(program)


async def test_the_admin_looks_at_anybody(caller: Caller):
    await caller.staged()

    def program() -> None:
        with Client(caller.site.url, token=ADMIN_TOKEN) as admin:
            (seen,) = [view for view in admin.workspaces() if str(view.id) == caller.id]
            assert len(admin.feed(of=seen.id).rows) == 1  # pyright: ignore[reportArgumentType]
            with pytest.raises(BadRequest):
                _ = admin.workspace_id

    await asyncio.to_thread(program)


# Wherever it is called from


async def test_it_works_where_a_loop_is_running():
    """In a notebook, say; it has a loop of its own."""
    with served_elsewhere(lambda _: OK) as other, Client(other.url, workspace_id=uuid4()) as client:
        client.heartbeat()

    assert len(other.asked) == 1


def test_several_threads_share_one_client():
    with (
        served_elsewhere(lambda _: OK) as other,
        Client(other.url, workspace_id=uuid4()) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        for done in [threads.submit(client.heartbeat) for _ in range(40)]:
            done.result()

    assert len(other.asked) == 40


def test_it_is_used_inside_of_its_context():
    client = Client("http://127.0.0.1:1", workspace_id=uuid4())

    with pytest.raises(RuntimeError, match="with"):
        client.heartbeat()


def test_it_can_be_opened_again():
    with served_elsewhere(lambda _: OK) as other:
        client = Client(other.url, workspace_id=uuid4())
        for _ in range(2):
            with client:
                client.heartbeat()

    assert len(other.asked) == 2


# How it ends


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "restante" in thread.name]


@pytest.mark.usefixtures("no_delays")
def test_its_thread_ends_with_it():
    with Client("http://127.0.0.1:1", workspace_id=uuid4()) as client:
        assert our_threads() == ["restante"]
        with pytest.raises(ServerUnreachable):
            client.heartbeat()

    assert our_threads() == []


def hanging(asked: list[Asked], heard: threading.Event) -> Callable[[Asked], Any]:
    """Never answers, and says that it was asked."""

    async def hang(request: Asked) -> None:
        asked.append(request)
        heard.set()
        await asyncio.Event().wait()

    return hang


def test_closing_ends_whoever_still_waits():
    """Another thread reads an inbox in which nothing arrives."""
    heard = threading.Event()
    with served_elsewhere(hanging([], heard)) as other, ThreadPoolExecutor(1) as thread:
        with Client(other.url, token="t", workspace_id=uuid4()) as client:
            reading = thread.submit(lambda: next(iter(client.inbox(Cursor(0)))))
            assert heard.wait(10)

        with pytest.raises(CancelledError):
            reading.result(10)


async def test_leaving_an_inbox_in_the_middle_leaves_nothing_behind(caller: Caller):
    """Warnings are errors here, also those about what was never awaited."""
    await caller.staged(Part(), Part())

    def program() -> None:
        with client_of(caller) as client:
            for item in client.inbox():
                assert item.seq == 1
                break
            for _upload in client.pending():
                break

    await asyncio.to_thread(program)

    assert our_threads() == []


# A shell that ignores Ctrl-C passes that on to its children, so the program asks for it again.
WAITING = """
import signal
import sys
from uuid import uuid4
from restante.client import Client, Cursor

signal.signal(signal.SIGINT, signal.default_int_handler)
with Client(sys.argv[1], token="t", workspace_id=uuid4()) as client:
    for item in client.inbox(Cursor(0)):
        print(item)
"""


def test_ctrl_c_ends_a_program_that_waits():
    heard = threading.Event()
    with served_elsewhere(hanging([], heard)) as other:
        program = subprocess.Popen(
            [sys.executable, "-c", WAITING, other.url],
            env=clean_environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert heard.wait(20)
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=10)

    assert program.returncode == -signal.SIGINT
    assert said.count("Traceback") == 1
    assert said.endswith("KeyboardInterrupt\n")
