"""
Compares one table on two nodes, and names the keys that differ.

Ranges whose digests differ are looked at again once each side has read what the other had, so that
changes on their way do not count.  A key differs if both its records stayed as they were while the
two caught up, twice: a record that only one side has may be on its way at the first look, and a
delete of it at the second.  Nothing is written, and no transaction is longer than one statement.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeVar

from restante.database.pool import Database
from restante.errors import BadRequest
from restante.oplog import peers, tables
from restante.oplog.tables import TrackedTable
from restante.oplog.verifying import digests
from restante.wire.oplog_digests import (
    MAX_PARTS,
    MAX_RECORDS,
    DigestRequest,
    KeyDifference,
    KeyOrder,
    KeyRange,
    NodeDescription,
    RangeDigest,
    RecordDigest,
    RecordsRequest,
    TableReport,
)

T = TypeVar("T")

ROWS_PER_RANGE = 1000
# Within a statement's time-out on a slow disk.
_RANGES_AT_ONCE = 50
# Each statement reads the whole table then.
_RANGES_AT_ONCE_BY_TEXT = 500
_ROUNDS = 6
# So often both records of a key have to be found as they were the time before.
_SAME_LOOKS = 2
_LOOK_AGAIN_SECONDS = 0.25
_KEYS_AT_ONCE = 1000


class Side(Protocol):
    """One of the two nodes."""

    async def describe(self) -> NodeDescription: ...
    async def ranges(self, asked: DigestRequest) -> Sequence[RangeDigest]: ...
    async def records(self, asked: RecordsRequest) -> Sequence[RecordDigest]: ...


class Here:
    """This node, as a peer may see it."""

    def __init__(self, db: Database, peer_id: int, visible: frozenset[str] | None) -> None:
        self.db = db
        self._peer_id = peer_id
        self._visible = visible  # None: all
        self._tables: dict[str, TrackedTable] = {}

    async def describe(self) -> NodeDescription:
        async with self.db.connection() as connection:
            found = await digests.comparable(connection, self._visible)
            return NodeDescription(
                host=await tables.own_host(connection),
                head=await digests.head(connection, found),
                cursor=await peers.read_from(connection, self._peer_id),
                tables=[await digests.describe(connection, table) for table in found],
            )

    async def table(self, name: str) -> TrackedTable:
        if name not in self._tables:
            is_visible = self._visible is None or name in self._visible
            async with self.db.connection() as connection:
                found = await tables.find(connection, name) if is_visible else None
            if found is None or found.is_missing:
                raise BadRequest(f"There is no table {name} to compare.")
            self._tables[name] = found
        return self._tables[name]

    async def ranges(self, asked: DigestRequest) -> Sequence[RangeDigest]:
        return await digests.ranges(self.db, await self.table(asked.table), asked)

    async def records(self, asked: RecordsRequest) -> Sequence[RecordDigest]:
        return await digests.records(self.db, await self.table(asked.table), asked)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is listed, and how long is waited for."""

    keys: int = 100
    wait_seconds: float = 60.0


@dataclass(slots=True)
class Progress:
    """Where a comparison stands; `resume_after` is None until something of the table is done."""

    table: str = ""
    rows: int = 0
    estimated_rows: int = 0
    resume_after: str | None = None
    on_change: Callable[["Progress"], None] = lambda _: None

    def begin(self, table: str, estimated_rows: int) -> None:
        self.table, self.rows, self.estimated_rows = table, 0, estimated_rows
        self.resume_after = None
        self.on_change(self)

    def note(self, rows: int, resume_after: str | None) -> None:
        self.rows += rows
        self.resume_after = resume_after
        self.on_change(self)


