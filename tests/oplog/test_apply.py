"""A page is applied: the newest change of each record wins, whatever the order of arrival."""

import json
from datetime import timedelta
from typing import Any

import pytest
from msgspec import Raw
from oplog.nodes import (
    NOW,
    OWN,
    PEER,
    THIRD,
    logged,
    make_peer,
    op,
    pull_from,
    rows,
    tracked,
    ulid_at,
    write_locally,
)

from restante.database.pool import Database
from restante.oplog import tables, ulids
from restante.oplog.applying.apply import CursorMoved, PageResult, Source, apply_page
from restante.oplog.positions import Position
from restante.oplog.rules import Channel
from restante.wire.oplog import Op

pytestmark = pytest.mark.anyio


async def applied(db: Database, *ops: Op, **more: Any) -> PageResult:
    """Apply a page of the peer, wherever its cursor stands."""
    async with db.connection() as connection:
        cursor = await connection.fetchval("select cursor from op_peers where host = $1", PEER)
    peer = await make_peer(db)
    source = more.pop("source", pull_from(peer))
    end = ops[-1].position if ops else cursor or ""
    return await apply_page(
        db, ops, source, expected_cursor=cursor or "", end_cursor=end, now=NOW, **more
    )


async def items(db: Database, **more: Any) -> list[Any]:
    async with db.connection() as connection:
        return await rows(connection, **more)


@pytest.fixture
async def table(db: Database) -> tables.TrackedTable:
    async with db.connection() as connection:
        return await tracked(connection)


async def test_creates_updates_and_deletes_arrive(db: Database, table: tables.TrackedTable):
    result = await applied(
        db,
        op("create", {"id": 1, "name": "a", "price": 1}, {"id": 2, "name": "b", "price": 2}, at=1),
        op("update", {"id": 1, "name": "A", "price": 1}, at=2),
        op("delete", {"id": 2}, at=3),
    )

    assert await items(db) == [(1, "A", 1)]
    assert (result.applied, result.superseded, result.stopped) == (2, 2, None)


async def test_the_cursor_and_the_counters_are_part_of_the_transaction(
    db: Database, table: tables.TrackedTable
):
    page = [op("create", {"id": 1}, at=1), op("create", {"id": 2}, at=2)]

    result = await applied(db, *page)

    async with db.connection() as connection:
        row = await connection.fetchrow("select cursor, applied from op_peers")
    assert row is not None
    assert tuple(row) == (page[-1].position, 2)
    assert result.cursor == page[-1].position


async def test_a_page_that_was_asked_for_elsewhere_changes_nothing(
    db: Database, table: tables.TrackedTable
):
    """A second process has applied a page meanwhile."""
    peer = await make_peer(db)
    await applied(db, op("create", {"id": 1}, at=1))

    with pytest.raises(CursorMoved):
        await apply_page(
            db,
            [op("create", {"id": 2}, at=2)],
            pull_from(peer),
            expected_cursor="",
            end_cursor="x",
            now=NOW,
        )

    assert await items(db) == [(1, None, None)]


async def test_an_older_change_is_superseded_and_not_logged(
    db: Database, table: tables.TrackedTable
):
    await applied(db, op("update", {"id": 1, "name": "new"}, at=5))

    result = await applied(db, op("update", {"id": 1, "name": "old"}, at=4))

    assert await items(db) == [(1, "new", None)]
    assert (result.applied, result.superseded) == (0, 1)
    async with db.connection() as connection:
        assert await connection.fetchval("select count(*) from ops") == 1


@pytest.mark.parametrize("first", [PEER, THIRD])
async def test_of_two_changes_with_one_ulid_the_greater_host_wins(
    db: Database, table: tables.TrackedTable, first: str
):
    second = THIRD if first == PEER else PEER
    await applied(db, op("update", {"id": 1, "name": first}, at=1, host=first))
    await applied(db, op("update", {"id": 1, "name": second}, at=1, host=second))

    assert await items(db) == [(1, THIRD, None)]


