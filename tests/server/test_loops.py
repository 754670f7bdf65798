"""A loop continues after a failing pass, an endless pass, and a crash of its own."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from restante.server.loops import Loop, Loops

pytestmark = pytest.mark.anyio


class Recorder:
    """An observer that records outcomes, and lets a test wait for them."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.restarts = 0
        self._changed = asyncio.Condition()

    def pass_ended(self, loop: str, outcome: str, seconds: float) -> None:
        self.outcomes[outcome] += 1
        asyncio.get_running_loop().create_task(self._notify())

    def loop_restarted(self, loop: str) -> None:
        self.restarts += 1
        asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)


def loop(
    one_pass: Callable[[], Awaitable[None]], *, deadline: float = 5, interval: float = 0
) -> Loop:
    return Loop("test", one_pass, interval_seconds=interval, deadline_seconds=deadline)


async def test_a_pass_that_raises_is_counted_and_runs_again():
    recorder = Recorder()
    tries = iter([ValueError("first"), ValueError("second")])

    async def fails_twice() -> None:
        for error in tries:
            raise error

    async with Loops([loop(fails_twice)], recorder):
        await recorder.until(lambda: recorder.outcomes["ok"] >= 1)

    assert recorder.outcomes["error"] == 2


async def test_a_pass_that_never_ends_is_cut_at_its_deadline_and_runs_again():
    recorder = Recorder()

    async def never_ends() -> None:
        await asyncio.Event().wait()

    async with Loops([loop(never_ends, deadline=0.01)], recorder):
        await recorder.until(lambda: recorder.outcomes["deadline"] >= 2)


async def test_a_pass_that_ignores_its_cancellation_does_not_block_the_loop():
    recorder = Recorder()
    release = asyncio.Event()

    async def stubborn_once() -> None:
        while not release.is_set() and not recorder.outcomes["deadline"]:
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async with Loops([loop(stubborn_once, deadline=0.01)], recorder):
        await recorder.until(lambda: recorder.outcomes["ok"] >= 1)
        release.set()

    assert recorder.outcomes["deadline"] == 1


async def test_a_loop_that_crashes_is_restarted():
    """The code around the passes may fail too."""
    recorder = Recorder()
    broken = iter([True, False])

    class Breaks(Recorder):
        def pass_ended(self, loop: str, outcome: str, seconds: float) -> None:
            if next(broken, False):
                raise RuntimeError("the observer broke")
            recorder.pass_ended(loop, outcome, seconds)

        def loop_restarted(self, loop: str) -> None:
            recorder.loop_restarted(loop)

    async def fine() -> None:
        return

    async with Loops([loop(fine)], Breaks()):
        await recorder.until(lambda: recorder.outcomes["ok"] >= 1)

    assert recorder.restarts == 1


async def test_the_first_pass_runs_at_once_and_stopping_does_not_wait_for_the_next():
    recorder = Recorder()
    running = asyncio.Event()

    async def once() -> None:
        running.set()

    async with Loops([loop(once, interval=3600)], recorder):
        await running.wait()


async def test_stopping_interrupts_a_running_pass():
    recorder = Recorder()
    running = asyncio.Event()

    async def long() -> None:
        running.set()
        await asyncio.Event().wait()

    async with Loops([loop(long, deadline=3600)], recorder):
        await running.wait()

    assert not recorder.outcomes
