"""
One connection: its settings, and whether a pooler in between keeps it a session.

The settings are made after connecting, because PgBouncer refuses or drops start-up parameters.
"""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import asyncpg
from asyncpg import Record as Row

from restante.database import sql
from restante.database.driver_errors import BROKEN, translated, unreachable_translated
from restante.errors import DatabaseTooOld, PoolerUnusable

if TYPE_CHECKING:
    from asyncpg.transaction import Transaction
    from asyncpg.types import ServerVersion

    DriverConnection = asyncpg.Connection[Row]
else:
    DriverConnection = asyncpg.Connection


class Connection(Protocol):
    """
    Any connection to our database.

    What is executed on it is committed at once, unless a transaction is open.
    """

    async def execute(self, query: str, *args: object, timeout: float | None = None) -> str: ...
    async def fetch(self, query: str, *args: object) -> "list[Row]": ...
    async def fetchrow(self, query: str, *args: object) -> Row | None: ...
    async def fetchval(self, query: str, *args: object) -> Any: ...
    def transaction(self, *, readonly: bool = False) -> "Transaction": ...
    def is_in_transaction(self) -> bool: ...
    def is_closed(self) -> bool: ...
    def terminate(self) -> None: ...
    def get_server_version(self) -> "ServerVersion": ...
    def get_settings(self) -> Any: ...


class Tx(Connection, Protocol):
    """
    A connection with an open transaction.

    A function that takes it relies on that: what it does is committed with everything else or not
    at all.  Only the type checker knows the difference; at run time it is the same connection.
    """

    in_transaction: None


queries = sql.load("restante.database")

OLDEST_POSTGRES = 15

# A schema of our own, so that Restante can share a database with an application.
SCHEMA = "restante"
# Temporary tables come last: without this they would be searched first.
SEARCH_PATH = f"{SCHEMA}, pg_temp"

CLOSE_SECONDS = 1.0

# A peer that vanished without closing is noticed within half a minute, on both sides.
_KEEPALIVE = {"idle": 10, "interval": 5, "count": 3}
_UNACKNOWLEDGED_MILLISECONDS = 15_000


@dataclass(frozen=True, slots=True)
class Backend:
    """The server process behind a connection; a pooler may give it to others later."""

    pid: int
    is_shared: bool


class Session(DriverConnection):
    """A connection with our settings."""

    __slots__ = ("backend", "settings")

    backend: Backend
    settings: str

    def get_reset_query(self) -> str:
        """Reset what a caller changed, and make our settings again."""
        return f"{super().get_reset_query()}\n{self.settings}"

    def keep_alive(self) -> None:
        """Let the kernel close the connection when its other end has vanished."""
        ours = self._transport.get_extra_info("socket")
        if ours.family == socket.AF_UNIX:
            return
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_OPTIONS.items():
            if option := getattr(socket, name, None):  # not every system has them
                ours.setsockopt(socket.IPPROTO_TCP, option, value)


_TCP_OPTIONS = {
    "TCP_KEEPIDLE": _KEEPALIVE["idle"],
    "TCP_KEEPINTVL": _KEEPALIVE["interval"],
    "TCP_KEEPCNT": _KEEPALIVE["count"],
    "TCP_USER_TIMEOUT": _UNACKNOWLEDGED_MILLISECONDS,
}


def driver_options(statement_timeout_seconds: float) -> dict[str, Any]:
    """The options of every connection, pooled or not."""
    return {
        "connection_class": Session,
        "command_timeout": statement_timeout_seconds + 5,  # when the server no longer answers
        "timeout": 10,
        "server_settings": {"application_name": "restante"},
    }


@dataclass(frozen=True, slots=True)
class SetUp:
    """Prepares a new connection: one round trip, and behind a pooler one more."""

    statement_timeout_seconds: float
    is_pooled: bool

    async def __call__(self, new: "asyncpg.Connection[Row]") -> None:
        connection = cast("Session", new)
        connection.keep_alive()
        connection.settings = _statement(_settings(self.statement_timeout_seconds))
        await connection.execute(connection.settings)
        pid = connection.get_server_pid()
        if self.is_pooled:  # the pooler has told us a number of its own
            pid = await connection.fetchval(queries.backend_pid)
        connection.backend = Backend(pid, is_shared=self.is_pooled)


