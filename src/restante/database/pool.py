"""
The pool, transactions, notifications, and the one translation of driver errors.

The pool replaces a lost connection the next time one is acquired, so a restart of Postgres costs
the requests in flight and nothing else.
"""

import asyncio
import math
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, cast

import asyncpg
from asyncpg import Record as Row

from restante.database import sql
from restante.errors import (
    DatabaseFull,
    DatabaseTooOld,
    DatabaseUnavailable,
    RestanteError,
    StatementTimedOut,
    TableBusy,
)

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy
    from asyncpg.transaction import Transaction
    from asyncpg.types import ServerVersion


class Connection(Protocol):
    """
    Any connection to our database.

    What is executed on it is committed at once, unless a transaction is open.
    """

    async def execute(self, query: str, *args: object) -> str: ...
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

_CLOSE_SECONDS = 1.0

_CONNECTING = (
    OSError,
    TimeoutError,
    ssl.SSLError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    ValueError,  # a malformed database URL
    OverflowError,  # a port number out of range
)
_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.TooManyConnectionsError,
    ConnectionError,
)
# What releasing or closing a connection may raise; the connection is gone in any case.
_BROKEN = (
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)

_FROM_THE_DRIVER = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    *_LOST,
    TimeoutError,
)
_CLOSED = "The connection to the database was closed."

# The driver raises InterfaceError for lost connections and for programming errors; only the text
# tells them apart.  A connection that is lost while acquired is released to the pool at once.
_CONNECTION_LOST_TEXTS = ("closed", "closing", "released back to the pool")


