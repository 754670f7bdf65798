"""Following a feed: rows come in order, and again only if they were not handled."""

import asyncio
import re
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from callers import Caller, Part, pattern, registered
from sites import Site

from restante import wire
from restante.client import AsyncClient, Cursor, FileItem, Item, MessageItem, calls
from restante.client.http_replies import Reply
from restante.client.poller import announced
from restante.errors import FileTooLarge, UploadGone
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

NOBODY = "11111111-2222-3333-4444-555555555555"


@pytest.fixture
async def caller(shared_site: Site) -> Caller:
    return await registered(shared_site)


@pytest.fixture
async def client(caller: Caller) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(
        caller.site.url, token=caller.token, workspace_id=UUID(caller.id)
    ) as client:
        yield client


async def write(caller: Caller, text: str) -> None:
    """Send a message to the caller's own workspace."""
    body = {"jsonrpc": "2.0", "method": "message/send", "params": {"message": {"content": text}}}
    answer = await caller.message(body, to=caller)
    assert answer.status == 200


async def all_items(client: AsyncClient, cursor: Cursor | None = None) -> list[Item]:
    return [item async for item in client.inbox(cursor, once=True)]


async def seqs(client: AsyncClient, cursor: Cursor | None = None) -> list[int]:
    return [item.seq for item in await all_items(client, cursor)]


# Items


async def test_files_and_messages_come_in_order(client: AsyncClient, caller: Caller):
    await caller.staged(Part(b"12345", name="a b.txt"))
    await write(caller, "hello")
    await caller.staged(Part(name="c"))

    first, second, third = await all_items(client)

    assert isinstance(first, FileItem)
    assert isinstance(second, MessageItem)
    assert isinstance(third, FileItem)
    assert (first.name, first.file.size, first.seq, first.is_file) == ("a_b.txt", 5, 1, True)
    assert (second.method, second.seq, second.is_file) == ("message/send", 2, False)
    assert second.body["params"]["message"]["parts"] == [{"kind": "text", "text": "hello"}]


async def test_a_feed_of_several_pages_is_read_completely(client: AsyncClient, caller: Caller):
    for _ in range(2):
        await caller.staged(*[Part(b"x")] * 60)

    assert await seqs(client) == list(range(1, 121))


async def test_each_save_writes_a_new_file(client: AsyncClient, caller: Caller, tmp_path: Path):
    await caller.staged(Part(pattern(300_000), name="../a b.txt"))
    (item,) = await all_items(client)
    assert isinstance(item, FileItem)
    sizes: list[int] = []

    paths = [await item.save(tmp_path / "in" / "box", progress=sizes.append) for _ in range(2)]

    assert sorted(paths) == sorted((tmp_path / "in" / "box").iterdir())
    for path in paths:
        assert re.fullmatch(r"[0-9a-f]{32}-a_b\.txt", path.name)
        assert path.read_bytes() == pattern(300_000)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sizes[-1] == 300_000


async def test_an_interrupted_save_is_resumed(client: AsyncClient, caller: Caller, tmp_path: Path):
    await caller.staged(Part(pattern(300_000)))
    (item,) = await all_items(client)
    assert isinstance(item, FileItem)
    (tmp_path / f".{item.file.file_id}.part").write_bytes(pattern(300_000)[:200_000])
    sizes: list[int] = []

    path = await item.save(tmp_path, progress=sizes.append)

    assert sizes[0] > 200_000
    assert path.read_bytes() == pattern(300_000)
    assert sorted(path.parent.iterdir()) == [path]


async def test_an_acknowledged_file_is_gone(client: AsyncClient, caller: Caller, tmp_path: Path):
    await caller.staged()
    (item,) = await all_items(client)
    assert isinstance(item, FileItem)

    await item.ack()

    assert [upload async for upload in client.pending()] == []
    with pytest.raises(UploadGone):
        await item.save(tmp_path)


async def test_a_file_above_max_bytes_is_not_fetched(
    client: AsyncClient, caller: Caller, tmp_path: Path
):
    await caller.staged(Part(b"12345"))
    (item,) = await all_items(client)
    assert isinstance(item, FileItem)

    with pytest.raises(FileTooLarge):
        await item.save(tmp_path / "in", max_bytes=4)

    assert not (tmp_path / "in").exists()


# Start and end


async def test_an_item_that_was_not_handled_comes_again(client: AsyncClient, caller: Caller):
    """A program that crashes while handling an item gets it again."""
    await caller.staged(Part(), Part())

    async for item in client.inbox():
        assert item.seq == 1
        break

    assert await seqs(client) == [1, 2]


async def test_handled_items_do_not_come_again(client: AsyncClient, caller: Caller):
    await caller.staged(Part(), Part())

    assert await seqs(client) == [1, 2]

    assert (await client.feed()).acked_seq == 2
    assert await seqs(client) == []


async def test_a_new_inbox_starts_after_the_acknowledged_row(client: AsyncClient, caller: Caller):
    await caller.staged(*[Part()] * 3)
    await client.acknowledge_feed(2)

    assert await seqs(client) == [3]


async def test_a_message_can_be_acknowledged_explicitly(client: AsyncClient, caller: Caller):
    await write(caller, "one")
    await write(caller, "two")

    async for item in client.inbox():
        await item.ack()
        break

    assert (await client.feed()).acked_seq == 1


