"""A snapshot makes a table equal to a peer's, whatever happens meanwhile, and says what it lost."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import Raw
from oplog.direct import SERVER, TAKER, Direct, Node, clock, new_node, take, until_taken, want

from restante.errors import PeerUnreachable, SnapshotGone, TableBusy, TableNotTracked
from restante.oplog import positions, ulids
from restante.oplog.peers import Peer
from restante.oplog.snapshots import progress, snapshot
from restante.oplog.snapshots.taking import Taker
from restante.oplog.tracking import capture
from restante.oplog.tracking.capture import Wanted
from restante.wire import oplog as wire

pytestmark = pytest.mark.anyio


@pytest.fixture
async def nodes(cluster: str) -> AsyncIterator[tuple[Node, Node]]:
    """A server and a taker, both with an empty table."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(new_node(cluster, SERVER, TAKER))
        taker = await stack.enter_async_context(new_node(cluster, TAKER, SERVER))
        yield server, taker


async def conflicts(node: Node) -> list[Any]:
    rows = await node.sql.fetch(
        "select key, reason, kept ->> 'body', lost ->> 'body'"
        " from restante.op_conflicts order by id"
    )
    return [tuple(row) for row in rows]


async def test_a_new_node_gets_records_with_their_versions(nodes: tuple[Node, Node]):
    """What has no op any more is older than the floor, and is logged under it."""
    server, taker = nodes
    await server.sql.execute("insert into notes values ('old', 'x', 1.10)")
    await server.drop_log()
    await server.sql.execute("insert into notes values ('new', 'y', 1e30)")
    await server.sql.execute("insert into notes values ('gone', 'z', 1)")
    await server.sql.execute("delete from notes where id = 'gone'")

    await take(server, taker)

    assert await taker.rows() == await server.rows()
    assert await taker.log("new") == [("c", SERVER, False)]
    assert await taker.log("old") == [("c", SERVER, True)]
    assert await taker.log("gone") == [("d", SERVER, False)]
    assert await conflicts(taker) == []


async def test_the_log_is_read_on_from_where_the_snapshot_began(nodes: tuple[Node, Node]):
    server, taker = nodes
    await server.sql.execute("insert into notes values ('a', 'x')")
    began = await server.head()
    floor = (await server.table()).floor

    async def change(what: str) -> None:
        if what == "records":
            await server.sql.execute("update notes set body = 'later'")

    await take(server, taker, change)

    cursor = positions.parsed((await taker.peer()).cursor)
    assert cursor is not None
    assert began < cursor < await server.head()
    table = await taker.table()
    assert (table.floor, table.taken_snapshot) == (floor, True)
    assert await taker.sql.fetchval("select count(*) from restante.op_snapshots") == 0


async def test_the_floor_of_the_server_is_adopted_and_the_clock_is_above_it(
    nodes: tuple[Node, Node],
):
    """Else a change here could be older than one that the server has forgotten."""
    server, taker = nodes
    await server.sql.execute("insert into notes values ('a', 'x')")
    await server.sql.execute(
        "select restante.op_tick(1, (extract(epoch from now()) * 1000 + 60000)::bigint << 15)"
    )
    await server.sql.execute("update notes set body = 'y'")
    await server.drop_log()

    await take(server, taker)
    await taker.sql.execute("update notes set body = 'z'")

    table = await taker.table()
    newest = await taker.sql.fetchval("select ulid from restante.ops order by ulid desc limit 1")
    assert table.floor == (await server.table()).floor < newest
    assert table.floor_origin == SERVER


async def test_a_record_that_only_the_taker_has_is_offered_at_first_contact(
    nodes: tuple[Node, Node],
):
    """The server has never read from it, so it cannot have deleted it."""
    server, taker = nodes
    await server.sql.execute("insert into notes values ('s', 'x')")
    await server.drop_log()
    await taker.sql.execute("insert into notes values ('t', 'mine')")
    await taker.drop_log()

    await take(server, taker)

    assert [row[0] for row in await taker.rows()] == ["s", "t"]
    assert await taker.log("t") == [("u", TAKER, False)]
    newest = await taker.sql.fetchval("select ulid from restante.ops where key = '[\"t\"]'")
    assert newest > (await server.table()).floor


