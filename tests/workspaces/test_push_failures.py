"""A push workspace or its sender fails: the other side gets an error, and nothing hangs."""

import asyncio
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import structlog
from aiohttp import ClientError, ClientPayloadError, web
from pushes import (
    MIB,
    UNREACHABLE,
    half_sent,
    in_pieces,
    raw_receiver,
    receiver,
    registered,
    send_message,
    upload,
)
from sites import SiteFactory

from restante.delivery.rules import MAX_REQUEST_BYTES

pytestmark = pytest.mark.anyio


async def test_a_workspace_that_stops_reading_stops_the_sender(run_site: SiteFactory):
    """Nothing piles up in memory, and after the timeout the sender gets an error."""
    test_is_over = asyncio.Event()

    async def ingest(_request: web.Request) -> web.Response:
        await test_is_over.wait()
        return web.Response()

    async with (
        run_site(push_to_private=True, push_timeout_seconds=0.3) as site,
        receiver(ingest) as url,
    ):
        workspace = await registered(site, url)
        tracemalloc.start()
        try:
            status, body = await upload(site, workspace, in_pieces(48 * MIB))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            test_is_over.set()

    assert (status, json.loads(body)) == (502, UNREACHABLE)
    assert peak < 4 * MIB


@pytest.mark.parametrize("call", [upload, send_message])
async def test_a_refused_connection_is_unreachable_and_logged_without_secrets(
    run_site: SiteFactory, call: Any
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with run_site(push_to_private=True) as site:
        workspace = await registered(site, f"http://127.0.0.1:{port}/?key=hidden")

        with structlog.testing.capture_logs() as logged:
            status, body = await call(site, workspace)

    assert (status, json.loads(body)) == (502, UNREACHABLE)
    (failure,) = [event for event in logged if event["event"] == "push_failed"]
    assert failure["workspace"] == str(workspace.id)
    assert "refused" in failure["reason"].lower()
    assert workspace.secret not in str(logged)
    assert workspace.token not in str(logged)
    assert "hidden" not in str(logged)


@pytest.mark.parametrize("call", [upload, send_message])
async def test_a_call_to_a_workspace_that_hangs_times_out(run_site: SiteFactory, call: Any):
    given_up = asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        await request.read()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()
        return web.Response()

    async with (
        run_site(push_to_private=True, push_timeout_seconds=0.2) as site,
        receiver(hang) as url,
    ):
        workspace = await registered(site, url)

        status, body = await call(site, workspace)

        assert (status, json.loads(body)) == (502, UNREACHABLE)
        await asyncio.wait_for(given_up.wait(), 30)


async def test_a_slow_sender_does_not_count_against_the_workspace(run_site: SiteFactory):
    """The timeout is for the workspace; the time of the sender has another limit."""
    timeout_seconds = 1.0

    async def ingest(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async def sent() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.sleep(timeout_seconds * 2)  # what is tested is that time passes
        yield b"b"

    async with (
        run_site(push_to_private=True, push_timeout_seconds=timeout_seconds) as site,
        receiver(ingest) as url,
    ):
        workspace = await registered(site, url)

        assert await upload(site, workspace, sent()) == (200, b"ab")


MALFORMED = [
    b"",
    b"HTTP/1.1 200 OK\r\nContent-Le",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
]


async def test_an_answer_that_is_not_http_is_unreachable(run_site: SiteFactory):
    async with run_site(push_to_private=True) as site:
        for answer in MALFORMED:
            async with raw_receiver(answer) as url:
                workspace = await registered(site, url)

                status, body = await send_message(site, workspace)

            assert (answer, status, json.loads(body)) == (answer, 502, UNREACHABLE)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nonly this\r\n",
    ],
)
@pytest.mark.parametrize("call", [upload, send_message])
async def test_an_incomplete_answer_is_incomplete_for_the_sender_too(
    run_site: SiteFactory, call: Any, answer: bytes
):
    """It must not look complete."""
    async with run_site(push_to_private=True) as site, raw_receiver(answer) as url:
        workspace = await registered(site, url)

        with structlog.testing.capture_logs() as logged, pytest.raises(ClientPayloadError):
            await call(site, workspace)

    names = [event["event"] for event in logged]
    assert "push_failed" in names
    assert "bug" not in names


