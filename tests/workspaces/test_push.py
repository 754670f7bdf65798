"""Files and messages are streamed to push workspaces, and their answers back."""

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from callers import ADMIN
from pushes import (
    BODY,
    FORM,
    MESSAGE,
    MIB,
    Workspace,
    in_pieces,
    receiver,
    registered,
    send_message,
    upload,
)
from sites import SiteFactory

from restante import wire

pytestmark = pytest.mark.anyio


async def test_a_file_is_forwarded_and_the_answer_relayed(run_site: SiteFactory):
    seen: list[tuple[str, dict[str, str], bytes]] = []

    async def ingest(request: web.Request) -> web.Response:
        seen.append((request.path, dict(request.headers), await request.read()))
        return web.json_response({"files": []}, status=201)

    async with run_site(push_to_private=True) as site, receiver(ingest) as url:
        workspace = await registered(site, url + "/base/")
        sent = {**workspace.auth, "Content-Type": FORM}
        async with site.http.post(workspace.uploads, data=BODY, headers=sent) as answer:
            assert (answer.status, await answer.json()) == (201, {"files": []})
            assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"

    ((path, headers, body),) = seen
    assert path == "/base/internal/chat/uploads/ingest"
    assert headers["Authorization"] == f"Bearer {workspace.secret}"
    assert headers["Content-Type"] == FORM
    assert headers["Content-Length"] == str(len(BODY))
    assert "Transfer-Encoding" not in headers
    assert body == BODY


async def test_a_message_is_posted_to_the_url_itself(run_site: SiteFactory):
    seen: list[tuple[str, dict[str, str], bytes]] = []

    async def take(request: web.Request) -> web.Response:
        seen.append((request.path_qs, dict(request.headers), await request.read()))
        return web.json_response({"jsonrpc": "2.0", "id": 1, "result": {}})

    async with run_site(push_to_private=True) as site, receiver(take) as url:
        workspace = await registered(site, url + "/agent?v=1")
        status, body = await send_message(site, workspace)

    assert (status, json.loads(body)) == (200, {"jsonrpc": "2.0", "id": 1, "result": {}})
    ((path, headers, received),) = seen
    assert (path, received) == ("/agent?v=1", MESSAGE)
    assert headers["Authorization"] == f"Bearer {workspace.secret}"
    assert headers["Content-Type"] == "application/json"
    assert headers["Content-Length"] == str(len(MESSAGE))


