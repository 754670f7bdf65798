"""The rows of workspaces."""

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from factories import (
    NOW,
    Counters,
    counters,
    make_batch,
    make_message,
    make_workspace,
)

from restante.database.pool import Connection, Database, Tx
from restante.delivery import store as uploads
from restante.feed import store as feed
from restante.feed.store import Appended
from restante.ids import WorkspaceId
from restante.workspaces import store as workspaces
from restante.workspaces.rules import ONLINE_WITHIN, Details

pytestmark = pytest.mark.anyio

DETAILS = Details("a workspace", "poll", None, '{"name": "a workspace"}')


def hash_of(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def new_id() -> WorkspaceId:
    return WorkspaceId(uuid4())


async def test_an_id_can_be_registered_once(tx: Tx):
    workspace_id = new_id()

    first = await workspaces.insert(tx, workspace_id, DETAILS, hash_of("first"), "secret")
    second = await workspaces.insert(tx, workspace_id, DETAILS, hash_of("second"), "secret")

    assert (first, second) == (True, False)
    stored = await workspaces.get(tx, workspace_id)
    assert stored
    assert stored.token_hash == hash_of("first")
    assert await counters(tx, workspace_id) == Counters()


async def test_one_of_many_concurrent_registrations_gets_the_id(db: Database):
    workspace_id = new_id()

    async def register(number: int) -> bool:
        async with db.connection() as connection:
            token = hash_of(str(number))
            return await workspaces.insert(connection, workspace_id, DETAILS, token, "secret")

    registered = await asyncio.gather(*(register(number) for number in range(10)))

    async with db.connection() as connection:
        stored = await workspaces.get(connection, workspace_id)
    assert sum(registered) == 1
    assert stored
    assert stored.token_hash == hash_of(str(registered.index(True)))


async def test_a_workspace_is_found_by_its_token_while_it_has_one(tx: Tx):
    workspace_id = new_id()
    await workspaces.insert(tx, workspace_id, DETAILS, hash_of("old"), "secret")

    async def finds(token: str) -> bool:
        found = await workspaces.by_token(tx, hash_of(token))
        return found is not None and found.id == workspace_id

    assert await finds("old")
    assert await workspaces.set_token(tx, workspace_id, hash_of("new"))
    assert (await finds("old"), await finds("new")) == (False, True)
    assert await workspaces.set_token(tx, workspace_id, None)
    assert not await finds("new")


async def test_a_removed_workspace_has_no_token_and_cannot_be_changed(tx: Tx):
    workspace_id = await make_workspace(tx)

    assert await workspaces.remove(tx, workspace_id)

    stored = await workspaces.get(tx, workspace_id)
    assert stored
    assert (stored.status, stored.token_hash) == ("removed", None)
    assert not await workspaces.remove(tx, workspace_id)
    assert not await workspaces.update(tx, workspace_id, DETAILS)
    assert not await workspaces.set_token(tx, workspace_id, hash_of("new"))


async def test_a_workspace_that_is_registered_again_still_has_its_feed_and_files(
    db_with_partitions: Database,
):
    """A removal deletes no upload, and the feed of the same id continues."""
    async with db_with_partitions.connection() as connection:
        workspace_id = await make_workspace(connection)
        publication = make_batch(workspace_id)
        await uploads.publish(connection, publication)
        await workspaces.remove(connection, workspace_id)
        waiting = await counters(connection, workspace_id)

        revived = await workspaces.revive(
            connection, workspace_id, DETAILS, hash_of("new"), "other secret"
        )

        assert revived
        assert waiting == Counters(1, 10, 1)
        assert await feed.append(
            connection, workspace_id, make_message(), now=publication.created_at
        ) == Appended(2)
        stored = await workspaces.get(connection, workspace_id)
        assert stored
        assert (stored.status, stored.inbound_secret) == ("active", "other secret")
        assert not await workspaces.revive(
            connection, workspace_id, DETAILS, hash_of("newer"), "secret"
        )


async def test_a_removed_workspace_is_deleted_when_nothing_of_it_is_left(tx: Tx):
    """Otherwise the table would grow with every workspace that ever existed."""
    removed, still_there = await make_workspace(tx), await make_workspace(tx)
    await workspaces.remove(tx, removed)

    early = await delete_forgettable(tx, timedelta(0))
    late = await delete_forgettable(tx, timedelta(days=90))

    assert (early, late) == (0, 1)
    assert await workspaces.get(tx, removed) is None
    assert await tx.fetchval("select count(*) from feeds where workspace_id = $1", removed) == 0
    assert await workspaces.get(tx, still_there)


@pytest.mark.parametrize("kept", ["file", "row", "reservation"])
async def test_a_removed_workspace_stays_while_anything_of_it_is_kept(
    db_with_partitions: Database, kept: str
):
    """A workspace that registers again must get what was sent to it."""
    async with db_with_partitions.connection() as connection:
        workspace_id = await make_workspace(connection)
        if kept == "file":
            await uploads.publish(connection, make_batch(workspace_id))
            await connection.execute("update feeds set trimmed_seq = last_seq")
        elif kept == "row":
            await feed.append(connection, workspace_id, make_message(), now=NOW)
        else:
            await connection.execute(
                "insert into reservations values ($1, $2, now(), 1, 1, now())",
                *(uuid4(), workspace_id),
            )
        await workspaces.remove(connection, workspace_id)

        assert await delete_forgettable(connection, timedelta(days=90)) == 0
        assert await workspaces.get(connection, workspace_id)


async def test_a_workspace_that_is_registering_again_is_not_deleted(
    connections: Any,
):
    """The registration holds the row lock; the deletion skips it and does not wait."""
    returning, forgetting = await connections(), await connections()
    workspace_id = await make_workspace(returning)
    await workspaces.remove(returning, workspace_id)

    await forgetting.execute("set lock_timeout = '1s'")
    async with returning.transaction():
        await workspaces.revive(returning, workspace_id, DETAILS, hash_of("new"), "secret")
        forgotten = await delete_forgettable(forgetting, timedelta(days=90))

    assert forgotten == 0
    assert await delete_forgettable(forgetting, timedelta(days=90)) == 0
    stored = await workspaces.get(forgetting, workspace_id)
    assert stored
    assert stored.status == "active"


async def delete_forgettable(connection: Connection, after: timedelta) -> int:
    return await workspaces.delete_forgettable(
        connection, seen_before=datetime.now(UTC) - timedelta(seconds=1) + after, limit=10
    )


async def test_changes_are_stored(tx: Tx):
    workspace_id, parent = await make_workspace(tx), uuid4()
    changed = Details("renamed", "push", "https://example.com", '{"name": "x"}', parent)

    assert await workspaces.update(tx, workspace_id, changed)

    stored = await workspaces.view(tx, workspace_id)
    assert stored
    assert (stored.name, stored.delivery_mode, stored.url, bytes(stored.agent_card)) == (
        "renamed",
        "push",
        "https://example.com",
        b'{"name": "x"}',
    )
    assert stored.parent_id == parent


@pytest.mark.parametrize(
    ("seen", "tasks", "task", "is_written"),
    [
        ("1 minute", 1, "reading", False),
        ("1 minute", 2, "reading", True),
        ("1 minute", 1, "writing", True),
        ("-2 seconds", 1, "reading", True),
    ],
    ids=["the same at once", "other tasks", "another task", "the same later"],
)
async def test_a_heartbeat_that_changes_nothing_writes_once_a_second(
    *, tx: Tx, seen: str, tasks: int, task: str, is_written: bool
):
    """A workspace that sends them in a loop writes no more than that."""
    workspace_id = await make_workspace(tx)
    await workspaces.heartbeat(tx, workspace_id, 1, "reading")
    await tx.execute(
        "update workspaces set last_seen_at = clock_timestamp() + $1::text::interval", seen
    )
    version = "select ctid::text from workspaces"
    before = await tx.fetchval(version)

    await workspaces.heartbeat(tx, workspace_id, tasks, task)

    assert (await tx.fetchval(version) != before) is is_written


async def test_a_heartbeat_does_not_wait_for_an_upload_that_is_committing(
    db_with_partitions: Database, connections: Any
):
    """Heartbeats and deliveries lock different rows."""
    sender, workspace = await connections(), await connections()
    workspace_id = await make_workspace(sender)
    async with sender.transaction():
        await uploads.publish(sender, make_batch(workspace_id))

        await workspace.execute("set lock_timeout = '1s'")
        await workspaces.heartbeat(workspace, workspace_id, 3, "reading")

    stored = await workspaces.view(sender, workspace_id)
    assert stored
    assert (stored.active_tasks, stored.current_task) == (3, "reading")


async def test_pages_are_in_the_order_of_ids(tx: Tx):
    ids = sorted([await make_workspace(tx) for _ in range(5)])
    await workspaces.remove(tx, ids[1])

    first = await workspaces.page(tx, after=UUID(int=0), limit=3)
    second = await workspaces.page(tx, after=first[-1].id, limit=3)

    assert [workspace.id for workspace in (*first, *second)] == ids


async def test_an_unknown_workspace_is_not_found(tx: Tx):
    assert await workspaces.get(tx, new_id()) is None
    assert await workspaces.by_token(tx, hash_of("nobody's")) is None
    assert not await workspaces.remove(tx, new_id())


async def test_a_card_is_kept_by_a_change_that_has_none(tx: Tx):
    workspace_id = new_id()
    await workspaces.insert(tx, workspace_id, DETAILS, hash_of("token"), "secret")

    await workspaces.update(tx, workspace_id, Details("renamed", "poll", None, None))

    stored = await workspaces.view(tx, workspace_id)
    assert stored
    assert (stored.name, bytes(stored.agent_card)) == ("renamed", b'{"name": "a workspace"}')


async def test_authentication_and_lists_do_not_read_the_card(tx: Tx):
    """A megabyte for each request, wrong tokens included, would slow everybody down."""
    workspace_id = new_id()
    await workspaces.insert(tx, workspace_id, DETAILS, hash_of("token"), "secret")
    queries = workspaces.queries

    read = [
        await tx.fetchrow(queries.get, workspace_id),
        await tx.fetchrow(queries.get_for_update, workspace_id),
        await tx.fetchrow(queries.by_token, hash_of("token")),
        await tx.fetchrow(queries.page, UUID(int=0), 1, ONLINE_WITHIN),
        await tx.fetchrow(queries.recent, None, False, 1, ONLINE_WITHIN),
    ]

    assert [row is not None and "agent_card" not in row for row in read] == [True] * 5
