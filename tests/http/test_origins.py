"""WIRE, Browsers: pages of listed origins may use the server, and no others."""

import asyncio
from typing import Any

import pytest
import structlog
from aiohttp import WSServerHandshakeError, web
from callers import ADMIN, Answer, ask, bearer, register, registered, request_head, wire_to
from hypothesis import given, strategies as st
from pushes import receiver
from sites import Site, SiteFactory
from starlette.routing import Route

from restante.client.sending import DEFAULT_UPLOAD_LIMITS
from restante.http.origins import is_same_origin
from restante.server import openapi
from restante.server.app import ROUTES

pytestmark = pytest.mark.anyio

CANVAS = "http://localhost:3000"  # listed by default on loopback
FOREIGN = [
    "https://page.example",
    "null",
    "",
    "http://localhost",
    "http://localhost:3001",
    "https://localhost:3000",
    "http://127.0.0.1:3000",
    "http://localhost:3000/",
    "http://localhost:3000.page.example",
    "http://page.example:3000",
    "http://localhost:3000, http://localhost:3000",
    "*",
    "\xe9" * 1000,
]
DOCUMENT = openapi.document(ROUTES, DEFAULT_UPLOAD_LIMITS)
OPERATIONS = [
    (method, one) for methods in DOCUMENT["paths"].values() for method, one in methods.items()
]


async def preflight(site: Site, path: str, origin: str, **more: str) -> Answer:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    asked |= {name.replace("_", "-"): value for name, value in more.items()}
    return await ask(site, "OPTIONS", path, headers=asked)


def cors(answer: Answer) -> dict[str, str]:
    return {
        name: value
        for name, value in answer.headers.items()
        if name.lower().startswith("access-control-")
    }


def listed(value: str) -> set[str]:
    return {name.lower() for name in value.split(", ")}


def assert_readable(answer: Answer, origin: str = CANVAS) -> None:
    """The page may read it, and all of its headers."""
    assert answer.headers["Access-Control-Allow-Origin"] == origin
    assert answer.headers["Access-Control-Allow-Credentials"] == "true"
    assert "x-request-id" in listed(answer.headers["Access-Control-Expose-Headers"])
    assert answer.headers["Vary"] == "Origin"


@pytest.mark.parametrize(
    "path", sorted({route.path for route in ROUTES if isinstance(route, Route)})
)
async def test_a_listed_origin_may_ask_on_every_path(shared_site: Site, path: str):
    where = path.format(workspace_id="w", file_id="f")

    answer = await preflight(shared_site, where, CANVAS)

    assert (answer.status, answer.body) == (204, b"")
    assert_readable(answer)
    assert int(answer.headers["Access-Control-Max-Age"]) <= 7200
    assert "Access-Control-Allow-Private-Network" not in answer.headers


async def test_a_preflight_names_every_method_and_header_that_a_route_takes(shared_site: Site):
    """Both lists come from the descriptions of the routes, as OpenAPI does."""
    read = {
        parameter["name"].lower()
        for _, operation in OPERATIONS
        for parameter in operation["parameters"]
        if parameter["in"] == "header"
    }

    answer = await preflight(shared_site, "/registry/register", CANVAS)

    assert listed(answer.headers["Access-Control-Allow-Methods"]) == {m for m, _ in OPERATIONS}
    allowed = listed(answer.headers["Access-Control-Allow-Headers"])
    anywhere = {"authorization", "cache-control", "content-type", "x-request-id"}
    assert allowed == read | anywhere
    assert {"x-workspace-id", "idempotency-key", "last-event-id", "range", "if-range"} <= read


async def test_an_answer_exposes_every_header_that_is_described(shared_site: Site):
    sent = {
        name.lower()
        for _, operation in OPERATIONS
        for described in operation["responses"].values()
        for name in described["headers"]
    }

    answer = await ask(shared_site, "GET", "/health", headers={"Origin": CANVAS})

    assert listed(answer.headers["Access-Control-Expose-Headers"]) == sent
    assert {"etag", "content-disposition", "retry-after", "repr-digest", "content-range"} <= sent


async def test_the_private_network_is_opened_for_listed_origins_alone(shared_site: Site):
    asked = {"Access-Control-Request-Private-Network": "true"}

    ours = await preflight(shared_site, "/health", CANVAS, **asked)
    foreign = await preflight(shared_site, "/health", FOREIGN[0], **asked)

    assert ours.headers["Access-Control-Allow-Private-Network"] == "true"
    assert cors(foreign) == {}


