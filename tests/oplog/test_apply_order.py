"""Whatever the order, the repetitions and the pages in which ops arrive, the result is the same."""

import random
from typing import Any

import pytest
from oplog.nodes import NOW, PEER, THIRD, make_peer, op, pull_from, tracked

from restante.database.pool import Database
from restante.oplog.applying.apply import apply_page
from restante.wire.oplog import Op

pytestmark = pytest.mark.anyio

SEED = 20241117


def some_changes(chance: random.Random) -> list[Any]:
    """Changes of a few keys at a few moments, so that many of them meet; some ULIDs are equal."""
    made = [(at, host) for at in range(1, 7) for host in (PEER, THIRD)]
    return [
        (
            chance.choice(["create", "update", "delete"]),
            chance.sample(range(1, 5), chance.randint(1, 3)),
            at,
            host,
        )
        for at, host in chance.sample(made, chance.randint(1, len(made)))
    ]


def ops_of(changes: list[Any]) -> list[Op]:
    return [
        op(
            action,
            *(
                {"id": key} if action == "delete" else {"id": key, "name": f"{at} {host}"}
                for key in keys
            ),
            at=at,
            host=host,
        )
        for action, keys, at, host in changes
    ]


async def outcome(db: Database, ops: list[Op], seed: int) -> tuple[Any, Any]:
    """The table and the newest versions, after the ops in some order, some twice, in some pages."""
    async with db.connection() as connection:
        await connection.execute(
            "truncate public.items; truncate restante.ops; update op_peers set cursor = ''"
        )
    chance = random.Random(seed)
    sent = [*ops, *chance.choices(ops, k=len(ops) // 2)]
    chance.shuffle(sent)
    peer, cursor = await make_peer(db), ""
    while sent:
        size = chance.randint(1, len(sent))
        page, sent = sent[:size], sent[size:]
        end = f"{cursor}x"
        await apply_page(db, page, pull_from(peer), expected_cursor=cursor, end_cursor=end, now=NOW)
        async with db.connection() as connection:
            cursor = await connection.fetchval("select cursor from op_peers")
    async with db.connection() as connection:
        table = await connection.fetch("select * from public.items order by id")
        newest = await connection.fetch(
            "select distinct on (key) key, ulid, host, action from ops"
            " join op_hosts on op_hosts.id = origin order by key, ulid desc, host desc"
        )
    return [tuple(row) for row in table], [tuple(row) for row in newest]


async def test_any_order_repetition_and_paging_gives_the_same(db: Database):
    """Nodes hear of the same ops by many ways, and must agree."""
    async with db.connection() as connection:
        await tracked(connection)
    chance = random.Random(SEED)

    for _ in range(40):
        changes = some_changes(chance)
        seeds = chance.getrandbits(32), chance.getrandbits(32)
        first, second = [await outcome(db, ops_of(changes), seed) for seed in seeds]

        assert first == second, (changes, seeds)


async def test_only_one_part_of_an_op_begins_at_number_0(db: Database):
    """A node of the older protocol would take the second part for the op that it has."""
    async with db.connection() as connection:
        await tracked(connection)
    peer = await make_peer(db)
    parts = [op("create", {"id": key, "name": "a"}, at=1) for key in (1, 2)]

    for before, part in zip(("", "1"), parts, strict=True):
        await apply_page(
            db, [part], pull_from(peer), expected_cursor=before, end_cursor=f"{before}1", now=NOW
        )

    async with db.connection() as connection:
        numbers = await connection.fetch("select n from ops order by xid")
    assert [row["n"] for row in numbers] == [0, 1]
