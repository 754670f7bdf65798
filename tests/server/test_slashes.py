"""A slash at the end of an address: the client is sent to the address, and nowhere else."""

import pytest
from aiohttp import WSServerHandshakeError
from callers import FORM, Answer, Caller, Part, ask, form, registered, request_head, wire_to
from sites import Site

pytestmark = pytest.mark.anyio


async def raw(site: Site, target: str, method: str = "GET", host: str = "restante") -> Answer:
    async with wire_to(site) as wire:
        head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nX-Forwarded-Proto: https\r\n\r\n"
        await wire.send(head.encode("latin-1"))
        return await wire.answer()


@pytest.mark.parametrize(
    ("target", "location"),
    [
        ("/health/", "/health"),
        ("/health///", "/health"),
        ("/health/?a=1&b=%2F&c=", "/health?a=1&b=%2F&c="),
        ("/health/?a=//evil.example/", "/health?a=//evil.example/"),
        ("/workspaces/%7Bx%7D/activity/?limit=5", "/workspaces/%7Bx%7D/activity?limit=5"),
        ("/workspaces/a%0d%0aSet-Cookie:x/activity/", "/workspaces/a%0D%0ASet-Cookie%3Ax/activity"),
        ("/workspaces/%E2%82%AC/activity/", "/workspaces/%E2%82%AC/activity"),
    ],
)
async def test_the_location_is_relative_and_keeps_the_query(
    shared_site: Site, target: str, location: str
):
    """With the host that was sent, or with http, a token could go to somebody else."""
    answer = await raw(shared_site, target, host="evil.example")

    assert (answer.status, answer.headers["Location"], answer.body) == (307, location, b"")


@pytest.mark.parametrize(
    "target",
    [
        "//evil.example/", "//evil.example/health/", "///evil.example/%2e%2e/health/", "//health/",
        "/%2Fevil.example/", "/%2F%2Fevil.example/health/", "/\\evil.example/", "/nowhere/", "/",
        "/health/x/", "//",
    ],
)  # fmt: skip
async def test_an_address_that_is_none_of_ours_is_not_redirected(shared_site: Site, target: str):
    """A path that begins with two slashes would be the name of a host."""
    answer = await raw(shared_site, target)

    assert answer.status in {400, 404}
    assert "Location" not in answer.headers


@pytest.mark.parametrize("path", ["/ws/", "/nowhere", "/health", "/workspaces/x/ws/"])
async def test_a_websocket_to_an_unknown_address_is_a_404(shared_site: Site, path: str):
    """It is not a 403, which would say that the origin or the token is wrong."""
    with pytest.raises(WSServerHandshakeError) as refusal:
        await shared_site.http.ws_connect(path)

    assert refusal.value.status == 404


async def test_its_answer_is_a_json_problem(shared_site: Site):
    async with wire_to(shared_site) as wire:
        upgrade = (
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        )
        await wire.send(request_head("GET", "/ws/", lines=upgrade))
        answer = await wire.answer()

    assert (answer.status, answer.json["code"]) == (404, "no_such_route")


async def test_a_request_to_another_host_in_its_first_line_stays_here(shared_site: Site):
    answer = await raw(shared_site, "http://evil.example/health/")

    assert answer.headers.get("Location", "/health") == "/health"


async def test_a_client_that_follows_sends_its_files_again(shared_site: Site):
    caller = await registered(shared_site)

    sent = await caller.ask(
        "POST", "/chat/uploads/", data=form(Part(b"hello")), headers={"Content-Type": FORM}
    )
    rows = await caller.ask("GET", "/activity/?limit=1")

    assert (sent.status, sent.json["files"][0]["size"]) == (200, 5)
    assert [row["seq"] for row in rows.json] == [1]


async def test_a_body_is_not_read_before_it_is_sent_elsewhere(shared_site: Site):
    caller = await registered(shared_site)

    async with wire_to(shared_site) as wire:
        path = f"{caller.path}/chat/uploads/"
        await wire.send(request_head("POST", path, token=caller.token, length=10**7))
        answer = await wire.answer()

    assert (answer.status, answer.headers["Location"]) == (307, path[:-1])


async def test_a_method_that_the_address_does_not_take_is_refused_there(shared_site: Site):
    answer = await ask(shared_site, "DELETE", "/health/")

    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


async def test_a_caller_needs_the_same_token_there(shared_site: Site):
    """The redirect says nothing about the workspace: it looks at the shape of the address."""
    known = await registered(shared_site)
    unknown = Caller(shared_site, "5f0c6a52-3d1e-4b7a-9c1d-2e8f4a6b7c90", "")

    answers = [await raw(shared_site, f"{one.path}/activity/") for one in (known, unknown)]

    assert [answer.status for answer in answers] == [307, 307]
    assert (await ask(shared_site, "GET", f"{known.path}/activity/")).status == 401
