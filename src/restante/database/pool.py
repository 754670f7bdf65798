"""
The pool, transactions, and the one translation of driver errors.

A connection that was lost is replaced by the pool the next time one is asked for, so a restart of
Postgres costs the requests in flight and nothing else.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg

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

    Row: TypeAlias = asyncpg.Record
    Tx: TypeAlias = asyncpg.Connection[Row] | PoolConnectionProxy[Row]
else:
    Row = asyncpg.Record
    Tx = asyncpg.Connection

OLDEST_POSTGRES = 15

# Our tables have a schema of their own, so that Restante can share a database with an application.
SCHEMA = "restante"

_CLOSE_SECONDS = 1.0

_CONNECTING = (
    OSError,
    TimeoutError,
    ssl.SSLError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    ValueError,  # a malformed database URL
    OverflowError,  # a port that cannot be
)
_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.TooManyConnectionsError,
    ConnectionError,
)
# What giving up a connection may raise; it is given up all the same.
_BROKEN = (
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)

_FROM_THE_DRIVER = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
_CLOSED = "The connection to the database was closed."

# The driver uses one error for losses and for mistakes of ours, and tells them apart in words.  A
# connection that is lost while it is borrowed goes back to its pool at once.
_WORDS_FOR_A_LOSS = ("closed", "closing", "released back to the pool")


class Database:
    """A bounded set of connections to one Postgres."""

    def __init__(self, pool: "asyncpg.Pool[Row]", acquire_timeout_seconds: float) -> None:
        self._pool = pool
        self._acquire_timeout_seconds = acquire_timeout_seconds

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
                dsn, min_size=1, max_size=pool_size, reset=_leave_as_it_is, **options
            )
        database = cls(pool, acquire_timeout_seconds)
        async with database.connection() as connection:
            check_version(connection)
        return database

    async def close(self) -> None:
        """Close the connections, by force if a query does not end soon."""
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Tx]:
        """Borrow a connection outside of a transaction."""
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
        finally:
            await self._release(connection)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Tx]:
        """
        Borrow a connection whose session may be changed: locks, time-outs.

        It goes back as it came; if that cannot be made sure of, it is ended.
        """
        async with self.connection() as connection:
            try:
                yield connection
                await connection.reset()
            except BaseException:
                with suppress(asyncpg.InterfaceError):
                    connection.terminate()
                raise

    async def _release(self, connection: "PoolConnectionProxy[Row]") -> None:
        """Give it back; one that cannot be made clean in time is ended by the pool itself."""
        with suppress(*_BROKEN):
            await self._pool.release(connection, timeout=_CLOSE_SECONDS)

    @asynccontextmanager
    async def transaction(self, *, readonly: bool = False) -> AsyncIterator[Tx]:
        """Borrow a connection with a transaction on it: all of it is committed, or none."""
        async with self.connection() as connection:
            transaction = connection.transaction(readonly=readonly)
            await transaction.start()
            try:
                yield connection
            except BaseException:
                await roll_back(connection, transaction)
                raise
            await transaction.commit()


async def roll_back(connection: Tx, transaction: "Transaction") -> None:
    """
    Take the transaction back, or end its connection, which comes to the same.

    A request to cancel can reach Postgres before the statement that it is for; the rollback would
    then wait for as long as that statement may run, and its caller is gone already.
    """
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await transaction.rollback()
    except _BROKEN:
        with suppress(asyncpg.InterfaceError):  # the pool has noticed the loss before us
            connection.terminate()


async def _leave_as_it_is(_connection: object) -> None:
    """
    Save the round trip that would reset a session each time it is given back.

    The driver has rolled back an open transaction by now.  Whoever sets more borrows a `session`.
    """


def connection_options(statement_timeout_seconds: float) -> dict[str, Any]:
    """How every connection of ours is set up, pooled or not."""
    milliseconds = str(round(statement_timeout_seconds * 1000))
    return {
        "command_timeout": statement_timeout_seconds + 5,  # for a server that no longer answers
        "timeout": 10,
        "server_settings": {
            "application_name": "restante",
            "search_path": SCHEMA,
            "statement_timeout": milliseconds,
            # The statement of a process that was killed lets go of its locks soon.
            "client_connection_check_interval": "2000",
            "idle_in_transaction_session_timeout": milliseconds,
            # How the catalogue writes the bounds of leaves, whatever the database's own habits.
            "timezone": "UTC",
            "datestyle": "ISO",
            # What we confirm is on disk, whatever the database does for others; the statements that
            # nobody waits for say so themselves.
            "synchronous_commit": "on",
        },
    }


@asynccontextmanager
async def dedicated(dsn: str, *, statement_timeout_seconds: float) -> AsyncIterator[Tx]:
    """A connection of one's own, for locks that must live and die with it."""
    options = connection_options(statement_timeout_seconds)
    with unreachable_translated():
        connection = await asyncpg.connect(dsn, **options)
    try:
        check_version(connection)
        with translated():
            yield connection
    finally:
        # A close that does not end in time or fails has cut the connection all the same.
        with suppress(*_BROKEN):
            await connection.close(timeout=_CLOSE_SECONDS)