async def test_a_deleted_record_is_not_revived_by_an_older_change(
    db: Database, table: tables.TrackedTable
):
    await applied(db, op("delete", {"id": 1}, at=9))

    await applied(db, op("create", {"id": 1}, at=8))

    assert await items(db) == []


async def test_the_own_change_comes_back_unchanged(db: Database, table: tables.TrackedTable):
    """After a restore only others have it; otherwise it is known."""
    async with db.connection() as connection:
        ulid = await write_locally(connection, table, 1, {"id": 1, "name": "ours"}, at=1)
    echo = op("update", {"id": 1, "name": "ours"}, at=1, host=OWN)
    echo.ulid = ulids.text_of(ulid)

    result = await applied(db, echo, op("create", {"id": 2, "name": "lost"}, at=2, host=OWN))

    assert (result.applied, result.superseded, result.conflicts) == (1, 1, 0)
    assert await items(db) == [(1, "ours", None), (2, "lost", None)]


async def test_the_clock_is_raised_above_what_was_applied(db: Database, table: tables.TrackedTable):
    """A change that is made afterwards must be newer, although the peer's clock is ahead."""
    ahead = 3600 + 200

    await applied(db, op("create", {"id": 1}, at=ahead, tail=2**80 - 1))

    async with db.connection() as connection:
        made = await connection.fetchval("select op_ulid(op_tick(1), repeat('0', 16))")
    assert made > ulid_at(ahead, 2**80 - 1)


async def test_an_op_ahead_of_time_is_parked(db: Database, table: tables.TrackedTable):
    result = await applied(db, op("create", {"id": 1}, at=3600 + 600), op("create", {"id": 2}))

    assert result.parked_by == {"future": 1}
    assert await items(db) == [(2, None, None)]
    async with db.connection() as connection:
        row = await connection.fetchrow("select reason, key, sentence from op_parked")
    assert row is not None
    assert (row["reason"], row["key"]) == ("future", "[1]")
    assert PEER in row["sentence"]


async def test_a_record_without_some_columns_keeps_ours(db: Database):
    """The peer has not added the column yet."""
    definition = "create table {} (id integer primary key, name text, extra text default 'new')"
    async with db.connection() as connection:
        await tracked(connection, definition=definition)
        await connection.execute("insert into public.items values (1, 'old', 'ours')")

    await applied(db, op("update", {"id": 1, "name": "a"}, {"id": 2, "name": "b"}, at=1))

    assert await items(db) == [(1, "a", "ours"), (2, "b", "new")]


async def test_a_column_that_we_lack_stays_in_the_log(db: Database, table: tables.TrackedTable):
    """Peers behind us may have it."""
    await applied(db, op("create", {"id": 1, "colour": "red"}, at=1))

    async with db.connection() as connection:
        logged_data = await connection.fetchval("select data from ops")
    assert json.loads(logged_data) == {"id": 1, "colour": "red"}
    assert await items(db) == [(1, None, None)]


async def test_generated_and_identity_columns(db: Database):
    definition = """create table {} (
        id integer generated always as identity primary key,
        n integer, double integer generated always as (n * 2) stored)"""
    async with db.connection() as connection:
        await tracked(connection, definition=definition)

    await applied(db, op("create", {"id": 7, "n": 2, "double": 5}, at=1))
    await applied(db, op("update", {"id": 7, "n": 3, "double": 5}, at=2))

    assert await items(db) == [(7, 3, 6)]


async def test_partitioned_tables_and_composite_keys(db: Database):
    definition = "create table {} (a int, b text, v int, primary key (a, b)) partition by list (a)"
    async with db.connection() as connection:
        await connection.execute(definition.format("public.items"))
        for a in (1, 2):
            await connection.execute(
                f"create table public.items_{a} partition of public.items for values in ({a})"
            )
        await logged(connection, "items", key=("b", "a"))

    result = await applied(
        db,
        op("create", {"a": 1, "b": "x", "v": 1}, {"a": 2, "b": "x", "v": 2}, at=1),
        op("update", {"a": 1, "b": "x", "v": 3}, at=2),
        op("create", {"a": 3, "b": "no partition", "v": 2}, at=3),
    )

    assert await items(db, by="a") == [(1, "x", 3), (2, "x", 2)]
    assert result.parked_by == {"check": 1}