async def test_a_message_is_forwarded_in_its_one_shape(run_site: SiteFactory):
    """And a repetition is forwarded again: the workspace answers it, and nothing is queued."""
    seen: list[Any] = []

    async def take(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({})

    async with run_site(push_to_private=True) as site, receiver(take) as url:
        to = await registered(site, url)
        for _ in range(2):
            said = {"message": {"content": "hi", "messageId": "m"}}
            async with site.http.post(to.messages, json=said, headers=to.auth) as answer:
                assert answer.status == 200

    for body in seen:
        assert (body["jsonrpc"], body["method"]) == ("2.0", "message/send")
        parts = [{"kind": "text", "text": "hi"}]
        assert body["params"]["message"] == {"parts": parts, "messageId": "m", "role": "user"}
    assert len(seen) == 2


@pytest.mark.parametrize("attempt", ["2", "x"])
async def test_a_repeated_attempt_is_not_forwarded(run_site: SiteFactory, attempt: str):
    """An agent that acts would act again; nobody knows whether it got the first attempt."""
    seen: list[str] = []

    async def take(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.json_response({})

    async with run_site(push_to_private=True) as site, receiver(take) as url:
        to = await registered(site, url)
        answers = [await upload(site, to, **{wire.ATTEMPT: attempt})]
        sent = {**to.auth, wire.ATTEMPT: attempt}
        async with site.http.post(to.messages, data=MESSAGE, headers=sent) as answer:
            answers.append((answer.status, await answer.read()))

    assert seen == []
    for status, body in answers:
        refusal = json.loads(body)
        assert (status, refusal["code"]) == (503, "outcome_unknown")
        assert refusal["delivery_mode"] == "push"


async def test_a_first_attempt_is_forwarded(run_site: SiteFactory):
    async def take(_: web.Request) -> web.Response:
        return web.json_response({})

    async with run_site(push_to_private=True) as site, receiver(take) as url:
        to = await registered(site, url)
        sent = {**to.auth, wire.ATTEMPT: "1"}
        async with site.http.post(to.messages, data=MESSAGE, headers=sent) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("call", [upload, send_message])
async def test_every_status_is_relayed(run_site: SiteFactory, call: Any):
    statuses = [200, 201, 204, 304, 401, 413, 429, 500, 503]
    wanted = iter(statuses)

    async def take(request: web.Request) -> web.Response:
        await request.read()
        status = next(wanted)
        return web.Response(status=status, body=None if status in {204, 304} else b"as it is")

    async with run_site(push_to_private=True) as site, receiver(take) as url:
        workspace = await registered(site, url)

        for status in statuses:
            expected = b"" if status in {204, 304} else b"as it is"
            assert await call(site, workspace) == (status, expected)


async def test_connection_headers_and_cookies_are_not_relayed(run_site: SiteFactory):
    cookies: list[str | None] = []

    async def take(request: web.Request) -> web.Response:
        cookies.append(request.headers.get("Cookie"))
        headers = {"Set-Cookie": "a=b", "X-Own": "x", "Keep-Alive": "timeout=5", "Retry-After": "7"}
        return web.Response(status=503, headers=headers)

    async with run_site(push_to_private=True) as site, receiver(take) as url:
        workspace = await registered(site, url)
        await send_message(site, workspace)
        sent = {**workspace.auth, "Content-Type": "application/json"}
        async with site.http.post(workspace.messages, data=MESSAGE, headers=sent) as answer:
            assert answer.headers["Retry-After"] == "7"
            assert not {"Set-Cookie", "X-Own", "Keep-Alive"} & set(answer.headers)

    assert cookies == [None, None]


async def test_bodies_are_streamed_in_both_directions(run_site: SiteFactory):
    """The first bytes arrive before the last are sent, and little is held in memory."""
    begun, answered, size = asyncio.Event(), asyncio.Event(), 20 * MIB
    received = 0

    async def ingest(request: web.Request) -> web.StreamResponse:
        nonlocal received
        async for piece in request.content.iter_any():
            begun.set()
            received += len(piece)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first,")
        await answered.wait()
        await response.write(b"last")
        return response

    async def sent() -> AsyncIterator[bytes]:
        piece = bytes(64 * 1024)
        yield piece
        await begun.wait()
        for _ in range(size // len(piece) - 1):
            yield piece

    async with run_site(push_to_private=True) as site, receiver(ingest) as url:
        workspace = await registered(site, url)
        headers = {**workspace.auth, "Content-Type": FORM}
        tracemalloc.start()
        try:
            async with site.http.post(workspace.uploads, data=sent(), headers=headers) as answer:
                assert await answer.content.readany() == b"first,"
                _, peak = tracemalloc.get_traced_memory()
                answered.set()
                assert await answer.read() == b"last"
        finally:
            tracemalloc.stop()

    assert received == size
    assert peak < 4 * MIB  # sender, server and receiver together


async def test_every_workspace_has_a_secret_of_its_own(run_site: SiteFactory):
    seen: list[str] = []

    async def take(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.Response()

    async with run_site(push_to_private=True) as site, receiver(take) as url:
        one, other = await registered(site, url), await registered(site, url)
        await send_message(site, one)
        await upload(site, other)
        await send_message(site, one)

    assert one.secret != other.secret
    assert seen == [f"Bearer {secret}" for secret in (one.secret, other.secret, one.secret)]
    assert not {one.secret, other.secret} & {one.token, other.token}


async def test_an_answer_before_the_end_of_the_body_is_relayed(run_site: SiteFactory):
    """A workspace that refuses a large file does not have to read it."""

    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response({"error": "too large"}, status=413)

    async with run_site(push_to_private=True) as site, receiver(refuse) as url:
        workspace = await registered(site, url)

        status, body = await upload(site, workspace, in_pieces(20 * MIB))

    assert (status, json.loads(body)) == (413, {"error": "too large"})


async def test_an_answer_may_begin_before_the_body_ends(run_site: SiteFactory):
    """The rest of the body is still forwarded."""
    answered = asyncio.Event()

    async def echo(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for piece in request.content.iter_any():
            await response.write(piece)
        return response

    async def sent() -> AsyncIterator[bytes]:
        yield b"one,"
        await answered.wait()
        yield b"two"

    async with run_site(push_to_private=True) as site, receiver(echo) as url:
        workspace = await registered(site, url)
        headers = {**workspace.auth, "Content-Type": FORM}
        async with site.http.post(workspace.uploads, data=sent(), headers=headers) as answer:
            assert await answer.content.readany() == b"one,"
            answered.set()
            assert await answer.read() == b"two"


async def test_the_operator_can_get_the_secret_of_a_workspace_that_it_changes_to_push(
    run_site: SiteFactory,
):
    seen: list[str] = []

    async def take(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.Response()

    async with run_site(push_to_private=True) as site, receiver(take) as url:
        workspace = await registered(site, url, mode="poll")
        token = f"/admin/workspaces/{workspace.id}/token"
        async with site.http.post(token, headers=ADMIN) as answer:
            assert set(await answer.json()) == {"auth_token"}
        change = {"delivery_mode": "push", "url": url}
        async with site.http.patch(
            f"/workspaces/{workspace.id}", json=change, headers=ADMIN
        ) as answer:
            assert answer.status == 200
        async with site.http.post(token, headers=ADMIN) as answer:
            issued = await answer.json()
        again = Workspace(workspace.id, issued["auth_token"], issued["inbound_secret"])
        assert (await send_message(site, again))[0] == 200

    assert again.secret == workspace.secret
    assert seen == [f"Bearer {again.secret}"]


async def test_programs_of_the_previous_release_find_the_secret_of_a_push_workspace(
    run_site: SiteFactory,
):
    async with run_site() as site:
        workspace = await registered(site, "http://w.test")
        again = {"id": str(workspace.id), "agent_card": {"name": "w"}}
        answers: list[dict[str, Any]] = []
        for mode in ("push", "poll"):
            body = again | {"delivery_mode": mode}
            async with site.http.post(
                "/registry/register", json=body, headers=workspace.auth
            ) as answer:
                answers.append(await answer.json())

    assert answers[0]["inbound_secret"] == workspace.secret
    assert "inbound_secret" not in answers[1]
