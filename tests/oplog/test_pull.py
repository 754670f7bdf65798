"""Nodes that pull each other's logs come to the same records."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest
from oplog.meshes import Member, converge, equal, join, mesh, reads
from sites import running_site, settings_for
from waiting import until

from restante.oplog import peers, ulids
from restante.oplog.positions import Position
from restante.oplog.snapshots import snapshot
from restante.oplog.tracking import capture

pytestmark = pytest.mark.anyio


async def test_two_nodes_that_read_each_other_have_the_same_records(cluster: str, tmp_path: Path):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await join(a, b)

        await a.sql.execute("insert into notes values ('a', 'from a', 1.10)")
        await b.sql.execute("insert into notes values ('b', 'from b', 2)")
        await until(lambda: converge(a, b))

        await b.sql.execute("update notes set body = 'changed at b' where id = 'a'")
        await a.sql.execute("delete from notes where id = 'b'")
        await until(
            lambda: a.sql.fetchval("select body = 'changed at b' from notes where id = 'a'")
        )
        rows = await converge(a, b)

        assert [row[:2] for row in rows] == [("a", "changed at b")]


async def test_what_a_node_has_read_from_one_it_passes_on_to_the_next(cluster: str, tmp_path: Path):
    """A chain: the ends know only the middle."""
    async with mesh(cluster, tmp_path, 3) as (a, b, c):
        await reads(b, a)
        await reads(c, b)

        await a.sql.execute(
            "insert into notes select n::text, 'x' from generate_series(1, 50) as n"
        )

        await until(lambda: c.sql.fetchval("select count(*) = 50 from notes"))
        assert await c.rows() == await a.rows()


async def test_a_node_joins_while_others_write(cluster: str, tmp_path: Path):
    """Neither has a record that another lacks, whenever it was written."""
    async with mesh(cluster, tmp_path, 3) as (a, b, c):
        await join(a, b)
        done = asyncio.Event()

        async def write(node: Member, name: str) -> int:
            number, sql = 0, await asyncpg.connect(node.dsn)
            while not done.is_set():
                number += 1
                await sql.execute("insert into notes values ($1, $2)", f"{name}{number}", name)
                await sql.execute(
                    "update notes set body = body || '!' where id = $1", f"{name}{number // 2}"
                )
                if number % 3 == 0:
                    await sql.execute("delete from notes where id = $1", f"{name}{number // 3}")
                await asyncio.sleep(0.01)
            await sql.close()
            return number

        writers = [
            asyncio.create_task(write(one, name)) for one, name in ((a, "a"), (b, "b"), (c, "c"))
        ]
        await until(lambda: b.sql.fetchval("select count(*) > 20 from notes where id like 'a%'"))
        await join(a, b, c)
        await until(lambda: c.sql.fetchval("select count(*) > 20 from notes where id like 'b%'"))
        done.set()
        written = [await writer for writer in writers]

        rows = await converge(a, b, c)
        assert len(rows) == sum(number - number // 3 for number in written)


async def test_records_from_before_tracking_reach_a_peer(cluster: str, tmp_path: Path):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await a.sql.execute("create table public.old (id text primary key, body text)")
        await a.sql.execute(
            "insert into old select n::text, 'old' from generate_series(1, 2500) as n"
        )
        await b.sql.execute("create table public.old (id text primary key, body text)")
        await a.track("old")
        await b.track("old")
        await join(a, b)

        await until(lambda: b.sql.fetchval("select count(*) = 2500 from old"))

        await b.sql.execute("update old set body = 'new' where id = '7'")
        await until(lambda: a.sql.fetchval("select body = 'new' from old where id = '7'"))
        await converge(a, b, table="old")
        assert await a.sql.fetchval("select count(*) from restante.op_conflicts") == 0
        assert await b.sql.fetchval("select count(*) from restante.op_conflicts") == 0


async def test_a_populated_table_on_both_sides_is_merged(cluster: str, tmp_path: Path):
    """Both had records before tracking; nobody's are lost without being reported."""
    async with mesh(cluster, tmp_path, 2) as (a, b):
        for node, name in ((a, "a"), (b, "b")):
            await node.sql.execute("create table public.old (id text primary key, body text)")
            await node.sql.execute("insert into old values ($1, 'only here'), ('both', $1)", name)
            await node.track("old")
        await join(a, b)

        await until(lambda: a.sql.fetchval("select count(*) = 3 from old"))
        rows = await converge(a, b, table="old")

        assert [row[0] for row in rows] == ["a", "b", "both"]


