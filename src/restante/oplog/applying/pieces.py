"""
A page of ops, checked at the boundary and cut into pieces that fit into a transaction.

Records are decoded when their piece is made, so that a page of any number of them takes little
memory beside its own.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from msgspec import Raw

from restante.database.pool import Connection
from restante.errors import TooManyHosts
from restante.oplog import peers, positions, tables, ulids
from restante.oplog.applying import boundary, records
from restante.oplog.applying.boundary import Boundary, Refusal
from restante.oplog.applying.incoming import Context, Head, Record, Source
from restante.oplog.peers import Peer
from restante.oplog.rules import Action, Channel, Version
from restante.oplog.tables import TrackedTable
from restante.wire.oplog import ActionName, Op

MAX_RECORDS = 4000
MAX_BYTES = 8 * 1024 * 1024

_SMALL_PAGE = 500

ACTIONS: dict[ActionName, Action] = {"create": "c", "update": "u", "delete": "d"}
ACTION_NAMES: dict[Action, ActionName] = {letter: name for name, letter in ACTIONS.items()}


@dataclass(slots=True)
class Piece:
    """A part of a page that fits into a transaction."""

    records: list[Record] = field(default_factory=list[Record])
    bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    transient: list[Op] = field(default_factory=list[Op])
    cursor: str | None = None  # where it stands after this piece; None: as before
    is_last: bool = False  # the page ends with it

    def has_room(self, record: Record) -> bool:
        return len(self.records) < MAX_RECORDS and (
            not self.records or self.bytes + len(record.data) <= MAX_BYTES
        )

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.bytes += len(record.data)


@dataclass(frozen=True, slots=True)
class Page:
    """The ops of a page, and what was found out about them."""

    ops: Sequence[Op]
    origins: Sequence[str]
    refusals: Sequence[Refusal | None]
    numbers: dict[str, int]
    tracked: dict[str, TrackedTable]
    source: Source
    context: Context
    no_room: str | None = None  # why ops after these must wait: there is no room for their host

    @property
    def is_small(self) -> bool:
        """Whether it takes too little time to decode for anybody to notice."""
        return sum(len(op.data) for op in self.ops) <= _SMALL_PAGE

    def pieces(self, end_cursor: str | None) -> Iterator[Piece]:
        """The page in its order; the last piece has the page's end, unless the rest must wait."""
        piece = Piece()
        for index, op in enumerate(self.ops):
            why = self.refusals[index]
            if why is not None:
                piece.refused[why] += max(len(op.data), 1)
            elif op.transient:
                piece.transient.append(op)
            else:
                for n, record in self._records(index, op):
                    if isinstance(record, Refusal):
                        piece.refused[record] += 1
                        continue
                    if not piece.has_room(record):
                        piece.cursor = None if n else self.cursor_after(index - 1)
                        yield piece
                        piece = Piece()
                    piece.add(record)
        piece.cursor, piece.is_last = self._end(end_cursor)
        yield piece

    def _end(self, end_cursor: str | None) -> tuple[str | None, bool]:
        """Where the cursor stands after these ops, and whether the page ends with them."""
        if self.no_room is None:
            return end_cursor, True
        return self.cursor_after(len(self.ops) - 1) if self.ops else None, False

    def _records(self, index: int, op: Op) -> Iterator[tuple[int, Record | Refusal]]:
        head, table = self._head(index, op), self.tracked[op.table]
        for n, raw in enumerate(op.data):
            yield n, _record(head, table, op, n, raw)

    def _head(self, index: int, op: Op) -> Head:
        origin = self.origins[index]
        version = Version(boundary.ulid_of(op), origin)
        number, action = self.numbers[origin], ACTIONS[op.action]
        return Head(index, version, number, action, op.approximate)

    def cursor_after(self, index: int) -> str | None:
        """Where the cursor stands after an op; None if the op does not say."""
        if self.source.channel is Channel.PULL:
            position = positions.parsed(self.ops[index].position)
            return None if position is None else str(position)
        if self.source.channel is Channel.ULID and self.refusals[index] is None:
            return ulids.text_of(boundary.ulid_of(self.ops[index]))
        return None

    def halves(self, piece: Piece) -> tuple[Piece, Piece]:
        """Two pieces that together are the same."""
        middle = len(piece.records) // 2
        last, first = piece.records[middle - 1].head.index, piece.records[middle].head.index
        cursor = None if last == first else self.cursor_after(last)
        return (
            Piece(piece.records[:middle], 0, piece.refused, piece.transient, cursor),
            Piece(piece.records[middle:], cursor=piece.cursor, is_last=piece.is_last),
        )

    def before(self, piece: Piece, index: int) -> Piece:
        """The part of a piece before an op."""
        some = [record for record in piece.records if record.head.index < index]
        cursor = self.cursor_after(some[-1].head.index) if some else None
        return Piece(some, cursor=cursor)


def _record(head: Head, table: TrackedTable, op: Op, n: int, raw: Raw) -> Record | Refusal:
    found = boundary.decoded(raw)
    if isinstance(found, Refusal):
        return found
    data, sent = found
    key = records.key_of(table, sent)
    if key is None:
        return Refusal.DATA
    is_newest = op.newest is None or (n < len(op.newest) and op.newest[n])
    return Record(head, table, data, frozenset(sent), key, is_newest)


@dataclass(frozen=True, slots=True)
class _OwnName:
    """A peer that speaks only for itself."""

    peer: Peer

    def may_see(self, table: str) -> bool:
        return self.peer.may_see(table)

    def may_relay(self, origin: str) -> bool:
        return origin == self.peer.host


async def read(connection: Connection, ops: Sequence[Op], source: Source, now: datetime) -> Page:
    """What must be known of this node before a page is applied."""
    own = await tables.own_name(connection)
    tracked = {one.name: one for one in await tables.all_tables(connection) if not one.is_missing}
    is_pushed = source.channel is Channel.PUSH
    sender = _OwnName(source.peer) if is_pushed else source.peer
    border = Boundary(sender, "" if is_pushed else own.host, tracked, now)
    origins = [peers.normalised_host(op.host) for op in ops]
    refusals = [border.refusal(op, origin=origin) for op, origin in zip(ops, origins, strict=True)]
    numbers: dict[str, int] = {}
    count, no_room = len(ops), None
    for index, op in enumerate(ops):
        if refusals[index] is None and not op.transient and origins[index] not in numbers:
            try:
                number = await tables.host_id(connection, origins[index], peer_id=source.peer.id)
            except TooManyHosts as error:
                count, no_room = index, str(error)
                break
            numbers[origins[index]] = number
    context = Context(source.channel, source.server_cursor, own, now)
    taken = ops[:count], origins[:count], refusals[:count]
    return Page(*taken, numbers, tracked, source, context, no_room)
