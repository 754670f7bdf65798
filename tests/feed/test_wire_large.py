"""Messages of up to 16 MiB over HTTP: stored, read, watched, forwarded, and refused in time."""

import asyncio
import io
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web
from callers import ADMIN, Answer, Caller, Wire, ask, bearer, registered, request_head, wire_to
from pushes import receiver
from sites import Site, SiteFactory
from waiting import until
from watchers import WAYS, watch

from restante.http.operations import JsonPace
from restante.settings import Settings
from restante.wire import MAX_MESSAGE_BYTES

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
TEXT = "x" * (16 * MIB - 1000) + "\U0001f600"
LARGE = msgspec.json.encode({"message": {"content": TEXT}})


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


async def send_large(to: Caller, headers: dict[str, str] | None = None) -> Answer:
    """Send a message of 16 MiB, by default in the recipient's own name."""
    body, headers = io.BytesIO(LARGE), headers or bearer(to.token)
    return await ask(to.site, "POST", f"{to.path}/a2a", data=body, headers=headers)


def text_of(row: dict[str, Any]) -> str:
    return row["request_body"]["params"]["message"]["parts"][0]["text"]


async def test_a_message_of_16_mib_is_stored_and_read(caller: Caller):
    sent = await send_large(caller)
    await caller.message({"content": "after it"}, to=caller)

    assert sent.status == 200
    (row,) = await caller.feed(since_seq=0)
    assert text_of(row) == TEXT
    assert text_of((await caller.feed(since_id=row["id"]))[0]) == "after it"


@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "chunked"])
async def test_the_limit_of_a_message_is_exact(caller: Caller, is_declared: bool):
    frame = b'{"content": ""}'
    largest = frame[:-2] + b"x" * (MAX_MESSAGE_BYTES - len(frame)) + frame[-2:]

    async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(body), MIB):
            yield body[at : at + MIB]

    answers = [
        await caller.ask("POST", "/a2a", data=io.BytesIO(body) if is_declared else in_pieces(body))
        for body in (largest + b" ", largest)
    ]

    refused, queued = answers
    assert len(largest) == 16_777_216
    assert (refused.status, refused.json["code"]) == (413, "message_too_large")
    assert refused.json["max"] == 16_777_216
    assert queued.status == 200
    (row,) = await caller.feed()
    assert len(text_of(row)) == len(largest) - len(frame)


def test_a_client_may_send_a_few_such_messages_a_minute():
    assert Settings().message_bytes_per_minute >= 4 * MAX_MESSAGE_BYTES


@pytest.mark.parametrize("way", WAYS)
async def test_a_watcher_gets_it(caller: Caller, way: str):
    unlimited = {"events": {"read_bufsize": 64 * MIB}, "ws": {"max_msg_size": 0}}
    async with watch(caller, way, **unlimited[way]) as watcher:
        await send_large(caller)

        assert text_of(await watcher.row()) == TEXT


async def test_it_is_forwarded_to_a_push_workspace(run_site: SiteFactory):
    seen: list[str] = []

    async def take(request: web.Request) -> web.Response:
        seen.append((await request.json())["params"]["message"]["parts"][0]["text"])
        return web.json_response({})

    async with run_site(push_to_private=True) as site, receiver(take) as url:
        to = await registered(site, delivery_mode="push", url=url)
        answer = await send_large(to)

        assert (answer.status, seen) == (200, [TEXT])
        await until_free(site, 64 * MIB)


async def begun(wire: Wire, caller: Caller, arrived: int) -> None:
    """A message of 16 MiB, of which so much has arrived."""
    path = f"{caller.path}/a2a"
    head = request_head("POST", path, token=caller.token, length=16 * MIB)
    await wire.send(head + b'{"content": "' + b"x" * arrived)


async def until_free(site: Site, size: int) -> None:
    await until(lambda: site.state.body_room.free_bytes == size)


async def test_a_body_that_is_given_up_gives_its_room_back(caller: Caller):
    async with wire_to(caller.site) as wire:
        await begun(wire, caller, 100_000)
        await until_free(caller.site, 48 * MIB)
        wire.close()

        await until_free(caller.site, 64 * MIB)


async def test_bodies_that_dribble_give_way_to_one_that_does_not(caller: Caller):
    """They have taken all of the room, and would have it for minutes."""
    site = caller.site
    site.state.body_room.guaranteed_seconds = 0.1
    slow = [await registered(site) for _ in range(4)]
    async with wire_to(site) as a, wire_to(site) as b, wire_to(site) as c, wire_to(site) as d:
        for wire, sender in zip((a, b, c, d), slow, strict=True):
            await begun(wire, sender, 100_000)
        await until_free(site, 0)

        answering = [asyncio.create_task(wire.answer()) for wire in (a, b, c, d)]
        answer = await send_large(caller)
        done, rest = await asyncio.wait(answering, return_when=asyncio.FIRST_COMPLETED)
        for one in rest:
            one.cancel()
        refused = done.pop().result()

        assert answer.status == 200
        assert (refused.status, refused.json["code"]) == (429, "too_many_at_once")
        assert int(refused.headers["Retry-After"]) >= 1


async def test_without_room_a_large_message_is_refused_and_a_small_one_is_not(caller: Caller):
    site = caller.site
    site.state.body_room.longest_wait_seconds = 0.05
    async with site.state.body_room.place(64 * MIB) as place:
        await place.grow(64 * MIB)
        large = await send_large(caller)
        small = await caller.message({"content": "small"}, to=caller)

    assert (large.status, large.json["code"]) == (429, "too_many_at_once")
    assert int(large.headers["Retry-After"]) >= 1
    assert small.status == 200
    assert len(await caller.feed()) == 1


async def test_a_slow_body_has_more_time_the_larger_it_is(caller: Caller):
    """16 MiB take a minute over a line of 2 Mbit/s; a body that dribbles is refused as before."""
    site = caller.site
    site.state.json_pace = JsonPace(3600, total_seconds=0.2, bytes_per_second=100)
    body = b'{"content": "' + b"x" * 100_000 + b'"}'
    head = request_head("POST", f"{caller.path}/a2a", token=caller.token, length=len(body))
    async with wire_to(site) as large, wire_to(site) as dribbling:
        await large.send(head + body[:100_000])
        await until_free(site, 64 * MIB - len(body))
        await dribbling.send(head + body[:10])
        refused = await dribbling.answer()  # so the time of a body without bytes is over
        await large.send(body[100_000:])
        answer = await large.answer()

    assert (refused.status, refused.json["code"]) == (408, "upload_too_slow")
    assert answer.status == 200


async def test_the_operator_may_send_one_too(caller: Caller):
    answer = await send_large(caller, ADMIN)
    other = await send_large(caller, bearer("x"))

    assert (answer.status, other.status) == (200, 401)
