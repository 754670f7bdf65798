"""A failing pass, an endless pass, a crashing loop: none of them ends the work."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from restante.server.loops import Loop, Loops

pytestmark = pytest.mark.anyio


class Heard:
    """Collects what an observer is told, and lets a test wait for it."""

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
        async with asyncio.timeout(5), self._changed:
            await self._changed.wait_for(condition)


def loop(
    one_pass: Callable[[], Awaitable[None]], *, deadline: float = 5, interval: float = 0
) -> Loop:
    return Loop("test", one_pass, interval_seconds=interval, deadline_seconds=deadline)


async def test_a_pass_that_raises_is_counted_and_runs_again():
    heard = Heard()
    tries = iter([ValueError("first"), ValueError("second")])

    async def fails_twice() -> None:
        for error in tries:
            raise error

    async with Loops([loop(fails_twice)], heard):
        await heard.until(lambda: heard.outcomes["ok"] >= 1)

    assert heard.outcomes["error"] == 2


async def test_a_pass_that_never_ends_is_cut_at_its_deadline_and_runs_again():
    heard = Heard()

    async def never_ends() -> None:
        await asyncio.Event().wait()

    async with Loops([loop(never_ends, deadline=0.01)], heard):
        await heard.until(lambda: heard.outcomes["deadline"] >= 2)


async def test_a_pass_that_ignores_its_cancellation_does_not_hold_the_loop(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("restante.server.loops._LETTING_GO_SECONDS", 0.01)
    heard = Heard()
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async with Loops([loop(stubborn, deadline=0.01)], heard):
        await heard.until(lambda: heard.outcomes["deadline"] >= 2)
        release.set()


async def test_a_loop_that_crashes_is_started_again(monkeypatch: pytest.MonkeyPatch):
    """The loop's own bookkeeping may fail too; the server must not notice."""
    monkeypatch.setattr("restante.server.loops._FIRST_PAUSE_SECONDS", 0.01)
    heard = Heard()
    broken = iter([True, False])

    class Breaks(Heard):
        def pass_ended(self, loop: str, outcome: str, seconds: float) -> None:
            if next(broken, False):
                raise RuntimeError("the observer broke")
            heard.pass_ended(loop, outcome, seconds)

        def loop_restarted(self, loop: str) -> None:
            heard.loop_restarted(loop)

    async def fine() -> None:
        return

    async with Loops([loop(fine)], Breaks()):
        await heard.until(lambda: heard.outcomes["ok"] >= 1)

    assert heard.restarts == 1


async def test_the_first_pass_runs_at_once_and_stopping_is_prompt():
    heard = Heard()
    running = asyncio.Event()

    async def once() -> None:
        running.set()

    async with asyncio.timeout(2):
        async with Loops([loop(once, interval=3600)], heard):
            await running.wait()


async def test_stopping_interrupts_a_running_pass():
    heard = Heard()
    running = asyncio.Event()

    async def long() -> None:
        running.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(2):
        async with Loops([loop(long)], heard):
            await running.wait()

    assert not heard.outcomes
