"""
The Postgres that all tests share. Run as a program, it serves until its standard input closes.

It is a process of its own, so that it ends with the test run however that ends.
"""

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from restante.database import migrate
from restante.database.rules import BOTH_PHASES
from restante.postgres import DataDirectory, EmbeddedPostgres
from restante.server import logs

TEMPLATE = "restante_template"

_clone_numbers = itertools.count()

# Cloning a database writes 8 MB: in memory that takes a fifth of the time.
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 8 * 1024**3

# The crash tests, which need durability, run their own servers.
FAST = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "300",
    "max_prepared_transactions": "10",
}


def dsn_of(dsn: str, database: str) -> str:
    """The DSN of another database on the same server."""
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{database}"))


@asynccontextmanager
async def cloned(cluster: str, template: str = TEMPLATE) -> AsyncIterator[str]:
    """A new database, cloned from the template; yields its DSN."""
    name = f"test_{os.getpid()}_{next(_clone_numbers)}"
    maintenance = await asyncpg.connect(cluster)
    try:
        await maintenance.execute(f"create database {name} template {template}")
        yield dsn_of(cluster, name)
        await maintenance.execute(f"drop database {name} with (force)")
    finally:
        await maintenance.close()


@contextmanager
def shared_cluster() -> Iterator[str]:
    """Run the cluster with the template; yields its DSN."""
    program = [sys.executable, __file__]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        try:
            dsn = run.stdout.readline().strip()
            if not dsn:
                raise RuntimeError("the test cluster did not start; see the error above")
            yield dsn
        finally:
            run.stdin.close()


async def make_template(dsn: str) -> None:
    """Create the template database and run every migration on it."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"create database {TEMPLATE}")
    await connection.close()
    await migrate.apply(dsn_of(dsn, TEMPLATE), migrate.shipped(), phases=BOTH_PHASES)


def fastest_place() -> Path | None:
    """A filesystem in memory with enough room; None for the usual place."""
    with suppress(OSError):
        if shutil.disk_usage(MEMORY).free >= MEMORY_BYTES and os.access(MEMORY, os.W_OK):
            return MEMORY
    return None


async def main(directory: Path) -> None:
    bin_dir = os.environ.get("TEST_POSTGRES_BIN")
    postgres = EmbeddedPostgres(
        DataDirectory.open(directory), bin_dir=Path(bin_dir) if bin_dir else None, options=FAST
    )
    await postgres.start()
    try:
        await make_template(postgres.dsn)
        print(postgres.dsn, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await postgres.stop()


if __name__ == "__main__":
    logs.configure("auto", "warning")
    with tempfile.TemporaryDirectory(
        prefix="restante-tests-", dir=fastest_place(), ignore_cleanup_errors=True
    ) as parent:
        Path(parent).chmod(0o711)  # as root, the Postgres account must reach its files
        asyncio.run(main(Path(parent) / "data"))
