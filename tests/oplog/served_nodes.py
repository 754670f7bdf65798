"""A node as a real process, what applications do to its database, and what it has in the end."""

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import asyncpg
from oplog.clusters import Cluster
from processes import Server, alive, children, wait_until

from restante.database.pool import Database
from restante.errors import TableBusy
from restante.oplog.tracking import capture
from restante.oplog.tracking.capture import Wanted
from restante.postgres import DataDirectory, running_dsn

GONE = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
TABLE = "create table public.{} (id text primary key, body text, size numeric)"

# The product's clock, shifted as if the machine's clock were wrong.
_SHIFT_CLOCK = """
do $do$
declare
    body text := pg_get_functiondef('restante.op_tick(integer, bigint)'::regprocedure);
begin
    execute replace(body, 'clock_timestamp()', 'clock_timestamp() + interval ''{} seconds''');
end
$do$
"""


class Version(NamedTuple):
    """Of an op: its ULID and the host that made it."""

    ulid: str
    origin: str


class Key(NamedTuple):
    """Of a record."""

    table: str
    id: str


class Op(NamedTuple):
    """One record in a log."""

    key: Key
    version: Version
    is_delete: bool
    is_approximate: bool
    data: dict[str, Any]


@dataclass(slots=True)
class State:
    """What a node has in the end."""

    rows: dict[Key, Any]
    ops: list[Op]
    floors: dict[str, str]  # by table
    parked: set[tuple[Key, str]]  # with the ULID
    lost: set[str]  # the ULIDs in the conflict log

    @property
    def newest(self) -> dict[Key, Op]:
        found: dict[Key, Op] = {}
        for op in self.ops:
            if op.key not in found or found[op.key].version < op.version:
                found[op.key] = op
        return found

    def accounts_for(self, op: Op, newest: dict[Key, Op], own: set[tuple[Key, Version]]) -> bool:
        """Whether it was applied, superseded, parked, reported, or dropped with the log."""
        ulid = op.version.ulid
        if (op.key, op.version) in own or (op.key, ulid) in self.parked or ulid in self.lost:
            return True
        if op.key in newest and newest[op.key].version > op.version:
            return True
        return ulid <= self.floors[op.key.table]