async def test_a_changed_key_is_a_delete_and_a_create(db: Database, table: tables.TrackedTable):
    await applied(db, op("create", {"id": 1, "name": "a"}, at=1))

    await applied(
        db,
        op("delete", {"id": 1}, at=2),
        op("update", {"id": 2, "name": "a"}, at=2, tail=1),
    )

    assert await items(db) == [(2, "a", None)]


async def test_only_key_columns(db: Database):
    async with db.connection() as connection:
        await tracked(connection, definition="create table {} (id int primary key)")

    await applied(db, op("create", {"id": 1}, at=1))
    result = await applied(db, op("update", {"id": 1}, at=2))

    assert result.applied == 1
    assert await items(db) == [(1,)]


HOSTILE = "x\"; drop table items; --' $1 {} %s \\ é\n"


async def test_names_with_sql_in_them_are_names(db: Database):
    quoted = '"' + HOSTILE.replace('"', '""') + '"'
    async with db.connection() as connection:
        await connection.execute(
            f"create table public.{quoted} ({quoted} text primary key, at int, k0 text, rec int)"
        )
        await logged(connection, HOSTILE, key=(HOSTILE,))

    await applied(
        db,
        op("create", {HOSTILE: HOSTILE, "at": 1, "k0": "a"}, at=1, table=HOSTILE),
        op("update", {HOSTILE: HOSTILE, "at": 2, "k0": "b"}, at=2, table=HOSTILE),
        op("create", {HOSTILE: "gone", "'; drop table items": 1}, at=3, table=HOSTILE),
    )
    await applied(
        db,
        op("update", {HOSTILE: HOSTILE, "rec": 5}, at=4, table=HOSTILE),
        op("delete", {HOSTILE: "gone"}, at=5, table=HOSTILE),
    )

    assert await items(db, table=HOSTILE, by="at") == [(HOSTILE, 2, "b", 5)]


VALUES = [
    ("numeric", "12345678901234567890.123456789012345678901234567890"),
    ("numeric", "1.10"),
    ("numeric", "'NaN'"),
    ("double precision", "0.1::float8 + 0.2::float8"),
    ("double precision", "'-Infinity'"),
    ("real", "1.1"),
    ("bigint", "9223372036854775807"),
    ("timestamptz", "'2024-02-29 12:00:00.123456+05'"),
    ("timestamptz", "'infinity'"),
    ("date", "'0044-03-15 BC'"),
    ("interval", "'-1 year 2 days 03:04:05.6'"),
    ("bytea", "'\\x00ff10'"),
    ("text", "E'\\u00e9\\U0001F600 \\t\\n\\\\ \"quoted\"'"),
    ("text", "''"),
    ("text", "null"),
    ("jsonb", """'{"a": [1.10, null, "é"], "b": {"c": 1e400}}'"""),
    ("json", """'{"z": 1,   "a": 2, "a": 3}'"""),
    ("integer[]", "'{{1,2},{3,null}}'"),
    ("text[]", """'{"a,b","NULL",null,"q\\"uote"}'"""),
    ("public.mood", "'happy'"),
    ("public.mood[]", "'{happy,sad}'"),
    ("public.pair", "'(1,\"a b\")'"),
    ("int4range", "'[1,5)'"),
    ("uuid", "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'"),
    ("inet", "'10.0.0.1/8'"),
    ("bit varying", "B'101'"),
    ("character(5)", "'a'"),
    ("boolean", "true"),
]


