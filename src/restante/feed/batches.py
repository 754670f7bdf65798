"""
Waits for the next rows of a watcher, whether it follows one feed or all of them.

What the two look at, and when they look without a wake-up, are arguments.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

from restante.errors import DatabaseUnavailable, StatementTimedOut, TooManyAtOnce
from restante.feed.readers import LargeRoom
from restante.feed.row_events import RowEvent, WatchedEvent
from restante.feed.rules import Page, Query
from restante.feed.service import Feed
from restante.feed.wakeups import Waiter
from restante.ids import WorkspaceId


@dataclass(frozen=True, slots=True)
class WatchPolicy:
    """How watchers are served; one for the whole server."""

    # Proxies close connections that are silent for half a minute or a minute.
    heartbeat_seconds: float = 15.0
    # How long a permission is trusted before it is checked again.
    trust_seconds: float = 1.0
    # How long a watcher pauses when the database is unavailable or large rows have no place.
    retry_seconds: float = 1.0
    page_rows: int = 100
    # A page stays in memory while it is sent; it has at least one row.
    page_bytes: int = 1024 * 1024
    # How many times its size a large row takes while it is sent.
    copies: int = 1
    # A watcher that does not read one event in this time is disconnected; it can resume later.  A
    # large event takes longer, or a slow watcher would be disconnected by it again and again.
    send_seconds: float = 10.0
    bytes_per_second: float = 64 * 1024
    # A watcher of all workspaces searches this often for rows that no wake-up has announced.
    search_seconds: float = 60.0
    # And so many of them may be active between two searches; 20,000 positions take 3 MB.
    max_positions: int = 20_000


class TooSlow(Exception):
    """The watcher does not read what it is sent, or not as fast as others need its memory."""


Look: TypeAlias = Callable[[], Awaitable[Sequence[WatchedEvent]]]


@dataclass(frozen=True, slots=True)
class Batch:
    """A page of a feed, and the events of its rows."""

    page: Page
    events: Sequence[RowEvent]


class Batches:
    """The rows of one watcher, as many at a time as it is sent; large ones have a place."""

    def __init__(self, feed: Feed, waiter: Waiter, policy: WatchPolicy) -> None:
        self._feed = feed
        self.waiter = waiter
        self._policy = policy
        self._room = LargeRoom(feed.large_events, copies=policy.copies)
        self._must_look = False  # the last look has failed

    async def next(self, look: Look, due_at: Callable[[], float]) -> Sequence[WatchedEvent] | None:
        """
        Wait for the next rows; empty after a quiet while, None when the server stops.

        From `due_at` on, by the monotonic clock, it looks without a wake-up.  An unavailable
        database is waited for, and so is a place for large rows; `look` may raise anything else.
        """
        await self.aclose()
        quiet_until = time.monotonic() + self._policy.heartbeat_seconds
        while True:
            until = 0.0 if self._must_look else due_at()
            if until > time.monotonic():
                await self.waiter.wait(max(0.0, min(quiet_until, until) - time.monotonic()))
            if self._feed.wakeups.stopping:
                return None
            events = await self._look_or_pause(look)
            if events or time.monotonic() >= quiet_until:
                return events

    async def _look_or_pause(self, look: Look) -> Sequence[WatchedEvent]:
        self._must_look = False
        try:
            return await look()
        except (DatabaseUnavailable, StatementTimedOut, TooManyAtOnce):
            self._must_look = True
            await self.aclose()
            await self._feed.wakeups.pause(self._policy.retry_seconds)
            return ()

    async def read(self, workspace_id: WorkspaceId, after_seq: int) -> Batch:
        """Read the next page of a feed; raises TooManyAtOnce if it is large and has no room."""
        policy = self._policy
        query = Query(since_seq=after_seq, limit=policy.page_rows, max_bytes=policy.page_bytes)
        page = await self._feed.read(workspace_id, query.small)
        if page.left_out:
            page = await self._feed.read_large(workspace_id, query, page.left_out, self._room)
        return Batch(page, await self._feed.events_of(page.rows))

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """
        Read and send all rows in this block; it raises TooSlow when others need the room.
        """
        try:
            async with self._room:
                yield
        except TooManyAtOnce as error:
            raise TooSlow from error

    async def aclose(self) -> None:
        """Give the room of the last rows back: they are sent, or the watcher has gone."""
        await self._room.aclose()
