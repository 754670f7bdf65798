"""Pages of records that nobody has here: one statement writes and logs them."""

from typing import Any

import pytest
from oplog.nodes import NOW, PEER, THIRD, make_peer, op, pull_from, rows, tracked

from restante.database.pool import Database
from restante.oplog.applying.apply import PageResult, apply_page
from restante.wire.oplog import Op

pytestmark = pytest.mark.anyio

ODD = """create table {} (
    b text, a numeric, doubled numeric generated always as (a * 2) stored,
    other text default 'none', primary key (a, b))"""


async def applied(db: Database, *ops: Op) -> PageResult:
    async with db.connection() as connection:
        cursor = await connection.fetchval("select cursor from op_peers where host = $1", PEER)
    source = pull_from(await make_peer(db))
    return await apply_page(
        db, ops, source, expected_cursor=cursor or "", end_cursor=ops[-1].position, now=NOW
    )


async def log_of(db: Database, table: str) -> list[Any]:
    async with db.connection() as connection:
        found = await connection.fetch(
            "select ulid, n, origin, action, approximate, key_hash, old_hash, key, data::text"
            "  from ops join op_tables on op_tables.id = ops.table_id"
            " where op_tables.name = $1 order by ulid, n",
            table,
        )
    return [tuple(row) for row in found]


def created(table: str) -> list[Op]:
    """Keys that Postgres writes differently, a column that the table lacks, an op in two parts."""
    sent = [{"b": "x", "a": a, "lacks": True} for a in (1.50, 2, 3, 4)]
    return [
        op("create", sent[0], at=1, table=table, approximate=True),
        op("create", *sent[1:3], at=2, table=table, host=THIRD),
        op("create", sent[3], at=2, table=table, host=THIRD),
    ]


async def test_new_records_are_written_and_logged_like_any_others(db: Database):
    async with db.connection() as connection:
        for name in ("fresh", "mixed"):
            await tracked(connection, name, ODD, key=("a", "b"))

    fresh = await applied(db, *created("fresh"))
    update = op("update", {"b": "y", "a": 9}, at=3, table="mixed")
    mixed = await applied(db, *created("mixed"), update)

    assert (fresh.applied, mixed.applied) == (4, 5)
    assert await log_of(db, "fresh") == (await log_of(db, "mixed"))[:-1]
    async with db.connection() as connection:
        written = [await rows(connection, name, by="a") for name in ("fresh", "mixed")]
    assert written[0] == written[1][:-1]
    assert [len(some) for some in written] == [4, 5]


async def test_a_record_that_is_there_without_an_op_is_overwritten(db: Database):
    async with db.connection() as connection:
        await tracked(connection)
        await connection.execute("insert into public.items values (2, 'ours', 1)")

    result = await applied(db, op("create", {"id": 1}, {"id": 2, "name": "theirs"}, at=1))

    assert result.applied == 2
    async with db.connection() as connection:
        assert await rows(connection) == [(1, None, None), (2, "theirs", 1)]
    assert [row[7] for row in await log_of(db, "items")] == ["[1]", "[2]"]


async def test_of_two_new_records_with_one_key_the_newer_one_is_applied(db: Database):
    async with db.connection() as connection:
        await tracked(connection)

    result = await applied(
        db,
        op("create", {"id": 1, "name": "newer"}, at=2),
        op("create", {"id": 1, "name": "older"}, at=1),
    )

    assert (result.applied, result.superseded) == (1, 1)
    async with db.connection() as connection:
        assert await rows(connection) == [(1, "newer", None)]


async def test_a_record_that_a_trigger_keeps_out_is_parked_alone(db: Database):
    async with db.connection() as connection:
        await tracked(connection)
        await connection.execute(
            "create function public.no_two() returns trigger language plpgsql as"
            " $$ begin return case when new.id = 2 then null else new end; end $$;"
            " create trigger no_two before insert on public.items"
            " for each row execute function public.no_two()"
        )

    result = await applied(db, op("create", *({"id": n} for n in range(1, 4)), at=1))

    assert (result.applied, result.parked) == (2, 1)
    assert [row[7] for row in await log_of(db, "items")] == ["[1]", "[3]"]
