"""No caller uses more than its share of the connections."""

import asyncio
from contextvars import copy_context

import pytest

from restante.database.shares import Shares, caller
from restante.errors import TooManyAtOnce

pytestmark = pytest.mark.anyio


class Users:
    """Tasks that take a share and hold it until they are told to end."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self.running: list[str] = []
        self.end = asyncio.Event()

    def start(self, who: str | None) -> "asyncio.Task[None]":
        context = copy_context()
        context.run(caller.set, who)
        return asyncio.create_task(self._use(str(who)), context=context)

    async def _use(self, who: str) -> None:
        async with self.shares.one(timeout_seconds=5):
            self.running.append(who)
            await self.end.wait()


async def all_ready() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_caller_waits_for_itself_and_others_do_not():
    users = Users(Shares(2))
    greedy = [users.start("greedy") for _ in range(50)]
    await all_ready()

    quiet = users.start("quiet")
    server = users.start(None)
    await all_ready()

    assert users.running == ["greedy", "greedy", "quiet", "None"]
    users.end.set()
    await asyncio.gather(*greedy, quiet, server)
    assert users.running.count("greedy") == 50


async def test_a_share_is_waited_for_a_limited_time():
    shares = Shares(1)
    users = Users(shares)
    first = users.start("greedy")
    await all_ready()

    context = copy_context()
    context.run(caller.set, "greedy")

    async def second() -> None:
        async with shares.one(timeout_seconds=0.01):
            raise AssertionError("it got a second share")

    with pytest.raises(TooManyAtOnce):
        await asyncio.create_task(second(), context=context)
    users.end.set()
    await first


async def test_callers_that_left_are_forgotten_also_when_they_were_cancelled():
    shares = Shares(1)
    users = Users(shares)
    tasks = [users.start(who) for who in ("a", "a", "b", "c")]
    await all_ready()
    assert len(shares) == 3

    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert len(shares) == 0
