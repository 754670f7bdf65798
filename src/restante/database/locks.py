"""
Advisory locks, held by one pinned connection and gone with it.

They are tried again and again rather than waited for: a session that waits inside Postgres holds
a snapshot, and a `create index concurrently` of the lock's holder would wait for that snapshot.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from restante.database import sql
from restante.database.pool import Tx
from restante.errors import DatabaseUnavailable

locks = sql.load("restante.database")

_TRY_EVERY_SECONDS = 0.05


@asynccontextmanager
async def held_if_free(connection: Tx, name: str) -> AsyncIterator[bool]:
    """Hold the lock if nobody else does; says whether."""
    is_held = bool(await connection.fetchval(locks.try_lock, name))
    try:
        yield is_held
    finally:
        if is_held and not connection.is_closed():
            await connection.execute(locks.unlock, name)


@asynccontextmanager
async def held(connection: Tx, name: str, *, wait_seconds: float) -> AsyncIterator[None]:
    """
    Hold the lock of that name on this connection.

    Raises DatabaseUnavailable if somebody else keeps it for longer than we wait.
    """
    try:
        async with asyncio.timeout(wait_seconds):
            while not await connection.fetchval(locks.try_lock, name):  # noqa: ASYNC110 - see above
                await asyncio.sleep(_TRY_EVERY_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
    except TimeoutError as error:
        raise DatabaseUnavailable(
            f"Another process has held the lock {name!r} for more than {wait_seconds:g} s. "
            f"Look for it in pg_locks, or try again later."
        ) from error
    try:
        yield
    finally:
        if not connection.is_closed():
            await connection.execute(locks.unlock, name)