async def test_a_record_that_the_server_has_deleted_and_forgotten_goes(nodes: tuple[Node, Node]):
    """The server had read it, so its absence is news."""
    server, taker = nodes
    await taker.sql.execute("insert into notes values ('a', 'x'), ('b', 'x')")
    await server.has_read(await taker.head())
    await server.sql.execute("insert into notes values ('b', 'x')")
    await server.drop_log()

    await take(server, taker)

    assert [row[0] for row in await taker.rows()] == ["b"]
    assert (await taker.log("a"))[-1] == ("d", SERVER, True)
    assert await conflicts(taker) == []


async def _track_docs(node: Node, rows: int) -> None:
    """A second table, which is tracked when the nodes are peers already."""
    await node.sql.execute("create table public.docs (id text primary key, body text)")
    await node.sql.execute(
        "insert into docs select $1 || n, 'old' from generate_series(1, $2) as n", node.host, rows
    )
    await capture.track(node.db, Wanted("docs"), host=node.host, now=clock())


async def _follow_each_other(one: Node, other: Node) -> None:
    """Both have read all that the other has logged up to now."""
    for node, peer in ((one, other), (other, one)):
        await peer.sql.execute("insert into notes values ($1)", f"from {peer.host}")
        await node.has_read(await peer.head())
        await node.sql.execute("update restante.op_peers set protocol = 'restante'")


async def test_records_from_before_tracking_stay_although_the_server_has_read_other_tables(
    nodes: tuple[Node, Node],
):
    server, taker = nodes
    await _follow_each_other(server, taker)
    await _track_docs(server, 0)
    await server.sql.execute("delete from restante.op_snapshots")  # there was nothing to take
    await _track_docs(taker, 5)

    await take(server, taker, table="docs")

    assert len(await taker.rows("docs")) == 5
    assert await conflicts(taker) == []

    await take(taker, server, table="docs")

    assert await server.rows("docs") == await taker.rows("docs")


async def test_a_server_that_waits_for_its_first_snapshot_of_a_table_has_read_nothing_of_it(
    nodes: tuple[Node, Node],
):
    """Its cursor is past what was logged before it tracked the table, which it refused."""
    server, taker = nodes
    await _track_docs(taker, 5)
    await _follow_each_other(server, taker)
    await _track_docs(server, 3)

    await take(server, taker, table="docs")

    assert len(await taker.rows("docs")) == 8

    await take(taker, server, table="docs")

    assert await server.rows("docs") == await taker.rows("docs")


async def _load(node: Node, statement: str) -> None:
    await capture.pause(node.db, "notes", now=clock())
    await node.sql.execute(statement)
    await capture.resume(node.db, "notes", host=None, now=clock())


@pytest.mark.parametrize("is_repair", [False, True])
async def test_records_that_were_loaded_in_a_pause_stay(
    nodes: tuple[Node, Node], *, is_repair: bool
):
    """The server has not taken its snapshot yet, so it knows nothing of them."""
    server, taker = nodes
    await _follow_each_other(server, taker)
    await take(server, taker)
    before = len(await taker.rows())
    await _load(taker, "insert into notes select 'load' || n from generate_series(1, 100) as n")

    if is_repair:
        async with taker.db.connection() as connection:
            wanted, peer = [await taker.table()], await taker.peer()
            await progress.want(
                connection, peer, wanted, is_for_gap=False, is_repair=True, now=clock()
            )
    await take(server, taker)

    assert len(await taker.rows()) == before + 100
    await take(taker, server)
    assert await server.rows() == await taker.rows()


@pytest.mark.parametrize("has_op", [False, True])
async def test_a_record_that_was_changed_in_a_pause_and_loses_is_reported(
    nodes: tuple[Node, Node], *, has_op: bool
):
    """Nobody knows which of them is newer."""
    server, taker = nodes
    await server.sql.execute("insert into notes values ('a', 'old')")
    await _follow_each_other(server, taker)
    await take(server, taker)
    if not has_op:
        await server.drop_log()
    await _load(taker, "update notes set body = 'load' where id = 'a'")

    await take(server, taker)

    assert ("a", "old", None) in await taker.rows()
    assert ('["a"]', "approximate", "old", "load") in await conflicts(taker)


