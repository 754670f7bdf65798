"""Resets the tasks of workspaces that report tasks but have long been silent in their feed."""

from collections.abc import Callable
from datetime import datetime, timedelta

import structlog

from restante.database.pool import Database
from restante.workspaces import store

log = structlog.get_logger()


async def reset_phantoms(
    db: Database, *, now: datetime, stale: timedelta, count: Callable[[float], None]
) -> None:
    """One pass: a workspace that crashed during a task would stay busy otherwise."""
    while True:
        async with db.connection() as connection:
            batch = await store.reset_silent(connection, silent_since=now - stale)
        for one in batch:
            log.warning(
                "phantom_busy_reset",
                workspace=str(one.workspace_id),
                active_tasks=one.active_tasks,
            )
        count(len(batch))
        if len(batch) < store.RESET_BATCH:
            return
