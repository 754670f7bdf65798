"""
Session-level advisory locks and lock timeouts.

A lock is polled, not waited for: a session that waits inside Postgres holds a snapshot, and a
`create index concurrently` of the lock holder would wait for that snapshot.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from restante.database import sql
from restante.database.pool import Connection
from restante.errors import DatabaseUnavailable

queries = sql.load("restante.database")

_POLL_SECONDS = 0.05


@asynccontextmanager
async def held_if_free(connection: Connection, name: str) -> AsyncIterator[bool]:
    """Hold the lock if it is free; yields whether it is held."""
    is_held = bool(await connection.fetchval(queries.try_lock, name))
    try:
        yield is_held
    finally:
        if is_held and not connection.is_closed():
            await connection.execute(queries.unlock, name)


@asynccontextmanager
async def held(connection: Connection, name: str, *, wait_seconds: float) -> AsyncIterator[None]:
    """Hold the lock; raises DatabaseUnavailable if it does not become free in time."""
    try:
        async with asyncio.timeout(wait_seconds):
            while not await connection.fetchval(queries.try_lock, name):  # noqa: ASYNC110 - see above
                await asyncio.sleep(_POLL_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
    except TimeoutError as error:
        raise DatabaseUnavailable(
            f"Another process has held the lock {name!r} for more than {wait_seconds:g} s. "
            f"Look for it in pg_locks, or try again later."
        ) from error
    try:
        yield
    finally:
        if not connection.is_closed():
            await connection.execute(queries.unlock, name)


@asynccontextmanager
async def lock_timeout(connection: Connection, milliseconds: int) -> AsyncIterator[None]:
    """Set the session's lock_timeout while inside."""
    await connection.execute(f"set lock_timeout = {milliseconds:d}")
    try:
        yield
    finally:
        if not connection.is_closed():
            await connection.execute("reset lock_timeout")
