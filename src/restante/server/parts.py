"""What a server, the operator's commands and programs that embed us all build from the settings."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import msgspec

from restante.database.pool import Database
from restante.delivery.blobs.postgres import PostgresBlobs
from restante.delivery.receive import Receiver
from restante.delivery.subject import Buckets, DueUploads, ExpiredAnswers, ExpiredReservations
from restante.feed.subject import CrowdedFeeds, FeedPartitions, MessageIds
from restante.feed.total import TotalLimit
from restante.feed.wakeups import Wakeups
from restante.oplog.subject import EndedSnapshots, OldConflicts, ParkedOps, UnsettledDeletes
from restante.oplog.trimming import picture
from restante.oplog.trimming.log_subject import OpLog
from restante.postgres import Ballast, DataDirectory
from restante.retention import store as retention
from restante.retention.disk import Disk
from restante.retention.space import SpaceSamples
from restante.retention.subjects import Subjects
from restante.retention.sweep import Sweep
from restante.server import policies
from restante.settings import Settings
from restante.workspaces.subject import RemovedWorkspaces

SWEEP_SECONDS = 30.0  # the deadline of the loop that sweeps

_LAST_NOTIFICATION_SECONDS = 0.5

# The database and its disk ------------------------------------------------------------------------


def data_directory(settings: Settings) -> DataDirectory:
    """The configured data directory, created if it is missing."""
    return DataDirectory.open(chosen_directory(settings))


def chosen_directory(settings: Settings) -> Path:
    """Its path, whether it exists or not."""
    chosen = Path(settings.data_dir).expanduser() if settings.data_dir else DataDirectory.default()
    return chosen.absolute()


@asynccontextmanager
async def opened(settings: Settings, dsn: str) -> AsyncIterator[Database]:
    """A pool with the size and the timeouts of the settings."""
    db = await Database.open(
        dsn,
        pool_size=settings.pool_size,
        acquire_timeout_seconds=settings.acquire_timeout_seconds,
        statement_timeout_seconds=settings.statement_timeout_seconds,
    )
    try:
        yield db
    finally:
        await db.close()


async def disk_of(settings: Settings, db: Database, ballast: Ballast | None = None) -> Disk:
    """The disk of the database, if it can be seen from here."""
    disk = Disk(db, reserve_bytes=settings.disk_reserve_bytes, ballast=ballast)
    async with db.connection() as connection:
        await disk.locate(connection)
    return disk


def ballast_of(settings: Settings, directory: DataDirectory) -> Ballast | None:
    """What is kept back beside the embedded Postgres; nothing beside another one."""
    return None if settings.database_url else Ballast.beside(directory, settings.ballast_bytes)


# Retention ----------------------------------------------------------------------------------------


async def save_retention(settings: Settings, db: Database) -> None:
    """Save the retention of this server, for commands that run beside it."""
    async with db.connection() as connection:
        await retention.save_settings(connection, policies.retention_settings(settings))
        await picture.save_limits(connection, policies.log_limits(settings))


async def with_saved_retention(
    settings: Settings, db: Database, *, given: Collection[str] = ()
) -> Settings:
    """
    The settings, with the servers' retention where the command was not given one.

    A sweep in a bare shell must not delete by the defaults what the servers are to keep.
    """
    async with db.connection() as connection:
        saved = await retention.saved_settings(connection)
        servers = policies.settings_of(await picture.saved_limits(connection))
    if saved is not None:
        servers["ack_retention_seconds"] = int(saved.ack.total_seconds())
        servers["feed_retention_days"] = saved.feed / timedelta(days=1)
    changes = {name: value for name, value in servers.items() if name not in given}
    return msgspec.structs.replace(settings, **changes)


def subjects_of(settings: Settings, disk: Disk | None = None) -> Subjects:
    """Everything that is kept bounded, in the order in which a sweep handles it."""
    ack, feed = policies.ack_retention(settings), policies.retention_settings(settings).feed
    limit = feed_limit(settings, disk)
    return Subjects(
        DueUploads(ack_retention=ack),
        ExpiredReservations(),
        ExpiredAnswers(),
        RemovedWorkspaces(retention=feed),
        SpaceSamples(),
        ParkedOps(),
        OldConflicts(),
        EndedSnapshots(),
        UnsettledDeletes(),
        CrowdedFeeds(limit),
        OpLog(policies.log_limits(settings)),
        Buckets(
            width=timedelta(seconds=settings.bucket_seconds),
            ack_retention=ack,
            sweep_interval=timedelta(seconds=settings.sweep_interval_seconds),
        ),
        FeedPartitions(retention=feed, limit=limit),
        MessageIds(),
    )


def sweep_of(db: Database, subjects: Subjects, disk: Disk) -> Sweep:
    """The sweep, with time left before the deadline of its loop."""
    return Sweep(db, subjects, budget_seconds=SWEEP_SECONDS * 0.7, disk=disk)


# Services -----------------------------------------------------------------------------------------


def receiver_of(settings: Settings, db: Database, wakeups: Wakeups, disk: Disk) -> Receiver:
    """What receives files, with the quotas and limits of the settings."""
    policy, limits = policies.receive_policy(settings), policies.write_limits(settings)
    return Receiver(db, PostgresBlobs(db), wakeups, policy, limits=limits, disk=disk)


def feed_limit(settings: Settings, disk: Disk | None) -> TotalLimit:
    """What the messages of all workspaces may take."""
    return TotalLimit(settings.server_max_feed_bytes, disk)


@asynccontextmanager
async def notifying(wakeups: Wakeups) -> AsyncIterator[Wakeups]:
    """Exchange notifications with other processes while inside."""
    tasks = [
        asyncio.create_task(wakeups.keep_notifying()),
        asyncio.create_task(wakeups.keep_listening()),
    ]
    try:
        yield wakeups
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Best effort for the last commits: readers look again later anyway.
        with suppress(Exception):
            async with asyncio.timeout(_LAST_NOTIFICATION_SECONDS):
                await wakeups.notify_others()