async def test_a_record_that_the_server_deletes_after_it_has_read_a_load_goes(
    nodes: tuple[Node, Node],
):
    server, taker = nodes
    await _follow_each_other(server, taker)
    await _load(taker, "insert into notes values ('load')")
    trimmed = await taker.sql.fetchval("select trimmed from restante.op_tables")
    await server.has_read(positions.parsed(trimmed))  # of the other tables
    await take(taker, server)
    await server.sql.execute("delete from notes where id = 'load'")
    await server.drop_log()

    await take(server, taker)

    assert "load" not in [row[0] for row in await taker.rows()]


async def test_a_newer_change_of_the_taker_stays(nodes: tuple[Node, Node]):
    server, taker = nodes
    await server.sql.execute("insert into notes values ('a', 'old')")
    await server.drop_log()
    await taker.sql.execute("insert into notes values ('a', 'new')")

    await take(server, taker)

    assert [row[1] for row in await taker.rows()] == ["new"]


async def test_an_unsent_change_of_what_the_server_still_has_is_issued_again(
    nodes: tuple[Node, Node],
):
    """It is older than the server's floor, and yet nobody has changed the record since."""
    server, taker = nodes
    for one in nodes:
        await one.sql.execute("insert into notes values ('a', 'base')")
    await server.has_read(await taker.head())
    await taker.sql.execute("update notes set body = 'unsent'")
    await server.sql.execute("insert into notes values ('b', 'later')")
    await server.drop_log()

    await take(server, taker)

    assert [row[:2] for row in await taker.rows()] == [("a", "unsent"), ("b", "later")]
    assert (await taker.log("a"))[-1] == ("u", TAKER, False)
    newest = await taker.sql.fetchval(
        "select max(ulid::text)::uuid from restante.ops where key = '[\"a\"]'"
    )
    assert newest > (await server.table()).floor


async def test_an_unsent_change_of_what_the_server_has_changed_too_is_reported(
    nodes: tuple[Node, Node],
):
    server, taker = nodes
    for one in nodes:
        await one.sql.execute("insert into notes values ('a', 'base')")
    await server.has_read(await taker.head())
    await taker.sql.execute("update notes set body = 'unsent'")
    await server.sql.execute("update notes set body = 'theirs'")
    await server.drop_log()

    await take(server, taker)

    assert [row[1] for row in await taker.rows()] == ["theirs"]
    assert await conflicts(taker) == [('["a"]', "approximate", "theirs", "unsent")]
    assert (await taker.peer()).cursor


async def test_it_goes_on_page_by_page_while_both_sides_write(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
):
    """Each page is taken by a process that knows nothing but the tables."""
    monkeypatch.setattr(snapshot, "MAX_RECORDS", 7)
    monkeypatch.setattr(snapshot, "MAX_SCANNED_KEYS", 5)
    monkeypatch.setattr(snapshot, "MAX_ASKED_KEYS", 6)
    server, taker = nodes
    await server.sql.execute(
        "insert into notes select lpad(n::text, 3, '0'), 'x' from generate_series(1, 60) as n"
    )
    await server.drop_log()
    await server.sql.execute("delete from notes where id between '010' and '030'")
    await taker.sql.execute(
        "insert into notes select 't' || n, 'x' from generate_series(1, 20) as n"
    )
    await taker.drop_log()
    number = 0

    async def write(_what: str) -> None:
        nonlocal number
        number += 1
        await server.sql.execute("insert into notes values ($1, 'meanwhile')", f"{number:03}!")
        await server.sql.execute("delete from notes where id = $1", f"{60 - number:03}")
        await taker.sql.execute("insert into notes values ($1, 'mine')", f"{number:03}?")

    remote = await take(server, taker, write)

    assert remote.pages > 15
    start = positions.parsed((await taker.peer()).cursor)
    assert start is not None
    late = {
        row["key"]
        for row in await server.sql.fetch(
            "select key from restante.ops where (era, xid) >= ($1, $2)", start.era, start.xid
        )
    }
    theirs = {row[0] for row in await server.rows()}
    mine = {row[0] for row in await taker.rows()}
    own = {name for name in mine if name.endswith("?") or name.startswith("t")}
    assert len(own) == 20 + number
    # What differs apart from the taker's own records is in the log that follows.
    assert {f'["{name}"]' for name in (theirs ^ (mine - own))} <= late


async def test_pages_are_bounded_in_bytes(nodes: tuple[Node, Node]):
    server, taker = nodes
    await server.sql.execute(
        "insert into notes select n::text, string_agg(gen_random_uuid()::text, '')"
        " from generate_series(1, 4) as n, generate_series(1, 100000) group by n"
    )
    await server.drop_log()

    remote = await take(server, taker)

    assert await taker.rows() == await server.rows()
    assert remote.pages >= 6  # begin, deletes, at least three with records, what the taker has


