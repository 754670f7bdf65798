"""
Applies the ops of a page, in transactions that move the peer's cursor with them.

A page is cut into pieces of a bounded size.  If a piece fails because of a record, it is halved
until that record is alone, and then it is parked and the rest goes on.  Nothing of a page is
applied unless the cursor still stands where the page was asked for.  An op that is larger than a
piece takes several transactions, and only the last one moves the cursor over it: after a crash its
first parts are judged again, and found to be known.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import groupby

import structlog

from restante.database import driver_errors, sql
from restante.database.pool import SCHEMA, Database, Tx
from restante.errors import StatementTimedOut, TableBusy
from restante.oplog import ulids
from restante.oplog.applying import parking, pieces
from restante.oplog.applying.boundary import Refusal
from restante.oplog.applying.incoming import Met, Source
from restante.oplog.applying.merge import Merged, MustWait, merge
from restante.oplog.applying.parking import Parked, ParkedFull
from restante.oplog.applying.pieces import ACTION_NAMES, Page, Piece
from restante.oplog.applying.records import KeysTaken
from restante.oplog.callbacks import AppliedOp, Callbacks
from restante.oplog.peers import Peer
from restante.oplog.rules import Channel, Verdict
from restante.wire.oplog import Op

__all__ = ["CursorMoved", "PageResult", "Source", "apply_page", "apply_pushed"]

log = structlog.get_logger()

queries = sql.load("restante.oplog.applying", "apply")

# Since the process began, by reason: for its metrics.
refused_so_far = Counter[str]()

# How often a piece is tried again because a record appeared meanwhile.
_TRIES = 3
# A piece of this size is not halved to find the record that somebody has locked.
_SMALL_PIECE = 50

_SENTENCES = {
    Verdict.PARK_FUTURE: "Its time is more than five minutes ahead: the clock of {host} is wrong.",
    Verdict.PARK_FLOOR: "It is older than what this node has dropped from its log, and {peer} "
    "cannot tell whether it still holds.",
}


@dataclass(slots=True)
class PageResult:
    """What became of a page; numbers are records."""

    cursor: str
    applied: int = 0
    superseded: int = 0
    conflicts: int = 0
    parked_by: Counter[str] = field(default_factory=Counter[str])  # reason
    refused_by: Counter[str] = field(default_factory=Counter[str])
    # "wait", "busy", "parked_full", or a sentence: the rest must be tried again.
    stopped: str | None = None

    @property
    def parked(self) -> int:
        return self.parked_by.total()

    @property
    def refused(self) -> int:
        return self.refused_by.total()


class CursorMoved(Exception):
    """The cursor no longer stands where the page was asked for, or the peer was removed."""


class RecordFault(Exception):
    """Postgres refuses a record of this piece."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


async def apply_page(  # noqa: PLR0913 - what a page is, and where it stands
    db: Database,
    ops: Sequence[Op],
    source: Source,
    *,
    expected_cursor: str,
    end_cursor: str,
    now: datetime,
    callbacks: Callbacks | None = None,
) -> PageResult:
    """
    Apply the ops, and move the cursor to the end of the page if all could be judged.

    Raises CursorMoved; what was applied before it is committed.
    """
    async with db.connection() as connection:
        page = await pieces.read(connection, ops, source, now)
    applier = _Applier(db, page, callbacks or Callbacks(), PageResult(expected_cursor))
    async for piece in _prepared(page, end_cursor):
        await applier.apply(piece)
        if applier.result.stopped:
            break
    applier.stop_at_end()
    return applier.result


async def _prepared(page: Page, end_cursor: str) -> AsyncGenerator[Piece]:
    """The pieces of a page; in a large one each is made in a thread while the last is applied."""
    made = page.pieces(end_cursor)
    if page.is_small:
        for piece in made:
            yield piece
        return
    following = asyncio.ensure_future(asyncio.to_thread(next, made, None))
    try:
        while piece := await following:
            following = asyncio.ensure_future(asyncio.to_thread(next, made, None))
            yield piece
    finally:
        await asyncio.wait({following})


async def apply_pushed(
    db: Database, op: Op, peer: Peer, *, now: datetime, callbacks: Callbacks | None = None
) -> PageResult:
    """Apply one op that a peer has pushed, in its own name; the cursor does not move."""
    source = Source(peer, Channel.PUSH)
    async with db.connection() as connection:
        page = await pieces.read(connection, [op], source, now)
    applier = _Applier(db, page, callbacks or Callbacks(), PageResult(peer.cursor))
    for piece in page.pieces(None):
        await applier.apply(piece)
    applier.stop_at_end()
    return applier.result


