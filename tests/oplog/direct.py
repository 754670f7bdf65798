"""Two databases that take snapshots of each other, without HTTP between them."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import asyncpg
from cluster import cloned

from restante.database.pool import Database
from restante.oplog import peers, tables
from restante.oplog.peers import Changes, Peer
from restante.oplog.positions import Position
from restante.oplog.snapshots import progress, snapshot
from restante.oplog.snapshots.taking import Taker
from restante.oplog.tracking import capture
from restante.oplog.tracking.capture import Wanted
from restante.wire import oplog as wire

SERVER, TAKER = "http://server.example", "http://taker.example"
NOTES = {"notes": "id text primary key, body text, size numeric"}


def clock() -> datetime:
    return datetime.now(UTC)


@dataclass
class Node:
    """A database with a table, and the other node as its peer."""

    db: Database
    sql: Any
    host: str
    other: str

    async def peer(self) -> Peer:
        async with self.db.connection() as connection:
            found = await peers.find(connection, self.other)
        assert found is not None
        return found

    async def rows(self, table: str = "notes") -> list[Any]:
        return [tuple(row) for row in await self.sql.fetch(f"select * from {table} order by 1")]

    async def table(self, name: str = "notes") -> tables.TrackedTable:
        async with self.db.connection() as connection:
            found = await tables.find(connection, name)
        assert found is not None
        return found

    async def log(self, key: str) -> list[Any]:
        """The ops of a key, oldest first: action, host, whether approximate."""
        rows = await self.sql.fetch(
            "select action::text, host, approximate from restante.ops join restante.op_hosts h"
            " on h.id = origin where key = $1 order by ulid, host",
            f'["{key}"]',
        )
        return [tuple(row) for row in rows]

    async def drop_log(self) -> None:
        """Forget all ops, as trimming does: the floor and the mark say so."""
        await self.sql.execute(
            """
            update restante.op_tables set
                floor = coalesce((select ulid from restante.ops order by ulid desc limit 1), floor),
                floor_origin = $1,
                trimmed = $2
            """,
            self.host,
            str(await self.head()),
        )
        await self.sql.execute("delete from restante.ops")

    async def head(self) -> Position:
        row = await self.sql.fetchrow(
            "select era, xid, ulid, n from restante.ops"
            " order by era desc, xid desc, ulid desc, n desc limit 1"
        )
        return Position(*row)

    async def has_read(self, position: Position | None) -> None:
        """Set how far this node has read the other."""
        text = str(position) if position else ""
        await self.sql.execute("update restante.op_peers set cursor = $1", text)


Hook = Callable[[str], Any]


@dataclass
class Direct:
    """Calls the server's functions without HTTP; `before` is awaited before each call."""

    server: Node
    before: list[Hook] = field(default_factory=list[Hook])
    pages: int = 0

    async def _called(self, what: str) -> Peer:
        self.pages += 1
        for hook in self.before:
            await hook(what)
        return await self.server.peer()

    async def begin_snapshot(self, _peer: Peer, table: str) -> wire.SnapshotStart:
        asker = await self._called("begin")
        request = wire.SnapshotRequest(table)
        return await snapshot.begin(self.server.db, asker, request, now=clock())

    async def snapshot_page(
        self, _peer: Peer, request: wire.SnapshotPageRequest
    ) -> wire.SnapshotPage:
        asker = await self._called(request.phase)
        return await snapshot.page(self.server.db, asker, request, now=clock())

    async def snapshot_missing(
        self, _peer: Peer, request: wire.SnapshotKeysRequest
    ) -> wire.SnapshotPage:
        asker = await self._called("missing")
        return await snapshot.missing(self.server.db, asker, request, now=clock())


@asynccontextmanager
async def new_node(
    cluster: str, host: str, other: str, definitions: Mapping[str, str] = NOTES
) -> AsyncIterator[Node]:
    """A node with empty tracked tables: what is between the parentheses of CREATE TABLE."""
    async with cloned(cluster) as dsn:
        db = await Database.open(
            dsn, pool_size=5, acquire_timeout_seconds=5, statement_timeout_seconds=20
        )
        sql = await asyncpg.connect(dsn)
        async with db.connection() as connection:
            await tables.identify(connection, host)
            await peers.add(connection, other, Changes(), now=clock())
        try:
            for name, definition in definitions.items():
                await sql.execute(f"create table public.{name} ({definition})")
                await capture.track(db, Wanted(f"public.{name}"), host=host, now=clock())
            yield Node(db, sql, host, other)
        finally:
            await sql.close()
            await db.close()


async def want(
    taker: Node, table: str | None = None, *, is_for_gap: bool = True, is_repair: bool = False
) -> None:
    """Let a node take a snapshot of a table, or of all."""
    peer = await taker.peer()
    async with taker.db.connection() as connection:
        every = await tables.all_tables(connection)
        wanted = [one for one in every if table in (None, one.name)]
        await progress.want(
            connection, peer, wanted, is_for_gap=is_for_gap, is_repair=is_repair, now=clock()
        )


async def take(
    server: Node, taker: Node, *before: Hook, table: str | None = None, is_repair: bool = False
) -> Direct:
    """Whole snapshots; before each page a new process takes over."""
    remote = Direct(server, list(before))
    await want(taker, table, is_repair=is_repair)
    await until_taken(taker, remote)
    return remote


async def until_taken(taker: Node, remote: Direct) -> None:
    """Take all that is wanted; before each page a new process takes over."""
    while await Taker(taker.db, remote, taker.host, clock).advance(await taker.peer()):  # type: ignore[arg-type]
        pass
