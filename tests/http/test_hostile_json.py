"""Hostile JSON: malformed, too deep, too large, endless."""

import asyncio
import io
import json
from typing import Any

import pytest
from attacks import MIB, assert_refused
from callers import (
    ADMIN,
    Answer,
    Caller,
    ask,
    bearer,
    chunked,
    everything,
    registered,
    request_head,
    wire_to,
)
from sites import ADMIN_TOKEN, SiteFactory

pytestmark = pytest.mark.anyio

JSON_ROUTES = (
    "/registry/register",
    "/registry/heartbeat",
    "a2a",
    "notify",
    "activity/ack",
    "PATCH",
)


async def send_json(caller: Caller, route: str, body: bytes) -> Answer:
    if route == "PATCH":
        return await ask(caller.site, "PATCH", caller.path, data=io.BytesIO(body), headers=ADMIN)
    path = route if route.startswith("/") else f"{caller.path}/{route}"
    headers = bearer(caller.token)
    return await ask(caller.site, "POST", path, data=io.BytesIO(body), headers=headers)


@pytest.mark.parametrize(
    ("cut", "stored"),
    [
        (r"cut \ud83d", "cut \ufffd"),
        (r"\ude00 and \ud83d.", "\ufffd and \ufffd."),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"a path: C:\\ud83d and \udc00", "a path: C:\\ud83d and \ufffd"),
    ],
)
async def test_a_text_that_was_cut_inside_an_emoji_is_stored(caller: Caller, cut: str, stored: str):
    sent, said = (f'{{"{field}": "{cut}"}}'.encode() for field in ("content", "message"))

    answer = await send_json(caller, "a2a", sent)

    assert answer.status == 200, answer.json
    (row,) = await caller.feed()
    assert row["request_body"]["params"]["message"]["parts"] == [{"kind": "text", "text": stored}]
    assert (await send_json(caller, "notify", said)).status == 200


async def test_broken_json_is_refused_everywhere(caller: Caller, nothing_stored: None):
    bodies = [
        b"",
        b"\0",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"method": "\xff"}',
        b'{"method": "\xed\xa0\x80"}',
        b'{"method": "x", "id": 1e400}',
        b'{"method": "x", "id": ' + b"9" * 10_000 + b"}",
        b'{"method": "x", "id": NaN}',
        b'{"method": "x", "id": -Infinity}',
        b'{"method": "x"',
        b'{"method": "x",}',
        b"{'method': 'x'}",
        b'{"method": "x"} {"method": "y"}',
        b"[" * 500_000,
        b'{"a":' * 100_000,
        b'{"method": "x", "params": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'"' + b"x" * 1000,
        b"[]",
        b"1",
        b"true",
    ]
    # Fields that a route ignores are not decoded; what is wrong must be in one that it reads.
    read = {"PATCH": ((b'"method"', b'"name"'), (b'"id"', b'"parent_id"'))}
    for route in JSON_ROUTES:
        for body in bodies:
            for ignored, field in read.get(route, ()):
                body = body.replace(ignored, field)  # noqa: PLW2901
            answer = await send_json(caller, route, body)
            assert_refused(answer, 400, 413)


async def test_json_that_is_nested_too_deep_is_refused(caller: Caller):
    """A feed row that a reader cannot parse would stop that reader for ever."""
    for depth in (10, 90, 110, 500, *range(930, 1010, 5)):
        body = b'{"method": "x", "params": ' + b"[" * depth + b"]" * depth + b"}"
        answer = await send_json(caller, "a2a", body)

        assert answer.status == (200 if depth < 100 else 400), depth
        card = b'{"id": "%s", "agent_card": {"name": "x", "y": %s}}' % (
            caller.id.encode(),
            b"[" * depth + b"]" * depth,
        )
        answer = await send_json(caller, "/registry/register", card)
        assert answer.status == (200 if depth < 100 else 400), depth
    assert (await caller.read_feed()).status == 200


