"""Builds the server from the settings; the only place that knows all of it."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import structlog
from starlette.applications import Starlette

from restante import __version__
from restante.database import migrate
from restante.database.listener import Listener
from restante.database.pool import Database
from restante.database.rules import Phase
from restante.errors import DatabaseFull
from restante.feed.batches import WatchPolicy
from restante.feed.service import Feed
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
from restante.postgres import DataDirectory, EmbeddedPostgres
from restante.retention import upkeep
from restante.retention.disk import Disk
from restante.retention.space import SpaceAccount
from restante.retention.subjects import Subjects
from restante.server import admin_token, app, jobs, parts, policies
from restante.server.app import Services
from restante.server.connections import ConnectionLimits, Connections, limits_within_open_files
from restante.server.listener import HttpServer, address_of, is_loopback, listen
from restante.server.loops import Loops
from restante.server.metrics import Metrics
from restante.server.readiness import Readiness
from restante.server.stopping import StopOnSignal, stop_serving
from restante.settings import Settings, allowed_origins
from restante.workspaces.admin import WorkspaceAdmin
from restante.workspaces.auth import Access
from restante.workspaces.concurrency import Concurrency
from restante.workspaces.push import Push
from restante.workspaces.rates import Rate
from restante.workspaces.registry import Registry

log = structlog.get_logger()


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
    directory = parts.data_directory(settings)
    policies.warn_of_small_quotas(settings)
    async with AsyncExitStack() as stack:
        dsn = await stack.enter_async_context(_own_database(settings, directory))
        token, token_file = _admin_token(settings, directory)
        ran = await migrate.apply(dsn, migrate.shipped(), phases={Phase.PRE})
        if ran:
            log.info("migrated", migrations=[str(migration) for migration in ran])
        db = await stack.enter_async_context(parts.opened(settings, dsn))
        wakeups = await stack.enter_async_context(parts.notifying(Wakeups(db, Listener(dsn))))
        push = await stack.enter_async_context(
            Push.opened(
                to_private=settings.push_to_private,
                timeout_seconds=settings.push_timeout_seconds,
            )
        )
        disk = await parts.disk_of(settings, db, parts.ballast_of(settings, directory))
        subjects = parts.subjects_of(settings, disk)
        services = _services(settings, db, disk, wakeups, push, subjects, token, proxies)
        await _prepare_to_store(settings, services, subjects)
        loops = jobs.loops(settings, services, subjects)
        services.metrics.loops.expect(loop.name for loop in loops)
        await stack.enter_async_context(Loops(loops, services.metrics.loops))
        await stack.enter_async_context(pulling(settings, services.oplog))
        yield app.build(services), token_file


async def _prepare_to_store(settings: Settings, services: Services, subjects: Subjects) -> None:
    """On a full disk the server starts all the same: its sweeps and readers free it."""
    try:
        await upkeep.create_partitions(services.db, subjects, now=await services.sweep.now())
        async with services.db.connection() as connection:
            await tables.identify(connection, services.oplog.own_url)
        await parts.save_retention(settings, services.db)
    except DatabaseFull as error:
        log.warning("started_on_a_full_disk", reason=str(error))


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
    receiver = parts.receiver_of(settings, db, wakeups, disk)
    limit = parts.feed_limit(settings, disk)
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
        feed=Feed(db, wakeups, policies.write_limits(settings), disk, limit),
        watch_policy=WatchPolicy(),
        wakeups=wakeups,
        message_rate=Rate(settings.messages_per_minute, settings.message_bytes_per_minute),
        receiver=receiver,
        blobs=receiver.blobs,
        sweep=parts.sweep_of(db, subjects, disk),
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


def _admin_token(settings: Settings, directory: DataDirectory) -> tuple[str, Path | None]:
    if settings.admin_token:
        return settings.admin_token, None
    return admin_token.stored_in(directory.path), directory.path / admin_token.FILE_NAME
