"""The services of a server for the operator's commands, without a server."""

import os
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from restante.database import driver_errors, migrate
from restante.database.listener import Listener
from restante.database.pool import Database
from restante.delivery.admin import UploadAdmin
from restante.errors import DataDirectoryUnusable
from restante.feed.wakeups import Wakeups
from restante.oplog.trimming.limits import Limits
from restante.postgres import placement, postgres_for
from restante.retention.space import SpaceAccount
from restante.retention.sweep import Sweep
from restante.server import logs, parts, policies
from restante.server.readiness import Readiness
from restante.settings import Settings
from restante.workspaces.admin import WorkspaceAdmin


@dataclass(frozen=True, slots=True)
class Operator:
    """What the operator's commands work with."""

    db: Database
    sweep: Sweep
    space: SpaceAccount
    uploads: UploadAdmin
    workspaces: WorkspaceAdmin
    log_limits: Limits


@asynccontextmanager
async def operator(settings: Settings, *, given: Collection[str] = ()) -> AsyncIterator[Operator]:
    """For commands: the services of a server, without one; `given` settings were set explicitly."""
    logs.configure(settings.log_format, "warning")
    _check_database(settings)
    with driver_errors.refusal_named():
        async with database_for_a_while(settings) as dsn, parts.opened(settings, dsn) as db:
            await Readiness(db, migrate.shipped()).check()
            settings = await parts.with_saved_retention(settings, db, given=given)
            ballast = parts.ballast_of(settings, parts.data_directory(settings))
            disk = await parts.disk_of(settings, db, ballast)
            wakeups, subjects = Wakeups(db, Listener(dsn)), parts.subjects_of(settings, disk)
            yield Operator(
                db,
                parts.sweep_of(db, subjects, disk),
                SpaceAccount(db, subjects, disk),
                UploadAdmin(
                    parts.receiver_of(settings, db, wakeups, disk),
                    ack_retention=policies.ack_retention(settings),
                ),
                WorkspaceAdmin(db, wakeups.permissions_changed),
                policies.log_limits(settings),
            )
            await wakeups.notify_others()  # the readers wait at the servers
            await disk.keep_ballast()


def _check_database(settings: Settings) -> None:
    """A command creates no database: no server has run yet, or its directory is mistyped."""
    path = parts.chosen_directory(settings)
    if settings.database_url or (
        os.path.lexists(path) and placement.existing_home(parts.data_directory(settings))
    ):
        return
    raise DataDirectoryUnusable(
        f"There is no database in {path}: `restante serve` creates it. If a server has run, name "
        "its --data-dir."
    )


@asynccontextmanager
async def database_for_a_while(settings: Settings) -> AsyncIterator[str]:
    """For commands: the database of the running server, or one that runs while we need it."""
    if settings.database_url:
        yield settings.database_url
        return
    bin_dir = Path(settings.postgres_bin) if settings.postgres_bin else None
    async with postgres_for(
        parts.data_directory(settings), bin_dir=bin_dir, account=settings.postgres_account
    ) as dsn:
        yield dsn