async def test_a_pin_that_ran_out_lets_it_begin_again(nodes: tuple[Node, Node]):
    server, taker = nodes
    await server.sql.execute("insert into notes values ('a', 'x')")
    await want(taker)
    remote = Direct(server)
    advance = Taker(taker.db, remote, TAKER, clock).advance  # type: ignore[arg-type]
    await advance(await taker.peer())
    await server.sql.execute("update restante.op_pins set expires_at = now() - interval '1 s'")

    with pytest.raises(PeerUnreachable, match="begins again"):
        await advance(await taker.peer())
    while await advance(await taker.peer()):
        pass

    assert await taker.rows() == await server.rows()


@pytest.mark.parametrize(
    "change",
    [
        "update restante.op_pins set position = position || '0'",
        "update restante.op_tables set trimmed = repeat('f', 16)",
        "update restante.op_tables set state = 'paused'",
        "delete from restante.op_pins",
        "select setval('restante.op_era', 9000000000000000)",
    ],
)
async def test_a_server_that_cannot_go_on_says_so(nodes: tuple[Node, Node], change: str):
    """Its log was trimmed or paused, or its database restored."""
    server, _ = nodes
    await server.sql.execute("insert into notes values ('a', 'x')")
    asker = await server.peer()
    began = await snapshot.begin(server.db, asker, wire.SnapshotRequest("notes"), now=clock())
    await server.sql.execute(change)
    request = wire.SnapshotPageRequest("notes", began.start, "records")

    with pytest.raises(SnapshotGone):
        await snapshot.page(server.db, asker, request, now=clock())


async def test_each_page_renews_the_pins_of_all_tables(nodes: tuple[Node, Node]):
    """The first table's pin must last until the last table is complete."""
    server, _ = nodes
    asker, now = await server.peer(), clock()
    began = await snapshot.begin(server.db, asker, wire.SnapshotRequest("notes"), now=now)
    await server.sql.execute(
        "insert into restante.op_pins values ($1, 999, 'x', $2)",
        asker.id,
        now + timedelta(seconds=9),
    )

    request = wire.SnapshotPageRequest("notes", began.start, "records")
    await snapshot.page(server.db, asker, request, now=now)

    least = await server.sql.fetchval("select min(expires_at) from restante.op_pins")
    assert least == now + snapshot.PIN_LASTS


async def test_a_table_that_the_peer_may_not_see_does_not_exist_for_it(nodes: tuple[Node, Node]):
    server, _ = nodes
    await server.sql.execute("update restante.op_peers set tables = '{others}'")

    for name in ("notes", "nothing", 'x"; drop table notes; --'):
        with pytest.raises(TableNotTracked):
            await snapshot.begin(
                server.db, await server.peer(), wire.SnapshotRequest(name), now=clock()
            )


async def test_a_server_that_gives_no_snapshot_of_the_table_is_not_asked_again(
    nodes: tuple[Node, Node],
):
    """Else nothing else could be read from it."""
    server, taker = nodes

    async def refuse(_what: str) -> None:
        raise PeerUnreachable("It answered with status 404.", status=404)

    with pytest.raises(PeerUnreachable):
        await take(server, taker, refuse)

    assert await taker.sql.fetchval("select count(*) from restante.op_snapshots") == 0


async def test_a_table_that_is_paused_here_waits(nodes: tuple[Node, Node]):
    server, taker = nodes
    await taker.sql.execute("update restante.op_tables set state = 'paused'")

    with pytest.raises(TableBusy):
        await take(server, taker)


async def test_a_snapshot_that_was_aborted_here_does_not_go_on(nodes: tuple[Node, Node]):
    """Resuming a paused table forgets it: rows may have changed under old versions."""
    server, taker = nodes
    await server.sql.execute("insert into notes values ('a', 'x')")

    async def abort(what: str) -> None:
        if what == "records":
            await taker.sql.execute("delete from restante.op_snapshots")

    with pytest.raises(PeerUnreachable):
        await take(server, taker, abort)

    assert await taker.rows() == []


