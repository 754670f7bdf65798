"""Waits for what gives no signal, such as another session of Postgres."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


async def until(holds: Callable[[], Any], *, seconds: float = 30) -> None:
    """Poll until the condition holds, for a bounded time; it may have to be awaited."""
    async with asyncio.timeout(seconds):
        while not await _value(holds()):  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.002)


async def _value(found: Any) -> Any:
    return await found if isinstance(found, Awaitable) else found


async def until_earlier_transactions_end(connection: Any) -> None:
    """Those of other tests on the same cluster keep old row versions from being pruned."""
    now = await connection.fetchval("select pg_current_xact_id()::text")
    have_ended = "select pg_snapshot_xmin(pg_current_snapshot()) > $1::text::xid8"
    await until(lambda: connection.fetchval(have_ended, now))
