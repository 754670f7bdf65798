"""Builds everything from the settings; the only place that knows all parts."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
import structlog
from starlette.applications import Starlette

from restante.core.migrations import Phase
from restante.core.quotas import Quota
from restante.core.retention import Policy as RetentionPolicy
from restante.postgres import DataDirectory, EmbeddedPostgres, postgres_for
from restante.runtime import admin_token, logs
from restante.runtime.listener import HttpServer, address_of, is_loopback, listen
from restante.runtime.loops import Loop, Loops
from restante.runtime.metrics import Metrics
from restante.services.capacity import Capacity
from restante.services.delivery import Delivery
from restante.services.feed import Feed
from restante.services.inventory import Inventory
from restante.services.phantoms import Phantoms
from restante.services.push import Push
from restante.services.rates import Rate
from restante.services.readiness import Readiness
from restante.services.registry import Registry
from restante.services.space import SpaceAccount
from restante.services.staging import Policy, Staging
from restante.services.sweeping import Sweeping
from restante.services.upkeep import Upkeep
from restante.services.wakeups import Wakeups
from restante.settings import Settings
from restante.store import migrate, retention
from restante.store.blobs import PostgresBlobs
from restante.store.database import Database, Listener
from restante.store.retention import Choice
from restante.web import app
from restante.web.context import Context

log = structlog.get_logger()

_SWEEP_SECONDS = 30.0

# A bucket whose time is over is left alone for so long: the clocks of servers differ a little.
_SETTLING = timedelta(seconds=5)

_FAREWELL_SECONDS = 0.1
_LAST_NOTICE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Ready:
    """What to tell the person who started the server."""

    address: str
    admin_token_file: Path | None  # None: the operator gave the token


async def serve(settings: Settings, announce: Callable[[Ready], None]) -> None:
    """Run a server until SIGTERM or SIGINT; raises RestanteError if it cannot start."""
    listening = listen(settings.host, settings.port)
    stop = _StopOnSignal()
    with listening, suppress(asyncio.CancelledError):
        async with application(settings) as (web, token_file):
            ready = Ready(address_of(listening, settings.host), token_file)
            http = HttpServer(
                web,
                grace_seconds=settings.shutdown_grace_seconds,
                on_ready=lambda: announce(ready),
            )
            stop.gently = partial(_end, http, web)
            await http.serve(sockets=[listening])


def _end(http: HttpServer, web: Starlette) -> None:
    """Let those that wait for a feed answer with what there is, and take no new requests."""
    web.state.context.feed.wakeups.stop()
    # Uvicorn cuts WebSockets off with a code of its own; ours are closed in good order by then.
    asyncio.get_running_loop().call_later(_FAREWELL_SECONDS, setattr, http, "should_exit", True)  # noqa: FBT003 - setattr


class _StopOnSignal:
    """The first signal ends the server in good order, or the start-up at once."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - we are called from a coroutine
        self.gently: Callable[[], object] = task.cancel
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)

    def _stop(self) -> None:
        self.gently()


@asynccontextmanager
async def application(settings: Settings) -> AsyncIterator[tuple[Starlette, Path | None]]:
    """Everything but the socket: database, migrations, loops, and the web application."""
    directory = data_directory(settings)
    async with AsyncExitStack() as stack:
        dsn = await stack.enter_async_context(_own_database(settings, directory))
        token, token_file = _admin_token(settings, directory)
        ran = await migrate.apply(dsn, migrate.shipped(), phases={Phase.PRE})
        if ran:
            log.info("migrated", migrations=[str(migration) for migration in ran])
        db = await stack.enter_async_context(opened(settings, dsn))
        wakeups = await stack.enter_async_context(_awake(Wakeups(db, Listener(dsn))))
        push = await stack.enter_async_context(
            Push.opened(
                to_private=settings.push_to_private,
                timeout_seconds=settings.push_timeout_seconds,
            )
        )
        context = _context(settings, db, wakeups, push, token)
        upkeep = Upkeep(
            db,
            context.delivery,
            bucket=timedelta(seconds=settings.bucket_seconds),
            feed_retention=timedelta(days=settings.feed_retention_days),
        )
        await upkeep.create_leaves()
        async with db.connection() as connection:
            await retention.keep_choice(connection, _choice(settings))
        loops = _loops(settings, db, context, upkeep)
        context.metrics.loops.expect(loop.name for loop in loops)
        await stack.enter_async_context(Loops(loops, context.metrics.loops))
        yield app.build(context), token_file


@dataclass(frozen=True, slots=True)
class Operator:
    """What the operator's commands work with."""

    sweeping: Sweeping
    space: SpaceAccount
    inventory: Inventory


@asynccontextmanager
async def operator(settings: Settings, *, given: Collection[str]) -> AsyncIterator[Operator]:
    """
    For commands: the services of a server, without one.

    `given` names the settings that the operator chose explicitly, by flag or environment.
    """
    logs.configure(settings.log_format, "warning")
    async with database_for_a_while(settings) as dsn, opened(settings, dsn) as db:
        await Readiness(db, migrate.shipped()).check()
        settings = await _as_the_servers_have_it(settings, db, given)
        wakeups = Wakeups(db, Listener(dsn))
        delivery = _delivery(settings, db, wakeups)
        yield Operator(_sweeping(settings, db, delivery), SpaceAccount(db), Inventory(db, delivery))
        await wakeups.tell_now()  # the polls that wait are at the servers


