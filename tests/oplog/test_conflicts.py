"""A change that lost against one that it had not seen is kept, with both versions."""

import json
from typing import Any

import pytest
from oplog.nodes import (
    NOW,
    OWN,
    PEER,
    THIRD,
    make_peer,
    op,
    pull_from,
    tracked,
    ulid_at,
    write_locally,
)

from restante.database.pool import Database
from restante.oplog import tables, ulids
from restante.oplog.applying import conflicts
from restante.oplog.applying.apply import PageResult, apply_page
from restante.oplog.applying.conflicts import Conflict, Listed
from restante.oplog.positions import Position
from restante.oplog.rules import Version
from restante.wire.oplog import Op

pytestmark = pytest.mark.anyio

END = Position(2**62, 0, ulids.LOWEST, 0)


@pytest.fixture
async def table(db: Database) -> tables.TrackedTable:
    async with db.connection() as connection:
        return await tracked(connection)


async def applied(
    db: Database, *ops: Op, host: str = PEER, read: Position | None = None
) -> PageResult:
    peer = await make_peer(db, host)
    async with db.connection() as connection:
        cursor = await connection.fetchval("select cursor from op_peers where id = $1", peer.id)
    return await apply_page(
        db,
        ops,
        pull_from(peer, read),
        expected_cursor=cursor,
        end_cursor=max(cursor, ops[-1].position),
        now=NOW,
    )


async def kept(db: Database) -> list[Listed]:
    async with db.connection() as connection:
        return await conflicts.listed(connection, limit=100)


async def ours(db: Database, table: tables.TrackedTable, name: str | None, at: float) -> None:
    async with db.transaction() as tx:
        data = None if name is None else {"id": 1, "name": name}
        await write_locally(tx, table, 1, data, at=at)


def theirs(name: str, at: float, **more: Any) -> Op:
    return op("update", {"id": 1, "name": name}, at=at, **more)


async def test_an_older_change_arrives_that_ours_was_made_without(
    db: Database, table: tables.TrackedTable
):
    await ours(db, table, "ours", at=5)

    result = await applied(db, theirs("theirs", at=4))

    (one,) = await kept(db)
    assert result.conflicts == 1
    assert (one.reason, one.kept_host, one.lost_host, one.key) == ("unseen", OWN, PEER, "[1]")
    assert json.loads(bytes(one.kept or b""))["name"] == "ours"
    assert json.loads(bytes(one.lost or b""))["name"] == "theirs"


async def test_a_change_that_was_seen_is_none(db: Database, table: tables.TrackedTable):
    """It comes again, from another peer, after ours was made on top of it."""
    await applied(db, theirs("theirs", at=4))
    await ours(db, table, "ours", at=5)

    result = await applied(db, theirs("theirs", at=4), host=THIRD)

    assert (result.superseded, result.conflicts) == (1, 0)


async def test_what_lost_against_a_third_nodes_change_is_theirs_to_notice(
    db: Database, table: tables.TrackedTable
):
    await applied(db, theirs("third", at=4, host=THIRD), host=THIRD)
    await ours(db, table, "ours", at=5)

    result = await applied(db, theirs("theirs", at=3))

    assert result.conflicts == 0


async def test_a_conflict_is_counted_once_whoever_brings_it(
    db: Database, table: tables.TrackedTable
):
    await ours(db, table, "ours", at=5)
    await applied(db, theirs("theirs", at=4))

    again = await applied(db, theirs("theirs", at=4), host=THIRD)

    assert again.conflicts == 0
    assert len(await kept(db)) == 1


async def test_our_change_is_overwritten_by_a_node_that_had_not_read_it(
    db: Database, table: tables.TrackedTable
):
    await ours(db, table, "ours", at=5)

    result = await applied(db, theirs("theirs", at=6))

    (one,) = await kept(db)
    assert result.conflicts == 1
    assert (one.reason, one.kept_host, one.lost_host) == ("overwritten", PEER, OWN)


async def test_our_change_is_overwritten_by_a_node_that_had_read_it(
    db: Database, table: tables.TrackedTable
):
    await ours(db, table, "ours", at=5)

    result = await applied(db, theirs("theirs", at=6), read=END)

    assert (result.applied, result.conflicts) == (1, 0)


@pytest.mark.parametrize("at", [4, 6])
async def test_the_same_result_is_no_conflict(db: Database, table: tables.TrackedTable, at: float):
    await ours(db, table, None, at=5)

    result = await applied(db, op("delete", {"id": 1}, at=at))

    assert result.conflicts == 0


async def test_a_delete_and_a_change_are_a_conflict(db: Database, table: tables.TrackedTable):
    await ours(db, table, "ours", at=5)

    result = await applied(db, op("delete", {"id": 1}, at=4))

    assert result.conflicts == 1
    (one,) = await kept(db)
    assert (one.lost, one.lost_is_delete) == (None, True)
    assert (one.kept is None, one.kept_is_delete) == (False, False)


async def test_what_lost_against_our_delete_is_kept(db: Database, table: tables.TrackedTable):
    await ours(db, table, None, at=5)

    result = await applied(db, theirs("theirs", at=4))

    assert result.conflicts == 1
    (one,) = await kept(db)
    assert (one.kept, one.kept_is_delete, one.lost_is_delete) == (None, True, False)
    assert json.loads(bytes(one.lost or b""))["name"] == "theirs"


async def test_what_loses_against_an_approximate_version_is_reported(
    db: Database, table: tables.TrackedTable
):
    """It came from a snapshot and may be older than it says."""
    await applied(db, theirs("from a snapshot", at=5, approximate=True))

    result = await applied(db, theirs("exact", at=4, host=THIRD), host=THIRD)

    assert result.conflicts == 1
    assert (await kept(db))[0].reason == "approximate"


async def test_below_the_floor_nothing_is_said(db: Database, table: tables.TrackedTable):
    """The log may have had the change."""
    await ours(db, table, "ours", at=5)
    async with db.connection() as connection:
        await connection.execute("update op_tables set floor = (select ulid from ops limit 1)")

    result = await applied(db, theirs("theirs", at=4))

    assert (result.superseded, result.conflicts) == (1, 0)


async def test_the_log_of_conflicts_is_bounded(
    db: Database, table: tables.TrackedTable, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(conflicts, "MAX_KEPT", 5)
    monkeypatch.setattr(conflicts, "MAX_DATA_BYTES", 20)
    async with db.transaction() as tx:
        for i in range(8):
            one = Conflict(
                f"[{i}]",
                "unseen",
                Version(ulid_at(i), OWN),
                '{"id":1}',
                Version(ulid_at(i), PEER),
                '{"id":1,"name":"a long name"}',
            )
            await conflicts.add(tx, "items", [one], now=NOW)

    found = await kept(db)
    assert len(found) <= 6
    assert found[0].key == "[7]"
    assert (found[0].lost, found[0].lost_is_delete) == (None, False)
    assert found[0].kept is not None
