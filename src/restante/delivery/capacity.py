"""
How much of the server's quota, and of the space for bytes on disk, is left for uploads.

One counter for the whole server would be a row that every commit locks.  So the sum over all
workspaces and the sizes of the buckets are read now and then, and each process adds what it has
accepted since.  Alone it never exceeds a limit, but for the few percent that a table takes beside
its bytes; several together may by what they accept between two reads.
"""

import asyncio
import math
import time
from collections import Counter
from dataclasses import dataclass

from restante.database import partitions, shares
from restante.database.pool import Database
from restante.delivery import quotas, rules
from restante.delivery.reservations import Room
from restante.delivery.rules import NOTHING, ReceivePolicy, Usage
from restante.delivery.subject import CHUNKS
from restante.ids import WorkspaceId
from restante.retention.disk import Disk

_USAGE_FRESH_SECONDS = 1.0
# Asks the filesystem about several files of every bucket, while other uploads wait.
_SIZES_FRESH_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class Claim:
    """What one upload in progress takes of the server."""

    room: Room  # what of it is reserved in the database
    usage: Usage = NOTHING
    written_bytes: int = 0  # by statements that have ended
    publishing_bytes: int = 0  # by the one that publishes it

    @property
    def unwritten_bytes(self) -> int:
        return max(self.usage.bytes - self.written_bytes, 0)


class ServerRoom:
    """What all uploads together may still take."""

    def __init__(self, db: Database, policy: ReceivePolicy, disk: Disk) -> None:
        self.usage_fresh_seconds = _USAGE_FRESH_SECONDS
        self.sizes_fresh_seconds = _SIZES_FRESH_SECONDS
        self._db = db
        self._policy = policy
        self._disk = disk
        self._claims: set[Claim] = set()  # of the uploads in progress
        self._uploads = Counter[WorkspaceId]()
        self._reading = asyncio.Lock()
        self._usage = quotas.ServerUsage(0, 0, 0, 0)
        self._usage_read_at = -math.inf
        self._published_since = NOTHING
        self._sizes = 0  # of all buckets, with the bytes of dead files
        self._sizes_read_at = -math.inf
        self._written_since = 0

    def begin(self, claim: Claim) -> None:
        """An upload begins; what it claims counts until it ends."""
        self._claims.add(claim)
        self._uploads[claim.room.workspace_id] += 1

    def wrote(self, claim: Claim, size: int) -> None:
        """
        A statement that writes bytes of an upload has ended, well or not.

        Only now: a statement that still runs may be missing in sizes that are read meanwhile.
        """
        claim.written_bytes += size
        self._written_since += size

    def published(self, usage: Usage) -> None:
        """An upload was published; the next read of the sum has it."""
        since = self._published_since
        self._published_since = Usage(since.bytes + usage.bytes, since.files + usage.files)

    def end(self, claim: Claim) -> None:
        """An upload has ended: what it has written stays, what it has claimed beyond is free."""
        self._written_since += claim.publishing_bytes
        self._claims.discard(claim)
        self._uploads[claim.room.workspace_id] -= 1
        if not self._uploads[claim.room.workspace_id]:
            del self._uploads[claim.room.workspace_id]

    def claimed_by(self, workspace_id: WorkspaceId) -> int:
        """The bytes that the uploads of one workspace have claimed."""
        return sum(
            claim.usage.bytes for claim in self._claims if claim.room.workspace_id == workspace_id
        )

    def uploads_of(self, workspace_id: WorkspaceId) -> int:
        """How many uploads of one workspace are in progress."""
        return self._uploads[workspace_id]

    async def claim(self, claim: Claim, wanted: Usage) -> None:
        """Claim this much in all for an upload; raises ServerFull and DiskLow."""
        have = claim.usage
        await self.check(Usage(wanted.bytes - have.bytes, wanted.files - have.files))
        claim.usage = wanted

    async def check(self, extra: Usage) -> None:
        """Raise ServerFull or DiskLow unless the server has room for that much more."""
        self._disk.check()
        await self._read()
        if not self._taken().fits(self._policy.server_quota, extra):
            raise rules.server_full()
        if self._stored() + extra.bytes > self._policy.server_max_stored_bytes:
            raise rules.server_stored_full()

    async def _read(self) -> None:
        """Read what is not fresh any more; who comes meanwhile waits for it."""
        async with self._reading:
            # So it must not wait for the share of the one that came first.
            with shares.for_the_server():
                await self._read_stale()

    async def _read_stale(self) -> None:
        if time.monotonic() - self._usage_read_at >= self.usage_fresh_seconds:
            await self._read_usage()
        if time.monotonic() - self._sizes_read_at >= self.sizes_fresh_seconds:
            await self._read_sizes()

    async def _read_usage(self) -> None:
        # What commits during the read may be counted twice for a second, never not at all.
        self._published_since = NOTHING
        async with self._db.connection() as connection:
            self._usage = await quotas.usage_of_server(connection)
        self._usage_read_at = time.monotonic()

    async def _read_sizes(self) -> None:
        self._written_since = 0  # as above
        async with self._db.connection() as connection:
            buckets = await partitions.partitions_of(connection, [CHUNKS])
            sizes = await partitions.sizes(connection, [bucket.name for bucket in buckets])
        self._sizes = sum(size or 0 for size in sizes.values())
        self._sizes_read_at = time.monotonic()

    def _taken(self) -> Usage:
        """What the database had when it was read, and what this process has accepted since."""
        read, since = self._usage, self._published_since
        ours = [claim.usage for claim in self._claims]
        reserved = [claim.room.usage for claim in self._claims]
        others_bytes = max(read.reserved_bytes - sum(one.bytes for one in reserved), 0)
        others_files = max(read.reserved_files - sum(one.files for one in reserved), 0)
        return Usage(
            read.waiting_bytes + since.bytes + others_bytes + sum(one.bytes for one in ours),
            read.waiting_files + since.files + others_files + sum(one.files for one in ours),
        )

    def _stored(self) -> int:
        """The bytes on disk, and those that uploads in progress may still write."""
        unwritten = sum(claim.unwritten_bytes for claim in self._claims)
        return self._sizes + self._written_since + unwritten
