"""
Follows all feeds at once, for the operator.

Nothing here is kept for a workspace that is quiet.  Wake-ups say which feeds grew; each of them is
read from its position on, a page at a time.  A feed without a position is read from the horizon on:
its rows from transactions below the horizon were sent, or are from before the watch began.

A search finds what no wake-up has announced.  It is made when it is not known what was missed, and
once in a while, because a server can die between a commit and its notification.  It also moves the
horizon forward, and drops the positions of feeds that have been quiet since the last one (decision
25).
"""

import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime, timedelta

from restante import wire
from restante.database.pool import Connection, Database
from restante.errors import BadRequest, CursorGone, TooManyAtOnce
from restante.feed import horizon as horizons
from restante.feed.batches import Batches, WatchPolicy
from restante.feed.horizon import Horizon
from restante.feed.row_events import RowEvent, WatchedEvent
from restante.feed.service import Feed
from restante.feed.wakeups import WaiterForAll
from restante.ids import WorkspaceId

# A search that takes long is made less often.
_PAUSES_PER_SEARCH = 9
_FEEDS_PER_LOOK = 1000
# A watcher that comes back later would be sent too much again.
_LONGEST_BREAK = timedelta(hours=1)
_EVENT_ID = re.compile(r"(\d{1,14})-(\d{1,19})", re.ASCII)


def event_id(horizon: Horizon) -> str:
    """The id of an event when all rows below this horizon were sent before it."""
    return f"{int(horizon.at.timestamp() * 1000)}-{horizon.xid}"


def horizon_of(sent: str) -> Horizon:
    """The horizon in the id of an event; raises BadRequest."""
    found = _EVENT_ID.fullmatch(sent)
    if not found:
        raise BadRequest(
            "last_event_id is wrong: over all workspaces it must be an id that this stream has "
            "sent; the id of a row says nothing about the others."
        )
    milliseconds, xid = map(int, found.groups())
    return Horizon(xid, datetime.fromtimestamp(milliseconds / 1000, UTC))


