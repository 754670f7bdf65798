"""
How much all feeds together may hold; messages are refused beyond that.

One counter for all feeds would be a row that every commit locks.  So the sum over all feeds is read
now and then, and each process adds what it has appended since.  Alone it never exceeds the limit;
several together may by what they append between two reads.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from restante.database import shares
from restante.database.pool import Database
from restante.feed import rules, store
from restante.retention.disk import Disk

_FRESH_SECONDS = 1.0


class TotalLimit:
    """What the feeds of all workspaces may hold: as chosen, or a part of the disk."""

    def __init__(self, chosen: int | None = None, disk: Disk | None = None) -> None:
        self._chosen = chosen
        self._disk = disk

    @property
    def max_bytes(self) -> int:
        room = self._disk.room if self._disk else None
        return rules.max_total_bytes(self._chosen, disk_bytes=room.total if room else None)

    def is_nearly_reached(self, total_bytes: int) -> bool:
        """Whether rows that nobody needs any more are deleted early."""
        return rules.is_nearly_full(total_bytes, self.max_bytes)

    def is_space_short(self, total_bytes: int) -> bool:
        """Whether partitions that nobody needs any more are dropped early."""
        return self.is_nearly_reached(total_bytes) or (self._disk is not None and self._disk.is_low)


class FeedTotal:
    """What all feeds hold, as this process knows it."""

    def __init__(self, db: Database, limit: TotalLimit) -> None:
        self.fresh_seconds = _FRESH_SECONDS
        self._db = db
        self._limit = limit
        self._reading = asyncio.Lock()
        self._read_at = -math.inf
        self._bytes = 0
        self._appended_since = 0
        self._being_appended = 0

    @asynccontextmanager
    async def adding(self, size: int) -> AsyncIterator[None]:
        """Append so many bytes inside; raises ServerFull if there is no room for them."""
        await self._read()
        known = self._bytes + self._appended_since + self._being_appended
        if known + size > self._limit.max_bytes:
            raise rules.server_full()
        self._being_appended += size
        try:
            yield
        finally:
            # Also if it failed: whether it was committed may be unknown.
            self._being_appended -= size
            self._appended_since += size

    async def _read(self) -> None:
        """Read the sum unless it is fresh; a caller that comes meanwhile waits for it."""
        async with self._reading:
            if time.monotonic() - self._read_at < self.fresh_seconds:
                return
            # What commits during the read may count twice for a second, never not at all.
            self._appended_since = 0
            with shares.for_the_server():
                async with self._db.connection() as connection:
                    self._bytes = await store.total_bytes(connection)
            self._read_at = time.monotonic()
