"""
The Postgres that all tests share. Run as a program, it serves until its standard input closes.

It is a process of its own, so that it ends with the test run however that ends. Servers of tests
that run a Postgres of their own begin with a copy of the same cluster: to create one, and to
migrate it, takes as much time as to start it twice.
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
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from restante.database import migrate
from restante.database.pool import SCHEMA
from restante.database.rules import BOTH_PHASES, Phase
from restante.postgres import DataDirectory, EmbeddedPostgres, placement
from restante.server import logs

TEMPLATE = "restante_template"

# Names the directory of a cluster as the first start of a server leaves it.  Unset while the tests
# run on another Postgres than the embedded one: its clusters are of another version.
STARTED_ONCE = "TEST_CLUSTER_STARTED_ONCE"

_clone_numbers = itertools.count()

# Cloning a database writes 8 MB: in memory that takes a fifth of the time.
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 8 * 1024**3

# The crash tests, which need durability, run their own servers.
FAST = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "autovacuum": "off",  # the databases live for less than a second
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
        # The template does not change any more, so its files can be copied without WAL.
        await maintenance.execute(f"create database {name} template {template} strategy file_copy")
        yield dsn_of(cluster, name)
        await maintenance.execute(f"drop database {name} with (force)")
    finally:
        await maintenance.close()


def copy_cluster(data_dir: Path) -> None:
    """Copy the cluster of a first start into the data directory of a server, if there is one."""
    if STARTED_ONCE in os.environ:
        directory = DataDirectory.open(data_dir)
        # As root it belongs to another account, and shutil.copytree does not keep owners.
        source, target = os.environ[STARTED_ONCE], directory.path / placement.CLUSTER
        subprocess.run(["cp", "--archive", "--no-target-directory", source, target], check=True)


@contextmanager
def shared_cluster() -> Iterator[str]:
    """Run the cluster with the template; yields its DSN."""
    program = [sys.executable, __file__]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        try:
            dsn, _, started_once = run.stdout.readline().strip().partition(" ")
            if not dsn:
                raise RuntimeError("the test cluster did not start; see the error above")
            if started_once:  # for the processes that run the tests, and for another cluster
                os.environ.setdefault(STARTED_ONCE, started_once)
            yield dsn
        finally:
            run.stdin.close()


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Any]:
    """A connection to our tables, of a Postgres that may be killed meanwhile."""
    connection = await asyncpg.connect(dsn, server_settings={"search_path": SCHEMA})
    try:
        yield connection
    finally:
        with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            await connection.close(timeout=2)


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


async def start_once(directory: Path) -> Path:
    """Do what a server does to its Postgres at its first start; returns the cluster."""
    postgres = EmbeddedPostgres(DataDirectory.open(directory), options=FAST)
    await postgres.start()
    try:
        await migrate.apply(postgres.dsn, migrate.shipped(), phases={Phase.PRE})
    finally:
        await postgres.stop()
    return directory / placement.CLUSTER


async def main(parent: Path) -> None:
    bin_dir = os.environ.get("TEST_POSTGRES_BIN")
    if not bin_dir and STARTED_ONCE not in os.environ:
        os.environ[STARTED_ONCE] = str(await start_once(parent / "started-once"))
    if not bin_dir:
        copy_cluster(parent / "data")
    postgres = EmbeddedPostgres(
        DataDirectory.open(parent / "data"),
        bin_dir=Path(bin_dir) if bin_dir else None,
        options=FAST,
    )
    await postgres.start()
    try:
        await make_template(postgres.dsn)
        print(postgres.dsn, os.environ.get(STARTED_ONCE, ""), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await postgres.stop()


if __name__ == "__main__":
    logs.configure("auto", "warning")
    with tempfile.TemporaryDirectory(
        prefix="restante-tests-", dir=fastest_place(), ignore_cleanup_errors=True
    ) as parent:
        Path(parent).chmod(0o711)  # as root, the Postgres account must reach its files
        asyncio.run(main(Path(parent)))
