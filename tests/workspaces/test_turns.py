"""Requests with the same token take turns at the database; nobody else queues behind them."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest
from callers import ADMIN, ask, registered
from sites import Site
from waiting import until

from restante.errors import TooManyAtOnce
from restante.ids import WorkspaceId
from restante.workspaces import concurrency
from restante.workspaces.auth import Access
from restante.workspaces.concurrency import Turns

pytestmark = pytest.mark.anyio


async def test_few_requests_of_one_workspace_are_looked_up_at_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    busy, other = await registered(site), await registered(site)
    looking: Counter[str] = Counter()
    may_go_on = asyncio.Event()
    find = Access.find

    async def find_later(self: Access, workspace_id: WorkspaceId) -> Any:
        looking[str(workspace_id)] += 1
        if str(workspace_id) == busy.id:
            await may_go_on.wait()
        return await find(self, workspace_id)

    monkeypatch.setattr(Access, "find", find_later)
    asking = [asyncio.create_task(busy.ask("GET", "/activity")) for _ in range(50)]
    await until(lambda: asyncio.sleep(0, looking[busy.id] >= 4))

    assert (await other.ask("GET", "/activity")).status == 200
    assert looking[busy.id] == 4
    admin = asyncio.create_task(ask(site, "GET", f"{busy.path}/activity", headers=ADMIN))
    await until(lambda: asyncio.sleep(0, looking[busy.id] == 5))
    may_go_on.set()
    assert {answer.status for answer in await asyncio.gather(admin, *asking)} == {200}


async def test_a_turn_that_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(concurrency, "_TURN_SECONDS", 0.01)
    turns = Turns()
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(turns.turn("token"))

        with pytest.raises(TooManyAtOnce):
            await stack.enter_async_context(turns.turn("token"))
        async with turns.turn("another token"):
            pass

    async with turns.turn("token"):
        pass


async def test_tokens_are_not_remembered():
    turns = Turns()

    async with turns.turn("token"):
        assert len(turns._by_token) == 1

    assert not turns._by_token
