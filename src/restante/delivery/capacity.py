"""
What the whole server may hold.

One counter for all workspaces would be a row that every commit fights for.  So the sum is read at
most once a second, and each process adds to it what it has accepted since: on its own it never
holds too much; several processes together may overshoot by what they accept in one second.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from restante.database.pool import Database
from restante.delivery import quota_store as quotas
from restante.delivery import quotas as rules
from restante.delivery.quotas import Quota, Usage

_FRESH_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class Claim:
    """An upload on its way in."""

    capacity: "Capacity"
    bytes: int
    files: int
    reserved_bytes: int = 0  # of these, what the database counts as well
    reserved_files: int = 0

    async def grow_to(self, files: int) -> None:
        """Hold room for so many files; raises ServerFull if there is none."""
        if files > self.files:
            await self.capacity.check(0, files - self.files)
            self.files = files

    def is_reserved(self) -> None:
        """From now on the database counts it too."""
        self.reserved_bytes, self.reserved_files = self.bytes, self.files


class Capacity:
    """Counts what is on its way in, on top of what the database has."""

    def __init__(self, db: Database, quota: Quota) -> None:
        self._db = db
        self._quota = quota
        self._claims: list[Claim] = []
        self._read = Usage(0, 0)
        self._stored_since = Usage(0, 0)
        self._read_at = -_FRESH_SECONDS
        self._reading = asyncio.Lock()

    @asynccontextmanager
    async def claimed(self, extra_bytes: int, extra_files: int) -> AsyncIterator[Claim]:
        """Hold room while an upload arrives; raises ServerFull if there is none."""
        await self.check(extra_bytes, extra_files)
        claim = Claim(self, extra_bytes, extra_files)
        self._claims.append(claim)
        try:
            yield claim
        finally:
            self._claims.remove(claim)

    async def check(self, extra_bytes: int, extra_files: int) -> None:
        """Raise ServerFull unless there is room for that much more."""
        await self._refresh()
        if not rules.fits(
            self._usage(), extra_bytes=extra_bytes, extra_files=extra_files, quota=self._quota
        ):
            await self._refuse()

    def stored(self, total_bytes: int, files: int) -> None:
        """Count what was committed since the sum was read."""
        self._stored_since = Usage(
            self._stored_since.waiting_bytes + total_bytes,
            self._stored_since.waiting_files + files,
        )

    async def _refresh(self) -> None:
        """
        Read the sum if it is old; nobody decides by the old one meanwhile.

        What is committed while it is read may be in it, and is counted on top all the same: twice
        for a second is the safe side.
        """
        async with self._reading:
            now = time.monotonic()
            if now - self._read_at < _FRESH_SECONDS:
                return
            self._stored_since = Usage(0, 0)
            async with self._db.connection() as connection:
                self._read = await quotas.usage_of_server(connection)
            self._read_at = now

    def _usage(self) -> Usage:
        others_bytes = self._read.reserved_bytes - sum(one.reserved_bytes for one in self._claims)
        others_files = self._read.reserved_files - sum(one.reserved_files for one in self._claims)
        return Usage(
            self._read.waiting_bytes + self._stored_since.waiting_bytes,
            self._read.waiting_files + self._stored_since.waiting_files,
            max(others_bytes, 0) + sum(claim.bytes for claim in self._claims),
            max(others_files, 0) + sum(claim.files for claim in self._claims),
        )

    async def _refuse(self) -> None:
        async with self._db.connection() as connection:
            frees_at = await quotas.server_frees_at(connection)
        raise rules.server_full(self._usage(), self._quota, frees_at, now=datetime.now(UTC))
