"""
Ops as JSON: the records of one op are put together again, piece by piece.

Readers of the older protocol take an op with a ULID that they have seen for one that they have.  So
for them a part of an op has a ULID of its own: only the one with the first record has the real one.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from uuid import UUID

import msgspec
from msgspec import Raw

from restante.oplog import translate, ulids
from restante.oplog.positions import Position
from restante.oplog.serving.log import LoggedTable, Record

_ACTIONS = {"c": "create", "u": "update", "d": "delete"}
_RANDOM_BITS = 80
_MAX_NESTED = 400


def wire_ulid(position: Position, *, is_approximate: bool) -> UUID:
    """
    The ULID under which a reader of the older protocol gets the op that begins at a position.

    What is snapshotted without a version has the ULID of the floor, which many records share.
    """
    if position.n == 0 and not is_approximate:
        return position.ulid
    moment = position.ulid.int >> _RANDOM_BITS
    digest = hashlib.sha256(str(position).encode()).digest()
    return UUID(int=moment << _RANDOM_BITS | int.from_bytes(digest[:10], "big"))


def record_for_us(record: str) -> bytes:
    """
    A record as our own nodes get it, in pages of the log and in snapshots.

    The type json takes halves of a surrogate pair, and any depth.  Other parsers may refuse such a
    record, and with it the page: it is sent as a string.
    """
    is_for_postgres_only = (
        "\\ud" in record or "\\uD" in record or record.count("[") + record.count("{") > _MAX_NESTED
    )
    return msgspec.json.encode(record) if is_for_postgres_only else record.encode()


class PageEncoder:
    """The JSON array of a page; records must come in the order of the log."""

    def __init__(self, tables: Sequence[LoggedTable], *, is_ours: bool) -> None:
        self._tables: Mapping[int, LoggedTable] = {table.id: table for table in tables}
        self._is_ours = is_ours
        self._op: tuple[object, ...] | None = None
        self._last: Record | None = None
        self._newest: list[bool] = []
        self.last_ulid: UUID | None = None  # as the reader knows the last op
        self.ops = 0

    def add(self, records: Sequence[Record], outdated: Collection[Position] = ()) -> bytes:
        """The next piece of the array."""
        piece = bytearray()
        for record in records:
            if record.op == self._op:
                piece += b","
            else:
                piece += self._closed() + self._opened(record)
            piece += self._data(record)
            self._newest.append(record.position not in outdated)
            self._last = record
        return bytes(piece)

    def end(self) -> bytes:
        """The end of the array."""
        return (self._closed() if self.ops else b"[") + b"]"

    def _opened(self, record: Record) -> bytes:
        self._op, self._newest = record.op, []
        at = record.position
        ulid = at.ulid
        if not self._is_ours:
            ulid = wire_ulid(at, is_approximate=record.approximate)
        self.last_ulid = ulid
        head = {
            "ulid": ulids.text_of(ulid),
            "host": record.host,
            "action": _ACTIONS[record.action],
            "table": self._tables[record.table_id].name,
            "transient": False,
        }
        self.ops += 1
        before = b"[" if self.ops == 1 else b","
        return before + msgspec.json.encode(head)[:-1] + b',"data":['

    def _closed(self) -> bytes:
        if self._last is None:
            return b""
        if not self._is_ours:
            return b"]}"
        tail: dict[str, object] = {"position": str(self._last.position)}
        if self._last.approximate:
            tail["approximate"] = True
        if not all(self._newest):
            tail["newest"] = self._newest
        return b"]," + msgspec.json.encode(tail)[1:]

    def _data(self, record: Record) -> bytes:
        text = record.data or "null"
        if self._is_ours:
            return record_for_us(text)
        data = text.encode()
        key_map = self._tables[record.table_id].key_map
        if not key_map:
            return data
        return bytes(translate.record_to_peer(Raw(data), key_map))
