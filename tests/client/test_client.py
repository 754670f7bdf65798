"""The blocking client: the methods of the asyncio client, callable from anywhere."""

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
def served_in_a_thread(answering: Answering) -> Iterator[Impostor]:
    """An impostor in its own thread, because the test blocks."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(impostor(answering)) as other,
    ):
        yield other


# Public methods


def public_members(item: type) -> dict[str, Any]:
    """The public names of a class, with the parameters of its methods."""
    names = [name for name in vars(item) if not name.startswith("_")]
    return {name: _signature(vars(item)[name]) for name in names}


def _signature(member: Any) -> Any:
    if not inspect.isfunction(member):
        return type(member).__name__
    parameters = inspect.signature(member).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


def test_both_clients_have_the_same_methods():
    """So that the documentation of one applies to the other."""
    blocking, other = public_members(Client), public_members(AsyncClient)
    # Raw calls and open downloads need an event loop.
    del other["send"], other["fetch"]

    assert blocking == other


@pytest.mark.parametrize(
    ("blocking", "other"),
    [(BlockingFile, FileItem), (BlockingMessage, MessageItem), (BlockingInbox, Inbox)],
)
def test_both_clients_have_the_same_items(blocking: type, other: type):
    ours, theirs = public_members(blocking), public_members(other)

    shared = ours.keys() & theirs.keys()
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    assert {"save", "ack", "is_file"} & theirs.keys() <= shared


# Against a real server


async def test_a_program_without_a_loop_sends_and_receives(shared_site: Site, tmp_path: Path):
    def program() -> None:
        with Client(shared_site.url) as client:
            assert not client.is_registered
            kept = client.register("a script")
            assert (client.url, client.workspace_id) == (kept.url, kept.workspace_id)
            client.send_files(client.workspace_id, [Bytes("a.txt", pattern(300_000))])
            client.send_message(client.workspace_id, {"method": "tasks/get", "params": [7]})

        with Client.of(kept) as client:
            inbox = client.inbox(once=True)
            file, message = list(inbox)
            assert isinstance(file, BlockingFile)
            assert isinstance(message, BlockingMessage)
            assert (file.kind, message.kind) == ("file", "message")
            assert repr(file) == "BlockingFile(seq=1, name='a.txt', size=300000)"
            assert repr(message) == "BlockingMessage(seq=2, method='tasks/get')"
            assert (file.name, file.seq, file.file.size) == ("a.txt", 1, 300_000)
            assert file.save(tmp_path).read_bytes() == pattern(300_000)
            file.ack()
            assert message.body["params"] == [7]
            assert (message.method, message.seq) == ("tasks/get", 2)
            message.ack()
            assert (inbox.cursor, inbox.missed) == (Cursor(2, message.row.id), 0)  # pyright: ignore[reportArgumentType]

    await asyncio.to_thread(program)


async def test_the_other_methods(caller: Caller):
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


async def test_the_admin_reads_any_feed(caller: Caller):
    await caller.staged()

    def program() -> None:
        with Client(caller.site.url, token=ADMIN_TOKEN) as admin:
            (seen,) = [view for view in admin.workspaces() if str(view.id) == caller.id]
            assert len(admin.feed(of=seen.id).rows) == 1  # pyright: ignore[reportArgumentType]
            with pytest.raises(BadRequest):
                _ = admin.workspace_id

    await asyncio.to_thread(program)


# Event loops and threads


async def test_it_works_inside_a_running_event_loop():
    """As in a notebook."""
    with (
        served_in_a_thread(lambda _: OK) as other,
        Client(other.url, workspace_id=uuid4()) as client,
    ):
        client.heartbeat()

    assert len(other.asked) == 1


def test_several_threads_share_one_client():
    with (
        served_in_a_thread(lambda _: OK) as other,
        Client(other.url, workspace_id=uuid4()) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        for done in [threads.submit(client.heartbeat) for _ in range(40)]:
            done.result()

    assert len(other.asked) == 40


def test_it_works_only_inside_its_context():
    client = Client("http://127.0.0.1:1", workspace_id=uuid4())

    with pytest.raises(RuntimeError, match="with"):
        client.heartbeat()


def test_it_can_be_opened_again():
    with served_in_a_thread(lambda _: OK) as other:
        client = Client(other.url, workspace_id=uuid4())
        for _ in range(2):
            with client:
                client.heartbeat()

    assert len(other.asked) == 2


# Shutdown


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "restante" in thread.name]


@pytest.mark.usefixtures("no_delays")
def test_its_thread_ends_with_it():
    with Client("http://127.0.0.1:1", workspace_id=uuid4()) as client:
        assert our_threads() == ["restante"]
        with pytest.raises(ServerUnreachable):
            client.heartbeat()

    assert our_threads() == []


def hanging(asked: threading.Event) -> Callable[[Asked], Any]:
    """Never answers; sets the event when it is asked."""

    async def hang(_request: Asked) -> None:
        asked.set()
        await asyncio.Event().wait()

    return hang


def test_closing_cancels_a_waiting_thread():
    """Another thread reads an empty inbox."""
    asked = threading.Event()
    with served_in_a_thread(hanging(asked)) as other, ThreadPoolExecutor(1) as thread:
        with Client(other.url, token="t", workspace_id=uuid4()) as client:
            reading = thread.submit(lambda: next(iter(client.inbox(Cursor(0)))))
            assert asked.wait(10)

        with pytest.raises(CancelledError):
            reading.result(10)


async def test_leaving_an_inbox_early_leaves_nothing_running(caller: Caller):
    """Warnings are errors here, including those about coroutines that were never awaited."""
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


# A child inherits an ignored SIGINT, for example from a background job, so it resets the handler.
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


def test_ctrl_c_ends_a_waiting_program():
    asked = threading.Event()
    with served_in_a_thread(hanging(asked)) as other:
        program = subprocess.Popen(
            [sys.executable, "-c", WAITING, other.url],
            env=clean_environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert asked.wait(20)
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=10)

    assert program.returncode == -signal.SIGINT
    assert said.count("Traceback") == 1
    assert said.endswith("KeyboardInterrupt\n")
