"""An application publishes files on its own connection, in one transaction with its own rows."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from callers import pattern
from factories import NOW, Counters, Parts, counters, make_parts, make_workspace

from restante.database.pool import Database
from restante.delivery import fetch
from restante.delivery.receive import Incoming
from restante.delivery.rules import MIB, Quota
from restante.delivery.stage import NewFile, staging
from restante.errors import BadRequest, WorkspaceFull
from restante.ids import FileId, WorkspaceId

pytestmark = pytest.mark.anyio

INSERT = "insert into orders (item) values ('a lamp')"


class Cancelled(Exception):
    """The application changes its mind."""


@pytest.fixture
async def application(dsn: str) -> AsyncIterator[Any]:
    """A connection that knows nothing of Restante, and a table in the schema `public`."""
    connection = await asyncpg.connect(dsn, server_settings={"search_path": "public"})
    await connection.execute("create table orders (item text)")
    yield connection
    await connection.close()


def documents(size: int = 10) -> list[NewFile]:
    return [
        NewFile("invoice.txt", "text/plain", b"One lamp: 40."),
        NewFile("picture.bin", "image/png", pattern(size)),
    ]


@asynccontextmanager
async def ordering(
    parts: Parts, application: Any, workspace_id: WorkspaceId, size: int = 10
) -> AsyncIterator[Incoming]:
    """A transaction of the application, to which two documents belong."""
    files = documents(size)
    async with (
        staging(parts.receiver, workspace_id, files, now=NOW) as incoming,
        application.transaction(),
    ):
        yield incoming


async def order(
    incoming: Incoming, application: Any, *, then_raise: Exception | None = None
) -> list[FileId]:
    await application.execute(INSERT)
    file_ids = await incoming.publish_in(application, now=NOW)
    if then_raise:
        raise then_raise
    return file_ids


async def orders(connection: Any) -> int:
    return await connection.fetchval("select count(*) from public.orders")


async def listed(parts: Parts, workspace_id: WorkspaceId) -> list[Any]:
    found = await fetch.unacked(parts.db, workspace_id, after=None, limit=10, now=NOW)
    return [one.file_id for one in found]


@pytest.mark.parametrize("size", [10, 3 * MIB])
async def test_a_commit_shows_the_row_and_both_files(
    parts: Parts, application: Any, connection: Any, workspace_id: WorkspaceId, size: int
):
    async with ordering(parts, application, workspace_id, size) as incoming:
        ids = await order(incoming, application)

    assert await orders(connection) == 1
    assert sorted(await listed(parts, workspace_id)) == sorted(ids)
    assert await counters(connection, workspace_id) == Counters(2, size + 13, 2)
    upload = await fetch.get(parts.db, workspace_id, ids[1], now=NOW)
    pieces = fetch.read(parts.db, parts.blobs, upload, 0, size - 1, now=NOW)
    assert b"".join([piece async for piece in pieces]) == pattern(size)


@pytest.mark.parametrize("size", [10, 3 * MIB])
async def test_a_rollback_shows_neither_the_row_nor_a_file(
    parts: Parts, application: Any, connection: Any, workspace_id: WorkspaceId, size: int
):
    with pytest.raises(Cancelled):
        async with ordering(parts, application, workspace_id, size) as incoming:
            await order(incoming, application, then_raise=Cancelled())

    assert await orders(connection) == 0
    assert await listed(parts, workspace_id) == []
    assert await counters(connection, workspace_id) == Counters()


async def test_nobody_sees_the_row_or_a_file_before_the_commit(
    parts: Parts, application: Any, connection: Any, workspace_id: WorkspaceId
):
    async with ordering(parts, application, workspace_id) as incoming:
        await order(incoming, application)

        assert await orders(connection) == 0
        assert await listed(parts, workspace_id) == []


async def test_the_search_path_is_restored_inside_and_after_the_transaction(
    parts: Parts, application: Any, workspace_id: WorkspaceId
):
    """The application's next statement finds the application's tables."""
    show = "show search_path"
    async with ordering(parts, application, workspace_id) as incoming:
        await incoming.publish_in(application, now=NOW)
        inside = await application.fetchval(show)
        await application.execute(INSERT)

    assert (inside, await application.fetchval(show)) == ("public", "public")
    assert await orders(application) == 1


@pytest.mark.parametrize(("before", "inside"), [("off", "on"), ("on", "on"), ("local", "local")])
async def test_the_commit_is_synced_whatever_the_applications_setting(
    *, parts: Parts, application: Any, workspace_id: WorkspaceId, before: str, inside: str
):
    """Promise 2.  The application's own setting is back after the transaction."""
    show = "show synchronous_commit"
    await application.execute(f"set synchronous_commit = {before}")
    async with ordering(parts, application, workspace_id) as incoming:
        await incoming.publish_in(application, now=NOW)
        at_the_commit = await application.fetchval(show)

    assert at_the_commit == inside
    assert await application.fetchval(show) == before