async def test_odd_characters_in_json_strings_are_stored_or_cleaned(caller: Caller):
    odd = "\0\x1b\u202e\ufeff\U0001f600"

    queued = await caller.message({"method": "m" + odd, "params": {odd: odd}}, to=caller)
    beat = json.dumps({"workspace_id": caller.id, "current_task": odd}).encode()
    renamed = await ask(caller.site, "PATCH", caller.path, json={"name": odd}, headers=ADMIN)
    (row,) = await caller.feed()

    assert (queued.status, renamed.status) == (200, 200)
    assert (await send_json(caller, "/registry/heartbeat", beat)).status == 200
    assert row["method"].isprintable()
    assert row["request_body"]["params"] == {odd: odd}
    change = {"delivery_mode": "push", "url": odd}
    bad_url = await ask(caller.site, "PATCH", caller.path, json=change, headers=ADMIN)
    assert_refused(bad_url)


async def test_json_that_is_too_large_is_refused(caller: Caller, connections: Any):
    connection = await connections()
    before = await everything(connection)
    frame = b'{"method": "x", "params": [""]}'
    for route in (*JSON_ROUTES, "notify"):
        most = 16 * MIB if route == "a2a" else MIB
        body = frame.replace(b'""', b'"' + b"y" * (most + 1 - len(frame)) + b'"')
        answer = await send_json(caller, route, body)
        assert_refused(answer, 413)
        assert answer.json["max"] <= most
    assert await everything(connection) == before

    body = frame.replace(b'""', b'"' + b"y" * (16 * MIB - len(frame)) + b'"')
    assert len(body) == 16_777_216
    assert (await send_json(caller, "a2a", body)).status == 200


async def test_json_that_costs_too_much_to_decode_is_refused(caller: Caller, nothing_stored: None):
    """Many values and long numbers; many bytes in a string are no problem."""
    for params, status in (
        (b"[" + b"[]," * 13_000 + b"1]", 413),
        (b"{" + b'"":1,' * 26_000 + b'"":1}', 413),
        (b"9" * 4000, 400),
        (b"0." + b"9" * 4000, 400),
    ):
        for route in JSON_ROUTES:
            answer = await send_json(caller, route, b'{"method": "x", "params": %s}' % params)
            assert_refused(answer, status)


async def test_a_refusal_does_not_repeat_what_was_sent(caller: Caller, nothing_stored: None):
    for route, body in (
        ("/registry/register", {"id": caller.id, "agent_card": {}, "delivery_mode": "x" * 50_000}),
        ("PATCH", {"parent_id": "x" * 10_000}),
        ("PATCH", {"delivery_mode": "` - at `$.name`" * 1_000}),
    ):
        answer = await send_json(caller, route, json.dumps(body).encode())
        assert_refused(answer)
        assert len(answer.body) < 500
        assert "name" not in answer.json["error"].partition(" is wrong")[0]


async def test_json_that_stands_still_or_dribbles_is_refused(run_site: SiteFactory):
    """Long before the time of a whole body is over, if nothing arrives at all."""
    for limits, pause, sentence in (
        ({"json_idle_seconds": 0.2, "json_seconds": 3600}, None, "Nothing of the body arrived"),
        ({"json_idle_seconds": 3600, "json_seconds": 0.3}, 0.02, "did not arrive within 0.3 s"),
    ):
        async with run_site(**limits) as site:
            caller = await registered(site)
            for method, path, token in (
                ("POST", "/registry/register", ""),
                ("POST", "/registry/heartbeat", ""),
                ("POST", f"{caller.path}/a2a", caller.token),
                ("POST", f"{caller.path}/activity/ack", caller.token),
                ("PATCH", caller.path, ADMIN_TOKEN),
            ):
                async with wire_to(site) as wire:
                    await wire.send(request_head(method, path, token=token, length=10_000) + b"{")
                    answering = asyncio.create_task(wire.answer())
                    while not (await asyncio.wait({answering}, timeout=pause))[0]:
                        await wire.send(b" ")
                    answer = await answering

                    assert_refused(answer, 408)
                    assert sentence in answer.json["error"]
                    assert await wire.is_closed()


async def test_endless_json_is_refused_while_it_is_sent(caller: Caller, nothing_stored: None):
    for path, token in (("/registry/register", ""), (f"{caller.path}/a2a", caller.token)):
        async with wire_to(caller.site) as wire:
            lines = ["Transfer-Encoding: chunked"]
            await wire.send(request_head("POST", path, token=token, lines=lines))
            answering = asyncio.create_task(wire.answer())
            while not answering.done():
                await wire.send(chunked(b"[" * 65_536))
            assert_refused(await answering, 413)
