"""A record that Postgres refuses is parked alone, and everything beside it is applied."""

import json
from typing import Any

import pytest
import soak
from msgspec import Raw
from oplog.nodes import NOW, make_peer, op, pull_from, rows, tracked, ulid_at

from restante.database.pool import Database
from restante.oplog import tables, ulids
from restante.oplog.applying import parked, parking, records
from restante.oplog.applying.apply import PageResult, Source, apply_page
from restante.oplog.peers import Peer
from restante.oplog.positions import Position
from restante.oplog.rules import Channel
from restante.wire.oplog import Op

pytestmark = pytest.mark.anyio

PARENTS = "create table {} (id int primary key)"
CHILDREN = """create table {} (
    id int primary key, parent int references public.parents, name varchar(5) not null default 'x',
    code text unique, n int check (n > 0))"""


async def applied(db: Database, *ops: Op, **more: Any) -> PageResult:
    peer = await make_peer(db)
    source = more.pop("source", pull_from(peer))
    async with db.connection() as connection:
        cursor = await connection.fetchval("select cursor from op_peers where id = $1", peer.id)
    return await apply_page(
        db,
        ops,
        source,
        expected_cursor=cursor,
        end_cursor=max(ops[-1].position, cursor),
        now=NOW,
        **more,
    )


async def family(db: Database) -> None:
    async with db.connection() as connection:
        await tracked(connection, "parents", PARENTS)
        await tracked(connection, "children", CHILDREN)


def child(number: int, at: float, **values: Any) -> Op:
    return op("create", {"id": number} | values, at=at, table="children")


async def test_each_fault_is_parked_with_its_reason(db: Database):
    await family(db)
    good = [child(i, i / 1000) for i in range(100, 160)]

    result = await applied(
        db,
        *good[:20],
        child(1, 1, parent=99),
        child(2, 2, name="too long"),
        child(3, 3, name=None),
        *good[20:40],
        child(4, 4, n=0),
        child(5, 5, code="a"),
        child(6, 6, code="a"),
        op("create", {"id": "not a number"}, at=7, table="children"),
        *good[40:],
    )

    assert result.parked_by == {
        "foreign_key": 1,
        "type": 2,
        "not_null": 1,
        "check": 1,
        "unique": 1,
    }
    assert (result.applied, result.stopped) == (61, None)
    async with db.connection() as connection:
        found = await parked.listed(connection)
    assert [(one.reason, one.key) for one in found] == [
        ("foreign_key", "[1]"),
        ("type", "[2]"),
        ("not_null", "[3]"),
        ("check", "[4]"),
        ("unique", "[6]"),
        ("type", None),
    ]
    assert 'Key (parent)=(99) is not present in table "parents".' in found[0].sentence


async def test_a_record_too_large_for_an_index_is_parked(db: Database):
    async with db.connection() as connection:
        await tracked(connection, definition="create table {} (id int primary key, v text unique)")
    noise = "".join(f"{i:x}" for i in range(9000))

    result = await applied(db, op("create", {"id": 1, "v": noise}, {"id": 2, "v": "a"}, at=1))

    assert (result.applied, result.parked_by) == (1, {"too_large": 1})


async def test_parents_come_before_their_children_whatever_the_order_of_the_page(db: Database):
    """The relay may have learnt of them in another order."""
    await family(db)

    result = await applied(
        db,
        child(1, 1, parent=7),
        op("create", {"id": 7}, at=2, table="parents"),
        op("create", {"id": 8}, at=3, table="parents"),
        op("delete", {"id": 8}, at=4, table="parents"),
    )

    assert (result.applied, result.parked) == (3, 0)


async def test_a_trigger_that_raises_or_drops_records_parks_them(db: Database):
    async with db.connection() as connection:
        await tracked(connection)
        await connection.execute(
            """
            create function public.picky() returns trigger language plpgsql as $$
            begin
                if new.name = 'raise' then raise exception 'no such name'; end if;
                if new.name = 'drop' then return null; end if;
                return new;
            end $$;
            create trigger picky before insert on public.items
                for each row execute function public.picky()
            """
        )

    result = await applied(
        db, op("create", *({"id": i, "name": n} for i, n in enumerate(["a", "raise", "drop"])))
    )

    assert (result.applied, result.parked_by) == (1, {"other": 2})


