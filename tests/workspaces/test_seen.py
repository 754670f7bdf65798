"""When a workspace was last seen: every request with its token counts, with few writes."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from callers import ADMIN, Caller, ask, registered
from factories import make_workspace
from sites import Site
from waiting import until, until_earlier_transactions_end
from watchers import WAYS, id_of, watch

from restante.database.pool import Database
from restante.feed.batches import WatchPolicy
from restante.ids import WorkspaceId
from restante.workspaces import store
from restante.workspaces.rules import ONLINE_WITHIN
from restante.workspaces.seen import Seen

pytestmark = pytest.mark.anyio

SEEN = "select last_seen_at > now() - interval '30 seconds' from workspaces where id = $1"
VERSION = "select ctid::text from workspaces where id = $1"


async def make_unseen(connection: Any, workspace_id: WorkspaceId) -> None:
    await connection.execute(
        "update workspaces set last_seen_at = last_seen_at - $2::interval where id = $1",
        workspace_id,
        ONLINE_WITHIN * 2,
    )


@pytest.fixture
async def connection(connections: Any) -> Any:
    return await connections()


@pytest.fixture
async def unseen(db: Database, connection: Any) -> WorkspaceId:
    """A workspace that was last seen some minutes ago."""
    workspace_id = await make_workspace(connection)
    await make_unseen(connection, workspace_id)
    return workspace_id


async def test_a_note_is_written_with_the_next_pass(
    db: Database, connection: Any, unseen: WorkspaceId
):
    seen = Seen()

    seen.note(unseen)
    before = await connection.fetchval(SEEN, unseen)
    await seen.write(db)

    assert before is False
    assert await connection.fetchval(SEEN, unseen) is True


async def test_a_process_writes_a_workspace_once_a_minute(
    db: Database, connection: Any, unseen: WorkspaceId
):
    """It does not even ask the database in between."""
    seen = Seen()
    seen.note(unseen)
    await seen.write(db)
    await make_unseen(connection, unseen)

    seen.note(unseen)
    await seen.write(db)

    assert await connection.fetchval(SEEN, unseen) is False


async def test_several_processes_together_write_a_workspace_once_a_minute(
    db: Database, connection: Any, unseen: WorkspaceId
):
    one, other = Seen(), Seen()
    for seen in (one, other):
        seen.note(unseen)
    await one.write(db)
    written = await connection.fetchval(VERSION, unseen)

    await other.write(db)

    assert await connection.fetchval(VERSION, unseen) == written


async def test_a_locked_workspace_is_skipped_and_noted_again_later(
    db: Database, connection: Any, connections: Any, unseen: WorkspaceId
):
    """The others of the batch are written meanwhile."""
    seen, neighbour = Seen(), await make_workspace(connection)
    await make_unseen(connection, neighbour)
    holder = await connections()
    async with holder.transaction():
        await holder.execute("select from workspaces where id = $1 for update", unseen)
        for workspace_id in (unseen, neighbour):
            seen.note(workspace_id)
        async with asyncio.timeout(10):
            await seen.write(db)
    assert [await connection.fetchval(SEEN, one) for one in (unseen, neighbour)] == [False, True]

    seen.note(unseen)
    await seen.write(db)

    assert await connection.fetchval(SEEN, unseen) is True


async def test_a_removed_workspace_is_not_seen_again(
    db: Database, connection: Any, unseen: WorkspaceId
):
    """The time of its removal decides when it is deleted."""
    await store.remove(connection, unseen)
    await make_unseen(connection, unseen)
    seen = Seen()

    seen.note(unseen)
    await seen.write(db)

    assert await connection.fetchval(SEEN, unseen) is False


async def test_a_process_remembers_a_bounded_number_of_workspaces(db: Database, connection: Any):
    ids = [await make_workspace(connection) for _ in range(5)]
    for workspace_id in ids:
        await make_unseen(connection, workspace_id)
    seen = Seen(limit=3)

    for workspace_id in ids:
        seen.note(workspace_id)
    await seen.write(db)

    assert [await connection.fetchval(SEEN, one) for one in ids] == [True] * 3 + [False] * 2
    assert len(seen._fresh_until) == 3
    for workspace_id in ids[3:]:
        seen.note(workspace_id)
    await seen.write(db)
    assert list(seen._fresh_until) == ids[2:]


async def test_the_writes_are_hot_and_leave_the_table_as_large_as_it_is(
    db: Database, connection: Any
):
    """No index is written, and pruning makes the room of the old version free for the next."""
    ids = [await make_workspace(connection) for _ in range(200)]
    size = "select pg_total_relation_size('workspaces')"
    before = await connection.fetchval(size)

    for _ in range(10):
        await until_earlier_transactions_end(connection)
        assert len(await store.mark_seen(connection, ids, every=timedelta(0))) == 200

    assert await connection.fetchval(size) == before


# Over HTTP


@pytest.fixture
async def caller(site: Site, connection: Any) -> Caller:
    caller = await registered(site)
    await make_unseen(connection, id_of(caller))
    return caller


async def poll(caller: Caller) -> None:
    assert (await caller.read_feed()).status == 200


async def long_poll(caller: Caller) -> None:
    assert (await caller.read_feed(wait="0.01")).status == 200


async def list_files(caller: Caller) -> None:
    assert (await caller.ask("GET", "/pending-uploads")).status == 200


async def see_events(caller: Caller) -> None:
    for way in WAYS:
        async with watch(caller, way):
            pass


@pytest.mark.parametrize("act", [poll, long_poll, list_files, see_events])
async def test_every_request_of_a_workspace_counts(
    site: Site, caller: Caller, connection: Any, act: Callable[[Caller], Awaitable[None]]
):
    before = (await ask(site, "GET", f"/admin/workspaces/{caller.id}", headers=ADMIN)).json

    await act(caller)
    await site.state.access.seen.write(site.state.db)

    after = (await ask(site, "GET", f"/admin/workspaces/{caller.id}", headers=ADMIN)).json
    assert (before["is_online"], after["is_online"]) == (False, True)
    assert await connection.fetchval(SEEN, id_of(caller)) is True


@pytest.mark.parametrize("way", WAYS)
async def test_an_open_watch_is_seen_again_and_again(
    site: Site, caller: Caller, connection: Any, way: str
):
    """It is checked with each heartbeat, also if nothing happens."""
    site.state.watch_policy = WatchPolicy(heartbeat_seconds=0.01, trust_seconds=0)
    async with watch(caller, way):
        await site.state.access.seen.write(site.state.db)
        await make_unseen(connection, id_of(caller))
        seen = site.state.access.seen = Seen()

        async def is_noted() -> bool:
            return id_of(caller) in seen._noted

        await until(is_noted)


async def test_neither_the_operator_nor_a_wrong_token_makes_a_workspace_seen(
    site: Site, caller: Caller, connection: Any
):
    other = await registered(site)

    for headers in (ADMIN, {"Authorization": f"Bearer {other.token}"}):
        await ask(site, "GET", f"{caller.path}/activity", headers=headers)
    await site.state.access.seen.write(site.state.db)

    assert await connection.fetchval(SEEN, id_of(caller)) is False
