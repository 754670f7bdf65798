"""Several nodes in one test: each a whole server on a database of its own."""

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
from cluster import cloned
from sites import Site, running_site, settings_for
from waiting import until

from restante.database.pool import Database
from restante.oplog import peers
from restante.oplog.peers import Changes
from restante.oplog.tracking import capture
from restante.oplog.tracking.capture import Wanted

NOTES = "create table public.notes (id text primary key, body text, size numeric)"


@dataclass(slots=True)
class Member:
    """A node; its database stays when its server is stopped."""

    dsn: str
    url: str
    port: int
    data_dir: Path
    sql: Any  # a connection of an application
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    site: Site | None = None
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def db(self) -> Database:
        assert self.site is not None
        return self.site.state.db

    async def start(self) -> None:
        settings = settings_for(self.dsn, self.data_dir, self_url=self.url, **self.settings)
        self.site = await self._stack.enter_async_context(running_site(settings, port=self.port))

    async def stop(self) -> None:
        self.site = None
        await self._stack.aclose()

    async def rows(self, table: str = "notes") -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await self.sql.fetch(f"select * from {table} order by 1")]

    async def peer(self, other: "Member | str") -> Any:
        """What is stored about another node."""
        url = other if isinstance(other, str) else other.url
        return await self.sql.fetchrow("select * from restante.op_peers where host = $1", url)

    async def track(self, table: str = "notes") -> None:
        wanted = Wanted(f"public.{table}")
        await capture.track(self.db, wanted, host=self.url, now=datetime.now(UTC))


@asynccontextmanager
async def member(cluster: str, data_dir: Path, **settings: Any) -> AsyncIterator[Member]:
    """A node that is not started yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with cloned(cluster) as dsn:
        sql = await asyncpg.connect(dsn)
        url = f"http://127.0.0.1:{port}"
        node = Member(dsn, url, port, data_dir, sql, {"ops_pull_seconds": 0.2} | settings)
        try:
            yield node
        finally:
            await node.stop()
            await sql.close()


@asynccontextmanager
async def mesh(
    cluster: str, data_dir: Path, count: int, **settings: Any
) -> AsyncIterator[list[Member]]:
    """Nodes with an empty tracked table `notes`, started, that do not know each other yet."""
    async with AsyncExitStack() as stack:
        nodes: list[Member] = []
        for _ in range(count):
            node = await stack.enter_async_context(member(cluster, data_dir, **settings))
            await node.sql.execute(NOTES)
            await node.start()
            await node.track()
            nodes.append(node)
        yield nodes


async def reads(reader: Member, server: Member, **given: Any) -> None:
    """Let one node read from another."""
    token = peers.new_token()
    now = datetime.now(UTC)
    async with server.db.connection() as connection:
        await peers.add(connection, reader.url, Changes(shown_token=token), now=now)
    async with reader.db.connection() as connection:
        await peers.add(connection, server.url, Changes(token=token, **given), now=now)


async def join(*nodes: Member) -> None:
    """Let all read from each other."""
    for one in nodes:
        for other in nodes:
            if one is not other:
                await reads(one, other)


async def equal(*nodes: Member, table: str = "notes") -> bool:
    """Whether all have the same records."""
    first, *others = [await node.rows(table) for node in nodes]
    return all(other == first for other in others)


async def converge(*nodes: Member, table: str = "notes") -> list[tuple[Any, ...]]:
    """Wait until all have the same records as the first one."""
    await until(lambda: equal(*nodes, table=table))
    return await nodes[0].rows(table)
