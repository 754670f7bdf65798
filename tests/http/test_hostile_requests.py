"""Hostile HTTP: lengths, chunks, `Expect`, headers, tokens, paths and queries."""

from uuid import uuid4

import pytest
from attacks import MIB, assert_refused
from callers import (
    ADMIN,
    FORM,
    Caller,
    Part,
    chunked,
    form,
    registered,
    request_head,
    upload_head,
    wire_to,
)
from sites import Site

pytestmark = pytest.mark.anyio


async def raw(site: Site, data: bytes) -> bytes:
    """Everything the server answers before it closes the connection."""
    async with wire_to(site) as wire:
        await wire.send(data)
        return await wire.rest()


async def test_contradicting_lengths_are_refused(caller: Caller, nothing_stored: None):
    """They would allow request smuggling; they are refused before any handler runs."""
    body = form(Part())
    length = f"Content-Length: {len(body)}"
    form_type = f"Content-Type: {FORM}"

    for lines in (
        ["Content-Length: -1"],
        ["Content-Length: 1e3"],
        ["Content-Length: 5, 5"],
        [f"Content-Length: {'9' * 40}"],
        [length, "Content-Length: 1"],
        [length, "Transfer-Encoding: chunked"],
        ["Transfer-Encoding: chunked, identity"],
    ):
        path = f"{caller.path}/chat/uploads"
        head = request_head("POST", path, token=caller.token, lines=[form_type, *lines])
        answer = await raw(caller.site, head + body)
        assert answer.startswith(b"HTTP/1.1 400 "), lines
        assert answer.count(b"HTTP/1.1") == 1


async def test_a_body_longer_than_its_content_length_is_cut_there(
    caller: Caller, nothing_stored: None
):
    body = form(Part())
    async with wire_to(caller.site) as wire:
        await wire.send(upload_head(caller, len(body) - 10) + body)

        assert (await wire.rest()).startswith(b"HTTP/1.1 400 ")


async def test_broken_chunks_end_the_connection(caller: Caller, nothing_stored: None):
    for chunk in (
        b"zz\r\nhello\r\n",
        b"-5\r\nhello\r\n",
        b"ffffffffffffffffff\r\nx",
        b"5\r\nhelloX",
    ):
        async with wire_to(caller.site) as wire:
            await wire.send(upload_head(caller) + chunked(form(Part(), closed=False)) + chunk)
            assert await wire.is_closed()


async def test_a_client_that_expects_100_continue_is_refused_without_it(
    caller: Caller, nothing_stored: None
):
    """Then it does not send its body in vain."""
    other = await registered(caller.site)
    absent = Caller(caller.site, str(uuid4()), ADMIN["Authorization"].removeprefix("Bearer "))
    stranger = Caller(caller.site, caller.id, other.token)
    expect = ["Expect: 100-continue", f"Content-Type: {FORM}"]

    for one, length, extra, status in (
        (stranger, 100, [], b"401"),
        (absent, 100, [], b"404"),
        (caller, 10**10, [], b"413"),
        (caller, 100, ["Idempotency-Key: " + "k" * 300], b"400"),
    ):
        async with wire_to(caller.site) as wire:
            await wire.send(upload_head(one, length, lines=[*expect, *extra]))
            assert await wire.read(12) == b"HTTP/1.1 " + status