@pytest.mark.parametrize("origin", FOREIGN, ids=lambda origin: origin[:40])
async def test_a_foreign_origin_is_refused_and_may_read_nothing(shared_site: Site, origin: str):
    head = request_head(
        "OPTIONS",
        "/registry/register",
        lines=[f"Origin: {origin}", "Access-Control-Request-Method: POST"],
    )
    async with wire_to(shared_site) as wire:
        await wire.send(head)
        asked = await wire.answer()
        await wire.send(request_head("GET", "/health", lines=[f"Origin: {origin}"]))
        read = await wire.answer()

    assert (asked.status, asked.json["code"]) == (403, "origin_refused")
    assert len(asked.body) < 500
    assert read.status == 200
    for answer in (asked, read):
        assert cors(answer) == {}
        assert answer.headers["Vary"] == "Origin"


async def test_two_origins_are_not_one_that_is_listed(shared_site: Site):
    async with wire_to(shared_site) as wire:
        await wire.send(
            request_head("GET", "/health", lines=[f"Origin: {CANVAS}", "Origin: https://x.test"])
        )
        answer = await wire.answer()

    assert cors(answer) == {}


async def test_refusals_are_readable_too(shared_site: Site):
    """A page must be able to tell its user what is wrong."""
    caller = await registered(shared_site)
    own = {"Origin": CANVAS} | bearer(caller.token)
    page = {"Origin": CANVAS}
    missing = "01234567-89ab-4def-8123-456789abcdef"

    answers = [
        await ask(shared_site, "GET", f"{caller.path}/activity", headers=page),
        await ask(shared_site, "GET", f"{caller.path}/activity?source=x", headers=own),
        await ask(
            shared_site, "GET", f"{caller.path}/pending-uploads/{missing}/content", headers=own
        ),
        await ask(shared_site, "GET", "/nowhere", headers=page),
        await ask(shared_site, "PUT", "/health", headers=page),
        await ask(shared_site, "POST", "/registry/register", headers=page, data=b"{"),
        await ask(shared_site, "GET", f"{caller.path}/activity", headers=own),
    ]

    assert [answer.status for answer in answers] == [401, 400, 404, 404, 405, 400, 200]
    for answer in answers:
        assert_readable(answer)


async def test_a_bug_is_readable_too(site: Site):
    caller = await registered(site)
    site.state.feed = None

    answer = await ask(
        site, "GET", f"{caller.path}/activity", headers={"Origin": CANVAS, **bearer(caller.token)}
    )

    assert (answer.status, answer.json["code"]) == (500, "internal")
    assert_readable(answer)


