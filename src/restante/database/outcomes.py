"""
Commits whose reply is lost.

The server may have committed, although the connection broke before it could say so.  Then the
backend must be over before anybody looks: until it is, it may still commit.  What is found is the
truth, and is answered; if nothing can be found out in time, that is said too.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import structlog

from restante.database import driver_errors, shares, sql
from restante.database.pool import Connection, Database
from restante.database.sessions import Backend, Session
from restante.errors import (
    DatabaseReadOnly,
    DatabaseUnavailable,
    OutcomeUnknown,
    StatementTimedOut,
    TableBusy,
)

log = structlog.get_logger()

queries = sql.load("restante.database")

T = TypeVar("T")

# How long a cancelled caller waits for its commit: the server is stopping, or the client has gone.
CANCELLED_SECONDS = 3.0
# A restart of Postgres is often over by then, and a sender still waits.
_LOOK_SECONDS = 10.0
_ONE_LOOK_SECONDS = 3.0
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5
_NOT_YET = (DatabaseReadOnly, DatabaseUnavailable, StatementTimedOut, TableBusy, TimeoutError)


async def decided(
    db: Database,
    commit: Callable[[Connection], Awaitable[T]],
    look_up: Callable[[Connection], Awaitable[T | None]],
) -> T:
    """
    Run what commits, and return its result even if the reply to it is lost.

    `look_up` returns that result on another connection, or None if there was no commit; for
    something idempotent it is the same statement again.  Raises DatabaseUnavailable if nothing was
    committed, and OutcomeUnknown.  A cancelled caller gets the result too, or OutcomeUnknown: a
    commit that is under way is not cancelled, because nobody would know how it ended.
    """
    deciding = asyncio.ensure_future(_decide(db, commit, look_up))
    deciding.add_done_callback(_ignore_result)
    try:
        await asyncio.wait({deciding})
    except asyncio.CancelledError:
        await asyncio.wait({deciding}, timeout=CANCELLED_SECONDS)
        if not deciding.done():
            raise _unknown("the server is stopping") from None
    return deciding.result()


def _ignore_result(deciding: "asyncio.Future[Any]") -> None:
    """Retrieve the exception: the event loop would log it if the caller was cancelled."""
    if not deciding.cancelled():
        deciding.exception()


async def _decide(
    db: Database,
    commit: Callable[[Connection], Awaitable[T]],
    look_up: Callable[[Connection], Awaitable[T | None]],
) -> T:
    async with db.connection() as connection:
        backend = cast("Session", connection).backend
        try:
            return await commit(connection)
        except driver_errors.FROM_THE_DRIVER as error:
            if not driver_errors.is_uncertain(error):
                raise
            lost = error
    with shares.for_the_server():
        found = await _found(db, backend, look_up, lost)
    log.warning("reply_lost", reason=driver_errors.reason(lost), committed=found is not None)
    if found is None:
        raise driver_errors.translation(lost) or lost from lost
    return found


async def _found(
    db: Database,
    backend: Backend,
    look_up: Callable[[Connection], Awaitable[T | None]],
    lost: BaseException,
) -> T | None:
    """Look until there is an answer; raises OutcomeUnknown when the time is over."""
    await db.replace_connections()
    pause_seconds = _FIRST_PAUSE_SECONDS
    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            while True:
                try:
                    async with asyncio.timeout(_ONE_LOOK_SECONDS), db.connection() as connection:
                        if await _is_over(connection, backend):
                            return await look_up(connection)
                except _NOT_YET as error:
                    log.debug("look_up_failed", reason=driver_errors.reason(error))
                await asyncio.sleep(pause_seconds * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
    except TimeoutError:
        raise _unknown(driver_errors.reason(lost)) from lost


async def _is_over(connection: Connection, backend: Backend) -> bool:
    return await connection.fetchval(queries.end_lost_backend, backend.pid, backend.is_shared)


def _unknown(cause: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"Whether this was done is unknown: {cause}. Repeat it with the same Idempotency-Key; "
        "without one, look first.",
        retry_after_seconds=driver_errors.RETRY_AFTER_SECONDS,
    )
