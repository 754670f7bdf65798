"""What a commit makes visible is synced to disk; what nobody waits for is not."""

from typing import Any

import pytest
from factories import (
    NOW,
    Content,
    make_batch,
    make_message,
    make_reservation,
    make_upload,
)

from restante.database import pool
from restante.database.pool import Database
from restante.delivery import quotas, store
from restante.delivery.rules import Quota
from restante.feed import store as feed
from restante.feed.wakeups import CHANNEL
from restante.ids import WorkspaceId
from restante.workspaces import store as workspaces

pytestmark = pytest.mark.anyio


async def setting(connection: Any) -> str:
    return await connection.fetchval("show synchronous_commit")


async def setting_after(connection: Any, run: Any) -> str:
    """The setting when the statement's transaction is about to commit."""
    async with connection.transaction():
        await run()
        return await setting(connection)


async def test_commits_that_make_something_visible_are_synced_and_others_are_not(
    db: Database, workspace_id: WorkspaceId
):
    """And no statement changes the setting for the session."""
    async with db.connection() as connection:
        reservation = make_reservation(workspace_id)
        content = Content()
        batch, file_id = make_batch(workspace_id), await make_upload(connection, workspace_id)
        put = (batch.bucket, workspace_id, [content.id], [0], [b"x"])
        statements = {
            "publish": lambda: store.publish(connection, batch),
            "append": lambda: feed.append(connection, workspace_id, make_message(), now=NOW),
            "mark": lambda: feed.acknowledge(connection, workspace_id, 1),
            "put": lambda: connection.execute(store.queries.put_chunks, *put),
            "reserve": lambda: quotas.reserve(connection, reservation, Quota(10**6, 100)),
            "release": lambda: quotas.release(connection, reservation.id),
            "fetched": lambda: store.mark_fetched(connection, workspace_id, file_id, now=NOW),
            "heartbeat": lambda: workspaces.heartbeat(connection, workspace_id, 1, ""),
            "notify": lambda: connection.execute(pool.queries.notify, CHANNEL, str(workspace_id)),
            "acknowledge": lambda: store.acknowledge(connection, workspace_id, file_id, now=NOW),
        }
        found = {
            name: [await setting_after(connection, run), await setting(connection)]
            for name, run in statements.items()
        }

    synced = {"publish", "append", "mark", "acknowledge"}
    assert {name for name, (inside, _) in found.items() if inside == "on"} == synced
    assert {after for _, after in found.values()} == {"on"}


async def test_publishing_flushes_the_chunks_that_were_written_ahead(
    db: Database, workspace_id: WorkspaceId
):
    """Their own commit was not synced; one flush of the WAL covers everything before it."""
    content = Content(bytes(100))
    batch = make_batch(workspace_id, content)
    async with db.connection() as connection:
        await connection.execute(
            store.queries.put_chunks, batch.bucket, workspace_id, [content.id], [7], [bytes(1000)]
        )
        ahead = await connection.fetchval("select pg_current_wal_insert_lsn()")

        await store.publish(connection, batch)

        assert await connection.fetchval("select pg_current_wal_flush_lsn() >= $1::pg_lsn", ahead)
