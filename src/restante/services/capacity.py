"""
What the whole server may hold.

One counter for all workspaces would be a row that every commit fights for.  So the sum is read at
most once a second, and each process adds to it what it has accepted since: on its own it never
holds too much; several processes together may overshoot by what they accept in one second.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from restante.core import quotas as rules
from restante.core.quotas import Quota, Usage
from restante.store import quotas
from restante.store.database import Database

_FRESH_SECONDS = 1.0


@dataclass(slots=True)
class Claim:
    """An upload on its way in."""

    bytes: int
    files: int
    is_reserved: bool = False  # counted by the database as well


class Capacity:
    """Counts what is on its way in, on top of what the database has."""

    def __init__(self, db: Database, quota: Quota) -> None:
        self._db = db
        self._quota = quota
        self._claims: list[Claim] = []
        self._stored = Usage(0, 0)
        self._read_at = -_FRESH_SECONDS

    @asynccontextmanager
    async def claimed(self, extra_bytes: int, extra_files: int) -> AsyncIterator[Claim]:
        """Hold room while an upload arrives; raises ServerFull if there is none."""
        if time.monotonic() - self._read_at >= _FRESH_SECONDS:
            await self._read()
        if not rules.fits(
            self._usage(), extra_bytes=extra_bytes, extra_files=extra_files, quota=self._quota
        ):
            await self._refuse()
        claim = Claim(extra_bytes, extra_files)
        self._claims.append(claim)
        try:
            yield claim
        finally:
            self._claims.remove(claim)

    def stored(self, total_bytes: int, files: int) -> None:
        """Count what was committed since the sum was read."""
        self._stored = Usage(
            self._stored.waiting_bytes + total_bytes,
            self._stored.waiting_files + files,
            self._stored.reserved_bytes,
            self._stored.reserved_files,
        )

    async def _read(self) -> None:
        self._read_at = time.monotonic()
        async with self._db.connection() as connection:
            self._stored = await quotas.usage_of_server(connection)

    def _usage(self) -> Usage:
        ours = [claim for claim in self._claims if claim.is_reserved]
        others_bytes = self._stored.reserved_bytes - sum(claim.bytes for claim in ours)
        others_files = self._stored.reserved_files - sum(claim.files for claim in ours)
        return Usage(
            self._stored.waiting_bytes,
            self._stored.waiting_files,
            max(others_bytes, 0) + sum(claim.bytes for claim in self._claims),
            max(others_files, 0) + sum(claim.files for claim in self._claims),
        )

    async def _refuse(self) -> None:
        async with self._db.connection() as connection:
            frees_at = await quotas.server_frees_at(connection)
        raise rules.server_full(self._usage(), self._quota, frees_at)
