"""
Starts, watches and stops the embedded Postgres.

Call `start` and `watch` in the main thread's event loop. Claim the data directory before `start`.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import structlog

from restante.errors import PostgresUnusable
from restante.postgres import options, pidfile
from restante.postgres.ballast import NEEDED_TO_START, Ballast
from restante.postgres.child import Child
from restante.postgres.datadir import DataDirectory
from restante.postgres.preparation import Installation, prepare
from restante.postgres.sockets import dsn

log = structlog.stdlib.get_logger(__name__)

READY_POLL_SECONDS = 0.02
RETRY_SECONDS = 0.1
RECOVERY_LOG_SECONDS = 10.0
# After kill -9, orphans of the old server hold its shared memory or lock file for a moment.
RETRY_TIMEOUT_SECONDS = 10.0
STILL_IN_USE = ("is still in use", 'lock file "postmaster.pid" already exists')
DISK_FULL = "No space left on device"
# A server that ran this long is restarted without back-off.
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
        retry_timeout_seconds: float = RETRY_TIMEOUT_SECONDS,
    ) -> None:
        self._directory = directory
        self._bin_dir = bin_dir
        self._account = account
        self._options = dict(options or {})
        self._retry_timeout_seconds = retry_timeout_seconds
        self._installation: Installation | None = None
        self._child: Child | None = None
        self._stopped = asyncio.Event()

    @property
    def dsn(self) -> str:
        """The DSN; it stays the same when Postgres is restarted."""
        return dsn(self._prepared.sockets)

    @property
    def sockets(self) -> Path:
        """The directory of its socket."""
        return self._prepared.sockets

    @property
    def pid(self) -> int | None:
        child = self._child
        return child.pid if child and not child.exited.is_set() else None

    async def start(self) -> None:
        """Create the cluster if there is none; return when Postgres accepts connections."""
        self._stopped.clear()
        try:
            self._installation = await prepare(self._directory, self._bin_dir, self._account)
        except OSError as error:
            raise PostgresUnusable(
                f"Postgres cannot be prepared in {self._directory.path}: {error}."
            ) from error
        await self._launch()

    async def stop(self) -> None:
        """Shut Postgres down within seconds; idempotent."""
        self._stopped.set()
        if self._child:
            await self._child.end()

    async def watch(self) -> None:
        """Restart Postgres whenever it dies, with back-off and without a limit, until stopped."""
        pauses = _back_off()
        while self._child and not self._stopped.is_set():
            since = time.monotonic()
            status = await self._child.wait()
            if self._stopped.is_set():
                return
            log.error("postgres_died", pid=self._child.pid, status=status)
            if time.monotonic() - since > STEADY_SECONDS:
                pauses = _back_off()
            await self._restart(pauses)

    async def _restart(self, pauses: Iterator[float]) -> None:
        for pause in pauses:
            if await self._stopped_within(pause):
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
        deadline = time.monotonic() + self._retry_timeout_seconds
        ballast = Ballast(self._prepared.home, 0)
        if ballast.free_bytes < NEEDED_TO_START:
            # Recovery writes, so a Postgres that died on a full disk could not start on it.
            ballast.release()
        while not self._stopped.is_set():
            child = self._child = self._spawn()
            if await self._becomes_ready(child):
                return
            if child.output.mentions(DISK_FULL) and ballast.release():
                continue
            if not child.output.mentions(*STILL_IN_USE) or time.monotonic() > deadline:
                reason = child.output.last_error
                raise PostgresUnusable(f"Postgres does not start. It reports: {reason}")
            await asyncio.sleep(RETRY_SECONDS)
        raise PostgresUnusable("Postgres was stopped before it was ready.")

    def _spawn(self) -> Child:
        prepared = self._prepared
        command = [
            str(prepared.binaries.postgres),
            *options.arguments(prepared.cluster, prepared.sockets, self._options),
        ]
        unrelated = pidfile.unrelated_pid(prepared.cluster)
        # Postgres ignores a pid file with this pid, but still checks for shared memory in use.
        environment = {"PG_GRANDPARENT_PID": str(unrelated)} if unrelated else {}
        return Child.spawn(command, prepared.account, environment=environment)

    async def _becomes_ready(self, child: Child) -> bool:
        """Wait without a timeout while Postgres runs, because recovery can take long."""
        try:
            return await self._ready_or_gone(child)
        except BaseException:
            await child.end()
            raise

    async def _ready_or_gone(self, child: Child) -> bool:
        started = logged = time.monotonic()
        while not child.exited.is_set():
            found = pidfile.read(self._prepared.cluster)
            if found and found.pid == child.pid and found.ready:
                return True
            if time.monotonic() - logged > RECOVERY_LOG_SECONDS:
                logged = time.monotonic()
                log.warning("postgres_recovering", seconds=round(logged - started))
            await asyncio.sleep(READY_POLL_SECONDS)
        await child.wait()
        return False

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopped.wait(), seconds)
        except TimeoutError:
            return False
        return True

    @property
    def _prepared(self) -> Installation:
        if self._installation is None:
            raise PostgresUnusable("Postgres has not been started yet.")
        return self._installation


def _back_off() -> Iterator[float]:
    return itertools.chain((0.0, 0.25, 0.5, 1.0, 2.0), itertools.repeat(3.0))
