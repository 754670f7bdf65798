"""What waits is tried again when there is reason to hope, and is lost only by somebody's word."""

from datetime import timedelta
from typing import Any

import pytest
from oplog.nodes import NOW, PEER, make_peer, op, pull_from, rows, tracked, ulid_at, write_locally

from restante.database.pool import Database
from restante.oplog import peers, tables
from restante.oplog.applying import parked
from restante.oplog.applying.apply import PageResult, Source, apply_page
from restante.oplog.applying.parked import Retried
from restante.oplog.rules import Channel
from restante.wire.oplog import Op

pytestmark = pytest.mark.anyio

CHILDREN = "create table {} (id int primary key, parent int references public.parents, v text)"
SOON = NOW + timedelta(seconds=1)
LATER = NOW + timedelta(hours=2)


async def applied(db: Database, *ops: Op, source: Source | None = None) -> PageResult:
    peer = await make_peer(db)
    async with db.connection() as connection:
        cursor = await connection.fetchval("select cursor from op_peers where id = $1", peer.id)
    return await apply_page(
        db,
        ops,
        source or pull_from(peer),
        expected_cursor=cursor,
        end_cursor=max(cursor, ops[-1].position),
        now=NOW,
    )


@pytest.fixture
async def children(db: Database) -> tables.TrackedTable:
    async with db.connection() as connection:
        await tracked(connection, "parents", "create table {} (id int primary key)")
        return await tracked(connection, "children", CHILDREN)


def child(number: int, at: float, parent: int, v: str = "") -> Op:
    return op("create", {"id": number, "parent": parent, "v": v}, at=at, table="children")


def parent(number: int, at: float) -> Op:
    return op("create", {"id": number}, at=at, table="parents")


async def found(db: Database) -> tuple[list[Any], list[str | None]]:
    async with db.connection() as connection:
        listed = await parked.listed(connection)
        return await rows(connection, "children"), [one.key for one in listed]


async def test_a_foreign_key_heals_as_soon_as_its_table_changes(
    db: Database, children: tables.TrackedTable
):
    await applied(db, child(1, 1, parent=7), child(2, 2, parent=8))
    before = await parked.retry_due(db, now=SOON)
    await applied(db, parent(7, 3))

    result = await parked.retry_due(db, now=SOON)

    assert before == Retried()
    assert result == Retried(applied=1, still_parked=1)
    assert await found(db) == ([(1, 7, "")], ["[2]"])
    async with db.connection() as connection:
        assert await connection.fetchval("select applied from op_peers") == 2


async def test_what_a_removed_peer_has_sent_waits_for_the_operator(
    db: Database, children: tables.TrackedTable
):
    await applied(db, child(1, 1, parent=7))
    async with db.connection() as connection:
        await peers.remove(connection, PEER)
        await connection.execute("insert into public.parents values (7)")

    by_itself = await parked.retry_due(db, now=LATER)
    asked = await parked.retry(db, None, now=LATER)

    assert by_itself == Retried()
    assert asked.applied == 1


async def test_numbers_under_which_nothing_is_parked_are_named(
    db: Database, children: tables.TrackedTable
):
    await applied(db, child(1, 1, parent=7))
    async with db.connection() as connection:
        (one,) = await parked.listed(connection)

        unknown = await parked.unknown(connection, [99999, one.id, 99998])

    assert unknown == [99998, 99999]


async def test_a_retry_does_not_revert_what_is_newer(db: Database, children: tables.TrackedTable):
    """The application has written the record meanwhile."""
    await applied(db, child(1, 1, parent=7, v="old"))
    await applied(db, parent(7, 2))
    async with db.transaction() as tx:
        await write_locally(tx, children, 1, {"id": 1, "parent": 7, "v": "new"}, at=5)

    result = await parked.retry(db, None, now=SOON)

    assert result == Retried(superseded=1)
    assert await found(db) == ([(1, 7, "new")], [])


async def test_others_are_tried_after_a_growing_pause(db: Database, children: tables.TrackedTable):
    await applied(db, child(1, 1, parent=7))

    passes = [
        await parked.retry_due(db, now=NOW + timedelta(seconds=seconds))
        for seconds in (9, 11, 20, 32)
    ]

    assert [one.still_parked for one in passes] == [0, 1, 0, 1]


