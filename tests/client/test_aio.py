"""Every method of the asyncio client against a real server."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from callers import ADMIN_TOKEN, Caller, Part, pattern, registered
from factories import make_workspace
from sites import Site, SiteFactory

from restante.client import AsyncClient, Bytes, Credentials, Cursor
from restante.errors import (
    BadRequest,
    CursorGone,
    FileTooLarge,
    FileUnreadable,
    NotAuthenticated,
    TooManyFiles,
    UploadGone,
    UploadMalformed,
    WorkspaceUnknown,
)
from restante.ids import ActivityId, FileId, WorkspaceId

pytestmark = pytest.mark.anyio

HELLO = {"jsonrpc": "2.0", "id": 1, "method": "message/send", "params": {"message": {"parts": []}}}


@pytest.fixture
async def caller(shared_site: Site) -> Caller:
    return await registered(shared_site)


@pytest.fixture
async def client(caller: Caller) -> AsyncIterator[AsyncClient]:
    """The client of a workspace."""
    credentials = Credentials(caller.site.url, WorkspaceId(UUID(caller.id)), caller.token)
    async with AsyncClient.of(credentials) as client:
        yield client


@pytest.fixture
async def admin(shared_site: Site) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(shared_site.url, token=ADMIN_TOKEN) as client:
        yield client


async def waiting(client: AsyncClient) -> list[str]:
    return [upload.name async for upload in client.pending()]


async def only_file(client: AsyncClient) -> FileId:
    (file_id,) = [upload.file_id async for upload in client.pending()]
    return FileId(file_id)


# Registration


async def test_a_client_acts_as_the_workspace_that_it_registered(shared_site: Site):
    async with AsyncClient(shared_site.url) as client:
        assert not client.is_registered
        kept = await client.register("laptop", card={"skills": ["read"]})
        await client.heartbeat()

        assert client.is_registered
        assert kept == Credentials(shared_site.url, client.workspace_id, kept.token)

    async with AsyncClient.of(kept) as again:
        await again.heartbeat()


async def test_a_server_can_require_a_registration_token(run_site: SiteFactory):
    """Later requests use the workspace's own token."""
    secret = "a-registration-token"
    async with run_site(registration_token=secret) as site, AsyncClient(site.url) as client:
        with pytest.raises(NotAuthenticated):
            await client.register("laptop")
        assert not client.is_registered

        await client.register("laptop", registration_token=secret)
        await client.heartbeat()


async def test_a_workspace_reports_its_name_and_tasks(client: AsyncClient, admin: AsyncClient):
    await client.rename("attic")
    await client.heartbeat(active_tasks=2, current_task="reading")

    (seen,) = [view async for view in admin.workspaces() if view.id == client.workspace_id]

    assert (seen.name, seen.active_tasks, seen.current_task) == ("attic", 2, "reading")


async def test_a_client_without_a_workspace_says_what_is_missing(admin: AsyncClient):
    with pytest.raises(BadRequest, match="workspace_id"):
        await admin.feed()


# Sending


async def test_files_arrive_in_order(client: AsyncClient, caller: Caller, tmp_path: Path):
    """From disk and from memory, with a given type or one guessed from the name."""
    (tmp_path / "a.pdf").write_bytes(pattern(300_000))
    sizes: list[int] = []

    accepted = await client.send_files(
        client.workspace_id,
        [tmp_path / "a.pdf", str(tmp_path / "a.pdf"), Bytes("b", b"hello", "text/x-odd")],
        progress=sizes.append,
    )

    assert [(file.name, file.mime_type, file.size) for file in accepted] == [
        ("a.pdf", "application/pdf", 300_000),
        ("a.pdf", "application/pdf", 300_000),
        ("b", "text/x-odd", 5),
    ]
    assert sizes[-1] == 600_005
    first = accepted[0].uri.rpartition("/")[2]
    assert (await caller.fetch(first)).body == pattern(300_000)


async def test_a_time_to_live_is_applied(client: AsyncClient):
    await client.send_files(client.workspace_id, [Bytes("a", b"x")], ttl_seconds=90)

    (upload,) = [upload async for upload in client.pending()]

    assert 89 <= (upload.expires_at - upload.created_at).total_seconds() <= 91


async def test_the_admin_can_send_to_any_workspace(admin: AsyncClient, client: AsyncClient):
    await admin.send_files(client.workspace_id, [Bytes("a", b"x")])
    assert await waiting(client) == ["a"]

    with pytest.raises(WorkspaceUnknown):
        await admin.send_files(uuid4(), [Bytes("a", b"x")])


async def test_no_files_and_too_many_files_are_refused(client: AsyncClient):
    with pytest.raises(UploadMalformed):
        await client.send_files(client.workspace_id, [])
    with pytest.raises(TooManyFiles):
        await client.send_files(client.workspace_id, [Bytes("a", b"x")] * 65)

    assert await waiting(client) == []


async def test_a_file_that_is_too_large_is_refused_before_it_is_sent(
    client: AsyncClient, tmp_path: Path
):
    with (tmp_path / "big").open("wb") as big:
        big.truncate(26_214_401)

    with pytest.raises(FileTooLarge) as caught:
        await client.send_files(client.workspace_id, [tmp_path / "big"])

    assert caught.value.facts["filename"] == "big"


@pytest.mark.parametrize("name", ["missing", ".", "a/b", "nul\0"])
async def test_an_unreadable_file_is_refused(client: AsyncClient, tmp_path: Path, name: str):
    with pytest.raises(FileUnreadable):
        await client.send_files(client.workspace_id, [tmp_path / name])


