"""Ctrl-C and SIGTERM end a command in the same way: what it has begun is given up in order."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

INTERRUPTED = 130


async def until_interrupted(work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result, or None after Ctrl-C or SIGTERM; the next run resumes unfinished work."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None
