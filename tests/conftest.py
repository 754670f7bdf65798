"""
One real Postgres for the whole run, a migrated template in it, and clones of the template.

`TEST_POSTGRES_BIN` names the programs of another Postgres; by default it is the one we embed.
"""

import asyncio
import logging
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import structlog
from cluster import cloned, shared_cluster
from factories import ROWS_FROM
from hypothesis import HealthCheck, settings as hypothesis_settings
from processes import Server
from sites import Site, SiteFactory, running_site, settings_for

from restante.database import partitions, shares
from restante.database.pool import SCHEMA, Database, Tx
from restante.database.spans import Span, floor
from restante.delivery.subject import CHUNKS
from restante.feed.message_rules import ID_SLOT
from restante.feed.subject import FEED, MESSAGE_IDS

# How long an example takes depends on what else the machine does.
hypothesis_settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("any machine")

_stack = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    """The process that hands out the tests runs the cluster; its workers are told the address."""
    _restore_sigint()
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        config.restante_cluster = _stack.enter_context(shared_cluster())  # pyright: ignore[reportAttributeAccessIssue]


def _restore_sigint() -> None:
    """
    Undo an ignored SIGINT, which a background job of a shell inherits and passes on.

    Workers and every process that a test starts inherit the disposition from here, and the tests
    of Ctrl-C need the default one.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure_node(node: Any) -> None:
    node.workerinput["restante_cluster"] = node.config.restante_cluster


def pytest_unconfigure(config: pytest.Config) -> None:
    _stack.close()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _closed_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in a test talks to anything but this machine."""
    connect = socket.socket.connect

    def connect_nearby(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in {"127.0.0.1", "::1", "localhost"}:
            raise AssertionError(f"a test tried to reach {address[0]}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_nearby)


@pytest.fixture(autouse=True)
def _own_logs() -> Iterator[None]:
    """A command that a test runs in this process chooses what is logged; the next test has all."""
    yield
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler.formatter, structlog.stdlib.ProcessorFormatter):
            structlog.reset_defaults()
            root.removeHandler(handler)
            root.setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> str:
    """The DSN of the shared cluster's maintenance database."""
    worker = getattr(request.config, "workerinput", None)
    return worker["restante_cluster"] if worker else request.config.restante_cluster  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
async def empty_dsn(cluster: str) -> AsyncIterator[str]:
    """A database in which nothing has happened yet."""
    async with cloned(cluster, "template0") as dsn:
        yield dsn


@pytest.fixture
async def dsn(cluster: str) -> AsyncIterator[str]:
    """A migrated database of the test's own: commits, locks and notifications are real."""
    shares.caller.set(None)  # all tests of a process run in one context, and some are a caller
    async with cloned(cluster) as dsn:
        yield dsn


@pytest.fixture
async def db(dsn: str) -> AsyncIterator[Database]:
    """A pool on a migrated database of the test's own."""
    db = await Database.open(
        dsn, pool_size=10, acquire_timeout_seconds=5, statement_timeout_seconds=20
    )
    yield db
    await db.close()


@pytest.fixture
async def db_with_partitions(db: Database) -> Database:
    """The same, with partitions for rows up to five minutes older than NOW, even at a full hour."""
    async with db.transaction() as tx:
        for table, start in (
            (CHUNKS, ROWS_FROM),
            (FEED, ROWS_FROM),
            (MESSAGE_IDS, floor(ROWS_FROM, ID_SLOT)),
        ):
            await partitions.create(tx, table, Span(start, start + timedelta(days=1)))
    return db


@pytest.fixture
async def tx(db: Database) -> AsyncIterator[Tx]:
    """One open transaction."""
    async with db.transaction() as tx:
        yield tx


@pytest.fixture
async def connections(dsn: str) -> AsyncIterator[Callable[[], Any]]:
    """Opens further connections to the test's database, for explicit interleavings."""
    opened: list[Any] = []

    async def connect() -> Any:
        connection = await asyncpg.connect(dsn, server_settings={"search_path": SCHEMA})
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        try:
            async with asyncio.timeout(10):
                await connection.close()
        except TimeoutError:  # a failed test has left a statement on it
            connection.terminate()


@pytest.fixture
def run_site(dsn: str, tmp_path: Path) -> SiteFactory:
    """For tests that choose settings, or run two servers on one database."""

    def run(*, with_jobs: bool = True, **chosen: Any) -> AbstractAsyncContextManager[Site]:
        return running_site(settings_for(dsn, tmp_path, **chosen), with_jobs=with_jobs)

    return run


@pytest.fixture
async def site(dsn: str, tmp_path: Path) -> AsyncIterator[Site]:
    """A server with the default settings, in the test's own event loop; no background job runs."""
    async with running_site(settings_for(dsn, tmp_path), with_jobs=False) as site:
        yield site


@pytest.fixture
async def site_with_jobs(run_site: SiteFactory) -> AsyncIterator[Site]:
    """The same with its background jobs."""
    async with run_site() as site:
        yield site


@pytest.fixture(scope="module")
async def shared_site(
    cluster: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    """The same for all tests of a file; each has workspaces of its own there."""
    data_dir = tmp_path_factory.mktemp("site")
    async with cloned(cluster) as dsn, running_site(settings_for(dsn, data_dir)) as site:
        yield site


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that Postgres's account can pass through; pytest's own is closed to it."""
    with tempfile.TemporaryDirectory(prefix="restante-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.fixture
def new_server(place: Path) -> Iterator[Server]:
    """A real server process that finds nothing at its first start."""
    with Server(place / "data") as server:
        yield server


@pytest.fixture
def server(new_server: Server) -> Server:
    """A real server process with a data directory of its own; start it, kill it, start it again."""
    return new_server.started_once()
