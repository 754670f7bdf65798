"""Resets of a node's log: two nodes with the same records, and plans that are made by hand."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from cluster import cloned
from oplog.meshes import NOTES
from oplog.nodes import make_peer

from restante.database.pool import Connection, Database
from restante.oplog import peers
from restante.oplog.positions import Position
from restante.oplog.remote import Remote
from restante.oplog.resetting import seeds
from restante.oplog.resetting.act import Reset
from restante.oplog.resetting.plan import Planner, Wanted
from restante.oplog.tracking import capture
from restante.oplog.verifying import digests
from restante.oplog.verifying.comparison import Here
from restante.wire.oplog_digests import (
    DIGEST_PATH,
    RECORDS_PATH,
    TABLES_PATH,
    DigestAnswer,
    RecordsAnswer,
    VerifyReport,
)
from restante.wire.oplog_reset import CURSORS_PATH, PeerLoss, ResetPlan, ResetReport, ResetTable

FILL = "insert into notes select n::text, 'body', n from generate_series(1, 50) as n"


def clock() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Still:
    """A node without a server: nothing changes but what a test does."""

    db: Database
    sql: Any  # a connection of an application
    url: str

    @classmethod
    @asynccontextmanager
    async def opened(cls, cluster: str, url: str) -> AsyncIterator["Still"]:
        """With fifty records in a tracked table."""
        async with cloned(cluster) as dsn:
            db = await Database.open(
                dsn, pool_size=4, acquire_timeout_seconds=5, statement_timeout_seconds=20
            )
            try:
                async with db.session() as connection:
                    await connection.execute("set search_path to public, restante")
                    await connection.execute(NOTES)
                    wanted = capture.Wanted("public.notes")
                    await capture.track(db, wanted, host=url, now=clock())
                    await connection.execute(FILL)
                    yield cls(db, connection, url)
            finally:
                await db.close()

    async def peer(self, host: str) -> Any:
        """What is stored about another node."""
        return await self.sql.fetchrow("select * from op_peers where host = $1", host)

    async def head(self) -> str:
        async with self.db.connection() as connection:
            return await digests.head(connection, await digests.comparable(connection, None))

    async def has_read(self, other: "Still") -> None:
        """All that is in the log of another node; there is nothing new in it."""
        if await self.peer(other.url) is None:
            await make_peer(self.db, other.url)
        await self.sql.execute(
            "update op_peers set protocol = 'restante', cursor = $2 where host = $1",
            other.url,
            await other.head(),
        )


@dataclass(frozen=True, slots=True)
class Beside:
    """Asks the other node as its routes would, without HTTP."""

    node: Still
    asking: str

    async def asked(self, _peer: object, path: str, request: Any, _shape: object) -> object:
        async with self.node.db.connection() as connection:
            asking = await peers.find(connection, self.asking)
            assert asking is not None
            if path == CURSORS_PATH:
                return await seeds.tell(connection, asking, request.hosts)
        here = Here(self.node.db, asking.id, asking.tables)
        match path:
            case _ if path == TABLES_PATH:
                return await here.describe()
            case _ if path == DIGEST_PATH:
                return DigestAnswer(list(await here.ranges(request)))
            case _:
                assert path == RECORDS_PATH
                return RecordsAnswer(list(await here.records(request)))


@asynccontextmanager
async def pair(cluster: str) -> AsyncIterator[tuple[Still, Still]]:
    """Two nodes with the same records, that have read each other's logs."""
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(Still.opened(cluster, "https://a.example"))
        b = await stack.enter_async_context(Still.opened(cluster, "https://b.example"))
        await a.has_read(b)
        await b.has_read(a)
        yield a, b


def _ignore(_why: str) -> None:
    """For tests in which nobody waits."""


async def planned_with(
    db: Database,
    remote: Remote,
    reference: str,
    *,
    on_wait: Callable[[str], None] = _ignore,
    **wanted: Any,
) -> ResetPlan:
    """The plan for the reset of a node, with another as the reference."""
    async with db.connection() as connection:
        peer = await peers.find(connection, reference)
    assert peer is not None
    given: dict[str, Any] = {"wait_seconds": 10.0} | wanted
    return await Planner(db, remote, peer, Wanted(**given), clock, on_wait=on_wait).plan()


async def planned(
    a: Still, b: Still, *, on_wait: Callable[[str], None] = _ignore, **wanted: Any
) -> ResetPlan:
    """The same of two nodes without servers: nobody is waited for, because nobody reads."""
    remote, given = cast("Remote", Beside(b, a.url)), {"wait_seconds": 0.0} | wanted
    return await planned_with(a.db, remote, b.url, on_wait=on_wait, **given)


async def reset(db: Database, plan: ResetPlan) -> ResetReport:
    return await Reset(db, plan, clock).run()


async def everything(connection: Connection) -> dict[str, Any]:
    """All that the op log has stored, and its partitions."""
    names = await connection.fetch(
        "select relname from pg_class where relnamespace = 'restante'::regnamespace"
        " and relname ~ '^ops?(_|$)' and relkind in ('r', 'p')"
    )
    return {
        name: await connection.fetch(f'select * from restante."{name}" as t order by t::text')
        for (name,) in names
    }


def plan_of(up_to: Position | str, *losses: PeerLoss, table: str = "pages") -> ResetPlan:
    """A plan that nothing is in the way of."""
    peer = "https://reference.example"
    verified = VerifyReport(peer=peer, is_equal=True, is_caught_up=True, tables=[], seconds=0)
    return ResetPlan(
        peer=peer,
        verified=verified,
        up_to=str(up_to),
        tables=[ResetTable(name=table, is_reset=True)],
        peers=list(losses),
        cursors=[],
        refusals=[],
    )