@pytest.mark.parametrize("size", [10, 3 * MIB])
async def test_a_connection_without_an_open_transaction_is_refused(
    parts: Parts, application: Any, connection: Any, workspace_id: WorkspaceId, size: int
):
    """The files would be committed on their own, whatever becomes of the application's rows."""
    with pytest.raises(BadRequest, match="needs a connection with an open transaction"):
        async with staging(parts.receiver, workspace_id, documents(size), now=NOW) as incoming:
            await incoming.publish_in(application, now=NOW)

    assert await listed(parts, workspace_id) == []
    assert await counters(connection, workspace_id) == Counters()


async def test_an_application_may_go_on_with_its_transaction_after_a_refusal(
    db: Database, application: Any, connection: Any, workspace_id: WorkspaceId
):
    """A full workspace is no database error: the transaction is intact, in its own schema."""
    parts = make_parts(db, quota=Quota(max_bytes=1000, max_files=2))
    await parts.stage(workspace_id, b"x")
    async with ordering(parts, application, workspace_id) as incoming:
        with pytest.raises(WorkspaceFull):
            await incoming.publish_in(application, now=NOW)
        await application.execute(INSERT)

    assert await orders(connection) == 1
    assert await counters(connection, workspace_id) == Counters(1, 1, 1)


async def test_a_savepoint_of_the_application_can_take_the_files_back(
    parts: Parts, application: Any, connection: Any, workspace_id: WorkspaceId
):
    async with ordering(parts, application, workspace_id) as incoming:
        await application.execute(INSERT)
        savepoint = application.transaction()
        await savepoint.start()
        await incoming.publish_in(application, now=NOW)
        await savepoint.rollback()
        assert await application.fetchval("show search_path") == "public"

    assert await orders(connection) == 1
    assert await listed(parts, workspace_id) == []
    assert await counters(connection, workspace_id) == Counters()


async def test_one_transaction_may_publish_to_several_workspaces(
    parts: Parts, application: Any, connection: Any, workspace_id: WorkspaceId
):
    other = await make_workspace(connection)
    async with (
        staging(parts.receiver, workspace_id, documents(), now=NOW) as mine,
        staging(parts.receiver, other, documents(), now=NOW) as theirs,
        application.transaction(),
    ):
        await mine.publish_in(application, now=NOW)
        await theirs.publish_in(application, now=NOW)

    for each in (workspace_id, other):
        assert await counters(connection, each) == Counters(2, 23, 2)


async def test_announcements_are_the_same_whatever_json_codec_the_application_has_set(
    parts: Parts, application: Any, connection: Any, workspace_id: WorkspaceId
):
    """Many applications let the driver encode and decode json."""
    await application.set_type_codec(
        "json", encoder=json.dumps, decoder=json.loads, schema="pg_catalog"
    )

    async with ordering(parts, application, workspace_id) as incoming:
        await incoming.publish_in(application, now=NOW)

    names = await connection.fetch("select request_body ->> 'name' as name from feed order by seq")
    assert [row["name"] for row in names] == ["invoice.txt", "picture.bin"]
