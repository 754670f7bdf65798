"""
For a Python application that has its own Postgres: Restante as a library, without a server.

Its tables live in the schema `restante` of the application's database, so a row of the application
and a staged file can be one transaction.  `docs/embedding.md` has an example.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from restante.database import migrate
from restante.database.listener import Listener
from restante.database.pool import Database
from restante.database.rules import Phase
from restante.delivery.blobs import Blobs
from restante.delivery.receive import Receiver
from restante.feed.wakeups import Wakeups
from restante.retention import upkeep
from restante.retention.subjects import Subjects
from restante.retention.sweep import Sweep
from restante.server import parts
from restante.server.readiness import Readiness
from restante.settings import load
from restante.workspaces.auth import Access
from restante.workspaces.registry import Registry


@dataclass(frozen=True, slots=True)
class Restante:
    """What the functions of `delivery` work with."""

    db: Database
    blobs: Blobs
    receiver: Receiver
    registry: Registry
    sweep: Sweep
    _subjects: Subjects

    async def create_partitions(self, *, now: datetime) -> None:
        """Create partitions for the hours to come.  Where no server runs, call it every hour."""
        await upkeep.create_partitions(self.db, self._subjects, now=now)


async def migrate_schema(dsn: str) -> None:
    """Create or update the tables; an older release keeps working on them."""
    await migrate.apply(dsn, migrate.shipped(), phases={Phase.PRE})


@asynccontextmanager
async def opened(dsn: str, **given: Any) -> AsyncIterator[Restante]:
    """
    Connect to a migrated database; waiting readers of every server are notified while inside.

    Settings are given by name, such as `upload_ttl_seconds=3600`.  A retention that is not given is
    the one that the servers of this database use.  Raises SettingsInvalid, and NotReady if the
    schema is missing or too old.
    """
    settings = load({}, given)
    async with parts.opened(settings, dsn) as db:
        await Readiness(db, migrate.shipped()).check()
        settings = await parts.with_saved_retention(settings, db, given=given)
        async with parts.notifying(Wakeups(db, Listener(dsn))) as wakeups:
            disk = await parts.disk_of(settings, db)
            receiver = parts.receiver_of(settings, db, wakeups, disk)
            access, subjects = Access(db, admin_token=""), parts.subjects_of(settings, disk)
            registry = Registry(db, access, registration_token=None, is_open=True, disk=disk)
            sweep = parts.sweep_of(db, subjects, disk)
            yield Restante(db, receiver.blobs, receiver, registry, sweep, subjects)
