"""A table that cannot be read from a peer holds up no other, and nothing of any is missed."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from oplog.meshes import Member, converge, join, mesh, reads
from waiting import until

from restante.oplog import peers
from restante.oplog.peers import Changes
from restante.oplog.pulling import state
from restante.oplog.tracking import capture

pytestmark = pytest.mark.anyio


async def _add_old(*nodes: Member) -> None:
    """A second table, which the first node has a record in from before it was tracked."""
    for node in nodes:
        await node.sql.execute("create table public.old (id text primary key, body text)")
    await nodes[0].sql.execute("insert into old values ('0', 'before')")
    for node in nodes:
        await node.track("old")


async def test_a_snapshot_of_one_table_at_the_first_contact_skips_nothing_of_another(
    cluster: str, tmp_path: Path
):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await a.sql.execute("insert into notes values ('n')")
        await _add_old(a, b)

        await reads(b, a)

        await until(lambda: b.sql.fetchval("select count(*) = 1 from old"))
        await converge(a, b)


async def test_a_gap_of_one_table_skips_nothing_of_another(cluster: str, tmp_path: Path):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await _add_old(a, b)
        await join(a, b)
        await until(lambda: b.sql.fetchval("select count(*) = 1 from old"))
        await b.stop()

        await a.sql.execute("insert into notes values ('missed')")
        now = datetime.now(UTC)
        await capture.pause(a.db, "old", now=now)
        await a.sql.execute("insert into old values ('1', 'loaded')")
        await capture.resume(a.db, "old", host=None, now=now)
        await b.start()

        await until(lambda: b.sql.fetchval("select count(*) = 2 from old"))
        await converge(a, b)
        await until(lambda: b.sql.fetchval("select gaps = 1 from restante.op_peers"))


async def test_a_table_whose_snapshot_fails_is_named_and_the_others_go_on(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What happens to it meanwhile is not lost."""
    monkeypatch.setattr(state, "_SNAPSHOT_TRIES", 2)
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await _add_old(a, b)
        await a.sql.execute("insert into notes values ('first')")
        await capture.pause(b.db, "old", now=datetime.now(UTC))

        await join(a, b)
        await converge(a, b)
        await a.sql.execute("insert into old values ('1', 'meanwhile')")
        await a.sql.execute("update old set body = 'changed' where id = '0'")
        await a.sql.execute("insert into notes values ('by the log')")
        await until(lambda: _has_note(b, "by the log"))
        peer = await b.peer(a)
        told = await _read_from(b, a)
        await capture.resume(b.db, "old", host=None, now=datetime.now(UTC))
        await converge(a, b, table="old")
        await a.sql.execute("insert into old values ('2', 'by the log')")

        await converge(a, b, table="old")
        assert "The snapshot of old fails: Capture of old is paused here" in peer["failure"]
        assert peer["failing_since"] is not None
        assert (bool(peer["cursor"]), told) == (True, "")
        await until(lambda: b.sql.fetchval("select failure is null from restante.op_peers"))
        assert await _read_from(b, a) != ""


async def _has_note(node: Member, name: str) -> bool:
    return await node.sql.fetchval("select count(*) = 1 from notes where id = $1", name)


async def _read_from(node: Member, other: Member) -> str:
    """How far a node says that it has read the log of another."""
    async with node.db.connection() as connection:
        return await peers.read_from(connection, (await node.peer(other))["id"])


async def test_a_peer_that_may_pass_on_more_hosts_gives_what_was_refused(
    cluster: str, tmp_path: Path
):
    async with mesh(cluster, tmp_path, 3) as (a, b, c):
        await reads(b, a)
        await reads(c, b, relays=["http://nobody.example"])
        await a.sql.execute("insert into notes values ('refused')")
        await until(lambda: _has_note(b, "refused"))
        await b.sql.execute("insert into notes values ('own')")
        await until(lambda: _has_note(c, "own"))
        refused = await c.rows()

        async with c.db.connection() as connection:
            await peers.add(connection, b.url, Changes(relays=["*"]), now=datetime.now(UTC))

        await until(lambda: _has_note(c, "refused"))
        assert [row[0] for row in refused] == ["own"]


async def test_a_node_that_was_added_to_itself_under_another_name_says_so(
    cluster: str, tmp_path: Path
):
    async with mesh(cluster, tmp_path, 1) as (a,):
        await a.sql.execute("insert into notes values ('n')")
        name = a.url.replace("127.0.0.1", "localhost")
        token = peers.new_token()
        async with a.db.connection() as connection:
            changes = Changes(token=token, shown_token=token)
            await peers.add(connection, name, changes, now=datetime.now(UTC))

        await until(
            lambda: a.sql.fetchval(
                "select failure like 'This address is this node itself%' from restante.op_peers"
            )
        )
        assert (await a.peer(name))["cursor"] == ""


async def _allow(node: Member, other: Member, *names: str) -> None:
    """Let another node see and send these tables."""
    async with node.db.connection() as connection:
        await peers.add(connection, other.url, Changes(tables=names), now=datetime.now(UTC))


async def test_a_table_that_the_other_node_lets_us_see_later_arrives_whole(
    cluster: str, tmp_path: Path
):
    """Nobody has read it before, so nobody takes what the other lacks for deleted."""
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await _add_old(a, b)
        await _allow(a, b, "notes")
        await join(a, b)
        await a.sql.execute("insert into old values ('1', 'by the log')")
        await b.sql.execute("insert into old values ('2', 'of the other')")
        for node, name in ((a, "n"), (b, "m")):
            await node.sql.execute("insert into notes values ($1)", name)
        await until(lambda: _has_note(b, "n"))
        await until(lambda: _has_note(a, "m"))
        before = await b.rows("old")

        await _allow(a, b, "*")
        await a.sql.execute("insert into notes values ('ends the long poll')")

        rows = await converge(a, b, table="old")
        assert (len(before), len(rows)) == (1, 3)
        await until(lambda: a.sql.fetchval("select shown_later = '{}' from restante.op_peers"))


async def test_a_peer_that_was_removed_and_added_again_takes_all_tables_anew(
    cluster: str, tmp_path: Path
):
    """It may see more than before, and it reads on where it had stopped."""
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await _add_old(a, b)
        await _allow(a, b, "notes")
        await join(a, b)
        await a.sql.execute("insert into notes values ('n')")
        await until(lambda: _has_note(b, "n"))

        async with a.db.connection() as connection:
            await peers.remove(connection, b.url)
        await join(a, b)

        assert len(await converge(a, b, table="old")) == 1


async def test_a_table_that_the_other_node_may_not_see_any_more_is_not_announced(
    cluster: str, tmp_path: Path
):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await reads(b, a)
        await until(lambda: a.sql.fetchval("select shown_later = '{}' from restante.op_peers"))
        for names in (["x"], ["notes"], ["x"]):
            await _allow(a, b, *names)

        assert (await a.peer(b))["shown_later"] == []
