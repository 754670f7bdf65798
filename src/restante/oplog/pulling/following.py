"""
Follows the log of one peer: asks for a page, applies it, and moves the cursor with it.

Our own nodes are asked by position, and wait for news themselves.  Peers of the older protocol are
asked by ULID every few seconds.  What fails is tried again, later and later.

Snapshots come before the log.  A table whose snapshot fails again and again does not hold up the
others: the log is read on for them, and ops of that table are left out.  Nothing is missed by that.
A snapshot that begins later has them; one that has begun puts the cursor back to its start when it
is complete.  In the same way the other tables are read on when one has a gap: its snapshot begins
after that, so the cursor need not jump over what they lack.  Meanwhile the peer is told the cursor
from before: it judges our older ops by whether we have read all that it has dropped.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import msgspec
import structlog

from restante.database.pool import Connection, Database
from restante.errors import BadRequest, PeerUnreachable, RestanteError
from restante.oplog import cursors, peers, positions, tables, translate, ulids
from restante.oplog.applying.apply import CursorMoved, PageResult, Source, apply_page
from restante.oplog.callbacks import Callbacks
from restante.oplog.cursors import Cursor
from restante.oplog.peers import Peer
from restante.oplog.pulling import joining, notes
from restante.oplog.pulling.state import Pace, State
from restante.oplog.remote import Ask, Page, Remote
from restante.oplog.rules import Channel
from restante.oplog.serving import log as oplog
from restante.oplog.snapshots import progress
from restante.oplog.snapshots.taking import TableFailed, Taker
from restante.oplog.tables import TrackedTable
from restante.wire.oplog import Op

log = structlog.get_logger()

# A page of the older protocol has this many ops at most; a full one is followed by another.
_FULL_PAGE = 10_000
# A peer that answers at once with nothing is not asked again at once.
_LEAST_SECONDS = 0.2

# What stops a page ends sooner than a failure of the peer.
_LONGEST_STOP_SECONDS = 3.0

# Limits may make a pause long, and somebody may change them meanwhile.
_LONGEST_SLEEP_SECONDS = 60.0
# How many ops to ask for while nobody knows how large they are.
_FEW_OPS = 100

_UNEXPECTED = "Something unexpected happened; the log of this node has it."
_STOPPED = {
    "wait": "It must take its snapshot of this node before its older ops can be judged.",
    "busy": "Records of its ops are locked here.",
    "parked_full": "There is no room for more parked ops; retry or discard some of them.",
}


class Stopped(Exception):
    """The rest of a page cannot be applied yet."""


@dataclass(frozen=True, slots=True)
class Follower:
    """Follows peers; each call of `follow` is about one."""

    db: Database
    remote: Remote
    taker: Taker
    pace: Pace
    clock: Callable[[], datetime]
    callbacks: Callbacks = field(default_factory=Callbacks)

    async def follow(self, host: str) -> None:
        """Pull from a peer until it is removed."""
        state = State()
        while True:
            async with self.db.connection() as connection:
                peer = await peers.find(connection, host)
            if peer is None:
                return
            pause_seconds = await self._tried(peer, state)
            await self._sleep(host, pause_seconds * random.uniform(0.8, 1.2))  # noqa: S311 - jitter

    async def _sleep(self, host: str, seconds: float) -> None:
        """A long pause ends when the peer is removed, or its limits are."""
        while seconds > _LONGEST_SLEEP_SECONDS:
            await asyncio.sleep(_LONGEST_SLEEP_SECONDS)
            seconds -= _LONGEST_SLEEP_SECONDS
            async with self.db.connection() as connection:
                peer = await peers.find(connection, host)
            if peer is None or not (peer.max_ops_per_minute or peer.max_bytes_per_minute):
                return
        await asyncio.sleep(seconds)

    async def _tried(self, peer: Peer, state: State) -> float:
        """Do the next thing; returns how long to pause."""
        longest_seconds = self.pace.max_backoff_seconds
        try:
            pause_seconds = await self.advance(peer, state)
        except CursorMoved:
            return self.pace.first_backoff_seconds
        except Stopped as error:
            longest_seconds = _LONGEST_STOP_SECONDS
            await self._note_failure(peer, str(error))
        except RestanteError as error:
            if seconds := error.facts.get("retry_after_seconds"):
                # It only has no time for us now.  Not sooner than it says, so beyond the jitter.
                return 1.25 * float(seconds)
            await self._note_failure(peer, str(error))
        except Exception:
            log.exception("pull_failed", peer=peer.host)
            await self._note_failure(peer, _UNEXPECTED)
        else:
            state.failures = 0
            return pause_seconds
        state.failures, state.has_answered = state.failures + 1, False
        longest = self.pace.first_backoff_seconds * 2 ** min(state.failures - 1, 20)
        return min(longest, longest_seconds)

    async def advance(self, peer: Peer, state: State) -> float:
        """Take a page of a snapshot, or of the log; returns how long to pause."""
        cursor = cursors.loaded(peer.cursor, now=self.clock())
        if cursor.problem:
            peer = await self._drop_cursor(peer, cursor.problem)
            cursor = Cursor()
        if not state.is_in_gap(asyncio.get_running_loop().time()):
            pause_seconds = await self._take_snapshots(peer, state)
            if pause_seconds is not None:
                return pause_seconds
        async with self.db.connection() as connection:
            known = await tables.all_tables(connection)
            here = [table for table in known if peer.may_see(table.name) and not table.is_missing]
            if await joining.join(connection, peer, cursor, here, now=self.clock()):
                return 0
            ask = await self._ask(connection, peer, cursor, here, state)
        asked_at = asyncio.get_running_loop().time()
        state.asked_at = self.clock()
        try:
            page = await self.remote.page(peer, ask)
        except PeerUnreachable as error:
            if cursor.position is None or error.facts.get("peer_code") != BadRequest.code:
                raise
            await self._drop_cursor(peer, f"The peer refuses the stored cursor: {error}")
            return 0
        pause_seconds = await self._take(peer, cursor, here, page, state)
        state.has_answered = True
        is_at_once = asyncio.get_running_loop().time() - asked_at < _LEAST_SECONDS
        return max(pause_seconds, _LEAST_SECONDS if is_at_once and not page.ops else 0)

    async def _take_snapshots(self, peer: Peer, state: State) -> float | None:
        """
        Go on with the next snapshot; returns how long to pause, or None: the log may be read.

        Raises PeerUnreachable if all of them would fail.
        """
        now = asyncio.get_running_loop().time()
        try:
            table_id = await self.taker.step(peer, state.waiting_tables(now))
        except TableFailed as failed:
            return await self._snapshot_failed(peer, state, failed)
        if table_id is not None:
            state.snapshot_went_on(table_id)
            return 0.0
        async with self.db.connection() as connection:
            pending = await progress.pending_tables(connection, peer)
        again_at = state.next_snapshot_at(pending, is_first=not peer.cursor)
        return None if again_at is None else max(again_at - now, _LEAST_SECONDS)

    async def _snapshot_failed(self, peer: Peer, state: State, failed: TableFailed) -> float:
        if failed.is_unexpected:
            log.error("snapshot_failed", peer=peer.host, table=failed.table, exc_info=failed)
        reason = _UNEXPECTED if failed.is_unexpected else str(failed)
        now = asyncio.get_running_loop().time()
        state.snapshot_failed(failed, reason, self.pace, now)
        await self._note_failure(peer, state.failure or reason)
        return min(_LEAST_SECONDS, self.pace.first_backoff_seconds)

    async def _ask(
        self,
        connection: Connection,
        peer: Peer,
        cursor: Cursor,
        here: Sequence[TrackedTable],
        state: State,
    ) -> Ask:
        head = await oplog.head(connection, await oplog.horizon(connection))
        floor = max((table.floor for table in here), default=ulids.LOWEST)
        after = ""
        if cursor.ulid:
            now = ulids.lowest_at(self.clock())
            after = ulids.text_of(state.resume_after or cursors.overlapping(min(cursor.ulid, now)))
        elif cursor.position and cursor.position.ulid != ulids.LOWEST:
            after = ulids.text_of(cursor.position.ulid)
        return Ask(
            position=str(cursor.position) if cursor.position else "",
            after=after,
            wait_seconds=self._wait_seconds(state) if peer.protocol == "restante" else 0,
            floor=ulids.text_of(floor) if floor != ulids.LOWEST else "",
            head=str(head.position) if head else "",
            limit=None if peer.protocol == "ulid" else _fitting_ops(peer, state),
        )

    def _wait_seconds(self, state: State) -> int:
        """
        How long the peer may wait for news before it answers.

        A snapshot that is wanted does not wait for the end of a long poll, nor does the news that
        the peer can be reached (again).
        """
        if state.gap_since is not None or not state.has_answered:
            return 0
        now = asyncio.get_running_loop().time()
        left = [int(one.again_at - now) for one in state.snapshots.values()]
        return max(min([self.pace.wait_seconds, *left]), 0)

    async def _take(
        self, peer: Peer, cursor: Cursor, here: Sequence[TrackedTable], page: Page, state: State
    ) -> float:
        if page.unreadable:
            log.warning("ops_unreadable", peer=peer.host, ops=page.unreadable)
        if page.is_ours and page.host and page.host == self.taker.own_host:
            raise PeerUnreachable(
                "This address is this node itself: remove it from the peers, nothing is read."
            )
        if page.is_ours:
            pause_seconds = await self._take_ours(peer, cursor, here, page, state)
        elif cursor.position:
            await self._drop_cursor(peer, "The peer no longer speaks our protocol.")
            pause_seconds = 0.0
        else:
            pause_seconds = await self._take_by_ulid(peer, cursor, here, page, state)
        async with self.db.connection() as connection:
            read_at = None if page.is_limited or state.resume_after else state.asked_at
            await notes.pulled(
                connection, peer, page, state.failure, read_all_at=read_at, now=self.clock()
            )
        if page.ops:
            state.bytes_per_op = page.size / len(page.ops)
        return max(pause_seconds, _seconds_of_limits(peer, page))

    async def _take_ours(
        self,
        peer: Peer,
        cursor: Cursor,
        here: Sequence[TrackedTable],
        page: Page,
        state: State,
    ) -> float:
        """
        A page of one of our own nodes, without the ops of tables that need a snapshot.

        At the first contact that is all of them, if one does: then nothing has been read yet.
        """
        gone = [table for table in here if table.name in page.gap_tables]
        new = [table for table in here if table.name in page.new_tables]
        is_first = not peer.cursor
        async with self.db.connection() as connection:
            if gone:
                names = [table.name for table in gone]
                log.warning("gap", peer=peer.host, tables=names, is_first=is_first)
                wanted = here if is_first else gone
                await progress.want(connection, peer, wanted, is_for_gap=True, now=self.clock())
            if gone and is_first:
                return 0.0
            if new:
                log.info("tables_shown", peer=peer.host, tables=[table.name for table in new])
                await progress.want(
                    connection, peer, new, is_for_gap=False, is_new=True, now=self.clock()
                )
            pending = await notes.read_without(connection, peer)
        state.note_gap(asyncio.get_running_loop().time(), has_gap=bool(gone))
        left_out = {table.name for table in here if table.id in pending}
        ops = [op for op in page.ops if op.table not in left_out]
        following = positions.parsed(page.next_position)
        if following is None:
            raise PeerUnreachable("The position after its page is unreadable.")
        if cursor.position and following < cursor.position:
            went_back = f"The peer went back, from {peer.cursor} to {page.next_position}."
            async with self.db.connection() as connection:
                await notes.cursor_problem(connection, peer, went_back, now=self.clock())
        server_cursor = positions.parsed(page.cursor_on_you or "")
        source = Source(peer, Channel.PULL, server_cursor)
        await self._apply(ops, source, str(following))
        return _LEAST_SECONDS if gone and not page.is_limited else 0

    async def _take_by_ulid(
        self, peer: Peer, cursor: Cursor, here: Sequence[TrackedTable], page: Page, state: State
    ) -> float:
        """A page of a peer of the older protocol; what it says of a gap is staged with it."""
        now = self.clock()
        gap = None
        if page.has_gap:
            gap = cursors.honoured_gap(page.available_min_ulid, cursor.ulid, now=now)
        seen = [*(op.ulid for op in page.ops), page.last_scanned_ulid]
        following = cursors.following(cursor.ulid, seen, gap=gap, now=now)
        by_name = {table.name: table for table in here}
        ops = [_translated(op, by_name.get(op.table)) for op in page.ops]
        end = ulids.text_of(following) if following else ""
        await self._apply(ops, Source(peer, Channel.ULID), end)
        if gap:
            async with self.db.connection() as connection:
                await notes.count_gap(connection, peer, gap)
        asked, state.resume_after = state.resume_after, None
        if not page.is_limited and len(page.ops) < _FULL_PAGE:
            return self.pace.pull_seconds
        last = cursors.end_of_page([op.ulid for op in page.ops], page.last_scanned_ulid, now=now)
        if asked is None and cursor.ulid:
            asked = cursors.overlapping(min(cursor.ulid, ulids.lowest_at(now)))
        if last is not None and (asked is None or last > asked):
            state.resume_after = last
            return 0
        if page.is_limited:
            raise PeerUnreachable(
                "It says that its page is not all, but the page ends where it was to begin."
            )
        return self.pace.pull_seconds

    async def _apply(self, ops: Sequence[Op], source: Source, end: str) -> PageResult:
        """Apply a page; raises CursorMoved, and Stopped if the rest has to wait."""
        cursor = source.peer.cursor
        if not ops and end == cursor:
            return PageResult(cursor)
        result = await apply_page(
            self.db,
            ops,
            source,
            expected_cursor=cursor,
            end_cursor=end,
            now=self.clock(),
            callbacks=self.callbacks,
        )
        if result.stopped:
            raise Stopped(_STOPPED.get(result.stopped, result.stopped))
        return result

    async def _drop_cursor(self, peer: Peer, problem: str) -> Peer:
        async with self.db.connection() as connection:
            return await notes.drop_cursor(connection, peer, problem, now=self.clock())

    async def _note_failure(self, peer: Peer, reason: str) -> None:
        try:
            async with self.db.connection() as connection:
                await notes.failed(connection, peer, reason, now=self.clock())
        except RestanteError as error:
            log.warning("pull_failed", peer=peer.host, reason=reason, also=str(error))


def _translated(op: Op, table: TrackedTable | None) -> Op:
    """With our column names; a record that is none is refused later, as it came."""
    if table is None:
        return op
    is_delete = op.action == "delete"
    translated = translate.key_from_peer if is_delete else translate.record_from_peer
    data = list(op.data)
    for n, record in enumerate(op.data):
        try:
            data[n] = translated(record, table.columns, table.key_columns, table.key_map)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return msgspec.structs.replace(op, data=data)


def _fitting_ops(peer: Peer, state: State) -> int | None:
    """How many ops the peer's limits allow for in a minute."""
    limits = [peer.max_ops_per_minute] if peer.max_ops_per_minute else []
    if peer.max_bytes_per_minute:
        size = state.bytes_per_op
        limits.append(int(peer.max_bytes_per_minute / size) if size else _FEW_OPS)
    return max(min(limits), 1) if limits else None


def _seconds_of_limits(peer: Peer, page: Page) -> float:
    """How long the page lasts, at the rates that the peer is limited to."""
    ops = 60 * len(page.ops) / peer.max_ops_per_minute if peer.max_ops_per_minute else 0.0
    size = 60 * page.size / peer.max_bytes_per_minute if peer.max_bytes_per_minute else 0.0
    return max(ops, size)