@dataclass(slots=True)
class Comparison:
    """One table on two nodes."""

    here: Here
    there: Side
    table: TrackedTable
    columns: list[str]
    order: KeyOrder
    limits: Limits
    progress: Progress
    is_caught_up: bool = True
    _rows: list[int] = field(default_factory=lambda: [0, 0])

    async def run(self, schema: list[str], *, after: str | None = None) -> TableReport:
        """Compare everything behind a key; the differences of the columns are only passed on."""
        suspects = await self._differing_of_all(after)
        keys, changing, more = list[KeyDifference](), 0, 0
        if suspects:
            await self._catch_up()
            suspects = await self._still_differing(suspects)
            keys, changing, more = await self._name_keys(suspects)
        outcome = "differs" if keys or more else "changing" if changing else "equal"
        return TableReport(
            table=self.table.name,
            outcome=outcome,
            rows_here=self._rows[0],
            rows_there=self._rows[1],
            keys=keys,
            more_ranges=more,
            schema=schema,
            reason=f"{changing} keys changed whenever they were compared." if changing else "",
        )

    async def _differing_of_all(self, after: str | None) -> list[KeyRange]:
        """The ranges that differ at the first look, from the given key to the end of the table."""
        at_once = _RANGES_AT_ONCE if self.order == "index" else _RANGES_AT_ONCE_BY_TEXT
        suspects = list[KeyRange]()
        while True:
            ends = await digests.cut(
                self.here.db,
                self.table,
                self.order,
                after,
                rows=at_once * ROWS_PER_RANGE,
                each=ROWS_PER_RANGE,
            )
            is_last = len(ends) < at_once
            bounds = [after, *ends, *([None] if is_last else [])]
            ranges = [KeyRange(*pair) for pair in pairwise(bounds)]
            pairs = await self._both(ranges)
            suspects += [
                one for one, (ours, theirs) in zip(ranges, pairs, strict=True) if ours != theirs
            ]
            self._rows[0] += sum(ours.rows for ours, _ in pairs)
            self._rows[1] += sum(theirs.rows for _, theirs in pairs)
            after = ends[-1] if ends else after
            # What differs is looked at once more at the end, so a later run must begin before it.
            resume_after = suspects[0].after if suspects else after
            self.progress.note(sum(ours.rows for ours, _ in pairs), resume_after)
            if is_last:
                return suspects

    async def _both(self, ranges: Sequence[KeyRange]) -> list[tuple[RangeDigest, RangeDigest]]:
        asked = DigestRequest(
            table=self.table.name, columns=self.columns, order=self.order, ranges=list(ranges)
        )
        ours, theirs = await asyncio.gather(self.here.ranges(asked), self.there.ranges(asked))
        return list(zip(ours, theirs, strict=True))

    async def _still_differing(self, suspects: Sequence[KeyRange]) -> list[KeyRange]:
        found = list[KeyRange]()
        for some in _batches(suspects, min(_RANGES_AT_ONCE_BY_TEXT, MAX_PARTS)):
            pairs = await self._both(some)
            found += [
                one for one, (ours, theirs) in zip(some, pairs, strict=True) if ours != theirs
            ]
        return found

    async def _catch_up(self) -> None:
        """Wait until each side has read what the other has now; not again if that took too long."""
        if not self.is_caught_up:
            return
        here, there = await asyncio.gather(self.here.describe(), self.there.describe())
        heads = here.head, there.head
        deadline = time.monotonic() + self.limits.wait_seconds
        while here.cursor < heads[1] or there.cursor < heads[0]:
            if time.monotonic() > deadline:
                self.is_caught_up = False
                return
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
            here, there = await asyncio.gather(self.here.describe(), self.there.describe())

    async def _name_keys(
        self, suspects: Sequence[KeyRange]
    ) -> tuple[list[KeyDifference], int, int]:
        """The keys that differ, how many never stood still, and how many ranges were not listed."""
        keys, changing, left = list[KeyDifference](), 0, list(suspects)
        while left and len(keys) < self.limits.keys:
            candidates = dict[str, "_Pair"]()
            while left and len(candidates) < self.limits.keys - len(keys):
                candidates |= await self._candidates(left.pop(0))
            settled, unsettled = await self._settled(candidates)
            keys += settled
            changing += unsettled
        return keys[: self.limits.keys], changing, len(left) + (len(keys) > self.limits.keys)

    async def _candidates(self, one: KeyRange) -> dict[str, "_Pair"]:
        """The keys of a range that differ now; at most a few more than are listed."""
        # It was cut here, and may have grown a little since.
        mine = await self._records(self.here, one, one.after, limit=MAX_RECORDS)
        ours = {record.key: record.digest for record in mine}
        found, after = dict[str, _Pair](), one.after
        while len(found) <= self.limits.keys:
            page = await self._records(self.there, one, after)
            pairs = {r.key: _Pair(ours.pop(r.key, None), r.digest) for r in page}
            found |= {key: pair for key, pair in pairs.items() if pair.here != pair.there}
            if len(page) < _KEYS_AT_ONCE:
                return found | {key: _Pair(digest, None) for key, digest in ours.items()}
            after = page[-1].key
        return found

    async def _records(
        self, side: Side, one: KeyRange, after: str | None, *, limit: int = _KEYS_AT_ONCE
    ) -> Sequence[RecordDigest]:
        return await side.records(
            RecordsRequest(
                table=self.table.name,
                columns=self.columns,
                order=self.order,
                range=KeyRange(after, one.through),
                limit=limit,
            )
        )

    async def _settled(self, candidates: dict[str, "_Pair"]) -> tuple[list[KeyDifference], int]:
        """Those of the keys that differ for good, and the number of those that kept changing."""
        settled, same_looks = dict[str, _Pair](), Counter[str]()
        for _ in range(_ROUNDS):
            if not candidates:
                break
            await self._catch_up()
            now = await self._pairs(candidates)
            for key, pair in now.items():
                same_looks[key] = same_looks[key] + 1 if pair == candidates[key] else 0
            settled |= {key: now[key] for key in now if same_looks[key] == _SAME_LOOKS}
            candidates = {
                key: pair
                for key, pair in now.items()
                if pair.here != pair.there and key not in settled
            }
        return [pair.difference(key) for key, pair in settled.items()], len(candidates)

    async def _pairs(self, keys: Iterable[str]) -> dict[str, "_Pair"]:
        """What both have of these keys now."""
        pairs = dict[str, _Pair]()
        for some in _batches(list(keys), _KEYS_AT_ONCE):
            asked = RecordsRequest(table=self.table.name, columns=self.columns, keys=list(some))
            ours, theirs = (
                {record.key: record.digest for record in side}
                for side in await asyncio.gather(
                    self.here.records(asked), self.there.records(asked)
                )
            )
            pairs |= {key: _Pair(ours.get(key), theirs.get(key)) for key in some}
        return pairs


@dataclass(frozen=True, slots=True)
class _Pair:
    """The hashes of a record on both nodes; None where there is none."""

    here: str | None
    there: str | None

    def difference(self, key: str) -> KeyDifference:
        if self.here is None:
            return KeyDifference(key, "missing_here")
        return KeyDifference(key, "missing_there" if self.there is None else "different")


def _batches(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
