"""
A node goes back in time: no reader skips an op, none is stuck, and no deleted record comes back.

Each test writes records before the backup and after it, lets the other node read all of them,
restores the first node, and writes again on both.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import pytest
import soak
from oplog.accounts import until_accounted, until_equal
from oplog.clusters import Cluster
from oplog.oracle import Nodes
from oplog.served_nodes import Node

from restante.backup.archive import Reader
from restante.backup.destination import Destination
from restante.backup.restore import restore
from restante.backup.take import take
from restante.postgres import DataDirectory, postgres_for

pytestmark = [pytest.mark.anyio, pytest.mark.soak, pytest.mark.timeout(300)]


@dataclass(slots=True)
class Pair:
    """A node that is restored, and one that reads from it."""

    nodes: Nodes
    restored: Node
    other: Node

    async def write(self, node: Node, label: str, *, deletes: str = "") -> None:
        """Ten records, of which an earlier label's first five are deleted."""
        connection = await node.connect()
        await connection.execute(
            "insert into notes select $1 || i, $1, i from generate_series(1, 10) as i", label
        )
        if deletes:
            await connection.execute("delete from notes where body = $1 and size <= 5", deletes)
        await connection.close()

    async def before(self) -> None:
        await self.write(self.restored, "early")
        await self.write(self.other, "theirs")
        await until_equal([self.restored, self.other])

    async def after(self) -> None:
        """What the backup does not have, and the other node has read."""
        await self.write(self.restored, "late", deletes="early")
        await self.write(self.other, "their-late", deletes="theirs")
        await until_equal([self.restored, self.other])

    async def check(self) -> None:
        """All that was written is there again, and what was deleted is not."""
        await self.write(self.restored, "new")
        await self.write(self.other, "their-new")
        await until_equal([self.restored, self.other])
        await self.write(self.restored, "last", deletes="late")
        await until_accounted([self.restored, self.other])

        rows = await self.other.rows()
        assert Counter(record["body"] for record in rows.values()) == {
            "early": 5,
            "theirs": 5,
            "late": 5,
            "their-late": 10,
            "new": 10,
            "their-new": 10,
            "last": 10,
        }


@pytest.fixture
def clusters(place: Path) -> Iterator[ExitStack]:
    """Ends every cluster that a test has started."""
    with ExitStack() as stack:
        yield stack


def started(clusters: ExitStack, cluster: Cluster) -> Cluster:
    cluster.start()
    clusters.callback(cluster.end)
    return cluster


@pytest.fixture
def primary(place: Path, clusters: ExitStack) -> Cluster:
    return started(clusters, Cluster.create(place / "primary"))


@pytest.fixture
async def pair(place: Path, primary: Cluster, dsn: str) -> AsyncIterator[Pair]:
    """The node that is not restored has a database on the Postgres of all tests."""
    with Nodes(place, random.Random(0)) as nodes:
        restored, other = await nodes.start_on(primary.dsn, dsn)
        nodes.link(restored, other)
        yield Pair(nodes, restored, other)


async def test_a_dump_is_restored_into_another_cluster(
    pair: Pair, place: Path, primary: Cluster, clusters: ExitStack
):
    """There transaction ids are lower than those that are stored."""
    await pair.before()
    primary.dump(place / "dump.sql")
    await pair.after()
    primary.execute("select txid_current() from generate_series(1, 10)")

    pair.restored.server.stop()
    second = started(clusters, Cluster.create(place / "second"))
    second.load(place / "dump.sql")
    pair.nodes.move(pair.restored, second.dsn)
    await asyncio.to_thread(pair.restored.server.start)

    await pair.check()


@soak.only_long
async def test_a_backup_of_ours_is_restored(pair: Pair, place: Path, primary: Cluster):
    """As the embedded Postgres of the node; a backup does not depend on who runs the database."""
    await pair.before()
    file = BytesIO()
    await take(
        primary.dsn,
        Destination(file, None, 0),
        bin_dir=primary.bin_dir,
        admin_token=None,
        on_progress=lambda _done, _total: None,
    )
    await pair.after()

    pair.restored.server.stop()
    directory = DataDirectory.open(place / "second")
    await restore(Reader(BytesIO(file.getvalue())), directory)
    async with postgres_for(directory) as dsn:
        pair.nodes.move(pair.restored, dsn)
        await asyncio.to_thread(pair.restored.server.start)

        await pair.check()

        pair.restored.server.stop()


async def test_a_data_directory_is_copied_back(pair: Pair, place: Path, primary: Cluster):
    """Neither timeline nor system identifier change, and every counter is as it was."""
    await pair.before()
    primary.stop()
    primary.copy_data(place / "primary" / "copied")
    primary.start()
    await asyncio.to_thread(pair.restored.until_ready)
    await pair.after()

    pair.restored.server.stop()
    primary.stop("immediate")
    primary.put_back(place / "primary" / "copied")
    primary.start()
    await asyncio.to_thread(pair.restored.server.start)

    await pair.check()


@soak.only_long
async def test_a_backup_is_recovered_to_a_point_in_time(
    pair: Pair, place: Path, primary: Cluster, clusters: ExitStack
):
    backup = primary.base_backup(place / "backup")
    await pair.before()
    primary.execute("select pg_create_restore_point('before')")
    await pair.after()
    primary.execute("select pg_switch_wal()")

    pair.restored.server.stop()
    primary.stop()
    (backup.data / "standby.signal").rename(backup.data / "recovery.signal")
    with (backup.data / "postgresql.auto.conf").open("a") as settings:
        settings.write(
            f"primary_conninfo = ''\nrestore_command = 'cp {primary.archive}/%f %p'\n"
            "recovery_target_name = 'before'\nrecovery_target_action = 'promote'\n"
        )
    started(clusters, backup)
    pair.nodes.move(pair.restored, backup.dsn)
    await asyncio.to_thread(pair.restored.server.start)

    await pair.check()


@soak.only_long
async def test_a_standby_that_lags_is_promoted(
    pair: Pair, place: Path, primary: Cluster, clusters: ExitStack
):
    """It was started before the primary, so the time of its start says nothing."""
    standby = started(clusters, primary.base_backup(place / "standby"))
    primary.stop()
    primary.start()
    await asyncio.to_thread(pair.restored.until_ready)
    await pair.before()
    lsn = primary.execute("select pg_current_wal_flush_lsn()").strip()
    await caught_up(standby, lsn)
    standby.execute("alter system set primary_conninfo = ''")
    standby.execute("select pg_reload_conf()")
    await disconnected(primary)
    await pair.after()

    pair.restored.server.stop()
    primary.stop("immediate")
    standby.promote()
    pair.nodes.move(pair.restored, standby.dsn)
    await asyncio.to_thread(pair.restored.server.start)

    await pair.check()


async def caught_up(standby: Cluster, lsn: str) -> None:
    question = f"select pg_last_wal_replay_lsn() >= '{lsn}'"
    async with asyncio.timeout(30):
        while standby.execute(question).strip() != "t":  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.1)


async def disconnected(primary: Cluster) -> None:
    async with asyncio.timeout(30):
        while primary.execute("select count(*) from pg_stat_replication").strip() != "0":  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.1)
