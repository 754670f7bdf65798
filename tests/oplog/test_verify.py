"""Two nodes find out whether their tables are equal, and which keys are not."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from cluster import cloned

from restante.database.pool import Database
from restante.errors import BadRequest
from restante.oplog import ulids
from restante.oplog.positions import Position
from restante.oplog.verifying import comparison
from restante.oplog.verifying.comparison import Here, Limits, Progress
from restante.oplog.verifying.verify import verify
from restante.wire.oplog_digests import (
    DigestRequest,
    KeyDifference,
    KeyRange,
    RecordDigest,
    RecordsRequest,
    TableReport,
    VerifyReport,
)

pytestmark = pytest.mark.anyio

ADD = """
insert into op_tables (name, schema_name, table_name, key_columns, state, changed_at)
values ($1, 'public', $1, $2, 'tracked', now())
"""
ADD_PEER = "insert into op_peers (host, added_at, cursor) values ($1, now(), $2) returning id"
QUICK = Limits(wait_seconds=0.5)
PAGES = "create table public.pages (id bigint primary key, body text, at timestamptz)"
FILL = (
    "insert into public.pages select n, 'body ' || n, '2026-01-01Z' from generate_series(1, $1) n"
)


@dataclass
class Node:
    """A database with a peer on it, as the other side sees it."""

    db: Database
    side: Here

    async def execute(self, statement: str, *args: Any) -> None:
        async with self.db.connection() as connection:
            await connection.execute(statement, *args)


@asynccontextmanager
async def node(cluster: str, *, settings: str = "") -> AsyncIterator[Node]:
    async with cloned(cluster) as dsn:
        db = await Database.open(
            dsn + settings, pool_size=4, acquire_timeout_seconds=5, statement_timeout_seconds=20
        )
        async with db.connection() as connection:
            peer_id = await connection.fetchval(ADD_PEER, "http://other", "")
        yield Node(db, Here(db, peer_id, None))
        await db.close()


@pytest.fixture
async def nodes(cluster: str) -> AsyncIterator[tuple[Node, Node]]:
    async with node(cluster) as here, node(cluster) as there:
        yield here, there


async def track(nodes: tuple[Node, Node], create: str, name: str, *key: str) -> None:
    for one in nodes:
        await one.execute(create)
        await one.execute(ADD, name, list(key))


async def compared(nodes: tuple[Node, Node], **options: Any) -> VerifyReport:
    given: dict[str, Any] = {"limits": QUICK, "progress": Progress()} | options
    return await verify(nodes[0].side, nodes[1].side, "http://other", **given)


async def the_table(nodes: tuple[Node, Node], **options: Any) -> TableReport:
    (report,) = (await compared(nodes, **options)).tables
    return report


async def test_equal_tables_are_equal(nodes: tuple[Node, Node]):
    await track(nodes, PAGES, "pages", "id")
    for one in nodes:
        await one.execute(FILL, 120_000)

    report = await compared(nodes)

    assert report.is_equal
    assert report.is_caught_up
    assert [(one.outcome, one.rows_here, one.rows_there) for one in report.tables] == [
        ("equal", 120_000, 120_000)
    ]


async def test_each_key_that_differs_is_named_with_what_each_side_has(nodes: tuple[Node, Node]):
    await track(nodes, PAGES, "pages", "id")
    for one in nodes:
        await one.execute(FILL, 3000)
    await nodes[0].execute("delete from public.pages where id = 7")
    await nodes[0].execute("update public.pages set body = 'x' where id = 1500")
    await nodes[1].execute("delete from public.pages where id in (1, 3000)")

    report = await the_table(nodes)

    assert report.outcome == "differs"
    assert sorted(report.keys, key=lambda one: one.key) == [
        KeyDifference("[1500]", "different"),
        KeyDifference("[1]", "missing_there"),
        KeyDifference("[3000]", "missing_there"),
        KeyDifference("[7]", "missing_here"),
    ]
    assert (report.rows_here, report.rows_there, report.more_ranges) == (2999, 2998, 0)


@pytest.mark.parametrize("empty", [0, 1])
async def test_an_empty_table_differs_from_a_full_one_in_a_bounded_list(
    nodes: tuple[Node, Node], empty: int
):
    """A table that was never loaded must not fill the screen."""
    await track(nodes, PAGES, "pages", "id")
    await nodes[1 - empty].execute(FILL, 30_000)

    report = await the_table(nodes)

    assert report.outcome == "differs"
    assert len(report.keys) == 100
    assert {one.what for one in report.keys} == {"missing_there" if empty else "missing_here"}
    assert report.more_ranges > 0


async def test_two_empty_tables_are_equal(nodes: tuple[Node, Node]):
    await track(nodes, PAGES, "pages", "id")

    assert (await the_table(nodes)).outcome == "equal"


async def test_order_of_columns_and_columns_of_one_side_do_not_count_and_are_named(
    nodes: tuple[Node, Node],
):
    """A column is added on one node first; the rest of the table can be compared all the same."""
    here, there = nodes
    await here.execute("create table public.pages (id int primary key, a text, b numeric, c int)")
    await there.execute(
        "create table public.pages (b numeric, d text, a text, id bigint primary key)"
    )
    for one in nodes:
        await one.execute(ADD, "pages", ["id"])
        await one.execute("insert into public.pages (id, a, b) values (1, null, 1.50), (2, '', 0)")
    await here.execute("update public.pages set c = id")

    report = await the_table(nodes)

    assert report.outcome == "equal"
    assert report.schema == [
        "Only this node has the column c.",
        "Only the peer has the column d.",
        "id is integer here and bigint there.",
    ]


async def test_values_that_were_exchanged_or_are_null_are_seen(nodes: tuple[Node, Node]):
    """Digests of records are added up, and must not cancel each other out."""
    await track(nodes, PAGES, "pages", "id")
    for one in nodes:
        await one.execute("insert into public.pages (id, body) values (1, 'a'), (2, 'b'), (3, '')")
    await nodes[1].execute(
        "update public.pages set body = case id when 1 then 'b' when 2 then 'a' end"
    )

    report = await the_table(nodes)

    assert sorted(one.key for one in report.keys) == ["[1]", "[2]", "[3]"]


async def test_settings_of_a_database_do_not_count(nodes: tuple[Node, Node]):
    """Nodes are set up by different people."""
    there = nodes[1]
    create = (
        "create table public.events (at timestamptz primary key, took interval, share float8,"
        " raw bytea, price money)"
    )
    await track(nodes, create, "events", "at")
    for one in nodes:
        await one.execute(
            "insert into public.events values"
            " ('2026-03-01 12:00:00.5Z', '1 day 02:03', 0.1::float8 + 0.2, '\\xdeadbeef', 12.5)"
        )
    async with there.db.connection() as connection:
        name = await connection.fetchval("select current_database()")
    for setting, value in {
        "timezone": "Asia/Tokyo",
        "intervalstyle": "sql_standard",
        "extra_float_digits": "-5",
        "bytea_output": "escape",
        "datestyle": "German",
    }.items():
        await there.execute(f"alter database {name} set {setting} = '{value}'")
    await there.db.replace_connections()

    report = await the_table(nodes)

    assert (report.outcome, report.keys) == ("equal", [])


async def test_composite_keys_of_any_type_are_compared_in_their_order(nodes: tuple[Node, Node]):
    create = (
        "create type public.kind as enum ('z', 'a');"
        "create table public.parts (kind public.kind, name text, at timestamptz, id uuid, v int,"
        " primary key (kind, name, at, id))"
    )
    await track(nodes, create, "parts", "kind", "name", "at", "id")
    for one in nodes:
        await one.execute(
            "insert into public.parts select"
            " case when n % 2 = 0 then 'a' else 'z' end::public.kind,"
            " 'ä\"[' || n % 97, timestamptz '2026-01-01Z' + n * interval '1 ms',"
            " md5(n::text)::uuid, n from generate_series(1, 5000) n"
        )
    await nodes[1].execute("update public.parts set v = 0 where v = 4711")

    report = await the_table(nodes)

    assert report.rows_there == 5000
    assert [one.what for one in report.keys] == ["different"]


async def test_tables_that_sort_differently_are_compared_all_the_same(nodes: tuple[Node, Node]):
    """As with another collation: a range of keys on one node is none on the other."""
    here, there = nodes
    await here.execute("create type public.kind as enum ('a', 'b', 'c')")
    await there.execute("create type public.kind as enum ('b', 'c', 'a')")
    await track(
        nodes,
        "create table public.names (kind public.kind, id int, v int, primary key (kind, id))",
        "names",
        *("kind", "id"),
    )
    for one in nodes:
        await one.execute(
            "insert into public.names select chr(97 + n % 3)::public.kind, n, n"
            " from generate_series(1, 5000) n"
        )
    await there.execute("delete from public.names where v in (3, 4999)")
    await here.execute("update public.names set v = -1 where v = 2500")

    report = await the_table(nodes)

    assert sorted(one.what for one in report.keys) == [
        "different",
        "missing_there",
        "missing_there",
    ]
    assert (report.rows_here, report.rows_there) == (5000, 4998)


async def test_a_partitioned_table_is_compared(nodes: tuple[Node, Node]):
    create = (
        "create table public.logs (day int, id int, primary key (day, id)) partition by list (day);"
        "create table public.logs_1 partition of public.logs for values in (1);"
        "create table public.logs_2 partition of public.logs for values in (2)"
    )
    await track(nodes, create, "logs", "day", "id")
    for one in nodes:
        await one.execute(
            "insert into public.logs select 1 + n % 2, n from generate_series(1, 3000) n"
        )
    await nodes[0].execute("delete from public.logs where id = 2000")

    report = await the_table(nodes)

    assert report.keys == [KeyDifference("[1, 2000]", "missing_here")]


async def test_names_and_keys_with_quotes_are_only_names_and_keys(nodes: tuple[Node, Node]):
    create = 'create table public."a""b" ("k\'""; drop" text primary key, "v{0}" text)'
    await track(nodes, create, 'a"b', "k'\"; drop")
    for one in nodes:
        await one.execute("""insert into public."a""b" values ('''); drop table x; --', '{}')""")
    await nodes[1].execute("""update public."a""b" set "v{0}" = '{x}'""")

    report = await the_table(nodes)

    assert [one.what for one in report.keys] == ["different"]


async def test_what_is_on_its_way_does_not_count(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
):
    """The peer reads our log a moment later, and then has the change."""
    await track(nodes, PAGES, "pages", "id")
    for one in nodes:
        await one.execute(FILL, 10)
    here, there = nodes
    await log_an_op(here)
    await here.execute("update public.pages set body = 'new' where id = 5")
    wait = comparison.asyncio.sleep

    async def arrives(_seconds: float) -> None:
        await there.execute("update public.pages set body = 'new' where id = 5")
        head = (await here.side.describe()).head
        await there.execute("update op_peers set cursor = $1", head)
        await wait(0)

    monkeypatch.setattr(comparison.asyncio, "sleep", arrives)

    report = await compared(nodes)

    assert report.is_equal
    assert report.is_caught_up


WAITING = {
    "dropped": "update op_tables set trimmed = $1",
    "snapshot": "insert into op_snapshots (peer_id, table_id, phase, is_for_gap, read_to,"
    " started_at, progressed_at) select op_peers.id, op_tables.id, 'new', true, '', now(), now()"
    " from op_peers, op_tables where $1 <> ''",
}


@pytest.mark.parametrize("why", WAITING)
async def test_what_comes_by_a_snapshot_is_waited_for(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, why: str
):
    """Our op is gone before the peer has read it, or the peer reads on without the table."""
    await track(nodes, PAGES, "pages", "id")
    for one in nodes:
        await one.execute(FILL, 10)
    here, there = nodes
    await here.execute("update public.pages set body = 'new' where id = 5")
    place = str(Position(5, 7, ulids.LOWEST, 1))
    if why == "snapshot":
        await log_an_op(here)
        await there.execute("update op_peers set cursor = $1", (await here.side.describe()).head)
    await (here if why == "dropped" else there).execute(WAITING[why], place)
    wait = comparison.asyncio.sleep

    async def arrives(_seconds: float) -> None:
        await there.execute("update public.pages set body = 'new' where id = 5")
        await there.execute("delete from op_snapshots")
        await there.execute("update op_peers set cursor = $1", (await here.side.describe()).head)
        await wait(0)

    monkeypatch.setattr(comparison.asyncio, "sleep", arrives)

    report = await compared(nodes)

    assert report.is_equal
    assert report.is_caught_up


async def log_an_op(node: Node) -> None:
    await node.execute("create table ops_1 partition of ops for values in (1)")
    await node.execute(
        "insert into ops select 1, now(), 5, 7, op_ulid(1 << 40, '00000000000000ff'), 1, 1, 'u',"
        " false, 0, null, '[5]', '{}'"
    )


async def test_a_peer_that_does_not_catch_up_is_said_and_waited_for_once(nodes: tuple[Node, Node]):
    await track(nodes, PAGES, "pages", "id")
    await nodes[0].execute(FILL, 10)
    await log_an_op(nodes[0])

    report = await compared(nodes, limits=Limits(wait_seconds=0.05))

    assert not report.is_caught_up
    assert len(report.tables[0].keys) == 10


async def test_a_key_that_changes_at_every_look_is_undecided(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
):
    await track(nodes, PAGES, "pages", "id")
    await nodes[0].execute(FILL, 1)
    looks = 0
    records = nodes[0].side.records

    async def changed_meanwhile(asked: RecordsRequest) -> list[RecordDigest]:
        nonlocal looks
        looks += 1
        await nodes[0].execute("update public.pages set body = $1", str(looks))
        return list(await records(asked))

    monkeypatch.setattr(nodes[0].side, "records", changed_meanwhile)

    report = await the_table(nodes)

    assert report.outcome == "changing"
    assert report.reason == "1 keys changed whenever they were compared."


async def test_a_record_that_is_new_at_one_look_and_deleted_at_the_next_does_not_differ(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
):
    """The peer has not read it yet at the first look, and has deleted it before the second."""
    await track(nodes, PAGES, "pages", "id")
    await nodes[0].execute(FILL, 1)
    looks = 0
    records = nodes[0].side.records

    async def deleted_in_the_end(asked: RecordsRequest) -> list[RecordDigest]:
        nonlocal looks
        looks += 1
        if looks == 3:
            await nodes[0].execute("delete from public.pages")
        return list(await records(asked))

    monkeypatch.setattr(nodes[0].side, "records", deleted_in_the_end)

    report = await the_table(nodes)

    assert (looks, report.outcome) == (3, "equal")


async def test_a_comparison_goes_on_after_a_key(nodes: tuple[Node, Node]):
    await track(nodes, PAGES, "pages", "id")
    for one in nodes:
        await one.execute(FILL, 3000)
    await nodes[0].execute("delete from public.pages where id in (10, 2500)")

    report = await the_table(nodes, only=["pages"], after="[2000]")

    assert report.keys == [KeyDifference("[2500]", "missing_here")]
    assert report.rows_there == 1000


async def test_an_interrupted_comparison_is_resumed_before_what_differed(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
):
    """What was found and not yet looked at twice is found again."""
    monkeypatch.setattr(comparison, "_RANGES_AT_ONCE", 1)
    await track(nodes, PAGES, "pages", "id")
    for one in nodes:
        await one.execute(FILL, 5000)
    await nodes[0].execute("delete from public.pages where id = 2500")
    progress = Progress()

    def interrupted(at: Progress) -> None:
        if at.rows > 3500:
            raise KeyboardInterrupt

    progress.on_change = interrupted
    with pytest.raises(KeyboardInterrupt):
        await compared(nodes, progress=progress)
    report = await the_table(nodes, only=["pages"], after=progress.resume_after)

    assert progress.resume_after == "[2000]"
    assert report.keys == [KeyDifference("[2500]", "missing_here")]


async def test_tables_that_only_one_side_has_are_named(nodes: tuple[Node, Node]):
    await nodes[0].execute(PAGES)
    await nodes[0].execute(ADD, "pages", ["id"])
    await nodes[1].execute("create table public.more (id int primary key)")
    await nodes[1].execute(ADD, "more", ["id"])

    report = await compared(nodes)

    assert [(one.table, one.outcome) for one in report.tables] == [
        ("more", "not_compared"),
        ("pages", "not_compared"),
    ]
    with pytest.raises(BadRequest, match="no tracked table more"):
        await compared(nodes, only=["more"])


async def test_a_different_primary_key_cannot_be_compared(nodes: tuple[Node, Node]):
    await nodes[0].execute("create table public.t (a int primary key, b int)")
    await nodes[1].execute("create table public.t (a int, b int, primary key (a, b))")
    await nodes[0].execute(ADD, "t", ["a"])
    await nodes[1].execute(ADD, "t", ["a", "b"])

    assert (await the_table(nodes)).reason == "The primary key is (a) here and (a, b) there."


async def test_a_peer_asks_only_for_what_it_may_see_and_with_keys_that_fit(
    nodes: tuple[Node, Node],
):
    await track(nodes, PAGES, "pages", "id")
    hidden = Here(nodes[0].db, 1, frozenset({"others"}))
    ask = DigestRequest(table="pages", columns=["id"], ranges=[KeyRange()])

    assert (await hidden.describe()).tables == []
    with pytest.raises(BadRequest, match="no table pages to compare"):
        await hidden.ranges(ask)
    with pytest.raises(BadRequest, match="no column secret"):
        await nodes[0].side.ranges(
            DigestRequest(table="pages", columns=["secret"], ranges=[KeyRange()])
        )
    with pytest.raises(BadRequest, match="A key does not fit"):
        await nodes[0].side.ranges(
            DigestRequest(table="pages", columns=["id"], ranges=[KeyRange('["x"]', "[1]")])
        )
