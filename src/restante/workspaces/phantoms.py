"""Resets the tasks of workspaces that say they are busy and have long been silent."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import structlog

from restante.database.pool import Database
from restante.workspaces import phantom_store as phantoms

log = structlog.get_logger()


class Phantoms:
    """A workspace that crashed in the middle of a task would stay busy for ever."""

    def __init__(self, db: Database, *, stale: timedelta, count: Callable[[float], None]) -> None:
        self._db = db
        self._stale = stale
        self._count = count

    async def reset(self) -> None:
        """One pass; logs and counts each reset."""
        silent_since = datetime.now(UTC) - self._stale
        while True:
            async with self._db.connection() as connection:
                batch = await phantoms.reset(connection, silent_since=silent_since)
            for one in batch:
                log.warning(
                    "phantom_busy_reset",
                    workspace=str(one.workspace_id),
                    active_tasks=one.active_tasks,
                )
            self._count(len(batch))
            if len(batch) < phantoms.BATCH:
                return
