"""Random schedules for the model: what happens to the nodes, and in which order."""

from dataclasses import dataclass
from random import Random
from typing import Literal

from oplog.model import World
from oplog.model_node import KEYS, Entry, Laws, Node

from restante.oplog.rules import Channel

SKEWS = (-300, -150, 0, 0, 150, 300)
WIDE_SKEWS = (-600, 0, 0, 600, 1400)

Topology = Literal["mesh", "chain", "ring"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Which nodes there are, and what may happen to them."""

    nodes: int = 3
    topology: Topology = "mesh"
    retention: int = 1200
    cap: int | None = None
    capped: frozenset[int] | None = None
    splits: bool = False  # links fail for long, whole groups at a time
    skews: tuple[int, ...] = SKEWS
    open_share: float = 0
    fails_share: float = 0
    joins: bool = False
    restores: bool = False
    removes: bool = False
    pauses: bool = False
    is_populated: bool = False
    tracks_late: bool = False  # the nodes are peers already, and have rows

    @property
    def has_unlogged(self) -> bool:
        """Whether records may change without a version."""
        return self.pauses or self.is_populated or self.tracks_late


_CAP = 2600

SCENARIOS = {
    "mesh": Scenario(),
    "chain": Scenario(4, "chain"),
    "ring": Scenario(4, "ring"),
    "short retention": Scenario(retention=200),
    "short retention in a chain": Scenario(4, "chain", retention=200),
    "open transactions": Scenario(open_share=0.5),
    "open transactions in a chain": Scenario(4, "chain", open_share=0.4),
    "evictions": Scenario(cap=_CAP, splits=True),
    "one node evicts": Scenario(cap=_CAP, capped=frozenset({0}), splits=True),
    "a relay evicts": Scenario(4, "chain", cap=_CAP, capped=frozenset({1}), splits=True),
    "evictions in a chain": Scenario(4, "chain", cap=_CAP, splits=True),
    "evictions in a mesh of four": Scenario(4, cap=_CAP, splits=True),
    "join": Scenario(joins=True),
    "join a chain": Scenario(3, "chain", joins=True),
    "join with evictions": Scenario(joins=True, cap=_CAP, splits=True),
    "restore": Scenario(restores=True),
    "restore in a chain": Scenario(3, "chain", restores=True),
    "restore with evictions": Scenario(restores=True, cap=_CAP, splits=True),
    "a relay is removed": Scenario(3, "chain", removes=True),
    "wide skews": Scenario(skews=WIDE_SKEWS),
    "wide skews in a chain": Scenario(4, "chain", skews=WIDE_SKEWS),
    "foreign keys": Scenario(fails_share=0.15),
    "foreign keys and a join": Scenario(fails_share=0.15, joins=True),
    "pauses": Scenario(pauses=True),
    "pauses in a chain": Scenario(4, "chain", pauses=True),
    "pauses with wide skews": Scenario(skews=WIDE_SKEWS, pauses=True),
    "tracked with rows": Scenario(is_populated=True),
    "tracked with rows in a chain": Scenario(4, "chain", is_populated=True),
    "tracked late": Scenario(tracks_late=True),
    "tracked late by two": Scenario(2, tracks_late=True),
    "tracked late in a chain": Scenario(4, "chain", tracks_late=True),
    "everything in a mesh": Scenario(
        4, cap=_CAP, splits=True, joins=True, restores=True, open_share=0.3
    ),
    "everything in a chain": Scenario(
        4, "chain", cap=_CAP, splits=True, joins=True, restores=True, open_share=0.3
    ),
    "everything in a ring": Scenario(
        4, "ring", cap=_CAP, splits=True, joins=True, restores=True, open_share=0.3
    ),
}


@dataclass(frozen=True, slots=True)
class Found:
    """Sentences about what does not hold after a schedule; false if everything holds."""

    losses: list[str]
    others: list[str]

    def __bool__(self) -> bool:
        return bool(self.losses or self.others)

    @property
    def is_only_loss(self) -> bool:
        return bool(self.losses) and not self.others

    @property
    def sentences(self) -> list[str]:
        return self.others + self.losses


class Schedule:
    """One run: random steps, then healing, then the checks."""

    def __init__(self, scenario: Scenario, seed: str, laws: Laws | None = None) -> None:
        self.chance = Random(seed)
        self.scenario = scenario
        self.world = World(
            self.chance, laws or Laws(), retention=scenario.retention, cap=scenario.cap
        )
        self.world.capped = scenario.capped
        self.world.fails_share = scenario.fails_share
        self._pushes: list[tuple[int, int, Entry]] = []  # reader, sender
        self._may_join, self._may_remove = scenario.joins, scenario.removes
        self._connect()

    def _connect(self) -> None:
        count = self.scenario.nodes
        for number in range(count):
            self.world.add(self.chance.choice(self.scenario.skews))
            for other in range(number):
                is_ring_end = self.scenario.topology == "ring" and number - other == count - 1
                if self.scenario.topology == "mesh" or number - other == 1 or is_ring_end:
                    self.world.link(number, other)
        if self.scenario.is_populated:
            self._populate()
        if self.scenario.tracks_late:
            for node in self.world.nodes:
                node.is_tracked = False

    def _populate(self) -> None:
        """Rows from before tracking, of which some nodes have the same and some others."""
        for key in KEYS:
            change = None
            for node in self.world.nodes:
                has = self.chance.choice(("nothing", "the same", "its own"))
                if has == "nothing":
                    continue
                if change is None or has == "its own":
                    change = self.world.ledger.note(key, self.world.mint(node), is_delete=False)
                node.put(key, change.content)
                node.state[key] = change.number
        for node in self.world.nodes:
            self.world.now += self.chance.choice((1, 30))
            self.world.resume(node)

    def play(self) -> "Found":
        """What does not hold in the end."""
        steps = self.chance.choice((60, 150, 300))
        for step in range(steps):
            self.world.now += self.chance.choice((1, 5, 30, 120))
            if self.chance.random() < 0.04:
                self.world.now += self.chance.choice((700, 1500))
            if self.scenario.splits and self.chance.random() < 0.03:
                self._split()
            self._step(self.chance.choice([node for node in self.world.nodes if node.peers]))
            self._change_topology(step / steps)
        self._heal()
        others = self.world.differences() + self._drain()
        # Who is evicted may lose what nobody else has; that is reported.
        removals = self.world.removals if self.scenario.cap is None else []
        return Found(self.world.losses() + removals, others)

    def _step(self, node: Node) -> None:
        steps = {
            self._write: 28,
            self._pull_one: 34,
            self._push: 8,
            self._deliver: 6,
            self._use_late_page: 4,
            self.world.trim: 10,
            self.world.crash: 2,
            self._toggle_link: 3,
            self._commit_and_retry: 3,
            self._disturb: 2,
        }
        (step,) = self.chance.choices(list(steps), list(steps.values()))
        step(node)

    def _write(self, node: Node) -> None:
        commits = self.chance.random() >= self.scenario.open_share
        self.world.write(node, self.chance.choice(KEYS), commits=commits)

    def _use_late_page(self, _node: Node) -> None:
        if pages := self.world.late_pages:
            self.world.use(pages.pop(self.chance.randrange(len(pages))))

    def _commit_and_retry(self, node: Node) -> None:
        self._commit_all(node)
        self.world.retry(node, share=0.3)

    def _pull_one(self, node: Node) -> None:
        if node.peers:
            self.world.pull(node, self.world.nodes[self.chance.choice(sorted(node.peers))])

    def _push(self, node: Node) -> None:
        """A push may arrive late, twice or never."""
        if node.log and node.peers:
            entry = self.chance.choice(node.log[-5:])
            self._pushes.append((self.chance.choice(sorted(node.peers)), node.number, entry))

    def _deliver(self, _node: Node | None = None) -> None:
        if not self._pushes:
            return
        push = self.chance.choice(self._pushes)
        if self.chance.random() < 0.7:
            self._pushes.remove(push)
        reader, sender, entry = push
        if sender in self.world.nodes[reader].peers:
            self.world.receive(self.world.nodes[reader], entry, Channel.PUSH)

    def _toggle_link(self, _node: Node) -> None:
        if self.world.links and not self.scenario.splits:
            self.world.cut ^= {self.chance.choice(sorted(self.world.links, key=sorted))}

    def _split(self) -> None:
        """Some nodes lose the others for long, or all links come back."""
        count = len(self.world.nodes)
        size = self.chance.randrange(1, count) if self.chance.random() < 0.3 else 1
        group = set(self.chance.sample(range(count), size))
        is_cut = self.chance.random() < 0.7
        self.world.cut = {link for link in self.world.links if is_cut and len(link & group) == 1}

    def _commit_all(self, node: Node) -> None:
        for entry in list(node.open):
            self.world.commit(node, entry)

    def _disturb(self, node: Node) -> None:
        if self.scenario.restores:
            if self.chance.random() < 0.55:
                self.world.back_up(node)
            else:
                self.world.restore(node)
        if self.scenario.pauses:
            if node.is_paused:
                self._commit_all(node)
                self.world.resume(node)
            elif not node.open:
                self.world.pause(node)

    def _track_one(self) -> None:
        """Late: the peers have read what else is logged."""
        node = self.chance.choice(self.world.nodes)
        if not node.is_tracked:
            self._commit_all(node)
            self.world.track(node)
        node.next_place()

    def _change_topology(self, progress: float) -> None:
        if self.scenario.tracks_late and self.chance.random() < 0.1:
            self._track_one()
        if self._may_join and progress > 0.4 and self.chance.random() < 0.1:
            self._may_join = False
            others = range(len(self.world.nodes))
            node = self.world.add(self.chance.choice(self.scenario.skews))
            for other in others if self.scenario.topology == "mesh" else {0, others[-1]}:
                self.world.link(node.number, other)
        if self._may_remove and progress > 0.6 and self.chance.random() < 0.1:
            self._may_remove = False
            self.world.cut = set()
            self.world.remove(1)
            self.world.link(0, 2)

    def _heal(self) -> None:
        world = self.world
        world.cut = set()
        for node in world.nodes:
            self._commit_all(node)
            if node.is_paused:
                world.resume(node)
            if not node.is_tracked:
                world.track(node)
        while self._pushes:
            self._deliver()
        for page in world.late_pages:
            world.use(page)
        for turn in range(60):
            world.now += 4000 if turn == 40 else 60
            self._exchange()

    def _exchange(self) -> None:
        for node in self.world.nodes:
            self.world.retry(node, share=1)
            for peer in sorted(node.peers):
                self.world.pull(node, self.world.nodes[peer])
            if self.chance.random() < 0.3:
                self.world.trim(node)

    def _drain(self) -> list[str]:
        for _ in range(10):
            self.world.now += 3000
            self._exchange()
            for node in self.world.nodes:
                self.world.trim(node)
        return self.world.undrained()