async def test_a_server_that_could_not_see_our_table_has_deleted_nothing_of_it(
    nodes: tuple[Node, Node],
):
    """It has read our log, but without this table, until its operator and ours allowed it."""
    server, taker = nodes
    await taker.sql.execute("insert into notes values ('only here')")
    await taker.drop_log()
    await taker.sql.execute("insert into notes values ('logged')")
    await server.has_read(await taker.head())
    await taker.sql.execute(
        "update restante.op_peers set shown_later = array(select id from restante.op_tables)"
    )

    await take(server, taker)

    assert [row[0] for row in await taker.rows()] == ["logged", "only here"]


class Hostile(Direct):
    """A server that says anything."""

    entry = wire.SnapshotEntry(Raw(b'{"id":"a","body":"x","size":1}'))
    floor = ulids.LOWEST
    floor_origin = SERVER

    async def snapshot_page(
        self, _peer: Peer, request: wire.SnapshotPageRequest
    ) -> wire.SnapshotPage:
        entries = [self.entry] if request.phase == "records" and not request.after else []
        following = "end" if entries else None
        floor = ulids.text_of(self.floor)
        return wire.SnapshotPage(entries, floor, self.floor_origin, following)


def at(moment: datetime) -> str:
    return ulids.text_of(ulids.lowest_at(moment))


async def told(server: Node, taker: Node, **said: Any) -> None:
    """Take a snapshot in which one record has this version."""
    remote = Hostile(server)
    remote.entry = wire.SnapshotEntry(Raw(b'{"id":"a","body":"x","size":1}'), **said)
    await want(taker)
    await until_taken(taker, remote)


@pytest.mark.parametrize(
    ("ulid", "host"),
    [
        ("garbage", SERVER),
        ("01K0000000000000000000000", SERVER),
        pytest.param(at(datetime.now(UTC)), "", id="no host"),
        pytest.param(at(datetime.now(UTC)), "x" * 300, id="long host"),
    ],
)
async def test_a_version_that_is_unreadable_stops_it(
    nodes: tuple[Node, Node], ulid: str, host: str
):
    server, taker = nodes

    with pytest.raises(PeerUnreachable, match="unreadable"):
        await told(server, taker, ulid=ulid, host=host)

    assert await taker.rows() == []


@pytest.mark.parametrize(
    "moment", [datetime(2023, 1, 1, tzinfo=UTC), datetime.now(UTC) + timedelta(hours=25)]
)
async def test_a_version_that_no_honest_clock_makes_is_refused(
    nodes: tuple[Node, Node], moment: datetime
):
    """Taking it would set our own clock."""
    server, taker = nodes

    await told(server, taker, ulid=at(moment), host=SERVER)

    assert await taker.rows() == []
    assert await taker.sql.fetchval("select refused from restante.op_peers") == 1
    assert await taker.sql.fetchval("select last_value from restante.op_clock") < (
        ulids.tick_above(ulids.lowest_at(datetime.now(UTC) + timedelta(minutes=1)))
    )


async def test_a_version_of_a_clock_that_is_ahead_waits(nodes: tuple[Node, Node]):
    """The rest goes on, or a node whose clock is wrong could never be read."""
    server, taker = nodes

    await told(server, taker, ulid=at(datetime.now(UTC) + timedelta(hours=1)), host=SERVER)

    assert await taker.rows() == []
    parked = await taker.sql.fetch("select reason, data ->> 'id' as id from restante.op_parked")
    assert [tuple(row) for row in parked] == [("future", "a")]
    assert (await taker.peer()).cursor


async def test_a_floor_that_is_ahead_of_our_clock_is_not_adopted(nodes: tuple[Node, Node]):
    server, taker = nodes
    remote = Hostile(server)
    remote.floor = ulids.lowest_at(datetime.now(UTC) + timedelta(hours=1))
    await want(taker)
    advance = Taker(taker.db, remote, TAKER, clock).advance  # type: ignore[arg-type]
    await advance(await taker.peer())

    with pytest.raises(PeerUnreachable, match="ahead of our clock"):
        await advance(await taker.peer())

    assert (await taker.table()).floor == ulids.LOWEST


