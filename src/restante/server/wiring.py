"""Builds everything from the settings; the only place that knows all parts."""

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import msgspec
import structlog
from starlette.applications import Starlette

from restante import __version__
from restante.database import driver_errors, migrate
from restante.database.listener import Listener
from restante.database.pool import Database
from restante.database.rules import Phase
from restante.delivery.admin import UploadAdmin
from restante.delivery.blobs.postgres import PostgresBlobs
from restante.delivery.receive import Receiver
from restante.delivery.subject import Buckets, DueUploads, ExpiredAnswers, ExpiredReservations
from restante.errors import DatabaseFull, DataDirectoryUnusable
from restante.feed.batches import WatchPolicy
from restante.feed.service import Feed
from restante.feed.subject import CrowdedFeeds, FeedPartitions, MessageIds
from restante.feed.total import TotalLimit
from restante.feed.wakeups import Wakeups
from restante.http.body_room import BodyRoom
from restante.http.networks import AddressRanges
from restante.http.operations import JsonPace
from restante.http.refusal_delays import RefusalDelays
from restante.http.turns import Turns
from restante.oplog import tables
from restante.oplog.node import Node
from restante.oplog.pulling.outbox import Outbox
from restante.oplog.pulling.pull import Puller
from restante.oplog.pulling.state import Pace
from restante.oplog.remote import Remote
from restante.oplog.serving.watch import Watcher
from restante.oplog.subject import EndedSnapshots, OldConflicts, ParkedOps, UnsettledDeletes
from restante.oplog.trimming import picture
from restante.oplog.trimming.limits import Limits
from restante.oplog.trimming.log_subject import OpLog
from restante.postgres import Ballast, DataDirectory, EmbeddedPostgres, placement, postgres_for
from restante.retention import store as retention, upkeep
from restante.retention.disk import Disk
from restante.retention.space import SpaceAccount, SpaceSamples
from restante.retention.subjects import Subjects
from restante.retention.sweep import Sweep
from restante.server import admin_token, app, jobs, logs, policies
from restante.server.app import Services
from restante.server.connections import ConnectionLimits, Connections, limits_within_open_files
from restante.server.health import Readiness
from restante.server.listener import HttpServer, address_of, is_loopback, listen
from restante.server.loops import Loops
from restante.server.metrics import Metrics
from restante.server.stopping import StopOnSignal, stop_serving
from restante.settings import Settings, allowed_origins
from restante.workspaces.admin import WorkspaceAdmin
from restante.workspaces.auth import Access
from restante.workspaces.concurrency import Concurrency
from restante.workspaces.push import Push
from restante.workspaces.rates import Rate
from restante.workspaces.registry import Registry
from restante.workspaces.subject import RemovedWorkspaces

log = structlog.get_logger()

_LAST_NOTIFICATION_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Ready:
    """What to tell the person who started the server."""

    address: str
    admin_token_file: Path | None  # None: the operator has set the token


async def serve(settings: Settings, announce: Callable[[Ready], None]) -> None:
    """Run a server until SIGTERM or SIGINT; raises RestanteError if it cannot start."""
    began = time.monotonic()
    listening = listen(settings.host, settings.port)
    stop = StopOnSignal()
    with listening, suppress(asyncio.CancelledError):
        async with application(settings) as (web, token_file):
            ready = Ready(address_of(listening, settings.host), token_file)
            http = http_server(settings, web, on_ready=partial(_started, ready, announce))
            _collect_garbage_rarely()
            stop.on_signal(partial(stop_serving, http, web))
            await http.serve(sockets=[listening])
    log.info("stopped", version=__version__, seconds=round(time.monotonic() - began, 1))


def _started(ready: Ready, announce: Callable[[Ready], None]) -> None:
    log.info("started", version=__version__, address=ready.address)
    announce(ready)