@dataclass(slots=True, eq=False)
class Node:
    """One `restante serve`, and the applications that write to its database."""

    name: str
    server: Server
    clock_offset: int
    acked: list[str] = field(default_factory=list[str])  # values that were committed
    has_dropped: bool = False  # ops, at the end of a pause or by a limit
    tokens: dict[str, str] = field(default_factory=dict[str, str])  # what others show to us
    number: int = 0
    tables: Sequence[str] = ("notes",)  # that are tracked
    database_url: str | None = None  # of a Postgres that the test runs
    cluster: Cluster | None = None  # that Postgres, if it may be killed

    @property
    def dsn(self) -> str:
        """Raises ConnectionError while its Postgres does not run."""
        found = self.database_url or running_dsn(DataDirectory.open(self.server.data_dir))
        if found is None:
            raise ConnectionError(f"the Postgres of {self.name} does not run")
        return found

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def connect(self) -> asyncpg.Connection:
        return await asyncpg.connect(self.dsn, timeout=10)

    @asynccontextmanager
    async def database(self) -> AsyncIterator[Database]:
        """For what commands do; a process for each of them would take seconds."""
        db = await Database.open(
            self.dsn, pool_size=2, acquire_timeout_seconds=10, statement_timeout_seconds=30
        )
        try:
            yield db
        finally:
            await db.close()

    async def prepare(self) -> None:
        """Tracked tables, and a clock that is wrong."""
        connection = await self.connect()
        for name in self.tables:
            await connection.execute(TABLE.format(name))
        if self.clock_offset:
            await connection.execute(_SHIFT_CLOCK.format(self.clock_offset))
        await connection.close()
        async with self.database() as db:
            for name in self.tables:
                wanted = Wanted(f"public.{name}")
                await capture.track(db, wanted, host=self.url, now=datetime.now(UTC))

    async def pause(self) -> None:
        """From now on nothing is logged."""
        self.has_dropped = True
        await self._until_free(lambda db: capture.pause(db, "public.notes", now=datetime.now(UTC)))

    async def resume(self) -> None:
        await self._until_free(
            lambda db: capture.resume(db, "public.notes", host=self.url, now=datetime.now(UTC))
        )

    async def _until_free(self, step: Callable[[Database], Awaitable[Any]]) -> None:
        """Try again while somebody has locked the table for long, as an operator does."""
        async with self.database() as db, asyncio.timeout(60):
            while True:
                with suppress(TableBusy):
                    await step(db)
                    return

    def admin(self, body: dict[str, Any]) -> dict[str, Any]:
        """Add or change a peer."""
        headers = {"Authorization": f"Bearer {self.server.admin_token}"}
        request = Request(
            self.url + "/admin/oplog/peers", json.dumps(body).encode(), headers=headers
        )
        with urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def kill(self) -> None:
        """Kill the server and its Postgres."""
        self.server.kill()

    def kill_backend(self, chance: random.Random) -> None:
        """Kill a process of Postgres, which then recovers all of it."""
        if backends := list(children(self._postmaster())):
            with suppress(ProcessLookupError):
                os.kill(chance.choice(backends), signal.SIGKILL)

    def kill_postmaster(self) -> None:
        """Its server starts it again, or the test does if it is shared."""
        pid = self._postmaster()
        os.kill(pid, signal.SIGKILL)
        if self.cluster:
            wait_until(lambda: not alive(pid), seconds=60, what="the end of Postgres")
            self.cluster.start_again()

    def _postmaster(self) -> int:
        """Of a server that has just lost its Postgres, the next one."""
        if self.cluster:
            return self.cluster.postmaster
        return wait_until(
            lambda: next(
                (pid for pid, name in children(self.server.pid).items() if name == "postgres"), None
            ),
            seconds=60,
            what="the start of its Postgres",
        )

    def until_ready(self) -> None:
        """Start it again if it has ended, and wait until it answers."""
        process = self.server.process
        if process is None or process.poll() is not None:
            self.server.start()
        wait_until(lambda: self.server.get("/ready")[0] == 200, seconds=60, what="ready")

    async def state(self) -> State:
        connection = await self.connect()
        try:
            return await _state(connection, self.tables)
        finally:
            await connection.close()

    async def rows(self) -> dict[Key, Any]:
        connection = await self.connect()
        try:
            return await _rows(connection, self.tables)
        finally:
            await connection.close()


async def _rows(connection: asyncpg.Connection, tables: Sequence[str]) -> dict[Key, Any]:
    """All records; those of several tables at one moment."""
    found = await connection.fetch(
        " union all ".join(
            f"select '{name}' as name, id, to_json(t)::text as record from {name} as t"
            for name in tables
        )
    )
    return {Key(row["name"], row["id"]): json.loads(row["record"]) for row in found}


async def _state(connection: asyncpg.Connection, tables: Sequence[str]) -> State:
    ops = await connection.fetch(
        """
        select t.name, o.key, o.ulid::text, h.host, o.action = 'd' as is_delete, o.approximate,
               o.data::text as data
          from restante.ops as o
          join restante.op_hosts as h on h.id = o.origin
          join restante.op_tables as t on t.id = o.table_id
        """
    )
    floors = await connection.fetch("select name, floor::text from restante.op_tables")
    parked = await connection.fetch("select table_name, key, ulid::text from restante.op_parked")
    lost = await connection.fetch("select lost_ulid::text from restante.op_conflicts")
    return State(
        rows=await _rows(connection, tables),
        ops=[
            Op(
                key_of(row["name"], row["key"]),
                Version(row["ulid"], row["host"]),
                row["is_delete"],
                row["approximate"],
                json.loads(row["data"]),
            )
            for row in ops
        ],
        floors={row["name"]: row["floor"] for row in floors},
        parked={(key_of(row["table_name"], row["key"]), row["ulid"]) for row in parked},
        lost={row["lost_ulid"] for row in lost},
    )


def key_of(table: str, key: str | None) -> Key:
    """From the key as it is in the log."""
    return Key(table, json.loads(key or "[null]")[0])