def _settings(statement_timeout_seconds: float) -> dict[str, str]:
    milliseconds = str(round(statement_timeout_seconds * 1000))
    keepalive = {f"tcp_keepalives_{name}": str(value) for name, value in _KEEPALIVE.items()}
    return keepalive | {
        "search_path": SEARCH_PATH,
        "statement_timeout": milliseconds,
        # A killed process's statement is cancelled, and its locks are released, within 2 s.
        "client_connection_check_interval": "2000",
        "idle_in_transaction_session_timeout": milliseconds,
        # Partition bounds are parsed from the catalogue, so their format must be fixed.
        "timezone": "UTC",
        "datestyle": "ISO",
        # Our hot statements ask for the order that their index has.  Without sorts no other
        # index can be chosen, whatever the statistics of a table that has just grown.
        "enable_sort": "off",
        "jit": "off",  # it would compile for longer than our statements run
        # What we confirm is on disk, whatever the database's default.  Statements that nobody
        # waits for turn it off themselves.
        "synchronous_commit": "on",
    }


def _statement(settings: dict[str, str]) -> str:
    """Without parameters, so that the driver sends it in a single round trip."""
    each = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in settings.items())
    return f"select {each};"


@asynccontextmanager
async def dedicated(dsn: str, *, statement_timeout_seconds: float) -> AsyncIterator[Session]:
    """A connection outside of the pool, for session-level locks and LISTEN."""
    options = driver_options(statement_timeout_seconds)
    with unreachable_translated():
        connection = cast("Session", await asyncpg.connect(dsn, **options))
    try:
        check_version(connection)
        with translated():
            await SetUp(statement_timeout_seconds, is_pooled=False)(connection)
            yield connection
    finally:
        # A close that fails or times out has closed the socket anyway.
        with suppress(*BROKEN):
            await connection.close(timeout=CLOSE_SECONDS)


def check_version(connection: Connection) -> None:
    """Raise DatabaseTooOld for a Postgres that does not know the SQL we use."""
    if connection.get_server_version().major < OLDEST_POSTGRES:
        version = connection.get_settings().server_version.split()[0]
        raise DatabaseTooOld(
            f"The database is Postgres {version}; Restante needs {OLDEST_POSTGRES} or newer."
        )


async def is_pooled(dsn: str) -> bool:
    """
    Whether a pooler is in between; raises PoolerUnusable unless it is in session mode.

    Raises DatabaseTooOld, too.

    Checked before any setting is made: in the other modes our settings would reach the sessions
    of other applications, our locks would belong to nobody, and LISTEN would hear nothing.
    """
    async with _plain(dsn) as first:
        check_version(first)
        backend = await first.fetchval(queries.backend_pid)
        if backend == first.get_server_pid():
            return False
        async with _plain(dsn) as second:
            if await _share_a_backend(first, second, backend):
                raise PoolerUnusable(
                    "The pooler in front of the database is in transaction or statement mode; "
                    "Restante needs session mode. Set it, or connect without the pooler."
                )
    return True


@asynccontextmanager
async def _plain(dsn: str) -> "AsyncIterator[asyncpg.Connection[Row]]":
    with unreachable_translated():
        connection = await asyncpg.connect(dsn, command_timeout=10, timeout=10)
    try:
        with translated():
            yield connection
    finally:
        with suppress(*BROKEN):
            await connection.close(timeout=CLOSE_SECONDS)


async def _share_a_backend(first: Connection, second: Connection, backend: int) -> bool:
    """
    Whether the first connection has lost its backend, or the second was given the same one.

    One of them happens whether the pooler takes the backend that was used last or the one that
    has waited longest.  The names of prepared statements collide there as well.
    """
    try:
        if await first.fetchval(queries.backend_pid) != backend:
            return True
        return await second.fetchval(queries.backend_pid) == backend
    except (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError):
        return True
