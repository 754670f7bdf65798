"""`verify` and `resync` between running nodes, over HTTP."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from oplog.meshes import Member, converge, join, mesh, reads
from waiting import until

from restante.database.pool import Database
from restante.errors import PeerUnreachable
from restante.oplog import looks, peers, status
from restante.oplog.peers import Changes
from restante.oplog.remote import Remote
from restante.oplog.verifying.comparison import Here, Limits, Progress
from restante.oplog.verifying.resync import Resync
from restante.oplog.verifying.verify import There, verify
from restante.wire.oplog_digests import (
    DIGEST_PATH,
    RECORDS_PATH,
    TABLES_PATH,
    KeyDifference,
    ResyncReport,
    VerifyReport,
)

pytestmark = pytest.mark.anyio

FILL = "insert into notes select n::text, 'body', n from generate_series(1, 300) as n"
# What no trigger sees: somebody has disabled them.
UNSEEN = "select set_config('restante.applying', id::text, false) from restante.op_tables"
SEEN = "reset restante.applying"


def clock() -> datetime:
    return datetime.now(UTC)


async def compared(a: Member, b: Member, **limits: Any) -> VerifyReport:
    async with a.db.connection() as connection:
        peer = await peers.find(connection, b.url)
    assert peer is not None
    async with Remote.opened(own_host=a.url, clock=clock) as remote:
        return await verify(
            Here(a.db, peer.id, peer.tables),
            There(remote, peer),
            b.url,
            limits=Limits(**limits),
            progress=Progress(),
        )


async def resynced(db: Database, a: Member, b: Member, table: str = "notes") -> ResyncReport:
    async with db.connection() as connection:
        peer = await peers.find(connection, b.url)
    assert peer is not None
    async with Remote.opened(own_host=a.url, clock=clock) as remote:
        limits = Limits(wait_seconds=1)
        return await Resync(db, remote, peer, a.url, clock, print).run(table, limits)


async def test_nodes_in_step_are_equal_while_one_of_them_writes(cluster: str, tmp_path: Path):
    """Lag does not count as a difference."""
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await join(a, b)
        await a.sql.execute(FILL)

        report = await compared(a, b)

        assert report.is_equal
        assert report.is_caught_up
        assert report.tables[0].rows_here == 300


async def test_what_was_changed_behind_the_log_is_found_and_repaired(cluster: str, tmp_path: Path):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await join(a, b)
        await a.sql.execute(FILL)
        await converge(a, b)
        await a.sql.execute(UNSEEN)
        await a.sql.execute("delete from notes where id = '7'")
        await a.sql.execute("update notes set body = 'x' where id = '8'")
        await a.sql.execute("insert into notes values ('extra', 'y', 0)")
        await a.sql.execute(SEEN)

        before = await compared(a, b)
        await resynced(a.db, a, b)
        after = await compared(a, b)

        assert sorted(before.tables[0].keys, key=lambda one: one.key) == [
            KeyDifference('["7"]', "missing_here"),
            KeyDifference('["8"]', "different"),
            KeyDifference('["extra"]', "missing_there"),
        ]
        assert after.is_equal, after
        assert await a.rows() == await b.rows()
        assert await a.sql.fetchval("select body from notes where id = '8'") == "body"


async def test_a_resync_without_a_running_server_is_done_by_the_command(
    cluster: str, tmp_path: Path
):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await join(a, b)
        await a.sql.execute(FILL)
        await converge(a, b)
        await a.sql.execute(UNSEEN)
        await a.sql.execute("delete from notes where id = '7'")
        await a.stop()
        db = await Database.open(
            a.dsn, pool_size=4, acquire_timeout_seconds=5, statement_timeout_seconds=20
        )

        await resynced(db, a, b)

        await db.close()
        assert await a.rows() == await b.rows()


async def test_a_newer_change_of_this_node_survives_a_resync(cluster: str, tmp_path: Path):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await reads(a, b)
        await b.sql.execute(FILL)
        await until(lambda: a.sql.fetchval("select count(*) = 300 from notes"))
        await a.sql.execute("update notes set body = 'newer' where id = '9'")

        report = await resynced(a.db, a, b)

        assert await a.sql.fetchval("select body from notes where id = '9'") == "newer"
        assert report.status == "incomplete"
        assert [(one.key, one.what) for one in report.keys] == [('["9"]', "different")]
        assert f"UTC by {a.url}" in report.keys[0].reason


async def test_a_resync_says_what_it_had_to_refuse_or_park(cluster: str, tmp_path: Path):
    """A record of a host that the peer may not speak for, and one that breaks a constraint."""
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await reads(a, b, relays=frozenset({"http://only.example"}))
        await b.sql.execute(
            "insert into notes values ('5', 'good'), ('6', 'foreign'), ('7', 'bad')"
        )
        await until(lambda: a.sql.fetchval("select count(*) = 3 from notes"))
        foreign = await b.sql.fetchval(
            "insert into restante.op_hosts (host) values ('http://third.example') returning id"
        )
        await b.sql.execute("update restante.ops set origin = $1 where key = '[\"6\"]'", foreign)
        await a.sql.execute(UNSEEN)
        await a.sql.execute("delete from notes")
        await a.sql.execute("alter table notes add check (body <> 'bad')")

        report = await resynced(a.db, a, b)

        assert (report.status, report.refused) == ("incomplete", 1)
        assert [(one.key, one.what) for one in report.keys] == [
            ('["6"]', "missing_here"),
            ('["7"]', "missing_here"),
        ]
        assert "parked here" in report.keys[1].reason


@pytest.mark.parametrize("path", [TABLES_PATH, DIGEST_PATH, RECORDS_PATH])
async def test_only_peers_with_a_valid_token_may_compare(cluster: str, tmp_path: Path, path: str):
    async with mesh(cluster, tmp_path, 1) as (a,):
        assert a.site is not None
        async with a.db.connection() as connection:
            added = await peers.add(connection, "http://b", Changes(), now=clock())
        for headers in ({}, {"Authorization": "Bearer nonsense"}):
            async with a.site.http.post(path, json={}, headers=headers) as answer:
                assert answer.status == 401
        async with a.db.connection() as connection:
            await peers.remove(connection, "http://b")
        headers = {"Authorization": f"Bearer {added.token}"}
        async with a.site.http.post(path, json={}, headers=headers) as answer:
            assert answer.status == 401


async def test_a_peer_compares_only_tables_that_it_may_see(cluster: str, tmp_path: Path):
    async with mesh(cluster, tmp_path, 1) as (a,):
        assert a.site is not None
        async with a.db.connection() as connection:
            changes = Changes(tables=["others"])
            added = await peers.add(connection, "http://b", changes, now=clock())
        headers = {"Authorization": f"Bearer {added.token}"}
        hidden = {"table": "notes", "columns": ["id"], "ranges": [{}]}

        async with a.site.http.post(TABLES_PATH, json={}, headers=headers) as answer:
            seen = await answer.json()
        async with a.site.http.post(DIGEST_PATH, json=hidden, headers=headers) as answer:
            refused, sentence = answer.status, (await answer.json())["error"]

        assert seen["tables"] == []
        assert (refused, sentence) == (400, "There is no table notes to compare.")


async def test_a_peer_that_is_down_is_said_with_its_reason(cluster: str, tmp_path: Path):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await join(a, b)
        await b.stop()

        with pytest.raises(PeerUnreachable, match="Connection refused"):
            await compared(a, b)


async def test_a_node_learns_from_its_peer_how_far_it_is_behind(cluster: str, tmp_path: Path):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        await join(a, b)
        await b.sql.execute("alter table notes add added text")
        await b.sql.execute(FILL)
        await converge_by_count(a, 300)
        await until(
            lambda: a.sql.fetchval("select bool_and(protocol = 'restante') from restante.op_peers")
        )
        # It will not confirm what it has read: so it seems to be behind.
        await b.sql.execute("update restante.op_peers set confirmed = '', served = ''")

        async with Remote.opened(own_host=a.url, clock=clock) as remote:
            await looks.look_at_peers(a.db, remote, now=clock())

        (peer,) = (await status.look(a.db, now=clock())).peers
        assert peer.behind is not None
        assert peer.schema_differences == ["notes: Only the peer has the column added."]


async def converge_by_count(node: Member, count: int) -> None:
    await until(lambda: node.sql.fetchval("select count(*) = $1 from notes", count))