async def test_a_table_that_is_tracked_later_is_brought_in(cluster: str, tmp_path: Path):
    """Its ops were refused as long as it was not tracked here."""
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await join(a, b)
        for node in (a, b):
            await node.sql.execute("create table public.later (id text primary key)")
        await a.track("later")
        await a.sql.execute("insert into later values ('1')")
        await a.sql.execute("insert into notes values ('n')")
        await until(lambda: b.sql.fetchval("select count(*) = 1 from notes"))

        await b.track("later")

        await until(lambda: b.sql.fetchval("select count(*) = 1 from later"))


async def test_after_a_pause_the_peer_takes_a_snapshot(cluster: str, tmp_path: Path):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await join(a, b)
        await a.sql.execute("insert into notes values ('a', 'x'), ('b', 'x'), ('c', 'x')")
        await converge(a, b)

        now = datetime.now(UTC)
        await capture.pause(a.db, "notes", now=now)
        await a.sql.execute("truncate notes")
        await a.sql.execute("insert into notes values ('b', 'loaded'), ('d', 'loaded')")
        await capture.resume(a.db, "notes", host=None, now=now)

        await until(lambda: b.sql.fetchval("select count(*) = 1 from notes where id = 'd'"))
        rows = await converge(a, b)
        assert [row[:2] for row in rows] == [("b", "loaded"), ("d", "loaded")]
        await until(lambda: b.sql.fetchval("select gaps = 1 from restante.op_peers"))


@pytest.mark.parametrize("who", ["taker", "server"])
async def test_a_snapshot_goes_on_after_a_restart(
    cluster: str, tmp_path: Path, who: str, monkeypatch: pytest.MonkeyPatch
):
    """The servers are stopped in the middle of it, and started again."""
    monkeypatch.setattr(snapshot, "MAX_RECORDS", 20)
    async with mesh(cluster, tmp_path, 2) as (a, b):
        for node in (a, b):
            await node.sql.execute("create table public.old (id text primary key, body text)")
        await a.sql.execute(
            "insert into old select n::text, 'old' from generate_series(1, 2000) as n"
        )
        await a.track("old")
        await b.track("old")
        await reads(b, a)
        await until(lambda: b.sql.fetchval("select count(*) > 0 from old"))

        stopped = a if who == "server" else b
        await stopped.stop()
        taken = await b.sql.fetchval("select count(*) from old")
        await a.sql.execute("update old set body = 'meanwhile' where id > '1500'")
        await a.sql.execute("delete from old where id between '1' and '1200'")
        await stopped.start()

        await until(lambda: equal(a, b, table="old"))
        assert 0 < taken < 2000
        assert await b.sql.fetchval("select begun from restante.op_snapshots") in (None, 1)


async def test_a_peer_that_is_removed_is_not_asked_any_more(cluster: str, tmp_path: Path):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await join(a, b)
        await a.sql.execute("insert into notes values ('a')")
        await converge(a, b)

        async with b.db.connection() as connection:
            await peers.remove(connection, a.url)
        await until(lambda: _is_free(b))
        await a.sql.execute("insert into notes values ('b')")
        await reads(b, a)

        await until(lambda: b.sql.fetchval("select count(*) = 2 from notes"))


async def _is_free(node: Member) -> bool:
    """Whether no server holds the lock of a pull."""
    held = "select count(*) from pg_locks where locktype = 'advisory' and classid = 730118"
    return not await node.sql.fetchval(
        f"{held} and database = (select oid from pg_database where datname = current_database())"
    )


