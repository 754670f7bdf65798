"""Push workspaces that stall do not delay others: only their own calls are refused."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
from aiohttp import ClientPayloadError, ClientSession, TCPConnector, web
from callers import ADMIN
from hypothesis import given, strategies as st
from pushes import MESSAGE, UNREACHABLE, Workspace, receiver, registered, send_message, upload
from sites import Site, SiteFactory

from restante.workspaces import push, rules
from restante.workspaces.rules import PushCalls, push_refusal

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def stalled(calls: int) -> AsyncIterator[tuple[str, Awaitable[None]]]:
    """A host that answers nobody; its URL, and what to wait for until it has so many calls."""
    begun = asyncio.Semaphore(0)

    async def stall(request: web.Request) -> web.Response:
        await request.read()
        begun.release()
        await asyncio.Event().wait()
        return web.Response()

    async def all_begun() -> None:
        for _ in range(calls):
            await begun.acquire()

    async with receiver(stall) as url:
        yield url, all_begun()


@asynccontextmanager
async def healthy() -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(text="hello")

    async with receiver(answer) as url:
        yield url


@asynccontextmanager
async def running(*calls: Awaitable[Any]) -> AsyncIterator[None]:
    """Calls that go on in the background; none of them may have ended meanwhile."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def site(run_site: SiteFactory) -> AsyncIterator[Site]:
    async with run_site(push_to_private=True) as site:
        yield site


def refusal(answer: tuple[int, bytes]) -> str:
    status, body = answer
    said = json.loads(body)
    assert (status, said["code"]) == (429, "too_many_at_once")
    return said["error"]


@pytest.mark.parametrize("call", [upload, send_message])
async def test_a_stalled_workspace_fills_only_its_own_limit(site: Site, call: Any):
    """Its own next call is refused at once, and its neighbour answers."""
    limit = rules.MAX_CALLS_TO_WORKSPACE

    async with stalled(limit) as (url, all_begun), healthy() as other:
        stuck, neighbour = await registered(site, url), await registered(site, other)
        async with running(*(call(site, stuck) for _ in range(limit))):
            await all_begun

            assert f"{limit} push calls to this workspace" in refusal(await call(site, stuck))
            assert await call(site, neighbour) == (200, b"hello")


async def test_many_stalled_workspaces_do_not_delay_a_healthy_one(site: Site):
    """It does not wait in a pool of connections until one of theirs has timed out."""
    calls, each = 256, rules.MAX_CALLS_TO_WORKSPACE

    async with (
        ClientSession(site.url, connector=TCPConnector(limit=0)) as operator,
        stalled(calls // 4) as (one, one_begun),
        stalled(calls // 4) as (two, two_begun),
        stalled(calls // 4) as (three, three_begun),
        stalled(calls // 4) as (four, four_begun),
        healthy() as other,
    ):
        targets = [
            await registered(site, url)
            for url in (one, two, three, four)
            for _ in range(calls // 4 // each)
        ]
        well = await registered(site, other)
        async with running(*(sent(operator, to) for to in targets for _ in range(each))):
            await asyncio.gather(one_begun, two_begun, three_begun, four_begun)

            assert await send_message(site, well) == (200, b"hello")


async def sent(operator: ClientSession, to: Workspace) -> None:
    async with operator.post(to.messages, data=MESSAGE, headers=ADMIN) as answer:
        await answer.read()


async def test_a_sender_is_limited_and_the_operator_is_not(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rules, "MAX_CALLS_BY_SENDER", 2)

    async with stalled(2) as (url, all_begun), healthy() as other:
        sender, well = await registered(site, url), await registered(site, other)
        stuck = [await registered(site, url) for _ in range(2)]
        by_sender = [Workspace(to.id, sender.token, "") for to in (*stuck, well)]
        async with running(*(send_message(site, to) for to in by_sender[:2])):
            await all_begun

            assert "2 push calls of this sender" in refusal(await send_message(site, by_sender[2]))
            assert await send_message(site, well) == (200, b"hello")
            async with site.http.post(well.messages, data=MESSAGE, headers=ADMIN) as answer:
                assert answer.status == 200


async def test_a_call_that_has_ended_does_not_count(site: Site, monkeypatch: pytest.MonkeyPatch):
    """Whether it was answered, failed, or its sender has gone."""
    monkeypatch.setattr(rules, "MAX_CALLS_TO_WORKSPACE", 1)

    async with healthy() as url:
        well, gone = await registered(site, url), await registered(site, "http://127.0.0.1:1")
        for _ in range(3):
            assert await send_message(site, well) == (200, b"hello")
            assert (await send_message(site, gone))[0] == 502


@given(st.builds(PushCalls, *[st.integers(0, 600)] * 4))
def test_who_has_nothing_running_is_let_in_while_there_is_room(running: PushCalls):
    """Whatever the others do; at the host of others, there must be room too."""
    if running.in_all < rules.MAX_CALLS and running.to_host < rules.MAX_CALLS_TO_HOST:
        fresh = PushCalls(0, running.to_host, 0, running.in_all)
        assert push_refusal(fresh) is None
    if running.in_all >= rules.MAX_CALLS // 2 and (running.to_workspace or running.by_sender):
        assert push_refusal(running) is not None


# Answers


@pytest.mark.parametrize("is_announced", [True, False])
async def test_an_answer_that_is_too_long_is_cut_off(
    site: Site, monkeypatch: pytest.MonkeyPatch, is_announced: bool
):
    """An announced one becomes a 502; another one has begun and must not look complete."""
    monkeypatch.setattr(push, "_MAX_ANSWER_BYTES", 100_000)

    async def endless(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse()
        response.content_length = 10**9 if is_announced else None
        await response.prepare(request)
        while True:
            await response.write(bytes(10_000))

    async with receiver(endless) as url:
        workspace = await registered(site, url)
        with structlog.testing.capture_logs() as logged:
            if is_announced:
                status, body = await send_message(site, workspace)
                assert (status, json.loads(body)) == (502, UNREACHABLE)
            else:
                with pytest.raises(ClientPayloadError):
                    await send_message(site, workspace)

    (failure,) = [event for event in logged if event["event"] == "push_failed"]
    assert failure["reason"] == "its answer is too long"