async def test_an_op_of_the_future_is_applied_when_its_time_has_come(
    db: Database, children: tables.TrackedTable
):
    minutes = 30
    await applied(db, parent(7, 3600 + minutes * 60))

    early = await parked.retry_due(db, now=NOW + timedelta(minutes=minutes - 6))
    forced = await parked.retry(db, None, now=NOW + timedelta(minutes=minutes - 6))
    due = await parked.retry_due(db, now=NOW + timedelta(minutes=minutes - 4))

    assert (early.applied, forced.applied, due.applied) == (0, 0, 1)


async def test_below_the_floor_only_the_operator_decides(
    db: Database, children: tables.TrackedTable
):
    async with db.connection() as connection:
        await connection.execute("update op_tables set floor = $1", ulid_at(9))
    peer = await make_peer(db)
    await applied(db, parent(7, 1), source=Source(peer, Channel.ULID))

    by_itself = await parked.retry_due(db, now=LATER)
    by_word = await parked.retry(db, None, now=LATER)

    assert (by_itself.applied, by_word.applied) == (0, 1)


async def test_one_that_fails_does_not_keep_others_back(
    db: Database, children: tables.TrackedTable
):
    await applied(db, *(child(i, i, parent=i) for i in range(1, 30)))
    await applied(db, *(parent(i, 100 + i) for i in range(1, 30) if i != 13))

    result = await parked.retry_due(db, now=SOON)

    assert result == Retried(applied=28, still_parked=1)
    assert (await found(db))[1] == ["[13]"]


async def test_discard_one_and_all(db: Database, children: tables.TrackedTable):
    await applied(db, *(child(i, i, parent=99) for i in range(1, 4)))
    async with db.connection() as connection:
        first = (await parked.listed(connection))[0]

        one = await parked.discard(connection, [first.id])
        rest = await parked.discard(connection, None)

    assert (one, rest) == (1, 2)


async def test_a_table_that_is_not_tracked_any_more(db: Database, children: tables.TrackedTable):
    await applied(db, child(1, 1, parent=99))
    async with db.connection() as connection:
        await connection.execute("delete from op_tables where name = 'children'")

    result = await parked.retry_due(db, now=LATER)

    assert result == Retried(still_parked=1)
    async with db.connection() as connection:
        sentence = (await parked.listed(connection))[0].sentence
    assert sentence == "The table is not tracked any more."


async def test_a_host_for_which_there_is_no_room_keeps_no_others_back(
    db: Database, children: tables.TrackedTable, monkeypatch: pytest.MonkeyPatch
):
    await applied(db, child(1, 1, parent=7), child(2, 2, parent=7))
    await applied(db, parent(7, 3))
    monkeypatch.setattr(tables, "MAX_HOSTS_OF_A_PEER", 0)
    async with db.connection() as connection:
        await connection.execute(
            "update op_parked set origin = 'https://invented.example' where key = '[1]'"
        )

    result = await parked.retry(db, None, now=SOON)

    assert result == Retried(applied=1, still_parked=1)
    async with db.connection() as connection:
        assert "no room for another host" in (await parked.listed(connection))[0].sentence


async def test_listing_by_table_and_reason_and_from_a_place(
    db: Database, children: tables.TrackedTable
):
    await applied(db, *(child(i, i, parent=99) for i in range(1, 4)), parent(7, 3600 + 600))
    async with db.connection() as connection:
        ids = [one.id for one in await parked.listed(connection)]

        of_table = await parked.listed(connection, table="parents")
        of_reason = await parked.listed(connection, reason="foreign_key", limit=2)
        rest = await parked.listed(connection, reason="foreign_key", after=of_reason[-1].id)

    assert [one.reason for one in of_table] == ["future"]
    assert [one.id for one in [*of_reason, *rest]] == ids[:3]
    assert await _counted(db) == {"foreign_key": 3, "future": 1}


async def _counted(db: Database) -> dict[str, int]:
    async with db.connection() as connection:
        return await parked.count(connection)
