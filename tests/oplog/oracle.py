"""
Nodes as real processes, each with a Postgres of its own, and what must hold for them in the end.

Every link between two nodes leads through a proxy per direction, which can be cut.
"""

import asyncio
import json
import os
import random
import signal
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.request import Request, urlopen

import asyncpg
from processes import Server, children, restante, wait_until
from proxies import CALM, Fault, Proxy, Weather, calm

from restante.oplog import ulids

GONE = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
NOTES = "create table public.notes (id text primary key, body text, size numeric)"
KEYS = [f"k{number:02}" for number in range(40)]

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


class Op(NamedTuple):
    """One record in a log."""

    key: str
    version: Version
    is_delete: bool
    is_approximate: bool
    data: dict[str, Any]


@dataclass(slots=True)
class State:
    """What a node has in the end."""

    rows: dict[str, Any]
    ops: list[Op]
    floor: str
    parked: set[tuple[str, str]]  # key, ULID
    lost: set[str]  # the ULIDs in the conflict log

    @property
    def newest(self) -> dict[str, Op]:
        found: dict[str, Op] = {}
        for op in self.ops:
            if op.key not in found or found[op.key].version < op.version:
                found[op.key] = op
        return found

    def accounts_for(self, op: Op, newest: dict[str, Op], own: set[tuple[str, Version]]) -> bool:
        """Whether it was applied, superseded, parked, reported, or dropped with the log."""
        ulid = op.version.ulid
        if (op.key, op.version) in own or (op.key, ulid) in self.parked or ulid in self.lost:
            return True
        if op.key in newest and newest[op.key].version > op.version:
            return True
        return ulid <= self.floor


@dataclass(slots=True)
class Node:
    """One `restante serve`, and the applications that write to its database."""

    name: str
    server: Server
    clock_offset: int
    acked: list[str] = field(default_factory=list[str])  # values that were committed
    has_paused: bool = False
    tokens: dict[str, str] = field(default_factory=dict[str, str])  # what others show to us
    number: int = 0
    cluster_dsn: str | None = None  # of a Postgres that the test runs itself

    @property
    def dsn(self) -> str:
        return self.cluster_dsn or self.server.dsn

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def connect(self) -> asyncpg.Connection:
        return await asyncpg.connect(self.dsn, timeout=10)

    async def prepare(self) -> None:
        """A tracked table, and a clock that is wrong."""
        connection = await self.connect()
        await connection.execute(NOTES)
        if self.clock_offset:
            await connection.execute(_SHIFT_CLOCK.format(self.clock_offset))
        await connection.close()
        await self.command("track", "notes")

    async def command(self, *words: str) -> str:
        """Run a command of `restante oplog` on the node's database."""
        database = ("--database-url", self.cluster_dsn) if self.cluster_dsn else ()
        flags = ("--data-dir", self.server.data_dir, "--self-url", self.url, *database)
        done = await asyncio.to_thread(restante, "oplog", *words, *flags)
        assert done.code == 0, done
        return done.stdout

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
        backends = list(children(self.server.postgres_pid()))
        if backends:
            with suppress(ProcessLookupError):
                os.kill(chance.choice(backends), signal.SIGKILL)

    def kill_postmaster(self) -> None:
        os.kill(self.server.postgres_pid(), signal.SIGKILL)

    def until_ready(self) -> None:
        """Start it again if it has ended, and wait until it answers."""
        process = self.server.process
        if process is None or process.poll() is not None:
            self.server.start()
        wait_until(lambda: self.server.get("/ready")[0] == 200, seconds=60, what="ready")

    async def state(self) -> State:
        connection = await self.connect()
        try:
            return await _state(connection)
        finally:
            await connection.close()

    async def rows(self) -> list[tuple[Any, ...]]:
        connection = await self.connect()
        try:
            found = await connection.fetch("select * from notes order by id")
            return [tuple(row) for row in found]
        finally:
            await connection.close()