async def test_of_two_servers_on_one_database_one_pulls_and_the_other_takes_over(
    cluster: str, tmp_path: Path
):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await reads(b, a)
        settings = settings_for(b.dsn, tmp_path / "second", self_url=b.url)
        async with running_site(settings):
            await a.sql.execute("insert into notes values ('a')")
            await until(lambda: b.sql.fetchval("select count(*) = 1 from notes"))

            await b.stop()
            await a.sql.execute("insert into notes values ('b')")

            await until(lambda: b.sql.fetchval("select count(*) = 2 from notes"))


async def test_a_peer_that_does_not_answer_is_shown_with_the_reason(cluster: str, tmp_path: Path):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await reads(b, a)
        await until(lambda: _has_pulled(b, a))

        await a.stop()
        await until(lambda: _fails(b, a))
        failed = await b.peer(a)
        await a.start()
        await a.sql.execute("insert into notes values ('a')")

        assert "It cannot be reached" in failed["failure"]
        await until(lambda: b.sql.fetchval("select count(*) = 1 from notes"))
        await until(lambda: _has_pulled(b, a))


async def _has_pulled(node: Member, other: Member) -> bool:
    row = await node.peer(other)
    return row["pulled_at"] is not None and row["failing_since"] is None


async def _fails(node: Member, other: Member) -> bool:
    return (await node.peer(other))["failing_since"] is not None


async def test_a_node_that_was_away_during_a_bulk_load_keeps_what_nobody_else_changed(
    cluster: str, tmp_path: Path
):
    """Its changes are older than the load; those of records that it left alone still count."""
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await join(a, b)
        await a.sql.execute(
            "insert into notes values ('alone', 'x'), ('loaded', 'x'), ('gone', 'x')"
        )
        await converge(a, b)
        await until(lambda: _has_read_all(a, b))
        await b.stop()
        await b.sql.execute("update notes set body = 'from b'")
        await b.sql.execute("insert into notes values ('new', 'from b')")

        now = datetime.now(UTC)
        await capture.pause(a.db, "notes", now=now)
        await a.sql.execute("update notes set body = 'load' where id = 'loaded'")
        await a.sql.execute("delete from notes where id = 'gone'")
        await capture.resume(a.db, "notes", host=None, now=now)
        await b.start()

        await until(lambda: a.sql.fetchval("select body = 'from b' from notes where id = 'alone'"))
        await until(lambda: b.sql.fetchval("select body = 'load' from notes where id = 'loaded'"))
        rows = await converge(a, b)
        lost = await b.sql.fetch("select lost ->> 'body' from restante.op_conflicts")
        assert [row[:2] for row in rows] == [
            ("alone", "from b"),
            ("loaded", "load"),
            ("new", "from b"),
        ]
        # Of 'new' nobody knows whether it was deleted during the load, or never there.
        assert sorted(row[0] or "" for row in lost) == ["", "from b", "from b"]


async def _has_read_all(reader: Member, server: Member) -> bool:
    """Whether a node has read all that the other has logged."""
    row = await server.sql.fetchrow(
        "select era, xid, ulid, n from restante.ops order by era desc, xid desc, ulid desc, n desc"
        " limit 1"
    )
    return (await reader.peer(server))["cursor"] >= str(Position(*row))


@pytest.mark.parametrize("era", ["hour", "minute"])
async def test_a_cursor_of_an_era_that_the_peer_has_not_reached_heals(
    cluster: str, tmp_path: Path, era: str
):
    """The peer was replaced, or the stored cursor is wrong: nothing is skipped."""
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await a.sql.execute("insert into notes values ('a')")
        await reads(b, a)
        await until(lambda: b.sql.fetchval("select count(*) = 1 from notes"))
        await b.stop()
        ahead = datetime.now(UTC) + timedelta(**{f"{era}s": 1})
        ulid = ulids.lowest_at(datetime.now(UTC)) if era == "minute" else ulids.LOWEST
        wrong = str(Position(int(ahead.timestamp() * 1_000_000), 1, ulid, 0))
        await b.sql.execute("update restante.op_peers set cursor = $1", wrong)

        await b.start()
        await a.sql.execute("insert into notes values ('b')")

        await until(lambda: b.sql.fetchval("select count(*) = 2 from notes"))
        row = await b.peer(a)
        assert row["cursor"] < wrong
        assert row["cursor_problem"]
