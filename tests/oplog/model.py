"""
A model of nodes that keep one table in step; what an op or a snapshot does is decided by the
product's own rules.

Everything happens one step after the other, so that a seed gives the same run again.  The model has
the parts that surround the rules: the log and its places, cursors and who has confirmed what,
trimming, the clock, transactions in flight, the network.
"""

import copy
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from uuid import UUID

from oplog.ledger import Change, Ledger

from restante.oplog import rules, ulids
from restante.oplog.rules import Channel, Newest, Outcome, Verdict, Version

KEYS = "abcde"
EPOCH = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp())

# A place in a log is the era times this, plus a counter.
ERA = 10**6
NOWHERE = -1
_FAR = 10**15

# How long a peer that has just taken a snapshot is not evicted.
_GRACE_SECONDS = 1500


@dataclass(frozen=True, slots=True)
class Laws:
    """What the nodes obey; a test breaks one of them to see that the model notices."""

    judge: Callable[..., Verdict] = rules.judge
    judge_snapshot: Callable[
        [rules.SnapshotPair, rules.SnapshotSides], rules.SnapshotVerdict
    ] = rules.judge_snapshot
    logs_superseded: bool = False
    floor_is_age: bool = False  # of the trimmed ops, not the largest ULID among them
    sends_deletes: bool = True
    logs_snapshots: bool = True
    adopts_floor: bool = True
    has_durable_clock: bool = True
    raises_era: bool = True
    checks_cursor: bool = True  # a page applies only where it was asked for
    purges_parked: bool = True
    trims_while_taking: bool = False
    pins: bool = True
    first_contact_is_snapshot: bool = True
    locks_keys: bool = True
    applies_while_paused: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One op of one record in a log."""

    place: int
    key: str
    op: Newest
    record: int | None  # None is a delete
    change: int
    arrived_at: int
    old: int | None  # the record that it changed


@dataclass(frozen=True, slots=True)
class Page:
    """An answer to a pull."""

    reader: int
    server: int
    after: int | None
    entries: tuple[tuple[Entry, bool], ...]  # with whether it is the newest of its key there
    end: int
    server_cursor: int | None


@dataclass(slots=True)
class Taking:
    """A snapshot that a node is taking."""

    start: int
    server_cursor: int | None
    deletes: dict[str, Entry]
    floor: UUID
    after: str = ""
    seen: set[str] = field(default_factory=set[str])
    has_all_records: bool = False


@dataclass(slots=True)
class Node:
    """What a node has on disk; `open` and `held` are gone after a crash."""

    number: int
    skew: int
    rows: dict[str, int] = field(default_factory=dict[str, int])
    log: list[Entry] = field(default_factory=list[Entry])
    of_key: dict[str, list[Entry]] = field(default_factory=dict[str, list[Entry]])
    floor: UUID = ulids.LOWEST
    trimmed: int = 0
    era: int = 0
    counter: int = 0
    tick: int = 0
    peers: set[int] = field(default_factory=set[int])
    cursors: dict[int, int] = field(default_factory=dict[int, int])
    takings: dict[int, Taking] = field(default_factory=dict[int, Taking])
    has_taken: bool = False
    is_paused: bool = False
    parked: dict[Version, tuple[Entry, str]] = field(
        default_factory=dict[Version, tuple[Entry, str]]
    )
    # About its readers: how far each has read, how far both have read each other, and who is out.
    confirmed: dict[int, int] = field(default_factory=dict[int, int])
    pending: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    settled: dict[int, int] = field(default_factory=dict[int, int])
    evicted: set[int] = field(default_factory=set[int])
    spared_until: dict[int, int] = field(default_factory=dict[int, int])
    pins: dict[int, int] = field(default_factory=dict[int, int])
    open: list[Entry] = field(default_factory=list[Entry])
    # The model's own knowledge: which change made what the node has of a key.
    state: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def host(self) -> str:
        return f"http://node{self.number}"

    @property
    def head(self) -> int:
        return self.era * ERA + self.counter

    @property
    def horizon(self) -> int:
        """Below it no transaction is in flight."""
        return min((entry.place for entry in self.open), default=_FAR)

    def next_place(self) -> int:
        self.counter += 1
        return self.head

    def newest(self, key: str) -> Entry | None:
        entries = self.of_key.get(key)
        return max(entries, key=lambda entry: entry.op.version) if entries else None

    def newest_op(self, key: str) -> Newest | None:
        entry = self.newest(key)
        return entry.op if entry else None

    def is_locked(self, key: str) -> bool:
        return any(entry.key == key for entry in self.open)

    def append(self, entry: Entry) -> None:
        insort(self.log, entry, key=lambda each: each.place)
        self.of_key.setdefault(entry.key, []).append(entry)
        self.raise_clock(entry.op.version.ulid)

    def raise_clock(self, ulid: UUID) -> None:
        self.tick = max(self.tick, ulids.tick_above(ulid))

    def drop(self, entry: Entry) -> None:
        self.log.remove(entry)
        self.of_key[entry.key].remove(entry)
        if not self.of_key[entry.key]:
            del self.of_key[entry.key]
        self.trimmed = max(self.trimmed, entry.place)

    def put(self, key: str, record: int | None) -> None:
        if record is None:
            self.rows.pop(key, None)
        else:
            self.rows[key] = record

    def confirm(self, peer: int, place: int, peer_head: int) -> None:
        """The peer has read up to here, at a time when its own log ended at `peer_head`."""
        self.pins.pop(peer, None)
        if place < self.confirmed.get(peer, NOWHERE):
            self.settled[peer] = min(self.settled.get(peer, NOWHERE), place)
            self.pending.pop(peer, None)
        self.confirmed[peer] = place
        self.pending.setdefault(peer, (place, peer_head))
        self.settle(peer)
        self.pending.setdefault(peer, (place, peer_head))

    def settle(self, peer: int) -> None:
        """Ops may go when the peer has them, and we have what it wrote before it had them."""
        if peer in self.pending and self.cursors.get(peer, NOWHERE) >= self.pending[peer][1]:
            place, _ = self.pending.pop(peer)
            self.settled[peer] = max(self.settled.get(peer, NOWHERE), place)

    def forget(self, peer: int) -> None:
        """What this reader has confirmed counts no longer."""
        self.settled.pop(peer, None)
        self.pending.pop(peer, None)


class World:
    """Some nodes, the time, and the links between them."""

    def __init__(self, chance: Random, laws: Laws, *, retention: int, cap: int | None) -> None:
        self.chance = chance
        self.laws = laws
        self.now = EPOCH
        self.nodes: list[Node] = []
        self.links: set[frozenset[int]] = set()
        self.cut: set[frozenset[int]] = set()
        self.late_pages: list[Page] = []
        self.ledger = Ledger()
        self.counts = Counter[str]()
        self.fails_share = 0.0  # of the ops that break a foreign key at first
        self.capped: frozenset[int] | None = None  # None: all
        self._retention = retention
        self._cap = cap
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

    def clock_of(self, node: Node) -> int:
        return self.now + node.skew

    def _moment(self, node: Node) -> datetime:
        return datetime.fromtimestamp(self.clock_of(node), UTC)

    def mint(self, node: Node) -> Version:
        wall = self.clock_of(node) * 1000 << 15
        node.tick = max(node.tick + 1, wall) if self.laws.has_durable_clock else max(wall, node.tick)
        return Version(UUID(int=node.tick << 65 | self.chance.getrandbits(64)), node.host)

    # What the applications do.

    def write(self, node: Node, key: str, *, commits: bool = True) -> None:
        """A record is written or deleted; without commit the transaction stays open."""
        if node.is_locked(key):
            return
        is_delete = key in node.rows and self.chance.random() < 0.4
        change = self.ledger.note(key, self.mint(node), is_delete=is_delete)
        entry = Entry(
            place=node.next_place(),
            key=key,
            op=Newest(change.version, is_delete),
            record=None if is_delete else change.content,
            change=change.number,
            arrived_at=self.clock_of(node),
            old=node.rows.get(key),
        )
        node.open.append(entry)
        if commits:
            self.commit(node, entry)

    def commit(self, node: Node, entry: Entry) -> None:
        node.open.remove(entry)
        if node.is_paused:
            node.put(entry.key, entry.record)
            self._hold(node, entry.key, entry.change)
        else:
            self._store(node, entry)

    def _store(self, node: Node, entry: Entry) -> None:
        node.put(entry.key, entry.record)
        node.append(entry)
        self._hold(node, entry.key, entry.change)
        if self.laws.purges_parked:
            self._purge(node, entry.key, entry.op.version)

    def _hold(self, node: Node, key: str, change: int | None) -> None:
        self.ledger.replace(node.state.get(key), change)
        if change is None:
            node.state.pop(key, None)
        else:
            node.state[key] = change

    def _purge(self, node: Node, key: str, version: Version) -> None:
        for older in [v for v, (entry, _) in node.parked.items() if entry.key == key and v < version]:
            del node.parked[older]

    # Ops that come in.

    def receive(
        self,
        node: Node,
        entry: Entry,
        channel: Channel,
        *,
        is_newest: bool = True,
        server_cursor: int | None = None,
    ) -> bool:
        """Whether the cursor may move past the op."""
        if self._must_wait(node, entry):
            return False
        verdict = self.laws.judge(
            rules.Incoming(
                version=entry.op.version,
                channel=channel,
                is_approximate=entry.op.is_approximate,
                is_newest_there=is_newest,
                has_read_us=server_cursor is not None and server_cursor >= node.trimmed,
            ),
            node.newest_op(entry.key),
            floor=node.floor,
            now=self._moment(node),
        )
        self.counts[f"{channel} {verdict}"] += 1
        match verdict:
            case Verdict.WAIT:
                return False
            case Verdict.PARK_FUTURE | Verdict.PARK_FLOOR:
                node.parked[entry.op.version] = (entry, verdict)
            case Verdict.APPLY:
                self._apply(node, entry, channel)
            case Verdict.SUPERSEDED | Verdict.REPORT:
                self._lose(node, entry, verdict)
            case Verdict.SKIP:
                pass
        return True

    def _must_wait(self, node: Node, entry: Entry) -> bool:
        if node.is_paused and not self.laws.applies_while_paused:
            return True
        if not node.is_locked(entry.key):
            return False
        is_unseen = entry.record is None and entry.key not in node.rows
        return self.laws.locks_keys or not is_unseen

    def _lose(self, node: Node, entry: Entry, verdict: Verdict) -> None:
        newest = node.newest(entry.key)
        assert newest is not None
        if verdict is Verdict.REPORT:
            if newest.change != entry.change:
                self.ledger.report(entry.change)
        elif not newest.op.is_approximate:
            self.ledger.replace(entry.change, newest.change)
        is_new = all(e.op.version != entry.op.version for e in node.of_key[entry.key])
        if self.laws.logs_superseded and is_new:
            node.append(self._copied(node, entry, old=None))

    def _apply(self, node: Node, entry: Entry, channel: Channel) -> None:
        if channel is not Channel.RETRY and self.chance.random() < self.fails_share:
            node.parked[entry.op.version] = (entry, "failed")
            return
        have, held = node.rows.get(entry.key), node.state.get(entry.key)
        if entry.op.is_approximate and have != entry.record and held != entry.change:
            self.ledger.report(held)
        self._store(node, self._copied(node, entry, old=have))

    def _copied(self, node: Node, entry: Entry, *, old: int | None) -> Entry:
        return Entry(
            node.next_place(),
            entry.key,
            entry.op,
            entry.record,
            entry.change,
            self.clock_of(node),
            old,
        )

    def retry(self, node: Node, *, share: float) -> None:
        """Parked ops are tried again, those from the future when it has come."""
        for version, (entry, _) in list(node.parked.items()):
            if version not in node.parked or rules.is_ahead(version.ulid, now=self._moment(node)):
                continue
            if self.chance.random() < share and self.receive(node, entry, Channel.RETRY):
                node.parked.pop(version, None)

    # Trimming.

    def trim(self, node: Node) -> None:
        """Drop what is old enough and read by all; with a cap, whoever blocks it is evicted."""
        if node.takings and not self.laws.trims_while_taking:
            return
        for entry in list(node.log):
            if entry.arrived_at > self.clock_of(node) - self._retention:
                return
            if entry.place >= node.horizon or not self._may_go(node, entry):
                return
            node.drop(entry)
            if self.laws.floor_is_age:
                age = ulids.lowest_at(datetime.fromtimestamp(entry.arrived_at, UTC))
                node.floor = max(node.floor, age)
            else:
                node.floor = max(node.floor, entry.op.version.ulid)

    def _may_go(self, node: Node, entry: Entry) -> bool:
        if self.laws.pins and any(pin < entry.place for pin in node.pins.values()):
            return False
        late = {
            peer
            for peer in node.peers - node.evicted
            if node.settled.get(peer, NOWHERE) < entry.place
        }
        if not late:
            return True
        if not self._is_capped(node) or entry.arrived_at > self.clock_of(node) - (self._cap or 0):
            return False
        if any(node.spared_until.get(peer, 0) > self.now for peer in late):
            return False
        node.evicted |= late
        self.counts["evicted"] += len(late)
        return True

    def _is_capped(self, node: Node) -> bool:
        return self._cap is not None and (self.capped is None or node.number in self.capped)

    def pause(self, node: Node) -> None:
        """Capture stops."""
        node.is_paused = True

    def resume(self, node: Node) -> None:
        """Rows may have changed under their old versions: the floor is now, earlier ops go."""
        node.is_paused = False
        node.floor = max(node.floor, self.mint(node).ulid)
        for entry in list(node.log):
            node.drop(entry)
        node.trimmed = node.next_place()
        for entry, _ in node.parked.values():
            self.ledger.report(entry.change)
        node.parked = {}
        self.counts["resumed"] += 1

    # Pulling.

    def pull(self, node: Node, server: Node) -> None:
        """One request of a node to a peer, and what it does with the answer."""
        if frozenset((node.number, server.number)) in self.cut:
            return
        if server.number not in node.peers or node.number not in server.peers:
            return
        if server.number in node.takings:
            self._take_page(node, server)
            return
        cursor = node.cursors.get(server.number)
        if self._has_gap(server, cursor):
            server.evicted.add(node.number)
            self._begin_snapshot(node, server)
            return
        if cursor is not None:
            server.confirm(node.number, cursor, node.head)
            if node.number in server.evicted and not node.takings:
                server.evicted.discard(node.number)
                server.forget(node.number)
                server.pending[node.number] = (cursor, node.head)
        page = self._page(node, server, cursor)
        if self.chance.random() < 0.08:
            self.late_pages.append(page)
        self.use(page)

    def _has_gap(self, server: Node, cursor: int | None) -> bool:
        if cursor is not None:
            return cursor < server.trimmed
        return self.laws.first_contact_is_snapshot and bool(server.trimmed or server.has_taken)

    def _page(self, node: Node, server: Node, cursor: int | None) -> Page:
        after = cursor if cursor is not None else server.trimmed
        readable = [e for e in server.log if after < e.place < server.horizon]
        taken = readable[: self.chance.choice((2, 5, 50))]
        return Page(
            reader=node.number,
            server=server.number,
            after=cursor,
            entries=tuple((e, server.newest(e.key) is e) for e in taken),
            end=taken[-1].place if taken else after,
            server_cursor=server.cursors.get(node.number),
        )

    def use(self, page: Page) -> None:
        """Apply a page, in time or late."""
        node = self.nodes[page.reader]
        if page.server in node.takings:
            return
        if self.laws.checks_cursor and node.cursors.get(page.server) != page.after:
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

    # Snapshots.

    def _begin_snapshot(self, node: Node, server: Node) -> None:
        start = min(server.horizon - 1, server.head)
        deletes = {
            key: newest
            for key in server.of_key
            if (newest := server.newest(key)) is not None and newest.op.is_delete
        }
        node.takings[server.number] = Taking(
            start=start,
            server_cursor=server.cursors.get(node.number),
            deletes=deletes if self.laws.sends_deletes else {},
            floor=server.floor,
        )
        server.pins[node.number] = start
        self.counts["snapshot"] += 1

    def _take_page(self, node: Node, server: Node) -> None:
        taking = node.takings[server.number]
        if server.pins.get(node.number) != taking.start:
            del node.takings[server.number]  # the server has forgotten it: it begins again
            return
        if not taking.has_all_records:
            keys = sorted(key for key in server.rows if key > taking.after)[:2]
        else:
            own = node.rows.keys() | node.of_key.keys() | taking.deletes.keys()
            keys = sorted(key for key in own - taking.seen if key > taking.after)[:2]
        if node.is_paused or any(node.is_locked(key) for key in keys):
            return
        for key in keys:
            self._take_key(node, server, taking, key)
        taking.seen.update(keys)
        taking.floor = max(taking.floor, server.floor)
        node.raise_clock(server.floor)
        if keys:
            taking.after = keys[-1]
        elif taking.has_all_records:
            self._end_snapshot(node, server, taking)
        else:
            taking.has_all_records, taking.after = True, ""

    def _end_snapshot(self, node: Node, server: Node, taking: Taking) -> None:
        del node.takings[server.number]
        server.pins.pop(node.number, None)
        node.cursors[server.number] = taking.start
        node.has_taken = True
        if self.laws.adopts_floor:
            node.floor = max(node.floor, taking.floor)
        if taking.start >= server.trimmed:
            server.evicted.discard(node.number)
            server.spared_until[node.number] = self.now + _GRACE_SECONDS
            server.forget(node.number)
            server.confirmed[node.number] = taking.start
            server.pending[node.number] = (taking.start, node.head)

    def _take_key(self, node: Node, server: Node, taking: Taking, key: str) -> None:
        theirs = server.newest(key) if not taking.has_all_records else taking.deletes.get(key)
        record = server.rows.get(key) if not taking.has_all_records else None
        if theirs is not None and theirs.op.is_delete and record is not None:
            theirs = None
        pair = self._pair(node, taking, key, theirs, record)
        verdict = self.laws.judge_snapshot(
            pair,
            rules.SnapshotSides(
                server=server.host,
                taker=node.host,
                server_floor=server.floor,
                own_floor=node.floor,
                is_first=taking.server_cursor is None,
                has_read_us=taking.server_cursor is not None
                and taking.server_cursor >= node.trimmed,
            ),
        )
        self.counts[f"snapshot {verdict.outcome}{' reported' * verdict.reports}"] += 1
        match verdict.outcome:
            case Outcome.KEEP:
                if verdict.reports:
                    self.ledger.report(theirs.change if theirs else server.state.get(key))
            case Outcome.TAKE:
                self._take(node, server, key, theirs, record, verdict)
            case Outcome.KEEP_UNDER:
                self._keep_under(node, key, theirs, verdict)
            case Outcome.REISSUE:
                self._reissue(node, key, verdict)

    def _pair(
        self, node: Node, taking: Taking, key: str, theirs: Entry | None, record: int | None
    ) -> rules.SnapshotPair:
        read = taking.server_cursor if taking.server_cursor is not None else NOWHERE
        unsent = [e for e in node.of_key.get(key, []) if e.place > read]
        first = min(unsent, key=lambda entry: entry.place, default=None)
        return rules.SnapshotPair(
            server=theirs.op if theirs else None,
            own=node.newest_op(key),
            server_has_record=record is not None,
            own_has_record=key in node.rows,
            is_same=node.rows.get(key) == record,
            has_unsent=bool(unsent),
            is_unsent_on_server_record=first is not None and first.old == record,
        )

    def _take(
        self,
        node: Node,
        server: Node,
        key: str,
        theirs: Entry | None,
        record: int | None,
        verdict: rules.SnapshotVerdict,
    ) -> None:
        have, held = node.rows.get(key), node.state.get(key)
        change = theirs.change if theirs else server.state.get(key)
        if record is None and change is not None and not self.ledger[change].is_delete:
            change = None  # a leftover that was deleted, or created, since the deletes were read
        if verdict.reports and held != change:
            self.ledger.report(held)
        node.put(key, record)
        if verdict.version is None:
            self._hold(node, key, change)
            return
        if change is None:
            change = self.ledger.nothing(key).number
        self._hold(node, key, change)
        if theirs is not None or self.laws.logs_snapshots:
            op = Newest(verdict.version, record is None, verdict.is_approximate)
            node.append(
                Entry(node.next_place(), key, op, record, change, self.clock_of(node), have)
            )
        self._purge(node, key, verdict.version)

    def _keep_under(
        self, node: Node, key: str, theirs: Entry | None, verdict: rules.SnapshotVerdict
    ) -> None:
        assert verdict.version is not None
        record = node.rows.get(key)
        change = node.state.get(key, theirs.change if theirs else None)
        if change is None:
            change = self.ledger.nothing(key).number
        node.state[key] = change
        op = Newest(verdict.version, record is None, verdict.is_approximate)
        node.append(Entry(node.next_place(), key, op, record, change, self.clock_of(node), record))

    def _reissue(self, node: Node, key: str, verdict: rules.SnapshotVerdict) -> None:
        assert verdict.version is not None
        record = node.rows.get(key)
        again = node.state.get(key)
        change = self.ledger.note(key, verdict.version, is_delete=record is None, again=again)
        op = Newest(verdict.version, record is None)
        self._store(
            node,
            Entry(
                node.next_place(), key, op, record, change.number, self.clock_of(node), record
            ),
        )

    # What goes wrong.

    def crash(self, node: Node) -> None:
        """Transactions in flight never happened."""
        for entry in node.open:
            self.ledger.report(entry.change)
        node.open = []
        if not self.laws.has_durable_clock:
            node.tick = 0
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
            held |= {entry.change for entry, _ in node.parked.values()}
        return held

    # What must hold in the end.

    def differences(self) -> list[str]:
        """Sentences about tables that differ, and about changes that were lost in silence."""
        nodes = [node for node in self.nodes if node.peers]
        found = [
            f"{node.host} has {node.rows}, and {nodes[0].host} {nodes[0].rows}"
            for node in nodes
            if node.rows != nodes[0].rows
        ]
        for key in KEYS:
            if (winner := self.ledger.winner(key)) is not None:
                found += [
                    f"{node.host} has lost change {winner.number} of {key!r} without a report"
                    for node in nodes
                    if not self._has(node, winner)
                ]
        return found

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