async def test_values_of_all_types_survive_exactly(db: Database):
    """What one node's capture writes is what the other node's row becomes."""
    columns = ", ".join(f"v{i} {kind}" for i, (kind, _) in enumerate(VALUES))
    literals = ", ".join(literal for _, literal in VALUES)
    async with db.connection() as connection:
        await connection.execute(
            "create type public.mood as enum ('sad', 'happy'); "
            "create type public.pair as (a int, b text)"
        )
        await tracked(connection, definition=f"create table {{}} (id int primary key, {columns})")
        await connection.execute(f"insert into public.items values (1, {literals})")
        data = await connection.fetchval("select row_to_json(i)::text from public.items i")
        before = await connection.fetchval("select i::text from public.items i")
        await connection.execute("delete from public.items")
    created = op("create", at=1)
    created.data = [Raw(data.encode())]

    result = await applied(db, created)

    assert (result.applied, result.parked) == (1, 0)
    async with db.connection() as connection:
        assert await connection.fetchval("select i::text from public.items i") == before
        again = await connection.fetchval("select row_to_json(i)::text from public.items i")
    assert again == data


@pytest.mark.parametrize(
    ("kind", "value", "key"),
    [
        ("timestamptz", "2024-01-01T12:00:00+02:00", '["2024-01-01T10:00:00+00:00"]'),
        ("bytea", "\\x00FF", '["\\\\x00ff"]'),
        (
            "uuid",
            "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11",
            '["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]',
        ),
        ("bigint", 9007199254740993, "[9007199254740993]"),
        ("text", "é\n", '["é\\n"]'),
    ],
)
async def test_a_key_has_one_text_however_it_was_sent(
    db: Database, kind: str, value: Any, key: str
):
    async with db.connection() as connection:
        await tracked(connection, definition=f"create table {{}} (id {kind} primary key)")

    await applied(db, op("create", {"id": value}, at=1))

    async with db.connection() as connection:
        found = await connection.fetchrow(
            "select key, hashtextextended(key, 0) = key_hash from ops"
        )
    assert found is not None
    assert tuple(found) == (key, True)


async def test_records_of_ten_megabytes(db: Database, table: tables.TrackedTable):
    name = "x" * 10 * 1024 * 1024

    result = await applied(db, *(op("create", {"id": i, "name": name}, at=i) for i in range(1, 4)))

    assert result.applied == 3
    async with db.connection() as connection:
        assert await connection.fetchval("select sum(length(name)) from public.items") == 3 * len(
            name
        )


async def test_an_empty_page_moves_the_cursor(db: Database, table: tables.TrackedTable):
    """The peer has only ops of tables that we may not see."""
    peer = await make_peer(db)
    end = str(Position(1, 2, ulid_at(1), 0))

    result = await apply_page(db, [], pull_from(peer), expected_cursor="", end_cursor=end, now=NOW)

    assert result.cursor == end
    async with db.connection() as connection:
        assert await connection.fetchval("select cursor from op_peers") == end


async def test_what_is_refused_is_counted_by_reason(db: Database, table: tables.TrackedTable):
    epoch = op("create", {"id": 1}, at=1)
    epoch.ulid = "0" * 26
    garbage = op("create", {"id": 1}, at=1)
    garbage.ulid = "not a ulid"
    far = op("create", {"id": 1}, at=timedelta(days=3).total_seconds())
    shapeless = op("create", at=1)
    shapeless.data = [Raw(b"5"), Raw(b"{}"), Raw(b'{"id": null}'), Raw(b'{"id": "\xff"}')]

    result = await applied(
        db, epoch, garbage, far, shapeless, op("create", {"id": 1}, at=1, table="unknown")
    )

    assert result.refused_by == {"time": 2, "ulid": 1, "data": 4, "table": 1}
    assert await items(db) == []
    async with db.connection() as connection:
        assert await connection.fetchval("select refused from op_peers") == 8


async def test_a_peer_sends_only_its_tables_and_its_hosts(db: Database, table: tables.TrackedTable):
    async with db.connection() as connection:
        await tracked(connection, "others")
    peer = await make_peer(db, tables=["others"], relays=[THIRD])

    result = await applied(
        db,
        op("create", {"id": 1}, at=1),
        op("create", {"id": 2}, at=2, table="others", host=THIRD + "/"),
        op("create", {"id": 3}, at=3, table="others", host="https://fourth.example"),
        source=Source(peer, Channel.PULL),
    )

    assert result.refused_by == {"forbidden_table": 1, "host": 1}
    assert [row[0] for row in await items(db, table="others")] == [2]