@pytest.mark.parametrize(
    ("origin", "adopted"),
    [
        ("HTTP://Third.example/", "http://third.example"),
        (TAKER, TAKER),
        ("http://fourth.example", SERVER),
    ],
    ids=["that it relays", "our own", "that it may not speak for"],
)
async def test_the_floor_has_a_host_that_the_server_may_speak_for(
    nodes: tuple[Node, Node], origin: str, adopted: str
):
    server, taker = nodes
    await taker.sql.execute("update restante.op_peers set relays = '{http://third.example}'")
    remote = Hostile(server)
    remote.floor, remote.floor_origin = ulids.lowest_at(datetime.now(UTC)), origin
    await want(taker)

    await until_taken(taker, remote)

    assert (await taker.table()).floor_origin == adopted


@pytest.mark.parametrize("origin", ["", "x" * 256, "a\0b"], ids=["none", "long", "zero"])
async def test_a_floor_of_an_impossible_host_is_not_adopted(nodes: tuple[Node, Node], origin: str):
    server, taker = nodes
    remote = Hostile(server)
    remote.floor, remote.floor_origin = ulids.lowest_at(datetime.now(UTC)), origin
    await want(taker)

    with pytest.raises(PeerUnreachable, match="host of the floor"):
        await until_taken(taker, remote)

    assert (await taker.table()).floor == ulids.LOWEST


async def test_records_that_cannot_be_taken_are_counted(nodes: tuple[Node, Node]):
    server, taker = nodes
    remote = Hostile(server)
    remote.entry = wire.SnapshotEntry(Raw(b'{"body":"without a key"}'))
    await want(taker)
    await until_taken(taker, remote)

    assert await taker.sql.fetchval("select refused from restante.op_peers") == 1


async def test_what_postgres_refuses_is_parked_and_the_rest_is_taken(nodes: tuple[Node, Node]):
    server, taker = nodes
    await taker.sql.execute("alter table notes add check (body <> 'bad')")
    await server.sql.execute(
        "insert into notes select n::text, case when n = 5 then 'bad' else 'x' end"
        " from generate_series(1, 20) as n"
    )

    await take(server, taker)

    assert len(await taker.rows()) == 19
    parked = await taker.sql.fetch("select reason, data ->> 'id' as id from restante.op_parked")
    assert [tuple(row) for row in parked] == [("check", "5")]


@pytest.mark.parametrize("why", ["check", "future"])
async def test_what_a_snapshot_parks_is_found_by_its_key(nodes: tuple[Node, Node], why: str):
    """So a newer op of the record removes it; else it would win when that op is dropped."""
    server, taker = nodes
    if why == "check":
        await taker.sql.execute("alter table notes add check (body <> 'bad')")
        await server.sql.execute("insert into notes values ('a', 'bad')")
        await take(server, taker)
    else:
        await told(server, taker, ulid=at(datetime.now(UTC) + timedelta(hours=1)), host=SERVER)
    parked = "select key, key_hash = hashtextextended(key, 0) as is_hash from restante.op_parked"

    (row,) = await taker.sql.fetch(parked)

    assert tuple(row) == ('["a"]', True)


async def test_tables_that_others_refer_to_come_first(nodes: tuple[Node, Node]):
    """Else every record would be parked until its parent is there."""
    server, taker = nodes
    for one in nodes:
        await one.sql.execute(
            "create table public.lines (id text primary key, note text not null"
            " references notes deferrable initially deferred)"
        )
        await capture.track(one.db, Wanted("public.lines"), host=None, now=clock())
    await server.sql.execute("insert into notes values ('a', 'x')")
    await server.sql.execute("insert into lines values ('1', 'a')")
    await want(taker, "lines")

    await take(server, taker)

    assert await taker.rows("lines") == [("1", "a")]
    assert await taker.sql.fetchval("select count(*) from restante.op_parked") == 0


async def test_two_nodes_take_snapshots_of_each_other(nodes: tuple[Node, Node]):
    """Neither waits for the other, and both come to the same records."""
    one, two = nodes
    for node, name in ((one, "1"), (two, "2")):
        await node.sql.execute("insert into notes values ($1, 'own'), ('both', $1)", name)
        await node.drop_log()

    to_one, to_two = Direct(one), Direct(two)
    await want(one)
    await want(two)
    is_busy = True
    while is_busy:
        first = await Taker(one.db, to_two, SERVER, clock).advance(await one.peer())  # type: ignore[arg-type]
        second = await Taker(two.db, to_one, TAKER, clock).advance(await two.peer())  # type: ignore[arg-type]
        is_busy = first or second

    assert [row[0] for row in await one.rows()] == ["1", "2", "both"]
    assert [row[0] for row in await two.rows()] == ["1", "2", "both"]