async def test_triggers_find_their_tables_without_a_schema(db: Database):
    """The application's functions were written for the application's search path."""
    async with db.connection() as connection:
        await tracked(connection)
        await connection.execute(
            """
            create table public.audit (id int);
            create function public.audit_it() returns trigger language plpgsql as $$
            begin insert into audit values (new.id); return new; end $$;
            create trigger audited after insert on public.items
                for each row execute function public.audit_it()
            """
        )

    result = await applied(db, op("create", {"id": 1}, at=1))

    assert result.applied == 1


async def test_deferred_constraints_are_checked_with_the_record(db: Database):
    """Otherwise the commit would fail, and nobody would know whose fault it is."""
    deferred = CHILDREN.replace(
        "references public.parents", "references public.parents deferrable initially deferred"
    )
    async with db.connection() as connection:
        await tracked(connection, "parents", PARENTS)
        await tracked(connection, "children", deferred)

    result = await applied(db, child(1, 1, parent=99), child(2, 2))

    assert (result.applied, result.parked_by) == (1, {"foreign_key": 1})


async def test_the_same_op_is_parked_once(db: Database):
    """Pages of the older protocol overlap."""
    await family(db)
    peer = await make_peer(db)
    source = Source(peer, Channel.ULID)
    page = [child(1, 1, parent=99), child(2, 2)]
    page[-1].position = ulids.text_of(ulids.lowest_at(NOW))

    await applied(db, *page, source=source)
    await applied(db, *page, source=source)

    async with db.connection() as connection:
        assert len(await parked.listed(connection)) == 1


async def test_no_room_for_parked_ops_stops_the_page(db: Database, monkeypatch: pytest.MonkeyPatch):
    """What is parked is not dropped: the peer's log keeps the rest."""
    await family(db)
    monkeypatch.setattr(parking, "MAX_BYTES", 0)
    monkeypatch.setattr(parking, "LEAST_BYTES_OF_A_PEER", 0)

    result = await applied(db, child(1, 1), child(2, 2, parent=99), child(3, 3))

    assert (result.stopped, result.applied) == ("parked_full", 1)


async def test_the_parked_ops_of_one_peer_take_no_room_of_others(
    db: Database, monkeypatch: pytest.MonkeyPatch
):
    await family(db)
    monkeypatch.setattr(parking, "MAX_BYTES_OF_A_PEER", 600)
    monkeypatch.setattr(parking, "LEAST_BYTES_OF_A_PEER", 0)
    other = await make_peer(db, "https://other.example")
    await applied(db, *(child(n, n, parent=99) for n in range(1, 4)))

    full = await applied(db, child(5, 5, parent=99))
    theirs = await applied_from(db, other, child(6, 6, parent=99))
    monkeypatch.setattr(parking, "MAX_BYTES", 600)
    nothing_left = await applied_from(db, other, child(7, 7, parent=99))

    assert (full.stopped, full.parked) == ("parked_full", 0)
    assert (theirs.stopped, theirs.parked) == (None, 1)
    assert (nothing_left.stopped, nothing_left.parked) == ("parked_full", 0)


async def test_many_peers_together_leave_room_for_another_one(
    db: Database, monkeypatch: pytest.MonkeyPatch
):
    """Each has at most half of what is left, and a little in any case."""
    await family(db)
    monkeypatch.setattr(parking, "MAX_BYTES", 4000)
    monkeypatch.setattr(parking, "MAX_BYTES_OF_A_PEER", 1000)
    monkeypatch.setattr(parking, "LEAST_BYTES_OF_A_PEER", 400)
    counts: list[int] = []

    for number in range(8):
        peer = await make_peer(db, f"https://p{number}.example")
        taken = [
            await applied_from(db, peer, child(10 * number + n, n, parent=99)) for n in range(1, 5)
        ]
        counts.append(sum(one.parked for one in taken))

    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] >= 1


async def applied_from(db: Database, peer: Peer, *ops: Op) -> PageResult:
    async with db.connection() as connection:
        cursor = await connection.fetchval("select cursor from op_peers where id = $1", peer.id)
    end = ops[-1].position
    return await apply_page(
        db, ops, pull_from(peer), expected_cursor=cursor, end_cursor=end, now=NOW
    )


