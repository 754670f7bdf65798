"""
Supervised background loops: run a pass now, then one per interval, until stopped.

The loop knows no table and the pass knows no timer.  A pass that raises is logged and counted, and
the next one runs.  A pass that exceeds its deadline is cancelled.  A loop that crashes is restarted
with back-off.  None of this takes the server down.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import structlog

from restante.errors import RestanteError

log = structlog.get_logger()

Pass = Callable[[], Awaitable[None]]

# How long a cancelled pass may take to end before it is abandoned.
_CANCEL_SECONDS = 2.0
_FIRST_BACKOFF_SECONDS = 1.0
_MAX_BACKOFF_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Loop:
    """A pass, how often it runs, and how long one run may take."""

    name: str
    one_pass: Pass
    interval_seconds: float
    deadline_seconds: float


class Observer(Protocol):
    """Is told how each pass ended."""

    def pass_ended(self, loop: str, outcome: str, seconds: float) -> None: ...
    def loop_restarted(self, loop: str) -> None: ...


class Loops:
    """All background loops of a process; start them together, stop them together."""

    def __init__(self, loops: Sequence[Loop], observer: Observer) -> None:
        self._loops = loops
        self._observer = observer
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._supervise(loop), name=f"loop {loop.name}")
            for loop in self._loops
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CANCEL_SECONDS)

    async def _supervise(self, loop: Loop) -> None:
        pause_seconds = _FIRST_BACKOFF_SECONDS
        while not self._stop.is_set():
            try:
                await self._run(loop)
            except Exception:
                log.exception("loop_crashed", loop=loop.name, again_in_seconds=pause_seconds)
                self._observer.loop_restarted(loop.name)
                await self._pause(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _MAX_BACKOFF_SECONDS)

    async def _run(self, loop: Loop) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            outcome = await _outcome_of(loop)
            self._observer.pass_ended(loop.name, outcome, time.monotonic() - started)
            await self._pause(loop.interval_seconds * random.uniform(0.9, 1.1))  # noqa: S311 - jitter

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return


async def _outcome_of(loop: Loop) -> str:
    """Run one pass to its end or its deadline; returns the outcome."""
    task = asyncio.ensure_future(loop.one_pass())
    try:
        done, _ = await asyncio.wait({task}, timeout=loop.deadline_seconds)
        if not done:
            return await _cancel(loop, task)
    except asyncio.CancelledError:
        task.cancel()
        raise
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is None:
        return "ok"
    if isinstance(error, RestanteError):
        log.warning("pass_failed", loop=loop.name, code=error.code, reason=str(error))
    else:
        log.error("pass_failed", loop=loop.name, exc_info=error)
    return "error"


async def _cancel(loop: Loop, task: "asyncio.Future[None]") -> str:
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=_CANCEL_SECONDS)
    if done and not task.cancelled():
        task.exception()  # retrieved, so that the event loop does not log it again
    log.error("pass_cut", loop=loop.name, deadline_seconds=loop.deadline_seconds, ended=bool(done))
    return "deadline"
