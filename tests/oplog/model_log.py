"""The model's logs: what applications write, what becomes of incoming ops, and trimming."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from random import Random
from uuid import UUID

from oplog.ledger import Ledger
from oplog.model_node import EPOCH, ERA, NOWHERE, Entry, Laws, Node

from restante.database.partitions import Partition, PartitionState
from restante.database.spans import Span
from restante.oplog import rules, ulids
from restante.oplog.positions import Position
from restante.oplog.rules import Channel, Newest, Verdict, Version
from restante.oplog.trimming import fates
from restante.oplog.trimming.fates import KEPT, Fate
from restante.oplog.trimming.gate import Mark, Piece, Pin, TableLog
from restante.oplog.trimming.limits import Limits, Policy


def position_of(place: int) -> Position:
    """A place in the log of a node, as the product has it."""
    return Position(EPOCH * 1_000_000 + place // ERA, place % ERA, ulids.LOWEST, 0)


def piece_of(entry: Entry) -> Piece:
    """A partition that has one op."""
    arrived = datetime.fromtimestamp(entry.arrived_at, UTC)
    name, state = f"ops_1_{entry.place}", PartitionState.ATTACHED
    partition = Partition("ops", name, state, Span(arrived, arrived), "ops_1")
    return Piece(partition, position_of(entry.place))


class Logs:
    """Some nodes and the time."""

    def __init__(self, chance: Random, laws: Laws, *, retention: int, cap: int | None) -> None:
        self.chance = chance
        self.laws = laws
        self.now = EPOCH
        self.nodes: list[Node] = []
        self.ledger = Ledger()
        self.counts = Counter[str]()
        self.removals: list[str] = []  # sentences about records that only a snapshot has removed
        self.fails_share = 0.0  # of the ops that break a foreign key at first
        self.capped: frozenset[int] | None = None  # None: all
        self._retention = retention
        self._cap = cap

    def clock_of(self, node: Node) -> int:
        return self.now + node.skew

    def _moment(self, node: Node) -> datetime:
        return datetime.fromtimestamp(self.clock_of(node), UTC)

    def mint(self, node: Node) -> Version:
        wall = self.clock_of(node) * 1000 << 15
        node.tick = max(node.tick + 1, wall)
        return Version(UUID(int=node.tick << 65 | self.chance.getrandbits(64)), node.host)

    # What the applications do.

    def write(self, node: Node, key: str, *, commits: bool = True) -> None:
        """A record is written or deleted; without commit the transaction stays open."""
        if node.is_locked(key):
            return
        is_delete = key in node.rows and self.chance.random() < 0.4 and node.is_tracked
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
        if node.is_paused or not node.is_tracked:
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
        for parked in [each for each in node.parked if each[0] == key and each[1] < version]:
            del node.parked[parked]

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
        if not node.is_tracked:
            return True
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
                node.parked[entry.key, entry.op.version] = entry
            case Verdict.APPLY:
                self._apply(node, entry, channel, server_cursor)
            case Verdict.SUPERSEDED | Verdict.REPORT:
                self._lose(node, entry, verdict)
            case Verdict.SKIP | Verdict.REFUSE:
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

    def _report_overwritten(self, node: Node, entry: Entry, server_cursor: int | None) -> None:
        """
        A change of our own that the sender has not read is a conflict.

        Only one that was issued again can be newer than what it loses to.
        """
        mine, origin = node.newest(entry.key), entry.op.version.origin
        if mine is None or not mine.op.version.origin == node.host != origin:
            return
        was_read = server_cursor is not None and mine.place <= server_cursor
        if not was_read and self.ledger[mine.change].content != mine.change:
            self.ledger.report(mine.change)

    def _apply(self, node: Node, entry: Entry, channel: Channel, server_cursor: int | None) -> None:
        if channel is Channel.PULL:
            self._report_overwritten(node, entry, server_cursor)
        if channel is not Channel.RETRY and self.chance.random() < self.fails_share:
            node.parked[entry.key, entry.op.version] = entry
            return
        have, held = node.rows.get(entry.key), node.state.get(entry.key)
        if entry.op.is_approximate and have == entry.record:
            self.ledger.merge(held, entry.change)
        elif entry.op.is_approximate and held != entry.change:
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
        for parked, entry in list(node.parked.items()):
            is_ahead = rules.is_ahead(entry.op.version.ulid, now=self._moment(node))
            if parked not in node.parked or is_ahead or self.chance.random() >= share:
                continue
            if self.receive(node, entry, Channel.RETRY):
                node.parked.pop(parked, None)

    # Trimming.

    def trim(self, node: Node) -> None:
        """Drop what the product's gate lets go, the oldest first; whoever it evicts is out."""
        for entry in list(node.log):
            fate = self._fate(node, entry)
            if fate.cause is None:
                return
            if evicted := {self.number_of[host] for host in fate.evicts}:
                node.evicted |= evicted
                self.counts["evicted"] += len(evicted)
            node.drop(entry)
            if self.laws.floor_is_age:
                age = ulids.lowest_at(datetime.fromtimestamp(entry.arrived_at, UTC))
                node.floor = max(node.floor, age)
            else:
                node.floor = max(node.floor, entry.op.version.ulid)

    def _fate(self, node: Node, entry: Entry) -> Fate:
        """What becomes of a partition that has this op alone."""
        cap = timedelta(seconds=self._cap or 0) if self._is_capped(node) else None
        log = TableLog(
            "table",
            Policy(timedelta(seconds=self._retention), cap),
            [piece_of(entry)],
            [Pin(self.nodes[peer].host, position_of(pin)) for peer, pin in node.pins.items()],
            taking_from="somebody" if node.takings else None,
        )
        marks = [self._mark(node, self.nodes[peer]) for peer in sorted(node.peers)]
        limits, moment = Limits(margin=timedelta(0)), self._moment(node)
        return fates.fates([log], marks, limits, now=moment).get(log.pieces[0].name, KEPT)

    def _mark(self, node: Node, peer: Node) -> Mark:
        """How far a peer has passed the log of a node; its times are by the clock of that node."""
        confirmed = node.confirmed.get(peer.number, NOWHERE)
        passed = node.settled.get(peer.number, NOWHERE)
        spared_until = node.spared_until.get(peer.number, 0) + node.skew
        return Mark(
            peer.host,
            "" if passed == NOWHERE else str(position_of(passed)),
            "" if confirmed == NOWHERE else str(position_of(confirmed)),
            evicted_at=self._moment(node) if peer.number in node.evicted else None,
            spared_until=datetime.fromtimestamp(max(spared_until, 0), UTC),
        )

    @property
    def number_of(self) -> dict[str, int]:
        return {node.host: node.number for node in self.nodes}

    def _is_capped(self, node: Node) -> bool:
        return self._cap is not None and (self.capped is None or node.number in self.capped)

    def track(self, node: Node) -> None:
        """Of peers that were read before, ops of the table were refused."""
        node.is_tracked = True
        if node.rows:
            self.resume(node)
        else:
            node.unlogged = node.next_place()
        node.new_from = node.cursors.keys() & node.peers
        self.counts["tracked"] += 1

    def pause(self, node: Node) -> None:
        """Capture stops."""
        node.is_paused = True

    def resume(self, node: Node) -> None:
        """Rows may have changed under their old versions: the floor is now, earlier ops go."""
        node.is_paused = False
        node.floor = max(node.floor, self.mint(node).ulid)
        for entry in list(node.log):
            node.drop(entry)
        node.trimmed = node.unlogged = node.next_place()
        older = [each for each in node.parked if each[1].ulid <= node.floor]
        for parked in older:
            self.ledger.report(node.parked.pop(parked).change)
        if older and self.laws.reads_dropped_again:
            node.new_from |= node.cursors.keys() & node.peers
        node.pins = {}  # what is taken of it meanwhile begins again
        self.counts["resumed"] += 1
