"""
Nodes as real processes, and the links between them.

Each has a Postgres of its own, or a database on one that they share.  Every link leads through a
proxy per direction, which can be cut.
"""

import asyncio
import itertools
import json
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.request import Request, urlopen

from oplog.clusters import Cluster, running_cluster
from oplog.served_nodes import Node
from processes import Server
from proxies import CALM, Fault, Proxy, Weather, calm


@contextmanager
def made(
    place: Path, chance: random.Random, *, is_shared: bool, tables: Sequence[str] = ("notes",)
) -> Iterator["Nodes"]:
    """Nodes with databases on one Postgres, which starts in a second, or each with its own."""
    place.mkdir(mode=0o711, exist_ok=True)
    with ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(place / "shared")) if is_shared else None
        yield stack.enter_context(Nodes(place, chance, cluster=cluster, tables=tables))


class Nodes:
    """All nodes of a test, the links between them, and what happens to both."""

    def __init__(
        self,
        place: Path,
        chance: random.Random,
        *,
        cluster: Cluster | None = None,
        tables: Sequence[str] = ("notes",),
    ) -> None:
        self.every: list[Node] = []
        self.proxies: dict[tuple[str, str], Proxy] = {}  # reader, server
        self.chance = chance
        self._place = place
        self._cluster = cluster  # None: each has a Postgres of its own
        self._tables = tables
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    async def start_on(self, *urls: str) -> list[Node]:
        """Start nodes on databases that the test provides."""
        new = [self._made(0) for _ in urls]
        for node, url in zip(new, urls, strict=True):
            self.move(node, url)
        return await self._started(new)

    @staticmethod
    def move(node: Node, url: str) -> None:
        """Let a node that does not run use another database."""
        node.database_url = url
        node.server.environment["RESTANTE_DATABASE_URL"] = url

    async def start(self, *offsets: int) -> list[Node]:
        """Start nodes whose clocks are wrong by so many seconds."""
        new = [self._made(offset) for offset in offsets]
        if self._cluster:
            for node in new:
                self.move(node, self._cluster.new_database(node.name))
                node.cluster = self._cluster
        return await self._started(new)

    @staticmethod
    async def _started(new: list[Node]) -> list[Node]:
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
        node = Node(name, server, offset, tables=self._tables)
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

    def connect(self, nodes: Sequence[Node], topology: str) -> None:
        """As a mesh, a chain or a ring."""
        if topology == "mesh":
            self.mesh(nodes)
            return
        for one, other in itertools.pairwise(nodes):
            self.link(one, other)
        if topology == "ring":
            self.link(nodes[-1], nodes[0])

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