async def test_an_answer_that_the_shutdown_cuts_short_is_readable_too(site: Site):
    begun = asyncio.Event()

    async def never(*_: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    site.state.access.find_own = never
    caller = await registered(site)
    head = request_head(
        "GET", f"{caller.path}/activity", token=caller.token, lines=[f"Origin: {CANVAS}"]
    )
    async with wire_to(site) as wire:
        await wire.send(head)
        await begun.wait()
        for task in asyncio.all_tasks():
            if "RequestResponseCycle" in repr(task.get_coro()):
                task.cancel()
        answer = await wire.answer()

    assert (answer.status, answer.json["code"]) == (503, "stopping")
    assert_readable(answer)


async def test_streams_and_files_are_readable(shared_site: Site):
    caller = await registered(shared_site)
    (file_id,) = await caller.staged()
    own = {"Origin": CANVAS} | bearer(caller.token)
    path = f"{caller.path}/pending-uploads/{file_id}/content"

    whole = await ask(shared_site, "GET", path, headers=own)
    part = await ask(shared_site, "GET", path, headers=own | {"Range": "bytes=1-2"})
    async with shared_site.http.get(f"{caller.path}/events", headers=own) as stream:
        events = Answer(stream.status, stream.headers, b"")

    assert [one.status for one in (whole, part, events)] == [200, 206, 200]
    for answer in (whole, part, events):
        assert_readable(answer)


async def test_programs_notice_nothing(shared_site: Site):
    """They send no Origin; an OPTIONS of theirs is no preflight."""
    plain = await ask(shared_site, "GET", "/health")
    options = await ask(shared_site, "OPTIONS", "/registry/register")
    from_page = await ask(shared_site, "OPTIONS", "/registry/register", headers={"Origin": CANVAS})

    assert [cors(plain), cors(options)] == [{}, {}]
    assert (plain.status, options.status, options.headers["Allow"]) == (200, 405, "POST")
    assert from_page.status == 405
    # A cache must not give this answer to a page.
    assert plain.headers["Vary"] == "Origin"


async def test_what_a_push_workspace_says_about_origins_is_not_relayed(run_site: SiteFactory):
    async def take(_: web.Request) -> web.Response:
        return web.Response(headers={"Access-Control-Allow-Origin": "*", "Vary": "Cookie"})

    async with run_site(push_to_private=True) as site, receiver(take) as url:
        caller = await registered(site, delivery_mode="push", url=url)
        message = {"jsonrpc": "2.0", "id": 1, "method": "message/send", "params": {}}
        path = f"{caller.path}/a2a"
        ours = await ask(site, "POST", path, json=message, headers={"Origin": CANVAS, **ADMIN})
        foreign = await ask(site, "POST", path, json=message, headers={"Origin": "x", **ADMIN})

    assert_readable(ours)
    assert cors(foreign) == {}


async def test_the_operator_lists_origins(run_site: SiteFactory):
    async with run_site(cors_origins="https://Canvas.example:443,tauri://localhost") as site:
        answers = {
            origin: await preflight(site, "/registry/register", origin)
            for origin in ("https://canvas.example", "tauri://localhost", CANVAS)
        }

    assert [answer.status for answer in answers.values()] == [204, 204, 403]
    assert_readable(answers["https://canvas.example"], "https://canvas.example")


@pytest.mark.parametrize("chosen", [{"cors_origins": "none"}, {"host": "0.0.0.0"}], ids=str)
async def test_without_listed_origins_no_page_is_let_in(
    run_site: SiteFactory, chosen: dict[str, str]
):
    """The default is for a canvas on the same machine; a server for others has none."""
    async with run_site(**chosen) as site:
        asked = await preflight(site, "/registry/register", CANVAS)
        read = await ask(site, "GET", "/health", headers={"Origin": CANVAS})

    assert (asked.status, read.status) == (403, 200)
    assert [cors(asked), cors(read)] == [{}, {}]
    assert "Vary" not in read.headers


async def test_a_listed_origin_registers_openly_and_a_foreign_one_does_not(site: Site):
    ours = await register(site, headers={"Origin": CANVAS})
    foreign = await register(site, headers={"Origin": "http://localhost:3001"})

    assert (ours.status, "auth_token" in ours.json) == (200, True)
    assert (foreign.status, foreign.json["code"]) == (403, "origin_refused")
    assert cors(foreign) == {}
    shown = await ask(site, "GET", "/admin/workspaces", headers=ADMIN)
    assert len(shown.json["workspaces"]) == 1


async def opened(site: Site, path: str, headers: dict[str, str]) -> int:
    """The status of a WebSocket's handshake."""
    try:
        async with site.http.ws_connect(path, headers=headers):
            return 101
    except WSServerHandshakeError as refusal:
        return refusal.status


async def test_a_websocket_is_opened_for_programs_and_for_pages_that_may_use_the_server(
    shared_site: Site,
):
    """A browser opens it for any page: whoever got a token must not use it from anywhere."""
    caller = await registered(shared_site)
    own = shared_site.url
    socket, token = f"{caller.path}/ws", bearer(caller.token)

    may = [{}, {"Origin": CANVAS}, {"Origin": own}, {"Origin": own.replace("http", "https")}]
    with structlog.testing.capture_logs() as logged:
        foreign = [
            await opened(shared_site, socket, token | {"Origin": origin})
            for origin in ("https://page.example", "null", "http://localhost:3001", own + ".x")
        ]

    assert [await opened(shared_site, socket, token | page) for page in may] == [101] * 4
    assert foreign == [403] * 4
    assert [line["event"] for line in logged].count("websocket_refused") == 4
    assert await opened(shared_site, socket, {"Origin": CANVAS}) == 401


async def test_a_refused_websocket_is_told_why(shared_site: Site):
    caller = await registered(shared_site)
    lines = [
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "Origin: https://page.example",
    ]
    async with wire_to(shared_site) as wire:
        await wire.send(request_head("GET", f"{caller.path}/ws", token=caller.token, lines=lines))
        answer = await wire.answer()

    assert (answer.status, answer.json["code"]) == (403, "origin_refused")
    assert cors(answer) == {}


@given(st.text(max_size=20), st.none() | st.text(max_size=20))
def test_a_page_is_ours_only_under_the_name_that_it_was_called_by(origin: str, host: str | None):
    is_ours = is_same_origin(origin, host)

    assert not is_ours or (host and origin.lower().endswith("://" + host.lower()))
    if host and "://" not in host:
        assert is_same_origin(f"https://{host.upper()}", host.upper())