def check_version(connection: Tx) -> None:
    """Refuse a Postgres that does not know the SQL we speak."""
    if connection.get_server_version().major < OLDEST_POSTGRES:
        version = connection.get_settings().server_version.split()[0]
        raise DatabaseTooOld(
            f"The database is Postgres {version}; Restante needs {OLDEST_POSTGRES} or newer."
        )


@contextmanager
def unreachable_translated() -> Iterator[None]:
    """Turn every way a first connection can fail into one sentence, without the password."""
    try:
        yield
    except _CONNECTING as error:
        raise DatabaseUnavailable(
            f"The database cannot be reached: {reason(error)}. Check RESTANTE_DATABASE_URL."
        ) from error


@contextmanager
def translated() -> Iterator[None]:
    """Translate what the driver raises; everything else passes through untouched."""
    try:
        yield
    except (*_FROM_THE_DRIVER, *_LOST, TimeoutError) as error:
        fact = _fact(error)
        if fact is None:
            raise
        raise fact from error


def _fact(error: BaseException) -> RestanteError | None:
    """What has happened, in our words; None for a mistake of ours."""
    match error:
        case asyncpg.QueryCanceledError() | TimeoutError():
            return StatementTimedOut(f"The database took too long: {reason(error)}.")
        case _ if _means_busy(error):
            return TableBusy(f"Somebody is in the way; try again: {reason(error)}.")
        case asyncpg.DiskFullError() | asyncpg.OutOfMemoryError():
            return DatabaseFull("The database has no space left; nothing was stored.")
        case _ if isinstance(error, _LOST):
            return DatabaseUnavailable(f"The database went away: {reason(error)}.")
        case _ if _means_closed(error):
            return DatabaseUnavailable(_CLOSED)
        case _:
            return None


def _means_busy(error: BaseException) -> bool:
    """A lock that was not to be had, or a leaf that was closed between two statements."""
    if isinstance(error, asyncpg.CheckViolationError):
        return "no partition" in str(error) or '"sealed"' in str(error)
    return isinstance(error, asyncpg.LockNotAvailableError | asyncpg.DeadlockDetectedError)


def _means_closed(error: BaseException) -> bool:
    if isinstance(error, asyncpg.InternalClientError):
        # The driver trips over the farewell of a Postgres that ends between two statements.
        return True
    words = str(error)
    return isinstance(error, asyncpg.InterfaceError) and any(w in words for w in _WORDS_FOR_A_LOSS)


def reason(error: BaseException) -> str:
    """The driver's words as part of a sentence."""
    words = str(error).strip().splitlines()
    return words[0].rstrip(".") if words else type(error).__name__


class Listener:
    """Hears notices on a connection of its own."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    @asynccontextmanager
    async def listening(
        self, channel: str, heard: Callable[[str], None]
    ) -> AsyncIterator[asyncio.Event]:
        """Call `heard` with each payload; the event is set when the connection is lost."""
        lost = asyncio.Event()

        def on_notice(_connection: object, _pid: int, _channel: str, payload: object) -> None:
            heard(str(payload))

        async with dedicated(self._dsn, statement_timeout_seconds=30) as connection:
            connection.add_termination_listener(lambda _: lost.set())
            await connection.add_listener(channel, on_notice)
            yield lost
