"""What the log says about a request, and the id under which it says so."""

from collections.abc import MutableMapping, Sequence
from typing import Any

import pytest
import structlog
from aiohttp import WSServerHandshakeError
from callers import ADMIN, Part, ask, bearer, form, registered, wire_to
from sites import Site
from waiting import until

from restante.server.request_lines import request_line

pytestmark = pytest.mark.anyio


def lines_of(logged: Sequence[MutableMapping[str, Any]]) -> list[dict[str, Any]]:
    """A line is written after the answer's last byte."""
    return [dict(event) for event in logged if event["event"] == "request"]


async def test_a_request_line_says_who_where_and_how_much(site: Site):
    caller = await registered(site, agent_card={"name": "laptop"})
    with structlog.testing.capture_logs() as logged:
        (file_id,) = await caller.staged(Part(b"x" * 1000))
        await caller.fetch(file_id)
        await until(lambda: len(lines_of(logged)) == 2)

    upload, fetch = lines_of(logged)
    who = {"workspace": caller.id, "name": "laptop", "client": "127.0.0.1"}
    assert who.items() <= upload.items()
    assert who.items() <= fetch.items()
    assert upload["bytes_in"] == len(form(Part(b"x" * 1000)))
    assert upload["bytes_out"] > 0
    assert (fetch["bytes_in"], fetch["bytes_out"]) == (0, 1000)
    assert fetch["path"] == f"{caller.path}/pending-uploads/{file_id}/content"
    assert caller.token not in str(logged)


async def test_the_operators_request_names_the_workspace_and_a_stranger_none(site: Site):
    caller = await registered(site)
    with structlog.testing.capture_logs() as logged:
        await ask(site, "GET", f"{caller.path}/activity", headers=ADMIN)
        await ask(site, "GET", f"{caller.path}/activity", headers=bearer("somebody"))
        await until(lambda: len(lines_of(logged)) == 2)

    ours, theirs = lines_of(logged)
    assert (ours["workspace"], ours["name"]) == (caller.id, "tester")
    assert theirs["status"] == 401
    assert not {"workspace", "name"} & theirs.keys()


async def test_a_token_in_a_wrong_address_is_not_logged(site: Site):
    caller = await registered(site)
    with structlog.testing.capture_logs() as logged:
        await ask(site, "GET", f"/{caller.token}/x/{caller.token}")
        await until(lambda: len(lines_of(logged)) == 1)

    assert caller.token not in str(logged)
    (line,) = lines_of(logged)
    assert line["path"] == "/***/x/…"
    assert "/***/x/… " in request_line(line | {"timestamp": "09:41:07"}, width=80, colors=False)


@pytest.mark.parametrize(
    "path",
    ["/workspaces/{}/activity", "/workspaces/{0}/pending-uploads/{0}/content", "/" * 250 + "{}"],
)
async def test_a_token_where_an_id_belongs_is_not_logged(site: Site, path: str):
    caller = await registered(site)
    with structlog.testing.capture_logs() as logged:
        await ask(site, "GET", path.format(caller.token))
        await until(lambda: len(lines_of(logged)) == 1)

    assert caller.token not in str(logged)
    assert caller.token[:6] not in lines_of(logged)[0]["path"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"nonsense\r\n\r\n", 400), (b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000, 431)],
    ids=["malformed", "too long"],
)
async def test_what_is_not_http_gets_a_request_id_that_is_in_the_log(
    site: Site, sent: bytes, status: int
):
    with structlog.testing.capture_logs() as logged:
        async with wire_to(site) as wire:
            await wire.send(sent)
            answer = await wire.answer()

    (line,) = [event for event in logged if event["event"] == "refused_unread"]
    assert (answer.status, line["status"], line["client"]) == (status, status, "127.0.0.1")
    assert answer.headers["X-Request-ID"] == line["request_id"]


@pytest.mark.parametrize("path", ["/ws", "/nothing"])
async def test_the_refusal_of_a_websocket_has_a_request_id(site: Site, path: str):
    with pytest.raises(WSServerHandshakeError) as refused:
        await site.http.ws_connect(path, headers={"X-Request-ID": "mine"})

    assert refused.value.headers is not None
    assert refused.value.headers["X-Request-ID"] == "mine"
