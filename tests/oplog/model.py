"""
A model of nodes that keep one table in step; what an op or a snapshot does is decided by the
product's own rules.

Everything happens one step after the other, so that a seed gives the same run again.  The model has
the parts that surround the rules: the log and its places, cursors and who has confirmed what,
trimming, the clock, transactions in flight, the network.
"""

import copy
from collections.abc import Iterable
from random import Random

from oplog.ledger import Change
from oplog.model_node import KEYS, NOWHERE, Laws, Node, Page
from oplog.model_snapshots import Snapshots

from restante.oplog.rules import Channel


class World(Snapshots):
    """Some nodes, the links between them, and what goes wrong."""

    def __init__(self, chance: Random, laws: Laws, *, retention: int, cap: int | None) -> None:
        super().__init__(chance, laws, retention=retention, cap=cap)
        self.links: set[frozenset[int]] = set()
        self.cut: set[frozenset[int]] = set()
        self.late_pages: list[Page] = []
        self._backups: dict[int, Node] = {}

    # The nodes and the links.

    def add(self, skew: int) -> Node:
        node = Node(len(self.nodes), skew)
        self.nodes.append(node)
        return node

    def link(self, one: int, other: int) -> None:
        self.links.add(frozenset((one, other)))
        self.nodes[one].peers.add(other)
        self.nodes[other].peers.add(one)

    def unlink(self, one: int, other: int) -> None:
        self.links.discard(frozenset((one, other)))
        self.nodes[one].peers.discard(other)
        self.nodes[other].peers.discard(one)

    # Pulling.

    def pull(self, node: Node, server: Node) -> None:
        """One request of a node to a peer, and what it does with the answer."""
        if not self._reaches(node, server):
            return
        if server.number in node.takings:
            self.take_page(node, server)
            return
        cursor = node.cursors.get(server.number)
        if server.number in node.new_from:
            if server.is_tracked:
                self.begin_snapshot(node, server)
            else:
                node.new_from.discard(server.number)
            return
        if node.is_tracked and self._has_gap(server, cursor):
            server.evicted.add(node.number)
            self.begin_snapshot(node, server)
            return
        if cursor is not None:
            server.confirm(node.number, cursor, node.head)
        page = self._page(node, server, cursor)
        if self.chance.random() < 0.08:
            self.late_pages.append(page)
        self.use(page)

    def _reaches(self, node: Node, server: Node) -> bool:
        is_linked = server.number in node.peers and node.number in server.peers
        return is_linked and frozenset((node.number, server.number)) not in self.cut

    def _has_gap(self, server: Node, cursor: int | None) -> bool:
        if cursor is not None:
            return cursor < server.trimmed
        return self.laws.first_contact_is_snapshot and bool(server.trimmed or server.has_taken)

    def _page(self, node: Node, server: Node, cursor: int | None) -> Page:
        after = cursor if cursor is not None else server.trimmed
        readable = [e for e in server.log if after < e.place < server.horizon]
        taken = readable[: self.chance.choice((2, 5, 50))]
        scanned = max(after, min(server.horizon - 1, server.head))
        return Page(
            reader=node.number,
            server=server.number,
            after=cursor,
            entries=tuple((e, server.newest(e.key) is e) for e in taken),
            end=taken[-1].place if len(taken) < len(readable) else scanned,
            server_cursor=server.cursors.get(node.number),
        )

    def use(self, page: Page) -> None:
        """Apply a page, in time or late."""
        node = self.nodes[page.reader]
        if page.server in node.takings:
            return
        if node.cursors.get(page.server) != page.after:
            return
        reached = page.after if page.after is not None else 0
        for entry, is_newest in page.entries:
            if not self.receive(
                node,
                entry,
                Channel.PULL,
                is_newest=is_newest,
                server_cursor=page.server_cursor,
            ):
                break
            reached = entry.place
        else:
            reached = max(reached, page.end)
        node.cursors[page.server] = max(reached, node.cursors.get(page.server, NOWHERE))
        node.settle(page.server)

    # What goes wrong.

    def crash(self, node: Node) -> None:
        """Transactions in flight never happened."""
        for entry in node.open:
            self.ledger.report(entry.change)
        node.open = []
        self.late_pages = [page for page in self.late_pages if page.reader != node.number]

    def back_up(self, node: Node) -> None:
        if not node.open:
            self._backups[node.number] = copy.deepcopy(node)

    def restore(self, node: Node) -> None:
        """The disk of an earlier time; what nobody else has is lost, and the operator knows."""
        if node.number not in self._backups:
            return
        self.crash(node)
        before = self._held_changes(self.nodes)
        restored = copy.deepcopy(self._backups[node.number])
        restored.peers = node.peers
        restored.pins, restored.takings = {}, {}
        if self.laws.raises_era:
            restored.era, restored.counter = node.era + 1, 0
        self.nodes[node.number] = restored
        for lost in before - self._held_changes(self.nodes):
            self.ledger.report(lost)
        self.counts["restored"] += 1

    def remove(self, number: int) -> None:
        """A node goes for good; what nobody else has goes with it."""
        for peer in list(self.nodes[number].peers):
            self.unlink(number, peer)
        left = [node for node in self.nodes if node.number != number]
        for lost in self._held_changes([self.nodes[number]]) - self._held_changes(left):
            self.ledger.report(lost)

    @staticmethod
    def _held_changes(nodes: Iterable[Node]) -> set[int]:
        held = set[int]()
        for node in nodes:
            held |= {entry.change for entry in node.log} | set(node.state.values())
            held |= {entry.change for entry in node.parked.values()}
        return held

    # What must hold in the end.

    def differences(self) -> list[str]:
        """Sentences about tables that are not equal."""
        nodes = [node for node in self.nodes if node.peers]
        return [
            f"{node.host} has {node.rows}, and {nodes[0].host} {nodes[0].rows}"
            for node in nodes
            if node.rows != nodes[0].rows
        ]

    def losses(self) -> list[str]:
        """Sentences about changes that were lost without a report."""
        winners = [winner for key in KEYS if (winner := self.ledger.winner(key))]
        return [
            f"{node.host} has lost change {winner.number} of {winner.key!r} without a report"
            for winner in winners
            for node in self.nodes
            if node.peers and not self._has(node, winner)
        ]

    def _has(self, node: Node, winner: Change) -> bool:
        number = node.state.get(winner.key)
        if winner.is_delete and winner.key not in node.rows:
            return True
        if number is None:
            return False
        held = self.ledger[number]
        return held.version >= winner.version or held.content == winner.content

    def undrained(self) -> list[str]:
        return [
            f"{node.host} still has {len(node.log)} ops"
            for node in self.nodes
            if node.peers and node.log
        ]