async def test_a_given_cursor_takes_precedence_over_the_acknowledged_row(
    client: AsyncClient, caller: Caller
):
    await caller.staged(*[Part()] * 4)
    await client.acknowledge_feed(4)
    inbox = client.inbox(Cursor(1), once=True)

    got = [item async for item in inbox]

    assert [item.seq for item in got] == [2, 3, 4]
    assert inbox.cursor == Cursor(4, got[-1].row.id)  # pyright: ignore[reportArgumentType]
    assert inbox.missed == 0


async def test_nothing_is_acknowledged_before_an_item_was_handled(
    client: AsyncClient, caller: Caller
):
    """A given cursor does not mean that this program handled the rows before it."""
    await caller.staged()

    assert await seqs(client, Cursor(1)) == []

    assert (await client.feed()).acked_seq == 0


async def test_once_ends_at_the_row_that_was_newest_at_the_start(
    client: AsyncClient, caller: Caller
):
    """A sender that is faster than the reader must not keep it running for ever."""
    assert await seqs(client) == []
    await caller.staged(Part(), Part())

    got: list[int] = []
    async for item in client.inbox(once=True):
        got.append(item.seq)
        await caller.staged()

    assert got == [1, 2]


async def test_an_inbox_waits_for_new_items(client: AsyncClient, caller: Caller):
    items = aiter(client.inbox())
    waiting = asyncio.ensure_future(anext(items))

    await caller.staged(Part(name="late"))

    item = await asyncio.wait_for(waiting, 10)
    assert isinstance(item, FileItem)
    assert item.name == "late"


async def test_a_page_is_repeated_until_its_items_are_consumed(client: AsyncClient, caller: Caller):
    """A failure in the middle of a page loses nothing."""
    await caller.staged(*[Part()] * 3)
    inbox = client.inbox()

    first = await inbox.page()
    inbox.consumed(first[0])
    second = await inbox.page()

    assert [item.seq for item in first] == [1, 2, 3]
    assert [item.seq for item in second] == [2, 3]


# Rows that announce files


def row(body: Any, method: str = "chat_upload_receive") -> wire.ActivityRow:
    fields: dict[str, Any] = {
        "id": str(uuid4()),
        "workspace_id": str(uuid4()),
        "activity_type": "a2a_receive",
        "source_id": None,
        "target_id": None,
        "method": method,
        "summary": None,
        "request_body": body,
        "response_body": None,
        "duration_ms": None,
        "status": "ok",
        "error_detail": None,
        "created_at": "2026-01-02T03:04:05Z",
        "seq": 1,
    }
    call = calls.feed(WorkspaceId(uuid4()), None, limit=1)
    return call.read(Reply(200, {}, msgspec.json.encode([fields]))).rows[0]


FILE = {"file_id": NOBODY, "name": "a.txt", "size": 3, "mimeType": "text/plain"}


@pytest.mark.parametrize(
    ("name", "cleaned"),
    [
        ("../../.ssh/authorized_keys", "authorized_keys"),
        ("/etc/passwd", "passwd"),
        ("..", "file"),
        ("", "file"),
        ("a\0b\nc", "a_b_c"),
        ("x" * 500, "x" * 100),
        ("\u202egnp.exe", "_gnp.exe"),
    ],
)
def test_announced_names_are_cleaned(name: str, cleaned: str):
    file = announced(row(FILE | {"name": name}))

    assert file is not None
    assert file.name == cleaned


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("A letter, \xfc.txt", "A letter, \xfc.txt"),
        ("../../.ssh/authorized_keys", "authorized_keys"),
        ("\u202egnp.exe\x1b", "gnp.exe"),
        ("x" * 5000, "x" * 255),
        ("", "a.txt"),
        (None, "a.txt"),
        (7, "a.txt"),
        ({"a": []}, "a.txt"),
    ],
)
def test_a_name_for_people_is_cleaned_or_replaced_by_the_other(sent: Any, shown: str):
    """A wrong one must not hide the file, and earlier servers send none."""
    file = announced(row(FILE | {"display_name": sent}))

    assert file is not None
    assert (file.name, file.original_name) == ("a.txt", shown)


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "text",
        {},
        FILE | {"file_id": "../../x"},
        FILE | {"file_id": None},
        FILE | {"name": 7},
        FILE | {"size": -1},
        FILE | {"size": "3"},
        FILE | {"size": 1.5},
        {key: FILE[key] for key in ("file_id", "name")},
        msgspec.Raw(b'{"file_id": "\xff"}'),
    ],
)
def test_an_invalid_announcement_is_a_message(body: Any):
    """It is displayed, and does not stop the feed."""
    assert announced(row(body)) is None


def test_an_announcement_needs_no_type():
    file = announced(row({key: FILE[key] for key in ("file_id", "name", "size")}))

    assert file is not None
    assert file.mimetype == ""


def test_only_the_upload_method_announces_a_file():
    assert announced(row(FILE, method="message/send")) is None


async def test_another_workspace_cannot_announce_a_file(client: AsyncClient, caller: Caller):
    """It can send a message with the same method; fetching it would let strangers choose files."""
    stranger = await registered(caller.site)
    forged = {"method": "chat_upload_receive", "file_id": NOBODY, "name": "x", "size": 1}
    assert (await stranger.message(forged, to=caller)).status == 200

    (item,) = await all_items(client)

    assert isinstance(item, MessageItem)