async def test_a_message_of_many_mib_is_queued(client: AsyncClient):
    text = "x" * 15_000_000

    await client.send_message(client.workspace_id, {"message": {"content": text}})

    (row,) = (await client.feed()).rows
    assert msgspec.json.decode(row.request_body)["params"]["message"]["parts"][0]["text"] == text


async def test_a_message_is_queued(client: AsyncClient, admin: AsyncClient):
    answer = await admin.send_message(client.workspace_id, HELLO)

    (row,) = (await client.feed()).rows
    assert answer["status"] == "queued"
    assert row.method == "message/send"
    stored = msgspec.json.decode(row.request_body)
    assert stored["params"]["message"].pop("messageId")
    assert stored["params"]["message"].pop("role") == "user"
    assert stored == HELLO


# Receiving


async def test_the_feed_is_read_page_by_page(client: AsyncClient, caller: Caller):
    await caller.staged(*(Part(name=f"{n}") for n in range(5)))

    newest = await client.feed(limit=2)
    after = await client.feed(Cursor(0), limit=2)
    beyond = await client.feed(Cursor(2, ActivityId(after.rows[-1].id)), limit=2)

    assert [row.seq for row in newest.rows] == [4, 5]
    assert [row.seq for row in after.rows] == [1, 2]
    assert [row.seq for row in beyond.rows] == [3, 4]
    assert (newest.lowest_seq, newest.latest_seq, newest.acked_seq) == (1, 5, 0)


async def test_acknowledging_the_feed_moves_its_mark(client: AsyncClient, caller: Caller):
    await caller.staged(Part(), Part())

    await client.acknowledge_feed(1)

    assert (await client.feed()).acked_seq == 1


async def test_a_cursor_beyond_the_feed_is_gone(client: AsyncClient):
    with pytest.raises(CursorGone) as caught:
        await client.feed(Cursor(99))

    assert caught.value.facts["latest_seq"] == 0


async def test_the_admin_can_read_any_feed(admin: AsyncClient, client: AsyncClient, caller: Caller):
    await caller.staged()

    assert len((await admin.feed(of=client.workspace_id)).rows) == 1


async def test_pending_lists_every_file_while_they_are_acknowledged(
    client: AsyncClient, caller: Caller
):
    """More than one page; the last file of each page is acknowledged before the next is read."""
    await caller.staged(*(Part(name=f"{n}") for n in range(60)))

    listed: list[str] = []
    async for upload in client.pending():
        listed.append(upload.name)
        await client.acknowledge(upload.file_id)

    assert len(listed) == 60
    assert set(listed) == {f"{n}" for n in range(60)}
    assert await waiting(client) == []


async def test_a_download_can_start_at_any_byte(client: AsyncClient, caller: Caller):
    await caller.staged(Part(b"0123456789"))
    file_id = await only_file(client)

    async with client.fetch(file_id) as whole, client.fetch(file_id, 4) as rest:
        assert b"".join([piece async for piece in whole.pieces]) == b"0123456789"
        assert b"".join([piece async for piece in rest.pieces]) == b"456789"
        assert (rest.extent.start, rest.extent.size) == (4, 10)
        assert rest.extent.sha256 == whole.extent.sha256


async def test_acknowledging_is_idempotent(client: AsyncClient, caller: Caller):
    await caller.staged()
    file_id = await only_file(client)

    await client.acknowledge(file_id)
    await client.acknowledge(file_id)

    assert await waiting(client) == []


async def test_a_reopened_file_is_pending_again(client: AsyncClient, caller: Caller):
    await caller.staged()
    file_id = await only_file(client)
    await client.acknowledge(file_id)

    await client.reopen(file_id)

    assert await only_file(client) == file_id


async def test_an_unknown_upload_is_gone(client: AsyncClient):
    for call in (client.acknowledge, client.reopen):
        with pytest.raises(UploadGone):
            await call(uuid4())
    with pytest.raises(UploadGone):
        async with client.fetch(uuid4()):
            pass


async def test_every_workspace_is_listed_once(site: Site, connections: Any):
    """More than one page."""
    connection = await connections()
    made = {await make_workspace(connection) for _ in range(501)}

    async with AsyncClient(site.url, token=ADMIN_TOKEN) as admin:
        found = [view.id async for view in admin.workspaces()]

    assert len(found) == 501
    assert set(found) == made


async def test_listing_workspaces_needs_the_admin_token(client: AsyncClient):
    with pytest.raises(NotAuthenticated):
        _ = [view async for view in client.workspaces()]


async def test_a_wrong_token_is_refused(caller: Caller, tmp_path: Path):
    """Also while a large body is still being sent."""
    (tmp_path / "big").write_bytes(bytes(20_000_000))
    wrong = Credentials(caller.site.url, WorkspaceId(UUID(caller.id)), "not a token")

    async with AsyncClient.of(wrong) as stranger:
        with pytest.raises(NotAuthenticated):
            await stranger.feed()
        with pytest.raises(NotAuthenticated):
            await stranger.send_files(UUID(caller.id), [tmp_path / "big"])


async def test_a_client_works_only_inside_its_context(shared_site: Site):
    client = AsyncClient(shared_site.url)
    with pytest.raises(RuntimeError, match="async with"):
        await client.register("laptop")

    async with client:
        pass

    with pytest.raises(RuntimeError, match="async with"):
        await client.register("laptop")
