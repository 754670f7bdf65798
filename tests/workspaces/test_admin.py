"""The operator finds workspaces by name or id, changes and removes them, and their tokens."""

import asyncio
from typing import Any
from uuid import uuid4

import pytest
from callers import waits_for_a_lock
from factories import NOW, make_parts, make_upload, make_workspace, sweep_uploads
from waiting import until

from restante.database.pool import Database
from restante.delivery.admin import UploadAdmin
from restante.errors import BadRequest, WorkspaceUnknown
from restante.ids import WorkspaceId
from restante.workspaces import store
from restante.workspaces.admin import WorkspaceAdmin
from restante.workspaces.rules import MAX_LABEL, Changes, labels, token_hash

pytestmark = pytest.mark.anyio


@pytest.fixture
async def connection(db_with_partitions: Database, connections: Any) -> Any:
    return await connections()


@pytest.fixture
def told() -> list[WorkspaceId]:
    """The workspaces whose permissions have changed."""
    return []


@pytest.fixture
def admin(db: Database, told: list[WorkspaceId]) -> WorkspaceAdmin:
    return WorkspaceAdmin(db, told.append)


async def make_named(connection: Any, name: str) -> WorkspaceId:
    workspace_id = await make_workspace(connection)
    await connection.execute("update workspaces set name = $2 where id = $1", workspace_id, name)
    return workspace_id


async def name_of(connection: Any, workspace_id: WorkspaceId) -> str:
    return await connection.fetchval("select name from workspaces where id = $1", workspace_id)


# Names and ids


async def test_a_workspace_is_found_by_its_name_and_by_its_id(
    admin: WorkspaceAdmin, connection: Any
):
    one, _ = await make_named(connection, "laptop"), await make_named(connection, "phone")

    assert await admin.id_of("laptop") == one
    for text in (str(one), one.hex, str(one).upper(), f"{{{one}}}"):
        assert await admin.id_of(text) == one


async def test_an_ambiguous_name_is_refused_with_the_ids_to_choose_from(
    admin: WorkspaceAdmin, connection: Any
):
    ids = [await make_named(connection, "laptop") for _ in range(2)]

    with pytest.raises(BadRequest, match="2 workspaces are named laptop") as refused:
        await admin.id_of("laptop")

    assert all(str(one) in str(refused.value) for one in ids)
    await admin.remove(ids[0])
    assert await admin.id_of("laptop") == ids[1]


async def test_of_many_workspaces_with_one_name_ten_are_listed(
    admin: WorkspaceAdmin, connection: Any
):
    for _ in range(12):
        await make_named(connection, "laptop")

    with pytest.raises(BadRequest, match="More than 10 workspaces") as refused:
        await admin.id_of("laptop")

    assert str(refused.value).count("last seen") == 10


async def test_a_text_that_can_be_an_id_is_never_taken_for_a_name(
    admin: WorkspaceAdmin, connection: Any
):
    """Anybody may choose the id of somebody else as a name."""
    victim, nobody = await make_workspace(connection), uuid4()
    await make_named(connection, str(victim))
    hostile = await make_named(connection, str(nobody))

    assert await admin.id_of(str(victim)) == victim
    with pytest.raises(WorkspaceUnknown, match=f"named so: use its id {hostile}"):
        await admin.id_of(str(nobody))


@pytest.mark.parametrize(
    "text", ["", "nobody", "\x1b[31m", "a\x00b", "\ud800", "x" * 10_000], ids=ascii
)
async def test_an_unknown_name_is_refused_in_one_printable_line(admin: WorkspaceAdmin, text: str):
    with pytest.raises(WorkspaceUnknown) as refused:
        await admin.id_of(text)

    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("phone", "phone"),
        ("  a  phone\n", "a  phone"),
        ("a\x1b[31m\u202ephone", "a [31m phone"),
        ("x" * MAX_LABEL, "x" * MAX_LABEL),
    ],
    ids=["plain", "blanks", "control characters", "long"],
)
async def test_a_workspace_is_renamed(
    admin: WorkspaceAdmin, connection: Any, name: str, stored: str
):
    workspace_id = await make_named(connection, "laptop")

    assert await admin.rename(workspace_id, name) == stored

    assert await name_of(connection, workspace_id) == stored
    assert await admin.rename(workspace_id, name) == stored


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "that can be seen"),
        (" \x00\n", "that can be seen"),
        ("x" * (MAX_LABEL + 1), f"at most {MAX_LABEL} characters"),
        ("{11111111222233334444555555555555}", "looks like an id"),
        ("taken", "is named taken already"),
    ],
    ids=["empty", "invisible", "too long", "an id", "taken"],
)
async def test_a_name_that_would_not_find_the_workspace_is_refused(
    admin: WorkspaceAdmin, connection: Any, name: str, why: str
):
    workspace_id = await make_named(connection, "laptop")
    await make_named(connection, "taken")

    with pytest.raises(BadRequest, match=why):
        await admin.rename(workspace_id, name)

    assert await name_of(connection, workspace_id) == "laptop"


