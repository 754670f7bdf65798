"""
The embedded Postgres as a whole: prepared, started, watched and stopped.

`start` and `watch` belong in the main thread's event loop.  Whoever calls `start` has claimed the
data directory before.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import structlog

from restante.errors import PostgresUnusable
from restante.postgres import options, pidfile
from restante.postgres.child import Child
from restante.postgres.datadir import DataDirectory
from restante.postgres.preparation import Site, prepare
from restante.postgres.sockets import dsn

log = structlog.stdlib.get_logger(__name__)

READY_POLL_SECONDS = 0.02
RETRY_SECONDS = 0.1
RECOVERY_NEWS_SECONDS = 10.0
# After a kill -9, what is left of the old server holds its memory or its lock for a moment.
RETRY_FOR_SECONDS = 10.0
STILL_IN_USE = ("is still in use", 'lock file "postmaster.pid" already exists')
# A server that lived this long gets a fast restart again.
STEADY_SECONDS = 30.0


class EmbeddedPostgres:
    """Runs Postgres as our direct child and keeps it running."""

    def __init__(
        self,
        directory: DataDirectory,
        *,
        bin_dir: Path | None = None,
        account: str | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = directory
        self._bin_dir = bin_dir
        self._account = account
        self._options = dict(options or {})
        self._site: Site | None = None
        self._child: Child | None = None
        self._stopped = asyncio.Event()

    @property
    def dsn(self) -> str:
        """The address for asyncpg; it stays the same when Postgres is started again."""
        return dsn(self._prepared.sockets)

    @property
    def pid(self) -> int | None:
        child = self._child
        return child.pid if child and not child.exited.is_set() else None

    async def start(self) -> None:
        """Make the cluster if there is none, and return when Postgres takes connections."""
        self._stopped.clear()
        try:
            self._site = await prepare(self._directory, self._bin_dir, self._account)
        except OSError as error:
            raise PostgresUnusable(
                f"Postgres cannot be prepared in {self._directory.path}: {error}."
            ) from error
        await self._launch()

    async def stop(self) -> None:
        """Shut Postgres down within seconds; a second call changes nothing."""
        self._stopped.set()
        if self._child:
            await self._child.end()

    async def watch(self) -> None:
        """Until stopped, start Postgres again whenever it dies; nothing makes it give up."""
        pauses = _back_off()
        while self._child and not self._stopped.is_set():
            since = time.monotonic()
            status = await self._child.wait()
            if self._stopped.is_set():
                return
            log.error("postgres_died", pid=self._child.pid, status=status)
            if time.monotonic() - since > STEADY_SECONDS:
                pauses = _back_off()
            await self._bring_back(pauses)

    async def _bring_back(self, pauses: Iterator[float]) -> None:
        for pause in pauses:
            if await self._is_stopped_within(pause):
                return
            try:
                await self._launch()
            except PostgresUnusable as error:
                log.warning("postgres_not_back", reason=str(error))
            except Exception:
                log.exception("postgres_not_back")
            else:
                log.info("postgres_back", pid=self.pid)
                return

    async def _launch(self) -> None:
        give_up_at = time.monotonic() + RETRY_FOR_SECONDS
        while not self._stopped.is_set():
            child = self._child = self._spawn()
            if await self._becomes_ready(child):
                return
            if not child.said.mentions(*STILL_IN_USE) or time.monotonic() > give_up_at:
                raise PostgresUnusable(f"Postgres does not start. It says: {child.said.complaint}")
            await asyncio.sleep(RETRY_SECONDS)
        raise PostgresUnusable("Postgres was stopped before it was ready.")

    def _spawn(self) -> Child:
        site = self._prepared
        command = [
            str(site.binaries.postgres),
            *options.arguments(site.cluster, site.sockets, self._options),
        ]
        stale = pidfile.stranger(site.cluster)
        # Postgres overlooks a pid file that names this process, but not shared memory in use.
        environment = {"PG_GRANDPARENT_PID": str(stale)} if stale else {}
        return Child.spawn(command, site.account, environment=environment)

    async def _becomes_ready(self, child: Child) -> bool:
        """Wait for as long as Postgres lives, since recovery takes what it takes."""
        try:
            return await self._ready_or_gone(child)
        except BaseException:
            await child.end()
            raise

    async def _ready_or_gone(self, child: Child) -> bool:
        began = told = time.monotonic()
        while not child.exited.is_set():
            found = pidfile.read(self._prepared.cluster)
            if found and found.pid == child.pid and found.ready:
                return True
            if time.monotonic() - told > RECOVERY_NEWS_SECONDS:
                told = time.monotonic()
                log.warning("postgres_recovering", seconds=round(told - began))
            await asyncio.sleep(READY_POLL_SECONDS)
        await child.wait()
        return False

    async def _is_stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopped.wait(), seconds)
        except TimeoutError:
            return False
        return True

    @property
    def _prepared(self) -> Site:
        if self._site is None:
            raise PostgresUnusable("Postgres has not been started yet.")
        return self._site


def _back_off() -> Iterator[float]:
    return itertools.chain((0.0, 0.25, 0.5, 1.0, 2.0), itertools.repeat(3.0))