class Database:
    """A bounded set of connections to one Postgres."""

    def __init__(self, pool: "asyncpg.Pool[Row]", acquire_timeout_seconds: float) -> None:
        self._pool = pool
        self._acquire_timeout_seconds = acquire_timeout_seconds
        self.disk_full_at = -math.inf  # when Postgres last failed for that reason, monotonic

    @classmethod
    async def open(
        cls,
        dsn: str,
        *,
        pool_size: int,
        acquire_timeout_seconds: float,
        statement_timeout_seconds: float,
    ) -> "Database":
        """Connect; raises DatabaseUnavailable or DatabaseTooOld."""
        options = connection_options(statement_timeout_seconds)
        with unreachable_translated():
            pool = await asyncpg.create_pool(
                dsn, min_size=1, max_size=pool_size, reset=_no_reset, **options
            )
        database = cls(pool, acquire_timeout_seconds)
        async with database.connection() as connection:
            check_version(connection)
        return database

    async def close(self) -> None:
        """Close all connections; terminate those with a query that does not end soon."""
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Acquire a connection without a transaction."""
        try:
            connection = await self._pool.acquire(timeout=self._acquire_timeout_seconds)
        except TimeoutError as error:
            raise DatabaseUnavailable(
                f"No database connection became free within {self._acquire_timeout_seconds:g} s."
            ) from error
        except _CONNECTING as error:
            raise DatabaseUnavailable(f"The database does not answer: {reason(error)}.") from error
        try:
            with translated():
                yield connection
        except DatabaseFull as error:
            if isinstance(error.__cause__, asyncpg.DiskFullError):
                self.disk_full_at = time.monotonic()
            raise
        finally:
            # The pool terminates a connection that cannot be released in time.
            with suppress(*_BROKEN):
                await self._pool.release(connection, timeout=_CLOSE_SECONDS)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Connection]:
        """
        Acquire a connection whose session state may change: advisory locks, timeouts.

        The session is reset before the connection goes back to the pool; a connection that cannot
        be reset is terminated.
        """
        async with self.connection() as connection:
            try:
                yield connection
                await cast("PoolConnectionProxy[Row]", connection).reset()
            except BaseException:
                with suppress(asyncpg.InterfaceError):
                    connection.terminate()
                raise

    @asynccontextmanager
    async def transaction(self, *, readonly: bool = False) -> AsyncIterator[Tx]:
        """Acquire a connection and run a transaction on it; an exception rolls it back."""
        async with (
            self.connection() as connection,
            transaction(connection, readonly=readonly) as tx,
        ):
            yield tx

    async def notify(self, channel: str, payload: str) -> None:
        """Send a notification.  Nobody waits for it, so its commit is not synced."""
        async with self.connection() as connection:
            await connection.execute(queries.notify, channel, payload)


@asynccontextmanager
async def transaction(connection: Connection, *, readonly: bool = False) -> AsyncIterator[Tx]:
    """Run a transaction on a connection: an exception, cancellation included, rolls it back."""
    transaction = connection.transaction(readonly=readonly)
    await transaction.start()
    try:
        yield cast("Tx", connection)
    except BaseException:
        await _roll_back(connection, transaction)
        raise
    await transaction.commit()


def is_in_transaction(connection: Connection) -> bool:
    """Whether a transaction is open on it; a connection that went back to its pool has none."""
    try:
        return connection.is_in_transaction()
    except asyncpg.InterfaceError:
        return False


async def _roll_back(connection: Connection, transaction: "Transaction") -> None:
    """
    Roll back, or terminate the connection, which has the same effect.

    A cancel request can reach Postgres before the statement it is meant for.  The rollback would
    then wait until that statement ends, although its caller is gone.
    """
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await transaction.rollback()
    except _BROKEN:
        with suppress(asyncpg.InterfaceError):  # the pool has noticed the loss before us
            connection.terminate()


async def _no_reset(_connection: object) -> None:
    """
    Skip the round trip that would reset the session on every release.

    The driver has rolled back an open transaction by now.  Code that changes the session acquires
    the connection with `session`.
    """


def connection_options(statement_timeout_seconds: float) -> dict[str, Any]:
    """The options of every connection, pooled or not."""
    milliseconds = str(round(statement_timeout_seconds * 1000))
    return {
        "command_timeout": statement_timeout_seconds + 5,  # when the server no longer answers
        "timeout": 10,
        "server_settings": {
            "application_name": "restante",
            "search_path": SEARCH_PATH,
            "statement_timeout": milliseconds,
            # A killed process's statement is cancelled, and its locks are released, within 2 s.
            "client_connection_check_interval": "2000",
            "idle_in_transaction_session_timeout": milliseconds,
            # Partition bounds are parsed from the catalogue, so their format must be fixed.
            "timezone": "UTC",
            "datestyle": "ISO",
            # What we confirm is on disk, whatever the database's default.  Statements that nobody
            # waits for turn it off themselves.
            "synchronous_commit": "on",
        },
    }


@asynccontextmanager
async def dedicated(
    dsn: str, *, statement_timeout_seconds: float
) -> "AsyncIterator[asyncpg.Connection[Row]]":
    """A connection outside of the pool, for session-level locks and LISTEN."""
    options = connection_options(statement_timeout_seconds)
    with unreachable_translated():
        connection = await asyncpg.connect(dsn, **options)
    try:
        check_version(connection)
        with translated():
            yield connection
    finally:
        # A close that fails or times out has closed the socket anyway.
        with suppress(*_BROKEN):
            await connection.close(timeout=_CLOSE_SECONDS)


def check_version(connection: Connection) -> None:
    """Raise DatabaseTooOld for a Postgres that does not know the SQL we use."""
    if connection.get_server_version().major < OLDEST_POSTGRES:
        version = connection.get_settings().server_version.split()[0]
        raise DatabaseTooOld(
            f"The database is Postgres {version}; Restante needs {OLDEST_POSTGRES} or newer."
        )


@contextmanager
def unreachable_translated() -> Iterator[None]:
    """Turn every failure to connect into one sentence, without the password."""
    try:
        yield
    except _CONNECTING as error:
        raise DatabaseUnavailable(
            f"The database cannot be reached: {reason(error)}. Check RESTANTE_DATABASE_URL."
        ) from error


@contextmanager
def translated() -> Iterator[None]:
    """Translate what the driver raises; other exceptions pass unchanged."""
    try:
        yield
    except _FROM_THE_DRIVER as error:
        known = _translation(error)
        if known is None:
            raise
        raise known from error


def _translation(error: BaseException) -> RestanteError | None:
    """The error as one of ours; None if it is a bug."""
    match error:
        case asyncpg.QueryCanceledError() | TimeoutError():
            return StatementTimedOut(f"The database took too long: {reason(error)}.")
        case _ if busy := _busy(error):
            return busy
        case asyncpg.DiskFullError() | asyncpg.OutOfMemoryError():
            return DatabaseFull("The database has no space left; nothing was stored.")
        case _ if isinstance(error, _LOST):
            return DatabaseUnavailable(f"The database went away: {reason(error)}.")
        case _ if _means_closed(error):
            return DatabaseUnavailable(_CLOSED)
        case _:
            return None


def _busy(error: BaseException) -> TableBusy | None:
    """A lock timeout, a deadlock, or a partition that was sealed between two statements."""
    if isinstance(error, asyncpg.LockNotAvailableError | asyncpg.DeadlockDetectedError):
        return TableBusy(f"Another session holds a lock; try again: {reason(error)}.")
    text = str(error)
    if isinstance(error, asyncpg.CheckViolationError) and (
        "no partition" in text or '"sealed"' in text
    ):
        return TableBusy(f"There is no open partition for this time; try again: {reason(error)}.")
    return None


def _means_closed(error: BaseException) -> bool:
    if isinstance(error, asyncpg.InternalClientError):
        # Postgres closes the connection while shutting down, and the driver misreads it.
        return True
    text = str(error)
    return isinstance(error, asyncpg.InterfaceError) and any(
        part in text for part in _CONNECTION_LOST_TEXTS
    )


def reason(error: BaseException) -> str:
    """The first line of the driver's message, to be part of a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


class Listener:
    """Receives notifications on a connection of its own."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    @asynccontextmanager
    async def listening(
        self, channel: str, on_payload: Callable[[str], None]
    ) -> AsyncIterator[asyncio.Event]:
        """Call `on_payload` for each notification; the event is set when the connection is lost."""
        lost = asyncio.Event()

        def on_notification(_connection: object, _pid: int, _channel: str, payload: object) -> None:
            on_payload(str(payload))

        async with dedicated(self._dsn, statement_timeout_seconds=30) as connection:
            connection.add_termination_listener(lambda _: lost.set())
            await connection.add_listener(channel, on_notification)
            yield lost
