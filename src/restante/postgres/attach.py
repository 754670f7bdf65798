"""For commands other than `serve`: use the running Postgres, or start a temporary one."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from restante.errors import DataDirectoryInUse, PostgresUnusable
from restante.postgres import pidfile, placement
from restante.postgres.datadir import DataDirectory
from restante.postgres.sockets import SOCKET, dsn
from restante.postgres.supervisor import EmbeddedPostgres

OWNER_TIMEOUT_SECONDS = 10.0
POLL_SECONDS = 0.05


def running_dsn(directory: DataDirectory) -> str | None:
    """The DSN of the Postgres of this data directory, None unless it accepts connections."""
    try:
        home = placement.existing_home(directory)
    except (OSError, PostgresUnusable):
        return None
    found = pidfile.read(home / placement.CLUSTER) if home else None
    if found and found.ready and _accepts_connections(found.sockets / SOCKET):
        return dsn(found.sockets)
    return None


@asynccontextmanager
async def postgres_for(
    directory: DataDirectory,
    *,
    bin_dir: Path | None = None,
    account: str | None = None,
    options: Mapping[str, str] | None = None,
    owner_timeout_seconds: float = OWNER_TIMEOUT_SECONDS,
) -> AsyncIterator[str]:
    """
    Yield the DSN of the running Postgres, or of one that runs until the context ends.

    Another process may own the data directory and still be starting its Postgres. Raises
    DataDirectoryInUse if that Postgres is not ready within the timeout.
    """
    with ExitStack() as claim:
        running = await _running_or_claimed(directory, claim, owner_timeout_seconds)
        if running:
            yield running
            return
        postgres = EmbeddedPostgres(directory, bin_dir=bin_dir, account=account, options=options)
        try:
            await postgres.start()
            yield postgres.dsn
        finally:
            await postgres.stop()


async def _running_or_claimed(
    directory: DataDirectory, claim: ExitStack, timeout_seconds: float
) -> str | None:
    deadline = time.monotonic() + timeout_seconds
    while True:
        running = running_dsn(directory)
        if running:
            return running
        try:
            claim.enter_context(directory.claim())
        except DataDirectoryInUse:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(POLL_SECONDS)
        else:
            return None


def _accepts_connections(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
        except OSError:
            return False
        return True
