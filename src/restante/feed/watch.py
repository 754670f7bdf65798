"""
Follows a feed, one batch of committed rows at a time.

A watch keeps a position and nothing else: no rows are queued for it, and it holds no connection
while it waits.  A slow watcher finds its rows in the table when it is ready for them.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass

from restante import wire
from restante.errors import CursorGone, DatabaseUnavailable, StatementTimedOut, TooManyAtOnce
from restante.feed.rules import SMALL_ANSWER_BYTES, Query
from restante.feed.service import Feed
from restante.feed.wakeups import Waiter
from restante.ids import ActivityId, WorkspaceId

_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class WatchPolicy:
    """How watchers are served; one for the whole server."""

    # Proxies close connections that are silent for half a minute or a minute.
    heartbeat_seconds: float = 15.0
    # How long a permission is trusted before it is checked again.
    trust_seconds: float = 1.0
    page_rows: int = 100
    # A page stays in memory while it is sent; it has at least one row.
    page_bytes: int = 1024 * 1024
    # A watcher that does not read one event in this time is disconnected; it can resume later.  A
    # large event takes longer, or whoever is slow would be disconnected by it again and again.
    send_seconds: float = 10.0
    bytes_per_second: float = 64 * 1024


Check = Callable[[], Awaitable[object]]


class Watch:
    """A position in a feed that moves forward."""

    def __init__(
        self,
        feed: Feed,
        workspace_id: WorkspaceId,
        waiter: Waiter,
        check: Check,
        policy: WatchPolicy,
    ) -> None:
        self._feed = feed
        self._workspace_id = workspace_id
        self._waiter = waiter
        self._check = check
        self._policy = policy
        self._checked_at = time.monotonic()
        self._seq = 0
        self._place = ExitStack()  # taken while rows that are large are being sent
        self._ready: Sequence[wire.ActivityRow] = ()  # read before the watch began
        self._behind = False  # there may be rows without a wake-up
        self.last_id: ActivityId | None = None  # where it began; None: before the first row

    async def begin_after(self, row: ActivityId) -> None:
        """Begin with the row after this one; raises CursorGone."""
        try:
            self._seq = await self._feed.seq_of(self._workspace_id, row)
            self._ready = await self._look()
        except CursorGone as error:
            raise CursorGone(
                "last_event_id is not a row of this feed, or no longer; "
                "omit last_event_id to start from now.",
                **error.facts,
            ) from error
        self.last_id = row

    async def begin_now(self) -> None:
        """Begin with the first row that is not there yet."""
        page = await self._feed.read(self._workspace_id, Query(limit=1))
        # Without a row to begin after, every row that is not trimmed is newer.
        self._seq = page.marks.trimmed_seq
        for newest in page.rows:
            self._seq, self.last_id = newest.seq, ActivityId(newest.id)

    async def batch(self) -> Sequence[wire.ActivityRow] | None:
        """
        Wait for the next rows; empty after a quiet while, None when the server stops.

        Raises what the check raises when the watcher loses its permission, and CursorGone when
        rows were trimmed before they could be sent.  An unavailable database is waited for, and so
        is a place for large rows.
        """
        if self._ready:
            rows, self._ready = self._ready, ()
            return rows
        self.close()
        quiet_until = time.monotonic() + self._policy.heartbeat_seconds
        while True:
            if not self._behind:
                await self._waiter.wait(max(0.0, quiet_until - time.monotonic()))
            if self._feed.wakeups.stopping:
                return None
            rows = await self._look_or_retry()
            if rows or time.monotonic() >= quiet_until:
                return rows

    def close(self) -> None:
        """Give the place of the last rows back: they are sent, or the watcher has gone."""
        self._place.close()

    async def _look_or_retry(self) -> Sequence[wire.ActivityRow]:
        try:
            if time.monotonic() - self._checked_at >= self._policy.trust_seconds:
                await self._check()
                self._checked_at = time.monotonic()
            return await self._look()
        except (DatabaseUnavailable, StatementTimedOut, TooManyAtOnce):
            self._behind = True
            await self._waiter.wait(_RETRY_SECONDS)
            return ()

    async def _look(self) -> Sequence[wire.ActivityRow]:
        query = Query(
            since_seq=self._seq,
            limit=self._policy.page_rows,
            max_bytes=self._policy.page_bytes,
        )
        page = await self._feed.read(self._workspace_id, query)
        if page.body_bytes > SMALL_ANSWER_BYTES:
            place = self._feed.large_events.place(self._workspace_id, page.body_bytes)
            self._place.enter_context(place)
        self._behind = page.has_more
        self._seq = page.read_seq
        return page.rows


@asynccontextmanager
async def watching(
    feed: Feed,
    workspace_id: WorkspaceId,
    *,
    after: ActivityId | None,
    check: Check,
    policy: WatchPolicy,
) -> AsyncIterator[Watch]:
    """
    Watch a feed after a row, or from now on.

    `check` raises when the watcher loses its permission.  Raises TooManyAtOnce and CursorGone.
    """
    # The waiter is registered before the first look, so that no row falls in between.
    async with feed.wakeups.waiting(workspace_id, is_watcher=True) as waiter:
        with closing(Watch(feed, workspace_id, waiter, check, policy)) as watch:
            if after is None:
                await watch.begin_now()
            else:
                await watch.begin_after(after)
            yield watch