async def _state(connection: asyncpg.Connection) -> State:
    rows = await connection.fetch("select id, to_json(n)::text as record from notes as n")
    ops = await connection.fetch(
        """
        select o.key, o.ulid::text, h.host, o.action = 'd' as is_delete, o.approximate,
               o.data::text as data
          from restante.ops as o join restante.op_hosts as h on h.id = o.origin
        """
    )
    floor = await connection.fetchval("select floor::text from restante.op_tables")
    parked = await connection.fetch("select key, ulid::text from restante.op_parked")
    lost = await connection.fetch("select lost_ulid::text from restante.op_conflicts")
    return State(
        rows={row["id"]: json.loads(row["record"]) for row in rows},
        ops=[
            Op(
                json.loads(row["key"])[0],
                Version(row["ulid"], row["host"]),
                row["is_delete"],
                row["approximate"],
                json.loads(row["data"]),
            )
            for row in ops
        ],
        floor=floor,
        parked={(json.loads(row["key"] or "[null]")[0], row["ulid"]) for row in parked},
        lost={row["lost_ulid"] for row in lost},
    )


class Nodes:
    """All nodes of a test, the links between them, and what happens to both."""

    def __init__(self, place: Path, chance: random.Random) -> None:
        self.every: list[Node] = []
        self.proxies: dict[tuple[str, str], Proxy] = {}  # reader, server
        self.chance = chance
        self._place = place
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    async def start_on(self, dsn: str) -> Node:
        """Start a node on a Postgres that the test runs."""
        node = self._made(0)
        self.move(node, dsn)
        await asyncio.to_thread(node.server.start)
        await node.prepare()
        return node

    @staticmethod
    def move(node: Node, dsn: str) -> None:
        """Let a node that does not run use another Postgres."""
        node.cluster_dsn = dsn
        node.server.environment["RESTANTE_DATABASE_URL"] = dsn

    async def start(self, *offsets: int) -> list[Node]:
        """Start nodes whose clocks are wrong by so many seconds."""
        new = [self._made(offset) for offset in offsets]
        await asyncio.gather(*(asyncio.to_thread(node.server.start) for node in new))
        await asyncio.gather(*(node.prepare() for node in new))
        return new

    def _made(self, offset: int) -> Node:
        name = "abcdef"[len(self.every)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = Server(
            self._place / name,
            "--log-level",
            "warning",
            RESTANTE_SELF_URL=f"http://127.0.0.1:{port}",
            RESTANTE_OPS_PULL_SECONDS="0.3",
            RESTANTE_OPS_OPEN_TO="127.0.0.1/32",
        )
        server.port = port
        self._stack.enter_context(server)
        node = Node(name, server, offset)
        self.every.append(node)
        return node

    def link(self, one: Node, other: Node) -> None:
        """Let two nodes read from each other."""
        to_other, to_one = self._proxy(one, other), self._proxy(other, one)
        shown_to_one = one.admin({"url": to_other.address})["token"]
        shown_to_other = other.admin({"url": to_one.address, "token": shown_to_one})["token"]
        one.admin({"url": to_other.address, "token": shown_to_other})
        one.tokens[other.name], other.tokens[one.name] = shown_to_one, shown_to_other

    def _proxy(self, reader: Node, server: Node) -> Proxy:
        proxy = self._stack.enter_context(Proxy(server.server.port))
        self.proxies[reader.name, server.name] = proxy
        return proxy

    def unlink(self, one: Node, other: Node) -> None:
        """Remove each from the other's peers."""
        for reader, server in ((one, other), (other, one)):
            proxy = self.proxies.pop((reader.name, server.name))
            request = Request(
                f"{reader.url}/admin/oplog/peers?url={proxy.address}",
                method="DELETE",
                headers={"Authorization": f"Bearer {reader.server.admin_token}"},
            )
            with urlopen(request, timeout=10):
                pass

    def mesh(self, nodes: Sequence[Node]) -> None:
        for number, one in enumerate(nodes):
            for other in nodes[:number]:
                self.link(one, other)

    async def cut_some(self, seconds: float) -> None:
        """Cut some links for a while, one direction or both."""
        cut = [proxy for proxy in self.proxies.values() if self.chance.random() < 0.5]
        for proxy in cut:
            await asyncio.to_thread(proxy.cut)
        await asyncio.sleep(seconds)
        for proxy in cut:
            await asyncio.to_thread(proxy.restore)

    async def storm(self, seconds: float) -> None:
        """Requests and answers are lost, cut short and late."""
        for proxy in self.proxies.values():
            proxy.weather = self._weather()
        await asyncio.sleep(seconds)
        self.calm()

    def calm(self) -> None:
        for proxy in self.proxies.values():
            proxy.weather = calm

    def _weather(self) -> Weather:
        chance = random.Random(self.chance.random())

        def fault(_request: object) -> Fault:
            match chance.randrange(6):
                case 0:
                    return Fault(is_dropped=True)
                case 1:
                    return Fault(is_unanswered=True)
                case 2:
                    return Fault(answer_bytes=chance.randrange(200))
                case 3:
                    return Fault(delay_seconds=0.05)
                case _:
                    return CALM

        return fault

    async def counted(self) -> dict[tuple[str, str], int]:
        """How many records each reader says that it has had from each node."""
        found: dict[tuple[str, str], int] = {}
        for (reader, server), proxy in self.proxies.items():
            found[reader, server] = await self._asked(
                reader,
                "select applied + superseded + parked + refused from restante.op_peers"
                f" where host = '{proxy.address}'",
            )
        return found

    async def logged(self) -> dict[tuple[str, str], int]:
        """How many records there are for each reader."""
        count = "select count(*) from restante.ops"
        return {link: await self._asked(link[1], count) for link in self.proxies}

    async def _asked(self, name: str, question: str) -> int:
        node = next(node for node in self.every if node.name == name)
        connection = await node.connect()
        try:
            return await connection.fetchval(question)
        finally:
            await connection.close()

    async def push_again(self) -> int:
        """Push ops of one node to another once more, in any order and some of them twice."""
        links = list(self.proxies)
        reader, server = self.chance.choice(links)
        source = next(node for node in self.every if node.name == server)
        target = next(node for node in self.every if node.name == reader)
        ops = await asyncio.to_thread(_sweep, source.url, source.tokens.get(reader, ""))
        chosen = self.chance.choices(ops, k=min(len(ops), 20)) if ops else []
        token = target.tokens.get(server, "")
        statuses = [await asyncio.to_thread(_push, target.url, token, op) for op in chosen]
        return len(statuses)


def _sweep(url: str, token: str) -> list[Any]:
    headers = {"Authorization": f"Bearer {token}"}
    try:
        with urlopen(Request(f"{url}/internal/crud/sweep", headers=headers), timeout=10) as answer:
            return json.load(answer)
    except (OSError, ValueError):
        return []


def _push(url: str, token: str, op: Any) -> int:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = Request(f"{url}/internal/crud/push", json.dumps(op).encode(), headers=headers)
    try:
        with urlopen(request, timeout=10) as answer:
            return answer.status
    except OSError:
        return 0


class Writer:
    """An application: changes records of one node until it is told to stop."""

    def __init__(self, node: Node, chance: random.Random) -> None:
        self.node = node
        self.is_writing = True
        self._chance = chance

    async def run(self) -> None:
        while self.is_writing:
            try:
                connection = await self.node.connect()
            except (*GONE, AssertionError, TimeoutError):
                await asyncio.sleep(0.05)
                continue
            try:
                while self.is_writing:
                    await self._change(connection)
                    await asyncio.sleep(self._chance.uniform(0, 0.02))
            except asyncpg.IntegrityConstraintViolationError:
                pass
            except (*GONE, TimeoutError):
                await asyncio.sleep(0.05)
            finally:
                connection.terminate()

    async def _change(self, connection: asyncpg.Connection) -> None:
        """One transaction; its values count as committed once the commit was answered."""
        values: list[str] = []
        is_rolled_back = self._chance.random() < 0.1
        transaction = connection.transaction()
        await transaction.start()
        for _ in range(self._chance.choice((1, 1, 1, 3))):
            values += await self._statement(connection)
        if self._chance.random() < 0.1:
            await asyncio.sleep(self._chance.uniform(0, 0.3))
        if is_rolled_back:
            await transaction.rollback()
        else:
            await transaction.commit()
            self.node.acked += values

    async def _statement(self, connection: asyncpg.Connection) -> list[str]:
        self.node.number += 1
        value = f"{self.node.name}-{self.node.number}"
        key, other = self._chance.sample(KEYS, 2)
        match self._chance.randrange(10):
            case 0 | 1:
                await connection.execute("delete from notes where id = $1", key)
                return []
            case 2:
                await connection.execute(
                    "update notes set id = $2 where id = $1 "
                    "and not exists (select from notes where id = $2)",
                    key,
                    other,
                )
                return []
            case 3:
                low, high = sorted((key, other))
                done = await connection.fetch(
                    "update notes set body = $3, size = coalesce(size, 0) + 1 "
                    "where id between $1 and $2 returning id",
                    low,
                    high,
                    value,
                )
                return [value] if done else []
            case _:
                await connection.execute(
                    "insert into notes values ($1, $2, $3) "
                    "on conflict (id) do update set body = excluded.body, size = excluded.size",
                    key,
                    value,
                    self._chance.randrange(10**6),
                )
                return [value]


async def are_equal(nodes: Iterable[Node]) -> bool:
    """Whether all tables are the same, and nobody is taking a snapshot."""
    try:
        every = [await node.rows() for node in nodes]
        is_same = all(rows == every[0] for rows in every)
        return is_same and not any([await _is_taking_snapshots(node) for node in nodes])
    except GONE:
        return False


async def _is_taking_snapshots(node: Node) -> bool:
    connection = await node.connect()
    try:
        return await connection.fetchval("select exists (select from restante.op_snapshots)")
    finally:
        await connection.close()


async def until_equal(nodes: Sequence[Node], seconds: float = 60) -> None:
    """Wait until all tables are equal; says how they differ if that does not happen."""
    try:
        async with asyncio.timeout(seconds):
            while not await are_equal(nodes):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(await _how_they_differ(nodes)) from None


async def _how_they_differ(nodes: Sequence[Node]) -> str:
    lines: list[str] = []
    states = {node.name: await node.state() for node in nodes}
    keys = sorted({key for state in states.values() for key in state.rows})
    for key in keys:
        found = {name: state.rows.get(key) for name, state in states.items()}
        if any(record != found[nodes[0].name] for record in found.values()):
            newest = {name: state.newest.get(key) for name, state in states.items()}
            lines.append(f"{key}: {found}\n    {newest}")
    for node in nodes:
        connection = await node.connect()
        peers = await connection.fetch(
            "select host, cursor, failure, gaps, applied, superseded, parked, refused "
            "from restante.op_peers"
        )
        snapshots = await connection.fetch("select * from restante.op_snapshots")
        await connection.close()
        lines += [f"{node.name} {dict(peer)}" for peer in peers]
        lines += [f"{node.name} takes {dict(one)}" for one in snapshots]
        lines.append(f"{node.name} said {node.server.said[-1500:]}")
    return "\n".join(lines)


async def until_accounted(
    nodes: Sequence[Node], foreign: Iterable[Any] = (), seconds: float = 60
) -> None:
    """
    Wait until all tables are equal and stay so, and every op is accounted for.

    `foreign` are ops of a node that is not one of ours, as it sends them.
    """
    await until_equal(nodes, seconds)
    more = [op for sent in foreign for op in _as_logged(sent)]
    found = await unaccounted(nodes, more)
    for _ in range(100):
        if not found:
            break
        await asyncio.sleep(0.2)
        found = await unaccounted(nodes, more)
    assert not found, "\n".join(found[:10])
    await until_equal(nodes, seconds)


def _as_logged(sent: Any) -> list[Op]:
    ulid = ulids.parsed(sent["ulid"])
    version = Version(str(ulid), sent["host"])
    is_delete = sent["action"] == "delete"
    return [Op(record["id"], version, is_delete, False, record) for record in sent["data"]]


async def unaccounted(nodes: Sequence[Node], foreign: Sequence[Op] = ()) -> list[str]:
    """Sentences about ops and committed values of which a node knows nothing."""
    states = {node.name: await node.state() for node in nodes}
    found: list[str] = []
    logged = (op for state in states.values() for op in state.ops)
    every = {(op.key, op.version): op for op in (*foreign, *logged)}
    for name, state in states.items():
        newest, own = state.newest, {(op.key, op.version) for op in state.ops}
        found += [
            f"{name} does not account for {op}"
            for op in every.values()
            if not state.accounts_for(op, newest, own)
        ]
        found += _table_differs_from_log(name, state, newest)
    for node in nodes:
        if not node.has_paused:
            kept = {op.data.get("body") for op in states[node.name].ops}
            found += [f"{node.name} lost {value}" for value in node.acked if value not in kept]
    return found


def _table_differs_from_log(name: str, state: State, newest: dict[str, Op]) -> list[str]:
    """The newest op of a key is its record."""
    return [
        f"{name} has {state.rows.get(key)}, and the newest op is {op}"
        for key, op in newest.items()
        if state.rows.get(key) != (None if op.is_delete else op.data)
    ]