def _choice(settings: Settings) -> Choice:
    return Choice(
        ack=timedelta(seconds=settings.ack_retention_seconds),
        feed=timedelta(days=settings.feed_retention_days),
    )


async def _as_the_servers_have_it(
    settings: Settings, db: Database, given: Collection[str]
) -> Settings:
    """
    Take each retention that was not given from what the servers use.

    A sweep by hand must not delete by the defaults what the servers are configured to keep.
    """
    async with db.connection() as connection:
        chosen = await retention.choice(connection)
    if chosen is None:
        return settings
    servers = {
        "ack_retention_seconds": int(chosen.ack.total_seconds()),
        "feed_retention_days": chosen.feed / timedelta(days=1),
    }
    not_given = {name: value for name, value in servers.items() if name not in given}
    return msgspec.structs.replace(settings, **not_given)


def _loops(settings: Settings, db: Database, context: Context, upkeep: Upkeep) -> list[Loop]:
    """Everything that happens by itself."""
    metrics = context.metrics
    phantoms = Phantoms(
        db,
        stale=timedelta(seconds=settings.phantom_stale_seconds),
        count=metrics.sweep.phantom_busy_resets.inc,
    )

    async def look_after_leaves() -> None:
        try:
            await upkeep.create_leaves()
        finally:  # the lead is most worth showing when none can be created
            metrics.space.saw_lead(await upkeep.lead_seconds())

    async def sweep() -> None:
        await context.sweeping.one_pass(metrics.sweep)

    async def look_at_space() -> None:
        metrics.saw_space(await context.space.sample())

    sweep_seconds = settings.sweep_interval_seconds
    return [
        Loop("leaves", look_after_leaves, upkeep.seconds_between_looks, deadline_seconds=30),
        Loop("expired", upkeep.forget_expired, interval_seconds=60, deadline_seconds=30),
        Loop("removed", upkeep.forget_removed, interval_seconds=300, deadline_seconds=30),
        Loop("sweep", sweep, sweep_seconds, deadline_seconds=_SWEEP_SECONDS),
        Loop("space", look_at_space, interval_seconds=300, deadline_seconds=30),
        Loop("phantoms", phantoms.reset, interval_seconds=300, deadline_seconds=30),
    ]


def _sweeping(settings: Settings, db: Database, delivery: Delivery) -> Sweeping:
    choice = _choice(settings)
    policy = RetentionPolicy(
        ack_retention=choice.ack, feed_retention=choice.feed, settling=_SETTLING
    )
    return Sweeping(db, delivery, policy, budget_seconds=_SWEEP_SECONDS * 0.7)


def _context(
    settings: Settings, db: Database, wakeups: Wakeups, push: Push, admin_token: str
) -> Context:
    delivery = _delivery(settings, db, wakeups)
    return Context(
        metrics=Metrics(settings.metrics_namespace),
        readiness=Readiness(db, migrate.shipped()),
        registry=Registry(
            db,
            admin_token=admin_token,
            registration_token=settings.registration_token,
            is_open=is_loopback(settings.host),
        ),
        delivery=delivery,
        sweeping=_sweeping(settings, db, delivery),
        space=SpaceAccount(db),
        feed=Feed(db, wakeups),
        push=push,
        message_rate=Rate(settings.messages_per_minute),
        staging_enabled=settings.staging,
    )


def _delivery(settings: Settings, db: Database, wakeups: Wakeups) -> Delivery:
    blobs = PostgresBlobs(db)
    capacity = Capacity(db, Quota(settings.server_max_bytes, settings.server_max_files))
    staging = Staging(db, blobs, capacity, wakeups, _policy(settings))
    retention = timedelta(seconds=settings.ack_retention_seconds)
    return Delivery(db, blobs, staging, ack_retention=retention)


def _policy(settings: Settings) -> Policy:
    return Policy(
        ttl=timedelta(seconds=settings.upload_ttl_seconds),
        ttl_min=timedelta(seconds=settings.upload_ttl_min_seconds),
        ttl_max=timedelta(seconds=settings.upload_ttl_max_seconds),
        quota=Quota(settings.workspace_max_bytes, settings.workspace_max_files),
        answers_kept=timedelta(days=1),
        grace_seconds=settings.upload_grace_seconds,
        min_bytes_per_second=settings.upload_min_bytes_per_second,
    )


@asynccontextmanager
async def _awake(wakeups: Wakeups) -> AsyncIterator[Wakeups]:
    """Tell and hear other processes while inside."""
    tasks = [asyncio.create_task(wakeups.tell()), asyncio.create_task(wakeups.listen())]
    try:
        yield wakeups
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # What was committed last is worth a moment; who does not hear of it looks again later.
        with suppress(Exception):
            async with asyncio.timeout(_LAST_NOTICE_SECONDS):
                await wakeups.tell_now()


def data_directory(settings: Settings) -> DataDirectory:
    """The data directory that was asked for, made if it is missing."""
    chosen = Path(settings.data_dir).expanduser() if settings.data_dir else DataDirectory.default()
    return DataDirectory.open(chosen.absolute())


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
    """For the server: the database that was given, or an embedded one that it keeps running."""
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
    """A pool of the size and with the time limits of the settings."""
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
    return admin_token.kept_in(directory.path), directory.path / admin_token.FILE_NAME