async def test_a_client_that_expects_100_continue_gets_it(caller: Caller):
    body = form(Part())
    async with wire_to(caller.site) as wire:
        lines = ["Expect: 100-continue", f"Content-Type: {FORM}"]
        await wire.send(upload_head(caller, len(body), lines=lines))
        assert await wire.read(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        await wire.send(body)

        assert (await wire.answer()).status == 200


async def test_a_client_that_got_100_continue_and_is_refused_later_sees_the_refusal(
    caller: Caller, nothing_stored: None
):
    body = form(Part(b""), Part(bytes(3 * MIB)))
    async with wire_to(caller.site) as wire:
        lines = ["Expect: 100-continue", f"Content-Type: {FORM}"]
        await wire.send(upload_head(caller, len(body), lines=lines))
        await wire.read(25)
        await wire.send(body)

        assert_refused(await wire.answer())


async def test_of_duplicated_headers_the_first_counts(caller: Caller):
    other = await registered(caller.site)
    path = f"{caller.path}/activity"

    for first, second, status in (
        (other.token, caller.token, 401),
        (caller.token, other.token, 200),
    ):
        async with wire_to(caller.site) as wire:
            lines = [f"Authorization: Bearer {second}"]
            await wire.send(request_head("GET", path, token=first, lines=lines))
            assert (await wire.answer()).status == status


async def test_odd_tokens_are_refused(caller: Caller):
    path = f"{caller.path}/activity"
    for value in (
        "Bearer",
        "Bearer ",
        "Bearer  ",
        "bearer\t" + caller.token,
        "Basic " + caller.token,
        caller.token,
        "Bearer " + caller.token + "x",
        "Bearer " + caller.token[:-1],
        "Bearer " + caller.token.upper(),
        "Bearer \u00ff\u00fe",
        "Bearer " + "x" * 50_000,
        f"Bearer {caller.token}, Bearer {caller.token}",
    ):
        async with wire_to(caller.site) as wire:
            await wire.send(request_head("GET", path, lines=[f"Authorization: {value}"]))
            assert_refused(await wire.answer(), 401)


async def test_odd_paths_are_refused(caller: Caller):
    for path in (
        "/workspaces/%00/activity",
        "/workspaces/%ff%fe/activity",
        "/workspaces/" + "x" * 20_000 + "/activity",
        f"/workspaces/{caller.id}%2F..%2F{caller.id}/activity",
        f"/workspaces/../workspaces/{caller.id}/activity",
        f"{caller.path}/pending-uploads/..%2f..%2fadmin/content",
        "//admin/workspaces",
    ):
        async with wire_to(caller.site) as wire:
            await wire.send(request_head("GET", path, token=caller.token))
            assert_refused(await wire.answer(), 400, 401, 404)


async def test_a_query_that_is_too_long_is_refused_before_it_is_parsed(caller: Caller):
    for route in ("/activity", "/events", "/pending-uploads"):
        for query in ("a&" * 30_000, "limit=" + "1" * 10_000):
            async with wire_to(caller.site) as wire:
                path = f"{caller.path}{route}?{query}"
                await wire.send(request_head("GET", path, token=caller.token))
                assert_refused(await wire.answer())


HANDSHAKE = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


async def test_a_handshake_that_cannot_be_parsed_is_refused(caller: Caller):
    """Without an answer it would stay open for ever, and break the shutdown."""
    for extra, status in (
        (["X: " + "y" * 10_000], 431),
        (["X: y"] * 200, 431),
        (["Sec-WebSocket-Protocol: " + "a," * 4000], 431),
        (["Sec-WebSocket-Extensions: " + "a;b=c," * 1000] * 3, 431),
    ):
        async with wire_to(caller.site) as wire:
            lines = [*HANDSHAKE, *extra]
            await wire.send(
                request_head("GET", f"{caller.path}/ws", token=caller.token, lines=lines)
            )
            assert_refused(await wire.answer(), status)
            assert await wire.is_closed()


async def test_odd_query_values_are_refused(caller: Caller):
    numbers = ("-1", "0", "nan", "inf", "-inf", "1e309", "0x10", "%D9%A3", "1_0", "+", "%00")
    for route, name, values in (
        ("/activity", "since_secs", numbers),
        ("/activity", "since_seq", ("-1", *numbers[2:], "9" * 5000)),
        ("/activity", "wait", (*numbers[2:], "-0.1")),
        ("/activity", "source", ("%00", "%ff", "canvas%00")),
        ("/activity", "type", ("%00", "a2a_receive%00")),
        ("/activity", "since_id", ("%00", "%ff", "x" * 5000)),
        ("/activity", "peer_id", ("%00", "%ff", "x" * 5000)),
        ("/activity", "before_ts", (*numbers, "2030-01-01T00:00:00." + "9" * 5000)),
        ("/pending-uploads", "limit", numbers),
        ("/pending-uploads", "after", ("%00", "x", "-1")),
    ):
        for value in values:
            async with wire_to(caller.site) as wire:
                path = f"{caller.path}{route}?{name}={value}"
                await wire.send(request_head("GET", path, token=caller.token))
                answer = await wire.answer()
                assert_refused(answer)
                assert name in answer.json["error"], path