class WatchAll:
    """Positions in the feeds that were active of late."""

    def __init__(
        self, feed: Feed, db: Database, waiter: WaiterForAll, batches: Batches, policy: WatchPolicy
    ) -> None:
        self._feed = feed
        self._db = db
        self._waiter = waiter
        self.batches = batches
        self._policy = policy
        self._positions: dict[WorkspaceId, int] = {}
        self._search_at = 0.0
        # Up to which seq the feeds must be read that searches have found: all of them, and those
        # that keep the id to resume after from moving on to `_next_resume`.
        self._unread: dict[WorkspaceId, int] = {}
        self._due: dict[WorkspaceId, int] = {}

    async def begin_now(self) -> None:
        """Begin with the first rows that are not there yet."""
        async with self._db.connection() as connection:
            self._horizon = await horizons.current(connection)
            # A transaction that is not below the horizon may have ended all the same.
            changed = await self._changed(connection)
        if changed is None:
            raise TooManyAtOnce(self._too_many)
        self._positions = changed
        self._resumes_at = self._next_resume = self._horizon
        self._search_at = time.monotonic() + self._policy.search_seconds

    async def begin_after(self, horizon: Horizon) -> None:
        """Begin with what is not below a horizon; raises CursorGone."""
        async with self._db.connection() as connection:
            current = await horizons.current(connection)
        if current.xid < horizon.xid or abs(current.at - horizon.at) > _LONGEST_BREAK:
            raise CursorGone(
                "last_event_id is too old, or from before the database was restored; "
                "omit last_event_id to start from now."
            )
        self._horizon = self._resumes_at = self._next_resume = horizon

    @property
    def last_id(self) -> str:
        """A watcher that resumes after this id misses nothing."""
        return event_id(self._resumes_at)

    def id_after(self, _event: wire.Event) -> str:
        """What to resume after, once this event was received."""
        return self.last_id

    async def batch(self) -> Sequence[WatchedEvent] | None:
        """
        Wait for the next rows of any feed; empty after a quiet while, None when the server stops.

        What has happened to the server itself comes between them, once.

        Raises CursorGone when rows were trimmed before they could be sent, and when more feeds are
        active than positions can be kept for.
        """
        return await self.batches.next(self._look_in_turn, self._due_at)

    def _due_at(self) -> float:
        is_due = self._waiter.news or self._waiter.grown or self._is_search_due
        return 0.0 if is_due else self._search_at

    @property
    def _is_search_due(self) -> bool:
        # A search drops positions; it keeps fewer than this.
        is_full = len(self._positions) > 2 * self._policy.max_positions
        return is_full or self._waiter.must_search or time.monotonic() >= self._search_at

    async def _look_in_turn(self) -> Sequence[WatchedEvent]:
        if self._waiter.news:
            return [self._waiter.news.popleft()]
        async with self._feed.reads_of_all:
            return await self._look()

    async def _look(self) -> Sequence[RowEvent]:
        """The next rows of one feed."""
        if not self._due:  # and what was read of them is sent
            self._resumes_at = self._next_resume
        if self._is_search_due:
            await self._search()
        grown = self._waiter.grown
        if not grown:
            return ()
        workspace_id = next(iter(grown))
        del grown[workspace_id]
        try:
            return await self._read(workspace_id)
        except BaseException:
            grown[workspace_id] = None
            raise

    async def _read(self, workspace_id: WorkspaceId) -> Sequence[RowEvent]:
        seq = self._positions.get(workspace_id)
        if seq is None:
            async with self._db.connection() as connection:
                seen = await horizons.seen_seqs(connection, [workspace_id], self._horizon)
            if workspace_id not in seen:  # the feed is gone
                self._unread.pop(workspace_id, None)
                self._due.pop(workspace_id, None)
                return ()
            seq = seen[workspace_id]
        batch = await self.batches.read(workspace_id, seq)
        self._move_to(workspace_id, batch.page.read_seq)
        if batch.page.has_more:  # after the other feeds
            self._waiter.grown[workspace_id] = None
        return batch.events

    def _move_to(self, workspace_id: WorkspaceId, seq: int) -> None:
        self._positions[workspace_id] = seq
        for goals in (self._unread, self._due):
            if workspace_id in goals and goals[workspace_id] <= seq:
                del goals[workspace_id]

    async def _search(self) -> None:
        """Find the feeds that have grown since the last search."""
        self._waiter.must_search = False
        started = time.monotonic()
        try:
            async with self._db.connection() as connection:
                await self._find_grown(connection)
        except BaseException:
            self._waiter.must_search = True
            raise
        ended = time.monotonic()
        pause = max(self._policy.search_seconds, _PAUSES_PER_SEARCH * (ended - started))
        self._search_at = ended + pause

    async def _find_grown(self, connection: Connection) -> None:
        horizon = await horizons.current(connection)
        if horizon.xid < self._horizon.xid:
            raise CursorGone("The database was restored from a backup; start over.")
        changed = await self._changed(connection)
        if changed is None:
            raise CursorGone(self._too_many)
        seen = await self._seen(connection, changed)
        self._keep(changed, self._positions | seen)
        self._horizon = horizon
        # Goals that were set before stay: feeds may grow faster than they are read.
        if not self._due:
            self._due, self._next_resume = dict(self._unread), horizon

    async def _changed(self, connection: Connection) -> dict[WorkspaceId, int] | None:
        """The newest seqs of the feeds that are not below the horizon; None if too many are not."""
        limit = self._policy.max_positions
        changed = await horizons.changed_since(connection, self._horizon, limit=limit + 1)
        return changed if len(changed) <= limit else None

    @property
    def _too_many(self) -> str:
        return (
            f"More than {self._policy.max_positions} workspaces are active, too many to watch all "
            "of them together; watch single ones."
        )

    async def _seen(
        self, connection: Connection, changed: dict[WorkspaceId, int]
    ) -> dict[WorkspaceId, int]:
        """The positions of those that have none."""
        unknown = [workspace_id for workspace_id in changed if workspace_id not in self._positions]
        seen = dict[WorkspaceId, int]()
        for start in range(0, len(unknown), _FEEDS_PER_LOOK):
            some = unknown[start : start + _FEEDS_PER_LOOK]
            seen |= await horizons.seen_seqs(connection, some, self._horizon)
        return seen

    def _keep(self, changed: dict[WorkspaceId, int], known: dict[WorkspaceId, int]) -> None:
        """Keep the positions of those that have changed, and of those that are still to be read."""
        for workspace_id, last_seq in changed.items():
            if known[workspace_id] < last_seq:
                self._waiter.grown[workspace_id] = None
                self._unread[workspace_id] = last_seq
        kept = changed.keys() | self._waiter.grown.keys()
        self._positions = {one: known[one] for one in kept if one in known}


@asynccontextmanager
async def watching_all(
    feed: Feed, db: Database, *, after: Horizon | None, policy: WatchPolicy
) -> AsyncIterator[WatchAll]:
    """Watch all feeds from a horizon or from now on; raises TooManyAtOnce and CursorGone."""
    # The waiter is registered before the first look, so that no row falls in between.
    with feed.wakeups.waiting_for_all() as waiter:
        async with aclosing(Batches(feed, waiter, policy)) as batches:
            watch = WatchAll(feed, db, waiter, batches, policy)
            async with feed.reads_of_all:
                await (watch.begin_now() if after is None else watch.begin_after(after))
            yield watch
