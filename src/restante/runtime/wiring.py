"""Builds everything from the settings; the only place that knows all parts."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
from starlette.applications import Starlette

from restante.core.migrations import Phase
from restante.postgres import DataDirectory, EmbeddedPostgres, postgres_for
from restante.runtime import admin_token
from restante.runtime.listener import HttpServer, address_of, listen
from restante.runtime.loops import Loop, Loops
from restante.runtime.metrics import Metrics
from restante.services.readiness import Readiness
from restante.settings import Settings
from restante.store import migrate
from restante.store.database import Database
from restante.web import app
from restante.web.context import Context

log = structlog.get_logger()


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
            stop.gently = lambda: setattr(http, "should_exit", True)
            await http.serve(sockets=[listening])


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
    metrics = Metrics(settings.metrics_namespace)
    directory = data_directory(settings)
    async with AsyncExitStack() as stack:
        dsn = await stack.enter_async_context(_own_database(settings, directory))
        token_file = _keep_admin_token(settings, directory)
        ran = await migrate.apply(dsn, migrate.shipped(), phases={Phase.PRE})
        if ran:
            log.info("migrated", migrations=[str(migration) for migration in ran])
        db = await stack.enter_async_context(opened(settings, dsn))
        loops: list[Loop] = []
        metrics.expect_loops(loop.name for loop in loops)
        await stack.enter_async_context(Loops(loops, metrics))
        yield app.build(Context(metrics, Readiness(db, migrate.shipped()))), token_file


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


def _keep_admin_token(settings: Settings, directory: DataDirectory) -> Path | None:
    if settings.admin_token:
        return None
    admin_token.kept_in(directory.path)
    return directory.path / admin_token.FILE_NAME
