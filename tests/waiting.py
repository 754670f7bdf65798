"""Waits for what gives no signal, such as another session of Postgres."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


async def until(holds: Callable[[], Awaitable[Any]], *, seconds: float = 30) -> None:
    """Poll until the condition holds, for a bounded time."""
    async with asyncio.timeout(seconds):
        while not await holds():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.002)