def _collect_garbage_rarely() -> None:
    """
    Keep full collections from stalling the event loop, 100 ms each with thousands of connections.

    They skip what exists now, and most garbage is young: only one in 200 looks at everything.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 200)


def http_server(settings: Settings, web: Starlette, *, on_ready: Callable[[], None]) -> HttpServer:
    """What serves the application on a socket."""
    return HttpServer(
        web,
        web.state.connections,
        send_timeout_seconds=settings.send_timeout_seconds,
        grace_seconds=settings.shutdown_grace_seconds,
        on_ready=on_ready,
    )


@asynccontextmanager
async def application(settings: Settings) -> AsyncIterator[tuple[Starlette, Path | None]]:
    """Everything but the socket: database, migrations, loops, and the web application."""
    proxies = policies.trusted_proxies(settings)
    directory = data_directory(settings)
    policies.warn_of_small_quotas(settings)
    async with AsyncExitStack() as stack:
        dsn = await stack.enter_async_context(_own_database(settings, directory))
        token, token_file = _admin_token(settings, directory)
        ran = await migrate.apply(dsn, migrate.shipped(), phases={Phase.PRE})
        if ran:
            log.info("migrated", migrations=[str(migration) for migration in ran])
        db = await stack.enter_async_context(opened(settings, dsn))
        wakeups = await stack.enter_async_context(notifying(Wakeups(db, Listener(dsn))))
        push = await stack.enter_async_context(
            Push.opened(
                to_private=settings.push_to_private,
                timeout_seconds=settings.push_timeout_seconds,
            )
        )
        disk = await disk_of(settings, db, _ballast(settings, directory))
        subjects = subjects_of(settings, disk)
        services = _services(settings, db, disk, wakeups, push, subjects, token, proxies)
        await _prepare_to_store(settings, services, subjects)
        loops = jobs.loops(settings, services, subjects)
        services.metrics.loops.expect(loop.name for loop in loops)
        await stack.enter_async_context(Loops(loops, services.metrics.loops))
        await stack.enter_async_context(pulling(settings, services.oplog))
        yield app.build(services), token_file


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
        async with database_for_a_while(settings) as dsn, opened(settings, dsn) as db:
            await Readiness(db, migrate.shipped()).check()
            settings = await with_saved_retention(settings, db, given=given)
            disk = await disk_of(settings, db, _ballast(settings, data_directory(settings)))
            wakeups, subjects = Wakeups(db, Listener(dsn)), subjects_of(settings, disk)
            yield Operator(
                db,
                sweep_of(db, subjects, disk),
                SpaceAccount(db, subjects, disk),
                UploadAdmin(
                    receiver_of(settings, db, wakeups, disk),
                    ack_retention=policies.ack_retention(settings),
                ),
                WorkspaceAdmin(db, wakeups.permissions_changed),
                policies.log_limits(settings),
            )
            await wakeups.notify_others()  # the readers wait at the servers
            await disk.keep_ballast()


async def disk_of(settings: Settings, db: Database, ballast: Ballast | None = None) -> Disk:
    """The disk of the database, if it can be seen from here."""
    disk = Disk(db, reserve_bytes=settings.disk_reserve_bytes, ballast=ballast)
    async with db.connection() as connection:
        await disk.locate(connection)
    return disk


def _ballast(settings: Settings, directory: DataDirectory) -> Ballast | None:
    """What is kept back beside the embedded Postgres; nothing beside another one."""
    return None if settings.database_url else Ballast.beside(directory, settings.ballast_bytes)


async def _prepare_to_store(settings: Settings, services: Services, subjects: Subjects) -> None:
    """On a full disk the server starts all the same: its sweeps and readers free it."""
    try:
        await upkeep.create_partitions(services.db, subjects, now=await services.sweep.now())
        async with services.db.connection() as connection:
            await tables.identify(connection, services.oplog.own_url)
        await save_retention(settings, services.db)
    except DatabaseFull as error:
        log.warning("started_on_a_full_disk", reason=str(error))


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
    limit = _feed_limit(settings, disk)
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
    return Sweep(db, subjects, budget_seconds=jobs.SWEEP_SECONDS * 0.7, disk=disk)


def _services(  # noqa: PLR0913, PLR0917 - the wiring knows all parts
    settings: Settings,
    db: Database,
    disk: Disk,
    wakeups: Wakeups,
    push: Push,
    subjects: Subjects,
    admin_token: str,
    proxies: AddressRanges,
) -> Services:
    access = Access(db, admin_token=admin_token)
    receiver = receiver_of(settings, db, wakeups, disk)
    metrics = Metrics(settings.metrics_namespace, subjects)
    metrics.listening_silent_seconds.set_function(wakeups.silent_seconds)
    refusal_delays = RefusalDelays()
    limits = limits_within_open_files(
        ConnectionLimits(
            settings.max_connections,
            settings.max_connections_per_address,
            settings.max_requests_per_workspace,
        ),
        pool_size=settings.pool_size,
    )
    return Services(
        metrics=metrics,
        connections=Connections(limits, metrics.connections, refusal_delays, proxies),
        readiness=Readiness(db, migrate.shipped()),
        db=db,
        disk=disk,
        json_pace=JsonPace(
            settings.json_idle_seconds,
            settings.json_seconds,
            settings.upload_min_bytes_per_second,
        ),
        body_room=BodyRoom(),
        access=access,
        turns=Turns(),
        refusal_delays=refusal_delays,
        concurrency=Concurrency(
            limits.per_workspace,
            on_refusal=metrics.connections.refused.labels("workspace").inc,
        ),
        registry=Registry(
            db,
            access,
            registration_token=settings.registration_token,
            is_open=is_loopback(settings.host),
            disk=disk,
        ),
        workspace_admin=WorkspaceAdmin(db, wakeups.permissions_changed),
        push=push,
        feed=Feed(db, wakeups, policies.write_limits(settings), disk, _feed_limit(settings, disk)),
        watch_policy=WatchPolicy(),
        wakeups=wakeups,
        message_rate=Rate(settings.messages_per_minute, settings.message_bytes_per_minute),
        receiver=receiver,
        blobs=receiver.blobs,
        sweep=sweep_of(db, subjects, disk),
        space=SpaceAccount(db, subjects, disk),
        ack_retention=policies.ack_retention(settings),
        staging_enabled=settings.staging,
        serve_acked=settings.serve_acked,
        upload_limits=policies.upload_limits(settings),
        origins=allowed_origins(settings, on_loopback=is_loopback(settings.host)),
        proxies=proxies,
        oplog=_node(settings, db),
    )


def _node(settings: Settings, db: Database) -> Node:
    watcher = Watcher(db)
    return Node(
        db=db,
        watcher=watcher,
        outbox=Outbox(db, watcher),
        own_url=policies.own_url(settings),
        open_to=policies.ops_open_to(settings),
    )


def receiver_of(settings: Settings, db: Database, wakeups: Wakeups, disk: Disk) -> Receiver:
    """What receives files, with the quotas and limits of the settings."""
    policy, limits = policies.receive_policy(settings), policies.write_limits(settings)
    return Receiver(db, PostgresBlobs(db), wakeups, policy, limits=limits, disk=disk)


def _feed_limit(settings: Settings, disk: Disk | None) -> TotalLimit:
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


@asynccontextmanager
async def pulling(settings: Settings, node: Node) -> AsyncIterator[None]:
    """Pull the op logs of the peers, and push to them, while inside."""

    def clock() -> datetime:
        return datetime.now(UTC)

    async with Remote.opened(own_host=node.own_url or "", clock=clock) as remote:
        pace = Pace(pull_seconds=settings.ops_pull_seconds)
        puller = Puller(node.db, remote, pace, clock, node.callbacks)
        tasks = [
            asyncio.create_task(puller.run(), name="pull from peers"),
            asyncio.create_task(node.outbox.run(remote, puller.pulls_from), name="push to peers"),
            asyncio.create_task(node.callbacks.run(), name="callbacks for ops"),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


def data_directory(settings: Settings) -> DataDirectory:
    """The configured data directory, created if it is missing."""
    return DataDirectory.open(_chosen_directory(settings))


def _chosen_directory(settings: Settings) -> Path:
    chosen = Path(settings.data_dir).expanduser() if settings.data_dir else DataDirectory.default()
    return chosen.absolute()


def _check_database(settings: Settings) -> None:
    """A command creates no database: no server has run yet, or its directory is mistyped."""
    path = _chosen_directory(settings)
    if settings.database_url or (
        os.path.lexists(path) and placement.existing_home(data_directory(settings))
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
        data_directory(settings), bin_dir=bin_dir, account=settings.postgres_account
    ) as dsn:
        yield dsn


@asynccontextmanager
async def _own_database(settings: Settings, directory: DataDirectory) -> AsyncIterator[str]:
    """For the server: the configured database, or an embedded one that it keeps running."""
    if settings.database_url:
        yield settings.database_url
        return
    bin_dir = Path(settings.postgres_bin) if settings.postgres_bin else None
    with directory.claim():
        postgres = EmbeddedPostgres(directory, bin_dir=bin_dir, account=settings.postgres_account)
        watcher = None
        try:
            await postgres.start()
            watcher = asyncio.create_task(postgres.watch(), name="watch postgres")
            yield postgres.dsn
        finally:
            if watcher:
                watcher.cancel()
            await postgres.stop()


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


def _admin_token(settings: Settings, directory: DataDirectory) -> tuple[str, Path | None]:
    if settings.admin_token:
        return settings.admin_token, None
    return admin_token.stored_in(directory.path), directory.path / admin_token.FILE_NAME
