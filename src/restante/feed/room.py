"""
Room in a feed: who takes how much of it, and what can be freed before a row is refused.

The counters of a feed are exact, but they follow acknowledgements in steps of bounded work, and the
previous release trims without subtracting.  Both are made up for here, when it matters.
"""

import time
from dataclasses import dataclass
from uuid import UUID

from restante.database.pool import Connection, Database
from restante.errors import FeedFull, RestanteError, TableBusy, WorkspaceUnknown
from restante.feed import store
from restante.feed.readers import Scans
from restante.feed.rules import WriteLimits
from restante.ids import WorkspaceId

# With the rows of one step, some hundred thousand rows: less than a second.
_SETTLEMENTS = 20
# A sender's part is found by a search of the feed; until then, what it sends here is added.
_PART_KNOWN_SECONDS = 10.0
_MAX_PARTS = 10_000


async def free(connection: Connection, workspace_id: WorkspaceId) -> bool:
    """Stop counting what need not count; returns whether there is more room than before."""
    before = await store.fill_of(connection, workspace_id)
    if before is None:
        return False
    for _ in range(_SETTLEMENTS):
        if not await store.settle(connection, workspace_id):
            break
    await store.recount(connection, workspace_id)
    after = await store.fill_of(connection, workspace_id)
    return after is not None and (
        after.unacked_bytes < before.unacked_bytes or after.feed_bytes < before.feed_bytes
    )


async def refusal(
    connection: Connection, workspace_id: WorkspaceId, limits: WriteLimits, size: int
) -> RestanteError:
    """Why a row of this size was not appended."""
    fill = await store.fill_of(connection, workspace_id)
    if fill is None:
        return WorkspaceUnknown()
    return fill.refusal(limits, feed=size, written=size) or freed_meanwhile()


def freed_meanwhile() -> TableBusy:
    """There was no room, and now there is."""
    return TableBusy("The feed was full a moment ago; try again.")


@dataclass(slots=True)
class _Part:
    bytes: int
    known_until: float


class SenderParts:
    """How much of a feed is from one sender; looked at only when the feed is rather full."""

    def __init__(self, db: Database, scans: Scans) -> None:
        self._db = db
        self._scans = scans
        self._parts: dict[tuple[WorkspaceId, UUID], _Part] = {}

    async def take(
        self, workspace_id: WorkspaceId, sender: UUID, size: int, limits: WriteLimits
    ) -> None:
        """Add so many bytes to the part of a sender; raises FeedFull if it has too many."""
        part = await self._part(workspace_id, sender)
        if part.bytes + size > limits.for_any_sender.max_feed_bytes:
            raise FeedFull(
                "Too many messages from this sender are unacknowledged; send more when the "
                "workspace has acknowledged some."
            )
        part.bytes += size

    async def _part(self, workspace_id: WorkspaceId, sender: UUID) -> _Part:
        key, now = (workspace_id, sender), time.monotonic()
        part = self._parts.get(key)
        if part is None or part.known_until < now:
            async with self._scans.turn(workspace_id), self._db.connection() as connection:
                found = await store.part_of(connection, workspace_id, sender)
            part = _Part(found, now + _PART_KNOWN_SECONDS)
            if len(self._parts) >= _MAX_PARTS:
                self._parts.clear()
            self._parts[key] = part
        return part
