"""
The entries of a snapshot's page as the taker understands them: checked, and with what it is told.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from uuid import UUID

import structlog

from restante.errors import PeerUnreachable
from restante.oplog import rules, ulids
from restante.oplog.applying import boundary, records
from restante.oplog.applying.incoming import Head, Record
from restante.oplog.peers import Peer, normalised_host
from restante.oplog.positions import Position
from restante.oplog.rules import Action, Newest, SnapshotSides, Version
from restante.oplog.tables import TrackedTable
from restante.wire import oplog as wire

log = structlog.get_logger()

# A server without a floor has nothing that could be older; peers refuse earlier versions.
EARLIEST = ulids.lowest_at(ulids.EARLIEST)

Phase = Literal["new", "deletes", "records", "leftovers", "own_deletes", "done"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that is being taken, and how far it is."""

    peer_id: int
    table_id: int
    phase: Phase
    is_for_gap: bool
    after: str
    start: str
    host: str  # the server's
    columns: frozenset[str]  # the server's
    floor: UUID  # the largest that the server has told
    floor_origin: str
    server_cursor: Position | None  # how far the server had read us when it began
    records: int
    begun: int
    is_repair: bool = False
    has_unlogged: bool = False  # the server has changes without ops, which we have not read


@dataclass(frozen=True, slots=True)
class Taking:
    """A snapshot that is being taken."""

    peer: Peer
    table: TrackedTable
    progress: Snapshot
    own_host: str
    server_floor: UUID  # when the page was read
    now: datetime

    @property
    def has_records(self) -> bool:
        """Whether the server has a record of each key of the page."""
        return self.progress.phase == "records"

    @property
    def sides(self) -> SnapshotSides:
        cursor, trimmed = self.progress.server_cursor, self.table.trimmed
        unlogged = self.table.unlogged
        return SnapshotSides(
            server=self.progress.host,
            taker=self.own_host,
            server_floor=self.server_floor,
            own_floor=self.table.floor,
            is_first=cursor is None or (unlogged is not None and cursor < unlogged),
            has_read_us=cursor is not None and (trimmed is None or cursor >= trimmed),
            is_repair=self.progress.is_repair,
            has_unlogged=self.progress.has_unlogged,
        )

    @property
    def columns(self) -> frozenset[str]:
        """The columns that both nodes have, and that are written."""
        ours = {column.name for column in self.table.columns if not column.is_generated}
        return self.progress.columns & ours


def floor_of(page: wire.SnapshotPage, table: TrackedTable, *, now: datetime) -> UUID:
    """The floor that a page tells; raises PeerUnreachable if it cannot be adopted."""
    floor = ulids.parsed(page.floor)
    if floor is None:
        raise PeerUnreachable("The floor of its snapshot is unreadable.")
    if rules.is_ahead(floor, now=now):
        # Adopting it would set our clock ahead as well.
        raise PeerUnreachable(
            f"It has dropped changes of {ulids.moment_of(floor):%Y-%m-%d %H:%M:%S} UTC, "
            f"which is ahead of our clock; the snapshot of {table.name} goes on then."
        )
    return floor


def floor_origin_of(
    page: wire.SnapshotPage, peer: Peer, progress: Snapshot, *, own_host: str
) -> str:
    """
    The host that made the op at the floor; raises PeerUnreachable if it is none.

    The server may have dropped ops of hosts for which it may not speak here: then the floor is its
    own.
    """
    origin = normalised_host(page.floor_origin)
    if not boundary.is_host(origin):
        raise PeerUnreachable("The host of the floor of its snapshot is unreadable.")
    return origin if origin == own_host or peer.may_relay(origin) else progress.host


@dataclass(frozen=True, slots=True)
class Entry:
    """What the server has of one key."""

    data: str
    key: str  # a JSON object of the key columns
    has_record: bool
    newest: Newest | None
    n: int


def is_ahead(entry: Entry, now: datetime) -> bool:
    return entry.newest is not None and rules.is_ahead(entry.newest.version.ulid, now=now)


def as_op(taking: Taking, entry: Entry) -> Record:
    """The entry as an op; the number of its host is looked up when it is tried again."""
    floor = Version(max(taking.server_floor, EARLIEST), taking.progress.host)
    version = entry.newest.version if entry.newest else floor
    action: Action = "u" if taking.has_records else "d"
    is_approximate = entry.newest is None or entry.newest.is_approximate
    head = Head(0, version, 0, action, is_approximate)
    return Record(head, taking.table, entry.data, taking.columns, entry.key)


def checked(taking: Taking, sent: Sequence[wire.SnapshotEntry]) -> list[Entry]:
    """
    The entries that can be taken.

    Too large ones, those without a key or with an impossible time, and those of hosts that are not
    the peer's to speak for are left out, as they are when they come by the log.
    """
    entries = [_entry(taking, one) for one in sent]
    taken = [entry for entry in entries if entry and _may_be_sent(taking, entry)]
    if len(taken) < len(entries):
        refused = len(entries) - len(taken)
        log.warning("ops_refused", peer=taking.peer.host, table=taking.table.name, records=refused)
    return taken


def _entry(taking: Taking, sent: wire.SnapshotEntry) -> Entry | None:
    decoded = boundary.decoded(sent.data)
    if isinstance(decoded, boundary.Refusal):
        return None
    key = records.key_of(taking.table, decoded[1])
    if key is None:
        return None
    data = decoded[0] if taking.has_records else key
    newest = _newest(sent)
    return Entry(data, key, taking.has_records, newest, sent.n)


def _newest(sent: wire.SnapshotEntry) -> Newest | None:
    if not sent.ulid:
        return None
    ulid, host = ulids.parsed(sent.ulid), normalised_host(sent.host)
    if ulid is None or not boundary.is_host(host):
        raise PeerUnreachable("A version in its snapshot is unreadable.")
    return Newest(Version(ulid, host), sent.deleted, sent.approximate)


def _may_be_sent(taking: Taking, entry: Entry) -> bool:
    if entry.newest is None:
        return True
    ulid, origin = entry.newest.version.ulid, entry.newest.version.origin
    if not ulids.is_plausible(ulid, now=taking.now):
        return False
    return origin == taking.own_host or taking.peer.may_relay(origin)
