"""Two connections, in an explicit order: what is uncommitted is not seen, and must not be lost."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from oplog.nodes import (
    NOW,
    PEER,
    THIRD,
    make_peer,
    op,
    pull_from,
    rows,
    tracked,
    ulid_at,
    write_locally,
)
from waiting import until

from restante.database.pool import Database
from restante.oplog import tables
from restante.oplog.applying import records
from restante.oplog.applying.apply import PageResult, apply_page
from restante.oplog.applying.pieces import MAX_RECORDS
from restante.oplog.applying.settle import settle
from restante.oplog.peers import Peer
from restante.wire.oplog import Op

pytestmark = pytest.mark.anyio


@pytest.fixture
async def table(db: Database) -> tables.TrackedTable:
    async with db.connection() as connection:
        return await tracked(connection)


async def applied(db: Database, peer: Peer, *ops: Op) -> PageResult:
    async with db.connection() as connection:
        cursor = await connection.fetchval("select cursor from op_peers where id = $1", peer.id)
    return await apply_page(
        db,
        ops,
        pull_from(peer),
        expected_cursor=cursor,
        end_cursor=ops[-1].position,
        now=NOW,
    )


async def items(db: Database) -> list[Any]:
    async with db.connection() as connection:
        return await rows(connection)


async def test_a_delete_meets_an_insert_that_is_not_committed(
    db: Database, table: tables.TrackedTable, connections: Callable[[], Any]
):
    """The delete touches nothing, then the insert commits: the record must not stay."""
    peer, writer = await make_peer(db), await connections()
    transaction = writer.transaction()
    await transaction.start()
    await write_locally(writer, table, 1, {"id": 1, "name": "ours"}, at=1)

    await applied(db, peer, op("delete", {"id": 1}, at=2))
    assert await settle(db) == 0
    await transaction.commit()
    assert await items(db) == [(1, "ours", None)]
    removed = await settle(db)

    assert removed == 1
    assert await items(db) == []
    async with db.connection() as connection:
        assert await connection.fetchval("select count(*) from op_unsettled") == 0


async def test_a_newer_insert_survives_the_second_look(db: Database, table: tables.TrackedTable):
    peer = await make_peer(db)
    await applied(db, peer, op("delete", {"id": 1}, at=2))
    async with db.transaction() as tx:
        await write_locally(tx, table, 1, {"id": 1, "name": "later"}, at=3)

    await settle(db)
    await settle(db)

    assert await items(db) == [(1, "later", None)]


async def test_a_delete_meets_an_older_create_of_another_page(
    db: Database, table: tables.TrackedTable, connections: Callable[[], Any]
):
    """Two peers at once: neither transaction sees the other's op, and there is no row to lock."""
    peer, other = await make_peer(db), await connections()
    transaction = other.transaction()
    await transaction.start()
    await records.begin(other, [table])
    fact = (await records.facts(other, table, ['{"id":1}']))[0]

    await applied(db, peer, op("delete", {"id": 1}, at=2))
    await settle(db)
    assert fact.newest is None
    change = records.Change(
        "c", '{"id":1}', frozenset({"id"}), fact.key, fact.key_hash, False, ulid_at(1), 0, 1
    )
    await records.write(other, table, [change])
    await records.append(other, table, [change])
    await settle(db)
    await transaction.commit()
    await settle(db)

    assert await items(db) == []


async def test_an_update_that_is_not_committed_is_waited_for(
    db: Database, table: tables.TrackedTable, connections: Callable[[], Any]
):
    """What the application changes while we wait is judged as it is committed."""
    peer, writer, watcher = await make_peer(db), await connections(), await connections()
    await applied(db, peer, op("create", {"id": 1, "name": "first"}, at=1))
    transaction = writer.transaction()
    await transaction.start()
    await write_locally(writer, table, 1, {"id": 1, "name": "ours"}, at=5)

    applying = asyncio.ensure_future(
        applied(db, peer, op("update", {"id": 1, "name": "old"}, at=4))
    )
    await until(lambda: _somebody_waits(watcher))
    await transaction.commit()
    result = await applying

    assert (result.superseded, result.applied) == (1, 0)
    assert await items(db) == [(1, "ours", None)]


async def _somebody_waits(watcher: Any) -> bool:
    return bool(
        await watcher.fetchval(
            "select exists (select from pg_stat_activity"
            " where datname = current_database() and wait_event_type = 'Lock')"
        )
    )


async def test_a_record_that_stays_locked_stops_the_page_before_it(
    db: Database, table: tables.TrackedTable, connections: Callable[[], Any]
):
    peer, writer = await make_peer(db), await connections()
    first = op("create", {"id": 1}, at=1)
    await applied(db, peer, first)
    transaction = writer.transaction()
    await transaction.start()
    await writer.execute("update public.items set name = 'held' where id = 1")

    page = op("update", {"id": 1, "name": "new"}, at=2), op("create", {"id": 2}, at=3)
    result = await applied(db, peer, *page)
    await transaction.rollback()
    again = await applied(db, peer, *page)

    assert (result.stopped, result.cursor) == ("busy", first.position)
    assert (again.stopped, again.applied) == (None, 2)
    assert await items(db) == [(1, "new", None), (2, None, None)]


async def test_two_pages_with_the_same_new_record(db: Database, table: tables.TrackedTable):
    """One of them finds the record of the other when it inserts, and looks again."""
    peer, third = await make_peer(db), await make_peer(db, THIRD)
    one = [op("create", {"id": i, "name": "peer"}, at=i, host=PEER) for i in range(1, 300)]
    two = [op("create", {"id": i, "name": "third"}, at=i, host=THIRD) for i in range(299, 0, -1)]

    results = await asyncio.gather(applied(db, peer, *one), applied(db, third, *two))
    for result, of, ops in ((results[0], peer, one), (results[1], third, two)):
        if result.stopped:
            await applied(db, of, *ops)

    assert {row[1] for row in await items(db)} == {"third"}


async def test_a_killed_backend_repeats_the_page_and_nothing_twice(
    db: Database, table: tables.TrackedTable, connections: Callable[[], Any]
):
    """The process of the transaction dies before its commit: the cursor and the records agree."""
    peer, holder, watcher = await make_peer(db), await connections(), await connections()
    page = [op("create", {"id": i}, at=i / 10) for i in range(1, MAX_RECORDS + 501)]
    transaction = holder.transaction()
    await transaction.start()
    await holder.execute("insert into public.items values ($1)", MAX_RECORDS + 200)

    applying = asyncio.ensure_future(applied(db, peer, *page))
    await until(lambda: _somebody_waits(watcher))
    await watcher.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and wait_event_type = 'Lock'"
    )
    with pytest.raises(Exception, match=r"went away|closed"):
        await applying
    await transaction.rollback()
    cursor = await watcher.fetchval("select cursor from op_peers")
    count = await watcher.fetchval("select count(*) from public.items")
    again = await apply_page(
        db,
        [one for one in page if one.position > cursor],
        pull_from(peer),
        expected_cursor=cursor,
        end_cursor=page[-1].position,
        now=NOW,
    )

    assert (cursor, count) == (page[MAX_RECORDS - 1].position, MAX_RECORDS)
    assert (again.applied, again.superseded) == (500, 0)
    assert await watcher.fetchval("select count(*) from ops") == len(page)
