"""Requests take turns where they begin and go on; while they wait, others go on."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import pytest
from callers import (
    ADMIN,
    Answer,
    Caller,
    Part,
    ask,
    form,
    registered,
    request_head,
    upload_head,
    wire_to,
)
from sites import Site
from waiting import until
from watchers import append

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def all_turns_of(caller: Caller) -> AsyncIterator[None]:
    """Other requests of this workspace have all the turns that it may have."""
    turns = caller.site.state.turns
    workspace_id = UUID(caller.id)
    for _ in range(turns._per_caller):
        await turns.begin(workspace_id)
    try:
        yield
    finally:
        for _ in range(turns._per_caller):
            turns.end(workspace_id)


async def waits(answering: "asyncio.Task[Answer]", caller: Caller) -> None:
    """Wait until the request is queued for a turn, and make sure that it has no answer."""
    turns = caller.site.state.turns
    await until(lambda: bool(turns._callers[UUID(caller.id)].queue))
    assert not answering.done()


async def test_a_request_waits_for_the_others_of_its_workspace_and_for_no_one_else(site: Site):
    busy, quiet = await registered(site), await registered(site)
    for caller in (busy, quiet):
        assert (await caller.read_feed()).status == 200  # from now on their tokens are known

    async with all_turns_of(busy):
        held_up = asyncio.create_task(busy.read_feed())
        await waits(held_up, busy)
        others = [
            await quiet.read_feed(),
            await ask(site, "GET", f"{busy.path}/activity", headers=ADMIN),
            await ask(site, "GET", "/health"),
        ]

    assert [answer.status for answer in others] == [200, 200, 200]
    assert (await held_up).status == 200
    await until(lambda: len(site.state.turns) == 0)


async def goes_on_with_a_turn(caller: Caller, go_on: Awaitable[Any], answer: Awaitable[Any]) -> Any:
    """Let a request go on while its workspace has no turn left; it waits for one."""
    answering = asyncio.ensure_future(answer)
    async with all_turns_of(caller):
        await go_on
        await waits(answering, caller)
    return await answering


async def test_an_upload_takes_a_turn_for_the_body_that_arrives_later(site: Site):
    caller = await registered(site)
    body = form(Part())
    async with wire_to(site) as wire:
        await wire.send(upload_head(caller, len(body)) + body[:10])
        await until(lambda: len(site.state.receiver.server._claims) == 1)
        answer = await goes_on_with_a_turn(caller, wire.send(body[10:]), wire.answer())

    assert answer.status == 200


async def test_a_message_takes_a_turn_for_the_body_that_arrives_later(site: Site):
    caller = await registered(site)
    body = b'{"jsonrpc": "2.0", "method": "message/send", "params": {"message": {"parts": []}}}'
    head = request_head("POST", f"{caller.path}/a2a", token=caller.token, length=len(body))
    async with wire_to(site) as wire:
        await wire.send(head + body[:1])
        await until(lambda: running(caller) == 1)
        answer = await goes_on_with_a_turn(caller, wire.send(body[1:]), wire.answer())

    assert answer.status == 200


def running(caller: Caller) -> int:
    return caller.site.state.concurrency._running[UUID(caller.id)]


async def test_a_long_poll_has_no_turn_while_it_waits_and_takes_one_when_it_is_woken(site: Site):
    caller = await registered(site)
    polling = asyncio.create_task(caller.read_feed(wait=30))
    await until(lambda: is_waiting(caller) and len(site.state.turns) == 0)

    answer = await goes_on_with_a_turn(caller, append(caller, "news"), polling)
    assert [row["summary"] for row in answer.json] == ["news"]


def is_waiting(caller: Caller) -> bool:
    return UUID(caller.id) in caller.site.state.wakeups._waiters


async def test_a_download_takes_turns_for_its_pieces(site: Site):
    caller = await registered(site)
    sent = await caller.upload(Part(content=b"x" * 2_000_000))
    file_id = sent.json["files"][0]["uri"].rpartition("/")[2]
    head = request_head(
        "GET", f"{caller.path}/pending-uploads/{file_id}/content", token=caller.token
    )

    async with wire_to(site) as wire:
        await wire.send(head)
        assert (await wire.head()).status == 200
        rest = asyncio.create_task(wire.read(2_000_000))
        answer = await goes_on_with_a_turn(caller, asyncio.sleep(0), rest)

    assert len(answer) == 2_000_000
