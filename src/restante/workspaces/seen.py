"""
When each workspace was last seen: with any request that carries its token.

Requests only make a note in memory.  A background pass writes the notes, many in one statement, and
each workspace once a minute at most: the statement skips what another server has written, and waits
for no lock.  A note that is lost is made again by the next request.
"""

import time
from collections import OrderedDict
from datetime import timedelta

from restante.database.pool import Database
from restante.ids import WorkspaceId
from restante.workspaces import store

WRITTEN_EVERY = timedelta(minutes=1)
_MAX_WORKSPACES = 100_000  # about 15 MB
_BATCH = 1000


class Seen:
    """The workspaces that this process has seen and not yet written down."""

    def __init__(self, limit: int = _MAX_WORKSPACES) -> None:
        self._limit = limit
        self._noted: dict[WorkspaceId, None] = {}
        self._fresh_until: OrderedDict[WorkspaceId, float] = OrderedDict()

    def note(self, workspace_id: WorkspaceId) -> None:
        """A request of this workspace has come; of too many at once, some are left out."""
        is_fresh = time.monotonic() < self._fresh_until.get(workspace_id, 0.0)
        if not is_fresh and len(self._noted) < self._limit:
            self._noted[workspace_id] = None

    async def write(self, db: Database) -> None:
        """One pass: write down what was noted since the last one."""
        noted, self._noted = list(self._noted), {}
        for start in range(0, len(noted), _BATCH):
            async with db.connection() as connection:
                written = await store.mark_seen(
                    connection, noted[start : start + _BATCH], every=WRITTEN_EVERY
                )
            self._remember(written)

    def _remember(self, written: list[WorkspaceId]) -> None:
        for workspace_id in written:
            self._fresh_until[workspace_id] = time.monotonic() + WRITTEN_EVERY.total_seconds()
            self._fresh_until.move_to_end(workspace_id)
        while len(self._fresh_until) > self._limit:
            self._fresh_until.popitem(last=False)
