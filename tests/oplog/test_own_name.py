"""
Changes in the name of this node that a peer has: those that a restore has lost come back, and
nobody else makes new ones.
"""

from datetime import timedelta
from typing import Any

import pytest
from oplog.direct import SERVER, TAKER, new_node, take
from oplog.nodes import (
    NOW,
    OWN,
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

from restante.database.pool import Connection, Database
from restante.oplog import tables, ulids
from restante.oplog.applying.apply import PageResult, apply_page
from restante.oplog.positions import Position
from restante.wire.oplog import Op

pytestmark = pytest.mark.anyio


async def began(connection: Any, **ago: float) -> None:
    """Let the present era have begun, and the node have got its name, so long ago."""
    moment = NOW - timedelta(**ago)
    await connection.fetchval("select restante.op_current_era()")
    await connection.fetchval(
        "select setval('restante.op_era', $1)", int(moment.timestamp() * 1_000_000)
    )
    await connection.execute("update restante.op_node set named_at = $1", moment)


@pytest.fixture
async def table(db: Database) -> tables.TrackedTable:
    async with db.connection() as connection:
        found = await tracked(connection)
        await began(connection, hours=2)
        return found


async def applied(db: Database, *ops: Op) -> PageResult:
    """Apply a page of a peer that may speak only for itself; ops are of an hour ago, and later."""
    peer = await make_peer(db, relays=[PEER])
    return await apply_page(
        db, ops, pull_from(peer), expected_cursor="", end_cursor=ops[-1].position, now=NOW
    )


async def names(db: Database) -> list[str]:
    async with db.connection() as connection:
        return [row[1] for row in await rows(connection)]


async def test_what_this_node_did_not_make_is_refused_in_its_name(
    db: Database, table: tables.TrackedTable
):
    """A peer could make changes in our name, or two copies of this node run."""
    result = await applied(
        db,
        op("create", {"id": 1, "name": "not ours"}, host=OWN, at=1),
        op("create", {"id": 2, "name": "its own"}, at=2),
    )

    assert await names(db) == ["its own"]
    assert (result.refused_by, result.stopped) == ({"own_name": 1}, None)
    async with db.connection() as connection:
        row = await connection.fetchrow("select refused, refused_by::text from op_peers")
        assert row is not None
        assert tuple(row) == (1, '{"own_name": 1}')


async def test_a_newer_change_than_ours_is_refused_in_our_name(
    db: Database, table: tables.TrackedTable
):
    async with db.connection() as connection:
        await write_locally(connection, table, 1, {"id": 1, "name": "ours"}, at=1)

    result = await applied(db, op("update", {"id": 1, "name": "not ours"}, host=OWN, at=2))

    assert await names(db) == ["ours"]
    assert result.refused_by == {"own_name": 1}


async def test_our_own_change_that_comes_back_is_not_refused(
    db: Database, table: tables.TrackedTable
):
    """Peers pass on what they have read, to us as well."""
    async with db.connection() as connection:
        first = await write_locally(connection, table, 1, {"id": 1, "name": "first"}, at=1)
        second = await write_locally(connection, table, 1, {"id": 1, "name": "second"}, at=2)
    ours = [op("update", {"id": 1, "name": "x"}, host=OWN, at=at) for at in (1, 2)]
    for one, ulid in zip(ours, (first, second), strict=True):
        one.ulid = ulids.text_of(ulid)

    result = await applied(db, *ours)

    assert (result.superseded, result.refused) == (2, 0)


async def test_what_was_dropped_from_our_log_is_neither_refused_nor_applied(
    db: Database, table: tables.TrackedTable
):
    async with db.connection() as connection:
        await connection.execute("insert into public.items values (1, 'now', 1)")
        await connection.execute("update op_tables set floor = $1", ulid_at(5))

    result = await applied(db, op("update", {"id": 1, "name": "then"}, host=OWN, at=2))

    assert await names(db) == ["now"]
    assert (result.superseded, result.refused) == (1, 0)


@pytest.mark.parametrize(
    "era", [{"hours": 0}, {"minutes": 64}], ids=["restored now", "the clock of the log was ahead"]
)
async def test_what_a_restore_has_lost_comes_back(
    db: Database, table: tables.TrackedTable, era: dict[str, float]
):
    async with db.connection() as connection:
        await began(connection, **era)

    result = await applied(db, op("create", {"id": 1, "name": "lost"}, host=OWN, at=1))

    assert await names(db) == ["lost"]
    assert result.refused == 0


async def test_what_had_our_name_before_us_comes_back(db: Database, table: tables.TrackedTable):
    """A new machine takes over the name of another one."""
    async with db.connection() as connection:
        await tables.identify(connection, THIRD)
        await tables.identify(connection, OWN)

    await applied(db, op("create", {"id": 1, "name": "of the old machine"}, host=OWN, at=1))

    assert await names(db) == ["of the old machine"]


async def test_what_was_logged_before_the_table_was_tracked_anew_comes_back(
    db: Database, table: tables.TrackedTable
):
    async with db.connection() as connection:
        now = str(Position(1, 1, ulid_at(5), 0))
        await connection.execute("update op_tables set unlogged = $1", now)

    await applied(db, op("create", {"id": 1, "name": "known once"}, host=OWN, at=1))

    assert await names(db) == ["known once"]


async def test_what_a_peer_has_taken_from_us_without_a_version_is_in_our_name(
    db: Database, table: tables.TrackedTable
):
    await applied(db, op("update", {"id": 1, "name": "a"}, host=OWN, at=1, approximate=True))

    assert await names(db) == ["a"]


async def in_the_takers_name(server: Connection) -> None:
    """The server has a change that the taker is said to have made."""
    await server.execute("insert into notes values ('x', 'not of the taker', 1)")
    await server.execute("insert into restante.op_hosts (host) values ($1)", TAKER)
    await server.execute(
        "update restante.ops set origin = (select id from restante.op_hosts where host = $1)", TAKER
    )


@pytest.mark.parametrize("is_repair", [False, True], ids=["snapshot", "resync"])
async def test_a_snapshot_brings_no_change_in_our_name_unless_the_operator_asks_for_it(
    cluster: str, is_repair: bool
):
    async with (
        new_node(cluster, SERVER, TAKER) as server,
        new_node(cluster, TAKER, SERVER) as taker,
    ):
        await began(taker.sql, hours=2)
        await in_the_takers_name(server.sql)

        await take(server, taker, is_repair=is_repair)

        assert len(await taker.rows()) == int(is_repair)
        refused = await taker.sql.fetchval("select refused from restante.op_peers")
        assert refused == int(not is_repair)