@dataclass(slots=True)
class _Applier:
    """Applies pieces one after the other, and adds up what became of them."""

    db: Database
    page: Page
    callbacks: Callbacks
    result: PageResult

    async def apply(self, piece: Piece) -> None:
        """Apply a piece, in parts if it must be; sets `result.stopped` if the rest has to wait."""
        todo = [piece]
        try:
            while todo:
                todo += await self._rest_of(todo.pop(), todo)
        except ParkedFull:
            self._stop("parked_full")

    def stop_at_end(self) -> None:
        """Once all pieces are applied: the ops after them may have to wait."""
        if self.page.no_room and not self.result.stopped:
            self.result.stopped = self.page.no_room
            host = self.page.source.peer.host
            log.warning("ops_wait", peer=host, why="too_many_hosts", reason=self.page.no_room)

    async def _rest_of(self, piece: Piece, todo: list[Piece]) -> list[Piece]:
        """Apply a piece; returns the parts of it that are still to be done, the first one last."""
        try:
            await self._apply_again(piece)
        except MustWait as found:
            self._stop("wait")
            todo.clear()
            return [self.page.before(piece, found.index)]
        except RecordFault as fault:
            return await self._isolated(piece, fault)
        except (TableBusy, StatementTimedOut) as error:
            if len(piece.records) > _SMALL_PIECE:
                return [*reversed(self.page.halves(piece))]
            self._stop("busy", reason=str(error))
            todo.clear()
        return []

    def _stop(self, why: str, **facts: str) -> None:
        self.result.stopped = why
        log.warning("ops_wait", peer=self.page.source.peer.host, why=why, **facts)

    async def _apply_again(self, piece: Piece) -> None:
        for tried in range(_TRIES):
            try:
                return await self._commit(piece, may_be_new=tried == 0)
            except KeysTaken:
                continue
        raise RecordFault("other", "A trigger or a rule of the table keeps the record out of it.")

    async def _commit(self, piece: Piece, *, may_be_new: bool) -> None:
        """One transaction."""
        async with self.db.transaction() as tx:
            merged = await merged_or_fault(tx, piece, self.page, may_be_new=may_be_new)
            parked = [self._to_park(*one) for one in merged.parked]
            await parking.park(tx, self.page.source.peer.id, parked, now=self._now)
            counts = _Counts(piece, merged, parked)
            await self._finish(tx, counts)
        self._add_up(counts)

    async def _isolated(self, piece: Piece, fault: RecordFault) -> list[Piece]:
        """What is left to do about a piece that failed: its halves, or nothing."""
        if len(piece.records) > 1:
            return [*reversed(self.page.halves(piece))]
        try:
            async with self.db.transaction() as tx:
                parked = await parking.with_keys(tx, piece.records, fault.reason, str(fault))
                await parking.park(tx, self.page.source.peer.id, parked, now=self._now)
                counts = _Counts(piece, Merged(), parked)
                await self._finish(tx, counts)
        except driver_errors.BAD_VALUE:  # not even as JSON
            piece.refused[Refusal.DATA] += 1
            return [replace(piece, records=[])]
        self._add_up(counts)
        return []

    def _to_park(self, met: Met, verdict: Verdict) -> Parked:
        peer, host = self.page.source.peer.host, met.version.origin
        sentence = _SENTENCES[verdict].format(host=host, peer=peer)
        return Parked(met.record, met.fact.key, met.fact.key_hash, verdict, sentence)

    @property
    def _now(self) -> datetime:
        return self.page.context.now

    async def _finish(self, tx: Tx, counts: "_Counts") -> None:
        """Move the cursor and count; raises CursorMoved."""
        peer = self.page.source.peer
        if refused := counts.refused:
            await tx.execute(queries.count_refused, peer.id, list(refused), [*refused.values()])
        if self.page.source.channel is Channel.PUSH:
            await tx.execute(queries.count, peer.id, *counts.numbers)
            return
        cursor = self._cursor_after(counts.piece)
        arguments = (peer.id, self.result.cursor, cursor, self._now, *counts.numbers)
        if not await tx.fetchval(queries.move_cursor, *arguments):
            raise CursorMoved

    def _cursor_after(self, piece: Piece) -> str:
        """Within a page it never goes back: pages of the older protocol overlap."""
        if piece.cursor is None:
            return self.result.cursor
        return piece.cursor if piece.is_last else max(piece.cursor, self.result.cursor)

    def _add_up(self, counts: "_Counts") -> None:
        """After the commit."""
        result, piece, merged = self.result, counts.piece, counts.merged
        if self.page.source.channel is not Channel.PUSH:
            result.cursor = self._cursor_after(piece)
        result.applied += len(merged.applied)
        result.superseded += merged.superseded
        result.conflicts += merged.conflicts
        refused = counts.refused
        result.refused_by += refused
        refused_so_far.update(refused)
        if refused:
            log.warning("ops_refused", peer=self.page.source.peer.host, records=dict(refused))
        result.parked_by.update(one.reason for one in counts.parked)
        self._call_back(piece, merged)

    def _call_back(self, piece: Piece, merged: Merged) -> None:
        for op in piece.transient:
            texts = tuple(bytes(record).decode(errors="replace") for record in op.data)
            self.callbacks.put(
                AppliedOp(op.table, op.action, texts, op.ulid, op.host, transient=True)
            )
        wanted = [one for one in merged.applied if self.callbacks.wants(one.table.name)]
        for head, some in groupby(wanted, key=lambda one: one.head):
            found = list(some)
            self.callbacks.put(
                AppliedOp(
                    found[0].table.name,
                    ACTION_NAMES[head.action],
                    tuple(one.data for one in found),
                    ulids.text_of(head.version.ulid),
                    head.version.origin,
                )
            )


@dataclass(frozen=True, slots=True)
class _Counts:
    """What one transaction did."""

    piece: Piece
    merged: Merged
    parked: Sequence[Parked]

    @property
    def refused(self) -> Counter[str]:
        return self.piece.refused + Counter({Refusal.OWN_NAME: self.merged.refused})

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        return (
            len(self.merged.applied),
            self.merged.superseded,
            len(self.parked),
            self.refused.total(),
            self.merged.conflicts,
        )


async def merged_or_fault(tx: Tx, piece: Piece, page: Page, *, may_be_new: bool = False) -> Merged:
    """Merge the records of a piece; raises RecordFault if Postgres refuses one of them."""
    if not piece.records:
        return Merged()
    try:
        return await merge(tx, piece.records, page.context, may_be_new=may_be_new)
    except driver_errors.FROM_THE_DRIVER as error:
        reason = driver_errors.record_fault(error, own_schema=SCHEMA)
        if reason is None:
            raise
        if may_be_new and reason == "unique":
            raise KeysTaken from error
        raise RecordFault(reason, driver_errors.full_reason(error)) from error
