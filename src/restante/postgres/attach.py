"""For commands beside `serve`: the Postgres that runs already, or one for the time being."""

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

OWNER_STARTS_WITHIN_SECONDS = 10.0
POLL_SECONDS = 0.05


def running_dsn(directory: DataDirectory) -> str | None:
    """Find the Postgres that runs on this data directory, None unless it takes connections."""
    try:
        home = placement.existing_home(directory)
    except (OSError, PostgresUnusable):
        return None
    found = pidfile.read(home / placement.CLUSTER) if home else None
    if found and found.ready and _answers(found.sockets / SOCKET):
        return dsn(found.sockets)
    return None


@asynccontextmanager
async def postgres_for(
    directory: DataDirectory,
    *,
    bin_dir: Path | None = None,
    account: str | None = None,
    options: Mapping[str, str] | None = None,
) -> AsyncIterator[str]:
    """Yield the address of the running Postgres, or of one that runs until the context ends."""
    with ExitStack() as claimed:
        running = await _running_or_claimed(directory, claimed)
        if running:
            yield running
            return
        postgres = EmbeddedPostgres(directory, bin_dir=bin_dir, account=account, options=options)
        try:
            await postgres.start()
            yield postgres.dsn
        finally:
            await postgres.stop()


async def _running_or_claimed(directory: DataDirectory, claimed: ExitStack) -> str | None:
    give_up_at = time.monotonic() + OWNER_STARTS_WITHIN_SECONDS
    while True:
        running = running_dsn(directory)
        if running:
            return running
        try:
            claimed.enter_context(directory.claim())
        except DataDirectoryInUse:
            if time.monotonic() > give_up_at:
                raise
            await asyncio.sleep(POLL_SECONDS)
        else:
            return None


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
        except OSError:
            return False
        return True