async def test_ambiguous_and_odd_names_are_told_apart_in_print(
    admin: WorkspaceAdmin, connection: Any
):
    gone, like_an_id = uuid4(), str(uuid4())
    one, _ = await make_named(connection, "laptop"), await make_named(connection, "laptop")
    alone, odd = await make_named(connection, "phone"), await make_named(connection, like_an_id)

    shown = await admin.labels([one, alone, odd, gone, None])

    assert shown == {
        one: f"laptop ({str(one)[:8]})",
        alone: "phone",
        odd: f'"{like_an_id}"',
        gone: str(gone),
    }
    assert labels([one], {one: "\x1b[2J\nx"}) == {one: '" [2J x"'}


# Several operators at once


async def test_of_two_tokens_that_are_issued_at_once_the_later_one_works(
    admin: WorkspaceAdmin, connection: Any, connections: Any
):
    """The first holds the row; the second waits for it, and wins."""
    workspace_id, watching = await make_workspace(connection), await connections()
    async with connection.transaction():
        await store.set_token(connection, workspace_id, token_hash("1"))
        issuing = asyncio.create_task(admin.reissue_token(workspace_id))
        await until(lambda: waits_for_a_lock(watching))
        assert not issuing.done()

    issued = await issuing

    stored = await store.get(watching, workspace_id)
    assert stored is not None
    assert stored.token_hash == token_hash(issued.auth_token)


@pytest.mark.parametrize("act", ["issue", "rename", "revoke", "remove"])
async def test_who_comes_after_a_removal_is_told_that_it_is_gone(
    admin: WorkspaceAdmin, connection: Any, connections: Any, act: str
):
    """The removal is not committed yet when the other begins; nothing of it comes back."""
    workspace_id, watching = await make_workspace(connection), await connections()
    acts = {
        "issue": lambda: admin.reissue_token(workspace_id),
        "rename": lambda: admin.change(workspace_id, Changes(name="other")),
        "revoke": lambda: admin.revoke_token(workspace_id),
        "remove": lambda: admin.remove(workspace_id),
    }
    async with connection.transaction():
        assert await store.remove(connection, workspace_id)
        acting = asyncio.create_task(acts[act]())
        await until(lambda: waits_for_a_lock(watching))

    with pytest.raises(WorkspaceUnknown):
        await acting

    stored = await store.get(watching, workspace_id)
    assert stored is not None
    assert (stored.status, stored.token_hash, stored.name) == ("removed", None, "a workspace")


async def test_whoever_holds_a_token_is_checked_again_when_it_stops_working(
    admin: WorkspaceAdmin, connection: Any, told: list[WorkspaceId]
):
    workspace_id = await make_workspace(connection)

    await admin.rename(workspace_id, "phone")
    assert told == []
    await admin.reissue_token(workspace_id)
    await admin.revoke_token(workspace_id)
    await admin.remove(workspace_id)

    assert told == [workspace_id] * 3


# Lists, and what is kept


async def test_the_list_begins_with_those_that_were_seen_last(
    admin: WorkspaceAdmin, connection: Any
):
    ids = [await make_workspace(connection) for _ in range(3)]
    await connection.execute(
        "update workspaces set last_seen_at = now() - interval '1 day' where id = $1", ids[1]
    )
    await make_upload(connection, ids[1])
    await admin.remove(ids[2])

    found = await admin.recent(limit=10, with_removed=False)
    everything = await admin.recent(limit=10, with_removed=True)

    assert [(one.id, one.is_online) for one in found] == [(ids[0], True), (ids[1], False)]
    waiting = found[1]
    assert (waiting.waiting_files, waiting.waiting_bytes, waiting.unread_rows) == (1, 10, 1)
    assert (everything[0].id, everything[0].is_online) == (ids[2], False)
    assert len(await admin.recent(limit=2, with_removed=True)) == 2


async def test_files_that_wait_for_a_workspace_can_expire_together(
    db_with_partitions: Database, connection: Any, connections: Any
):
    """The next sweep deletes them; those of others, and acknowledged ones, stay."""
    uploads = UploadAdmin(make_parts(db_with_partitions).receiver, ack_retention=NOW - NOW)
    workspace_id, other = await make_workspace(connection), await make_workspace(connection)
    for owner in (workspace_id, workspace_id, other):
        await make_upload(connection, owner)

    held = await uploads.held_for(workspace_id, now=NOW)
    expired = [await uploads.expire_waiting(workspace_id, now=NOW) for _ in range(2)]

    assert (held.waiting_files, held.waiting_bytes, held.acked_files) == (2, 20, 0)
    assert expired == [2, 0]
    assert (await sweep_uploads(connection, now=NOW.replace(year=NOW.year + 1)))["expired"] == 3