async def test_an_answer_that_stalls_is_cut_off(run_site: SiteFactory):
    async def stall(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        await asyncio.Event().wait()
        return response

    async with (
        run_site(push_to_private=True, push_timeout_seconds=1.0) as site,
        receiver(stall) as url,
    ):
        workspace = await registered(site, url)

        with pytest.raises(ClientPayloadError):
            await send_message(site, workspace)


@pytest.mark.parametrize("stage", ["sending", "waiting", "reading"])
async def test_a_sender_that_disconnects_ends_the_call(run_site: SiteFactory, stage: str):
    begun, ended = asyncio.Event(), asyncio.Event()

    async def ingest(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        try:
            await request.content.readexactly(3)
            if stage == "reading":
                await response.prepare(request)
                await response.write(b"half")
            begun.set()
            if stage == "sending":
                await request.content.readexactly(1)  # is never sent
            await asyncio.Event().wait()
        finally:
            ended.set()
        return response

    async with run_site(push_to_private=True) as site, receiver(ingest) as url:
        workspace = await registered(site, url)
        length = 9 if stage == "sending" else 3

        with structlog.testing.capture_logs() as logged:
            async with half_sent(site, workspace, length, b"abc") as reader:
                await asyncio.wait_for(begun.wait(), 30)
                if stage == "reading":
                    await reader.readuntil(b"half")
                assert not ended.is_set()
            await asyncio.wait_for(ended.wait(), 30)

    assert "bug" not in [event["event"] for event in logged]


async def test_the_shutdown_of_the_server_ends_the_call(run_site: SiteFactory):
    begun, ended = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        await request.read()
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return web.Response()

    async with receiver(hang) as url:
        async with run_site(push_to_private=True) as site:
            workspace = await registered(site, url)
            asking = asyncio.create_task(send_message(site, workspace))
            await begun.wait()
        await asyncio.wait_for(ended.wait(), 30)
        with suppress(ClientError):
            await asking


async def test_a_request_that_is_too_large_is_refused_before_the_call(
    run_site: SiteFactory,
):
    async with run_site(push_to_private=True) as site:
        workspace = await registered(site, "http://127.0.0.1:1")

        length = {"Content-Length": str(52 * MIB)}
        status, body = await upload(site, workspace, in_pieces(52 * MIB), **length)

    assert status == 413
    assert json.loads(body)["max"] == 50 * MIB


async def test_a_body_of_unknown_length_is_cut_off_when_it_grows_too_large(run_site: SiteFactory):
    broken = asyncio.Event()

    async def ingest(request: web.Request) -> web.Response:
        try:
            async for _ in request.content.iter_any():
                pass
        except BaseException:
            broken.set()
            raise
        return web.Response()

    async with run_site(push_to_private=True) as site, receiver(ingest) as url:
        workspace = await registered(site, url)

        status, body = await upload(site, workspace, in_pieces(52 * MIB))

        assert (status, json.loads(body)["code"]) == (413, "request_too_large")
        await asyncio.wait_for(broken.wait(), 30)


async def test_a_body_that_takes_too_long_is_refused_and_the_call_ends(run_site: SiteFactory):
    broken = asyncio.Event()

    async def ingest(request: web.Request) -> web.Response:
        try:
            await request.read()
        except BaseException:
            broken.set()
            raise
        return web.Response()

    async with (
        run_site(
            push_to_private=True, upload_grace_seconds=1.0, upload_min_bytes_per_second=10**9
        ) as site,
        receiver(ingest) as url,
    ):
        workspace = await registered(site, url)
        async with half_sent(site, workspace, 9, b"abc") as reader:
            assert b" 408 " in await reader.readline()
            await asyncio.wait_for(broken.wait(), 30)


@pytest.mark.parametrize("sent", [b"", b"abc"])
async def test_a_body_that_stands_still_is_cut_off(run_site: SiteFactory, sent: bytes):
    """Its length would give it an hour, for which it would hold one of the few calls."""
    async with (
        run_site(push_to_private=True, upload_idle_seconds=0.3) as site,
        receiver(read_all) as url,
    ):
        workspace = await registered(site, url)
        async with half_sent(site, workspace, 50 * MIB, sent) as reader:
            status = await asyncio.wait_for(reader.readline(), 30)
            body = await asyncio.wait_for(reader.readuntil(b"}"), 30)

    assert b" 408 " in status
    assert b"No more of the body arrived" in body


async def test_a_large_body_that_does_not_keep_the_pace_is_cut_off(run_site: SiteFactory):
    """Whatever it declares: the time for 50 MiB more than have arrived is all that it has."""
    limits = {"max_file_bytes": 64 * 1024 * MIB, "max_request_bytes": 64 * 1024 * MIB}
    pace = {"upload_grace_seconds": 0.2, "upload_min_bytes_per_second": MAX_REQUEST_BYTES * 5}
    async with (
        run_site(push_to_private=True, **limits, **pace) as site,
        receiver(read_all) as url,
    ):
        workspace = await registered(site, url)
        async with half_sent(site, workspace, 64 * 1024 * MIB, b"abc") as reader:
            status = await asyncio.wait_for(reader.readline(), 30)
            body = await asyncio.wait_for(reader.readuntil(b"}"), 30)

    assert b" 408 " in status
    assert b"did not arrive within 0 s" in body


async def test_a_workspace_that_reads_slowly_does_not_make_its_sender_idle(run_site: SiteFactory):
    """Only the wait for the sender counts."""
    idle_seconds = 0.3

    async def ingest(request: web.Request) -> web.Response:
        await asyncio.sleep(3 * idle_seconds)  # what is tested is that time passes
        return await read_all(request)

    async with (
        run_site(push_to_private=True, upload_idle_seconds=idle_seconds) as site,
        receiver(ingest) as url,
    ):
        workspace = await registered(site, url)

        status, body = await upload(site, workspace, in_pieces(40 * MIB))

    assert (status, int(body)) == (200, 40 * MIB)


async def read_all(request: web.Request) -> web.Response:
    return web.Response(text=str(len(await request.read())))
