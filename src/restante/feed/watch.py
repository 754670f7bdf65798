"""
Follows a feed, one batch of committed rows at a time.

A watch keeps a position and nothing else: no rows are queued for it, and it holds no connection
while it waits.  A slow watcher finds its rows in the table when it is ready for them.
"""

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

from restante import wire
from restante.errors import CursorGone
from restante.feed.batches import Batches, WatchPolicy
from restante.feed.row_events import RowEvent, WatchedEvent
from restante.feed.service import Feed
from restante.ids import ActivityId, WorkspaceId

Check = Callable[[], Awaitable[object]]


class Watch:
    """A position in a feed that moves forward."""

    def __init__(
        self,
        feed: Feed,
        workspace_id: WorkspaceId,
        batches: Batches,
        check: Check,
        *,
        trust_seconds: float,
    ) -> None:
        self._feed = feed
        self._workspace_id = workspace_id
        self.batches = batches
        self._check = check
        self._trust_seconds = trust_seconds
        self._checked_at = time.monotonic()
        self._seq = 0
        self._behind = False  # there may be rows without a wake-up
        self.last_id: ActivityId | None = None  # where it began; None: before the first row

    async def begin_after(self, row: ActivityId) -> None:
        """Begin with the row after this one; raises CursorGone."""
        try:
            self._seq = await self._feed.seq_of(self._workspace_id, row)
        except CursorGone as error:
            raise CursorGone(
                "last_event_id is not a row of this feed, or no longer; "
                "omit last_event_id to start from now.",
                **error.facts,
            ) from error
        self._behind, self.last_id = True, row

    async def begin_now(self) -> None:
        """Begin with the first row that is not there yet."""
        self._seq, self.last_id = await self._feed.newest(self._workspace_id)

    def id_after(self, event: wire.Event) -> str:
        """What to resume after, once this event was received."""
        return str(event.payload.id)

    async def batch(self) -> Sequence[WatchedEvent] | None:
        """
        Wait for the next rows; empty after a quiet while, None when the server stops.

        Raises what the check raises when the watcher loses its permission, and CursorGone when
        rows were trimmed before they could be sent.
        """
        return await self.batches.next(
            self._look_if_permitted, lambda: 0.0 if self._behind else math.inf
        )

    async def _look_if_permitted(self) -> Sequence[RowEvent]:
        is_trusted = time.monotonic() - self._checked_at < self._trust_seconds
        waiter = self.batches.waiter
        if waiter.must_check or not is_trusted:
            waiter.must_check, self._checked_at = False, -math.inf
            await self._check()
            self._checked_at = time.monotonic()
        return await self._look()

    async def _look(self) -> Sequence[RowEvent]:
        batch = await self.batches.read(self._workspace_id, self._seq)
        self._behind = batch.page.has_more
        self._seq = batch.page.read_seq
        return batch.events


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
    async with (
        feed.wakeups.waiting(workspace_id, is_watcher=True) as waiter,
        aclosing(Batches(feed, waiter, policy)) as batches,
    ):
        watch = Watch(feed, workspace_id, batches, check, trust_seconds=policy.trust_seconds)
        if after is None:
            await watch.begin_now()
        else:
            await watch.begin_after(after)
        yield watch