async def test_a_host_for_which_there_is_no_room_stops_the_page_before_its_op(
    db: Database, monkeypatch: pytest.MonkeyPatch
):
    """Its ops are not lost: they come when the operator has named it."""
    await family(db)
    monkeypatch.setattr(tables, "MAX_HOSTS_OF_A_PEER", 1)
    peer = await make_peer(db)
    invented, real = (f"https://{name}.example" for name in ("invented", "real"))
    page = [
        op("create", {"id": 1}, at=1, table="parents"),
        op("create", {"id": 2}, at=2, table="parents", host=invented),
        op("create", {"id": 3}, at=3, table="parents", host="https://second.example"),
        op("create", {"id": 4}, at=4, table="parents", host=real),
    ]

    first = await applied_from(db, peer, *page)
    again = await applied_from(db, peer, *page[2:])
    await make_peer(db, relays=["https://second.example", real])
    named = await applied_from(db, peer, *page[2:])

    assert "no room for another host, https://second.example" in (first.stopped or "")
    assert (first.applied, first.refused, first.cursor) == (2, 0, page[1].position)
    assert (again.applied, again.refused, again.cursor) == (0, 0, page[1].position)
    assert (named.applied, named.stopped, named.cursor) == (2, None, page[3].position)


async def test_an_applied_op_removes_older_parked_ones_of_its_key(db: Database):
    await family(db)
    await applied(db, child(1, 1, parent=99), child(2, 2, parent=99))

    result = await applied(db, child(1, 3))

    async with db.connection() as connection:
        assert [one.key for one in await parked.listed(connection)] == ["[2]"]
    assert (result.applied, result.superseded) == (1, 1)


async def set_floor(db: Database, at: float, trimmed: Position) -> None:
    async with db.connection() as connection:
        await connection.execute(
            "update op_tables set floor = $1, trimmed = $2", ulid_at(at), str(trimmed)
        )


TRIMMED = Position(1, 100, ulids.LOWEST, 0)


async def test_below_the_floor_the_page_waits_for_the_senders_snapshot(db: Database):
    """The sender has not read what we dropped; what it has may be revived."""
    async with db.connection() as connection:
        await tracked(connection)
    await set_floor(db, 10, TRIMMED)
    first, second = op("create", {"id": 1}, at=20), op("create", {"id": 2}, at=5)

    result = await applied(db, first, second, op("create", {"id": 3}, at=21))

    assert (result.stopped, result.cursor, result.applied) == ("wait", first.position, 1)


async def test_below_the_floor_a_sender_that_has_read_us_vouches_for_what_is_newest(
    db: Database,
):
    async with db.connection() as connection:
        await tracked(connection)
    await set_floor(db, 10, TRIMMED)
    peer = await make_peer(db)

    result = await applied(
        db,
        op("create", {"id": 1}, {"id": 2}, at=5, newest=[True, False]),
        source=pull_from(peer, TRIMMED),
    )

    assert (result.applied, result.superseded, result.stopped) == (1, 1, None)
    async with db.connection() as connection:
        assert [row[0] for row in await rows(connection)] == [1]


async def test_below_the_floor_the_older_protocol_cannot_vouch(db: Database):
    async with db.connection() as connection:
        await tracked(connection)
    await set_floor(db, 10, TRIMMED)
    peer = await make_peer(db)

    result = await applied(db, op("create", {"id": 1}, at=5), source=Source(peer, Channel.ULID))

    assert result.parked_by == {"below_floor": 1}


@pytest.mark.soak
async def test_one_op_with_many_keys(db: Database):
    """A million in the long run; every piece of it is a transaction of the same size."""
    keys = 1_000_000 if soak.is_long() else 30_000
    async with db.connection() as connection:
        await tracked(connection)
    one = op("create", at=1)
    one.data = [record(i) for i in range(keys)]

    result = await applied(db, one)

    assert result.applied == keys
    async with db.connection() as connection:
        assert await connection.fetchval("select count(*) from public.items") == keys
        assert await connection.fetchval("select count(distinct (xid, n)) from ops") == keys


def record(i: int) -> Raw:
    return Raw(json.dumps({"id": i, "name": "a"}).encode())


async def test_an_op_larger_than_a_transaction_moves_the_cursor_at_its_end(
    db: Database, monkeypatch: pytest.MonkeyPatch
):
    """A crash in the middle of it repeats it, and what was applied is known."""
    async with db.connection() as connection:
        await tracked(connection)
    large = op("create", *({"id": i} for i in range(4500)), at=1)
    large.data[4400:] = [record(i) for i in range(4400, 4500)]
    cursors: list[str] = []
    write = records.write

    async def watched(tx: Any, table: Any, changes: Any) -> None:
        cursors.append(await tx.fetchval("select cursor from restante.op_peers"))
        await write(tx, table, changes)

    monkeypatch.setattr(records, "write", watched)

    result = await applied(db, large)

    assert set(cursors) == {""}
    assert result.cursor == large.position
    assert result.applied == 4500
