"""The parts of the model: what its nodes obey, their logs, and what they have on disk."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID

from restante.oplog import rules, ulids
from restante.oplog.rules import Newest, Verdict, Version

KEYS = "abcde"
EPOCH = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp())

# A place in a log is the era times this, plus a counter.
ERA = 10**6
NOWHERE = -1
_FAR = 10**15


@dataclass(frozen=True, slots=True)
class Laws:
    """What the nodes obey; a test breaks one of them to see that the model notices."""

    judge: Callable[..., Verdict] = rules.judge
    judge_snapshot: Callable[[rules.SnapshotPair, rules.SnapshotSides], rules.SnapshotVerdict] = (
        rules.judge_snapshot
    )
    logs_superseded: bool = False
    floor_is_age: bool = False  # of the trimmed ops, not the largest ULID among them
    sends_deletes: bool = True
    logs_snapshots: bool = True
    raises_era: bool = True
    purges_parked: bool = True
    first_contact_is_snapshot: bool = True
    locks_keys: bool = True
    applies_while_paused: bool = False
    first_is_per_table: bool = True  # not: whether the server has ever read anything from us
    reads_dropped_again: bool = True  # what was parked when a pause ended
    reads_new_tables_first: bool = True  # until then a server says that it has read nothing


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
    floor: UUID  # the highest of those that came with the pages
    has_unlogged: bool  # changes of the server without ops that we have not read
    phase: int = 0
    after: str = ""


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
    unlogged: int = 0
    era: int = 0
    counter: int = 0
    tick: int = 0
    peers: set[int] = field(default_factory=set[int])
    cursors: dict[int, int] = field(default_factory=dict[int, int])
    takings: dict[int, Taking] = field(default_factory=dict[int, Taking])
    has_taken: bool = False
    is_paused: bool = False
    is_tracked: bool = True
    new_from: set[int] = field(default_factory=set[int])  # whose first snapshot is not complete
    parked: dict[tuple[str, Version], Entry] = field(
        default_factory=dict[tuple[str, Version], Entry]
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
        if peer in self.evicted:
            self.evicted.discard(peer)
            self.forget(peer)
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
