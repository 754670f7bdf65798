"""
Room in a feed: who takes how much of it, and what can be freed before a row is refused.

The counters of a feed are exact, but they follow acknowledgements in steps of bounded work, and the
previous release trims without subtracting.  Both are made up for here, when it matters.  Then the
oldest acknowledged rows go.
"""

import time
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from restante.database.pool import Connection, Database, transaction
from restante.errors import RestanteError, TableBusy, WorkspaceUnknown
from restante.feed import store
from restante.feed.readers import ReadTurns
from restante.feed.rules import SHORTEST_KEPT, Fill, SenderPart, WriteLimits
from restante.ids import WorkspaceId

# With the rows of one step, some hundred thousand rows: less than a second.
_SETTLEMENTS = 20
# Who needs room trims a little more than that, so that the next one need not.
_PART_TRIMMED = 64
_TRIMS = 20
# A sender's part is found by a search of the feed; until then, what it sends here is added.
_PART_KNOWN_SECONDS = 10.0
_MAX_PARTS = 10_000


async def free(
    connection: Connection,
    workspace_id: WorkspaceId,
    limits: WriteLimits,
    size: int,
    *,
    now: datetime,
) -> bool:
    """Make room for a row of this size; returns whether there is more room than before."""
    before = await store.fill_of(connection, workspace_id)
    if before is None:
        return False
    for _ in range(_SETTLEMENTS):
        if not await store.settle(connection, workspace_id):
            break
    await store.recount(connection, workspace_id)
    await _trim(connection, workspace_id, limits, size, now=now)
    after = await store.fill_of(connection, workspace_id)
    return after is not None and (
        after.unacked_bytes < before.unacked_bytes or after.feed_bytes < before.feed_bytes
    )


async def _trim(
    connection: Connection,
    workspace_id: WorkspaceId,
    limits: WriteLimits,
    size: int,
    *,
    now: datetime,
) -> None:
    """Trim the oldest acknowledged rows if the feed keeps too much, in steps of bounded work."""
    wanted = size
    for _ in range(_TRIMS):
        fill = await store.fill_of(connection, workspace_id)
        if fill is None or not fill.kept_excess(limits, wanted):
            return
        wanted = size + limits.max_kept_bytes // _PART_TRIMMED
        excess, before = fill.kept_excess(limits, wanted), now - SHORTEST_KEPT
        async with transaction(connection) as tx:
            await store.lock(tx, workspace_id)
            rows = await store.trim_oldest(tx, workspace_id, stored_before=before, at_least=excess)
        if not rows:
            return


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


@dataclass(frozen=True, slots=True)
class _Known:
    part: SenderPart
    until: float


class SenderParts:
    """How much of a feed is from one sender; looked at only when the feed is rather full."""

    def __init__(self, db: Database, scans: ReadTurns) -> None:
        self._db = db
        self._scans = scans
        self._known: dict[tuple[WorkspaceId, UUID], _Known] = {}

    async def take(  # noqa: PLR0913 - each argument is one fact, named by its caller
        self,
        workspace_id: WorkspaceId,
        sender: UUID,
        size: int,
        *,
        fill: Fill,
        limits: WriteLimits,
        now: datetime,
    ) -> None:
        """Add so many bytes to the part of a sender; raises FeedFull if it has too many."""
        known = await self._part(workspace_id, sender, now=now)
        if refusal := known.part.refusal(fill, limits, size):
            raise refusal
        self._known[workspace_id, sender] = _Known(known.part.plus(size), known.until)

    async def _part(self, workspace_id: WorkspaceId, sender: UUID, *, now: datetime) -> _Known:
        key, moment = (workspace_id, sender), time.monotonic()
        known = self._known.get(key)
        if known is None or known.until < moment:
            async with self._scans.turn(workspace_id), self._db.connection() as connection:
                held_since = now - SHORTEST_KEPT
                part = await store.part_of(connection, workspace_id, sender, held_since=held_since)
            known = _Known(part, moment + _PART_KNOWN_SECONDS)
            if len(self._known) >= _MAX_PARTS:
                self._known.clear()
            self._known[key] = known
        return known
