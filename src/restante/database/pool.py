"""
The pool, and transactions.

The pool replaces a lost connection the next time one is acquired, so a restart of Postgres costs
the requests in flight and nothing else.  Connections that are open and useless, to a demoted or a
silent server, are replaced as soon as one of them shows it.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, cast

import asyncpg
from asyncpg import Record as Row

from restante.database import driver_errors, sessions, sql
from restante.database.driver_errors import BROKEN, reason, translated, unreachable_translated
from restante.database.sessions import (
    CLOSE_SECONDS,
    SCHEMA,
    SEARCH_PATH,
    Connection,
    SetUp,
    Tx,
    check_version,
    dedicated,
    driver_options,
)
from restante.database.shares import Shares
from restante.errors import DatabaseReadOnly, DatabaseUnavailable, RestanteError

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy
    from asyncpg.transaction import Transaction

__all__ = [  # the database as the subjects see it
    "SCHEMA",
    "SEARCH_PATH",
    "Connection",
    "Database",
    "Row",
    "Tx",
    "dedicated",
    "is_in_transaction",
    "reason",
    "transaction",
    "translated",
]

queries = sql.load("restante.database")

# While the database stays read-only, each failed write would replace every connection.
_DOUBT_SECONDS = 1.0

_SHARES = 8


def share_of(pool_size: int) -> int:
    """How many connections one caller uses at once: an eighth, but two of a small pool."""
    return max(min(2, pool_size // 2), pool_size // _SHARES)


class Database:
    """A bounded set of connections to one Postgres."""

    def __init__(self, pool: "asyncpg.Pool[Row]", acquire_timeout_seconds: float) -> None:
        self._pool = pool
        self._shares = Shares(share_of(pool.get_max_size()))
        self._acquire_timeout_seconds = acquire_timeout_seconds
        self._doubted_at = -_DOUBT_SECONDS
        self.disk_full_at = -math.inf  # when Postgres last failed for that reason, monotonic
        self.refuses_sessions = False  # for that reason, when the last one was opened

    @classmethod
    async def open(
        cls,
        dsn: str,
        *,
        pool_size: int,
        acquire_timeout_seconds: float,
        statement_timeout_seconds: float,
    ) -> "Database":
        """Connect; raises DatabaseUnavailable, DatabaseFull, DatabaseTooOld or PoolerUnusable."""
        set_up = SetUp(statement_timeout_seconds, is_pooled=await sessions.is_pooled(dsn))
        options = driver_options(statement_timeout_seconds)
        with unreachable_translated():
            pool = await asyncpg.create_pool(
                dsn, min_size=1, max_size=pool_size, init=set_up, reset=_no_reset, **options
            )
        database = cls(pool, acquire_timeout_seconds)
        async with database.connection() as connection:
            check_version(connection)
        return database

    async def close(self) -> None:
        """Close all connections; terminate those with a query that does not end soon."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()

    @asynccontextmanager
    async def connection(self, *, wait_seconds: float | None = None) -> AsyncIterator[Connection]:
        """
        Acquire a connection without a transaction, within the share of the caller.

        Waits as long as configured, or longer for what cannot be refused any more.
        """
        seconds = max(self._acquire_timeout_seconds, wait_seconds or 0)
        async with (
            self._shares.one(timeout_seconds=seconds),
            self._acquired(seconds) as connection,
        ):
            yield connection

    @asynccontextmanager
    async def _acquired(self, seconds: float) -> AsyncIterator[Connection]:
        try:
            connection = await self._pool.acquire(timeout=seconds)
        except TimeoutError as error:
            raise DatabaseUnavailable(
                f"No database connection became free within {seconds:g} s."
            ) from error
        except driver_errors.CONNECTING as error:
            self.refuses_sessions = driver_errors.is_disk_full(error)
            self._note_full_disk(error)
            raise DatabaseUnavailable(f"The database does not answer: {reason(error)}.") from error
        self.refuses_sessions = False
        try:
            with translated():
                yield connection
        except RestanteError as error:
            self._note_full_disk(error.__cause__)
            if driver_errors.casts_doubt(error):
                await self.replace_connections()
            raise
        finally:
            # The pool terminates a connection that cannot be released in time.
            with suppress(*BROKEN):
                await self._pool.release(connection, timeout=CLOSE_SECONDS)

    def _note_full_disk(self, error: BaseException | None) -> None:
        if driver_errors.is_disk_full(error):
            self.disk_full_at = time.monotonic()

    async def replace_connections(self) -> None:
        """Replace every connection before its next use; at most once a second."""
        if time.monotonic() - self._doubted_at >= _DOUBT_SECONDS:
            self._doubted_at = time.monotonic()
            await self._pool.expire_connections()

    async def check_writable(self) -> None:
        """Raise DatabaseReadOnly if a write would be refused."""
        async with self.connection() as connection:
            if not await connection.fetchval(queries.accepts_writes):
                raise DatabaseReadOnly(
                    "The database accepts no writes now: it is a standby, or set read-only.",
                    retry_after_seconds=driver_errors.RETRY_AFTER_SECONDS,
                )

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
        async with asyncio.timeout(CLOSE_SECONDS):
            await transaction.rollback()
    except BROKEN:
        with suppress(asyncpg.InterfaceError):  # the pool has noticed the loss before us
            connection.terminate()


async def _no_reset(_connection: object) -> None:
    """
    Skip the round trip that would reset the session on every release.

    The driver has rolled back an open transaction by now.  Code that changes the session acquires
    the connection with `session`.
    """
