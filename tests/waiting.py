"""Waiting for something that gives no signal, such as what another session of Postgres does."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


async def until(holds: Callable[[], Awaitable[Any]], *, seconds: float = 10) -> None:
    """Ask again and again, for a bounded time, until the answer is yes."""
    async with asyncio.timeout(seconds):
        while not await holds():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.002)
