"""
A real browser with a page of another origin: what a canvas does works, and for nobody else.

The page is `canvas.html` beside this file.  It is served under two names of this machine, which are
two origins: `localhost` is listed, `127.0.0.1` is not.
"""

import os
import shutil
import struct
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from callers import Caller, Part, everything, registered
from cluster import cloned
from playwright.async_api import Browser, Error, Page, async_playwright
from processes import clean_environment
from sites import ADMIN_TOKEN, Site, running_site, settings_for

CANVAS = Path(__file__).with_name("canvas.html")
DEFAULT_PORT = 3000
MIB = 1024 * 1024

pytestmark = pytest.mark.anyio


def chromium_of(environ: Mapping[str, str]) -> str:
    """The browser; without one the tests are skipped, but not in CI, where nobody would notice."""
    if found := shutil.which("chromium", path=environ["PATH"]):
        return found
    reason = "There is no chromium (Debian's package)."
    if environ.get("CI") and not environ.get("TEST_WITHOUT_BROWSER"):
        pytest.fail(f"{reason} In CI this is a failure, unless TEST_WITHOUT_BROWSER is set.")
    pytest.skip(reason)


@pytest.mark.parametrize(
    ("environ", "outcome"),
    [
        ({}, pytest.skip.Exception),
        ({"CI": "true"}, pytest.fail.Exception),
        ({"CI": "true", "TEST_WITHOUT_BROWSER": "1"}, pytest.skip.Exception),
    ],
    ids=["on a desk", "in CI", "in CI without root"],
)
async def test_a_missing_browser_is_a_failure_in_ci(
    environ: dict[str, str], outcome: type[BaseException], tmp_path: Path
):
    with pytest.raises(outcome, match="no chromium"):
        chromium_of({"PATH": str(tmp_path), **environ})


@asynccontextmanager
async def canvas(port: int = 0) -> AsyncIterator[int]:
    """Serve the page on loopback; yields the port.  Raises OSError if the port is taken."""

    async def show(_: web.Request) -> web.FileResponse:
        return web.FileResponse(CANVAS)

    app = web.Application()
    app.router.add_get("/", show)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@dataclass(frozen=True, slots=True)
class Stage:
    """A server, and a page whose origin it lists under one of its names."""

    site: Site
    port: int
    browser: Browser

    @asynccontextmanager
    async def page(self, host: str) -> AsyncIterator[Page]:
        """The page under this name, in a browser profile of its own."""
        async with await self.browser.new_context() as context:
            page = await context.new_page()
            await page.goto(f"http://{host}:{self.port}/")
            yield page

    async def stored(self) -> dict[str, Any]:
        async with self.site.state.db.connection() as connection:
            return await everything(connection)


@pytest.fixture(scope="module")
def chromium() -> str:
    return chromium_of(os.environ)


@pytest.fixture(scope="module")
async def browser(chromium: str) -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium, env=dict(clean_environment())
        )
        yield browser
        await browser.close()


@pytest.fixture(scope="module")
async def stage(
    cluster: str, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    data_dir = tmp_path_factory.mktemp("site")
    async with canvas() as port, cloned(cluster) as dsn:
        settings = settings_for(dsn, data_dir, cors_origins=f"http://localhost:{port}")
        async with running_site(settings) as site:
            yield Stage(site, port, browser)


@pytest.fixture
async def listed(stage: Stage) -> AsyncIterator[Page]:
    async with stage.page("localhost") as page:
        yield page


@pytest.fixture
async def foreign(stage: Stage) -> AsyncIterator[Page]:
    async with stage.page("127.0.0.1") as page:
        yield page


async def call(page: Page, step: str, stage: Stage, *arguments: Any) -> Any:
    """Call a function of the page with the server's address and these arguments."""
    return await page.evaluate(f"given => {step}(...given)", [stage.site.url, *arguments])


def png(width: int, height: int) -> bytes:
    """A black picture."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes((width + 1) * height))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def protocols(path: str, token: str) -> list[str]:
    """How a page sends its token with a WebSocket."""
    return [f"molecule-auth.{token.encode().hex()}"] if path == "/ws" else ["bearer", token]


# Our own routes, and those of the existing server.
SOCKETS = ["/workspaces/{id}/ws", "/ws"]
STREAMS = ["/workspaces/{id}/events", "/events/stream"]
TOKENS = ["workspace", "admin"]


async def test_a_page_registers_and_uploads_with_progress(stage: Stage, listed: Page):
    workspace = await call(listed, "register", stage)
    sent = await call(listed, "upload", stage, workspace["id"], workspace["auth_token"], 4 * MIB)

    caller = Caller(stage.site, workspace["id"], workspace["auth_token"])
    (row,) = await caller.feed()
    (staged,) = sent["answer"]["files"]
    assert (sent["status"], staged["size"]) == (200, 4 * MIB)
    assert row["request_body"]["uri"] == staged["uri"]
    loaded = [loaded for loaded, _ in sent["progress"]]
    assert loaded == sorted(loaded)
    assert sent["progress"][-1][0] == sent["progress"][-1][1] > 4 * MIB


@pytest.mark.parametrize("path", SOCKETS)
async def test_a_page_follows_events_by_websocket(stage: Stage, listed: Page, path: str):
    caller = await registered(stage.site)
    where, offered = path.format(id=caller.id), protocols(path, caller.token)

    chosen = await call(listed, "watchBySocket", stage, where, offered)
    await caller.staged()
    event = await listed.evaluate("next()")

    assert chosen == offered[0]
    assert (event["event"], event["workspace_id"]) == ("ACTIVITY_LOGGED", caller.id)


@pytest.mark.parametrize("path", STREAMS)
async def test_a_page_follows_events_by_a_streaming_fetch(stage: Stage, listed: Page, path: str):
    caller = await registered(stage.site)

    kind = await call(listed, "watchByStream", stage, path.format(id=caller.id), caller.token)
    await caller.staged()
    event = await listed.evaluate("next()")

    assert kind == "text/event-stream"
    assert (event["event"], event["workspace_id"]) == ("ACTIVITY_LOGGED", caller.id)


async def test_a_page_follows_events_by_event_source(stage: Stage, listed: Page):
    caller = await registered(stage.site)

    await call(listed, "watchByEventSource", stage, f"{caller.path}/events", caller.token)
    await caller.staged()
    event = await listed.evaluate("next()")

    assert (event["event"], event["workspace_id"]) == ("ACTIVITY_LOGGED", caller.id)


@pytest.mark.parametrize("token", TOKENS)
async def test_a_page_previews_a_picture(stage: Stage, listed: Page, token: str):
    caller = await registered(stage.site)
    (file_id,) = await caller.staged(Part(png(3, 2), "a.png", "image/png"))
    given = ADMIN_TOKEN if token == "admin" else caller.token

    seen = await call(listed, "preview", stage, caller.id, file_id, given)

    assert (seen["width"], seen["height"]) == (3, 2)
    assert seen["etag"]
    assert seen["disposition"].startswith("attachment")


async def test_a_page_can_read_why_it_was_refused(stage: Stage, listed: Page):
    caller = await registered(stage.site)

    wrong = await call(listed, "refusal", stage, caller.id, caller.token)
    stranger = await call(listed, "refusal", stage, caller.id, "x" * 43)

    assert (wrong["status"], stranger["status"]) == (400, 401)
    assert wrong["requestId"]
    assert stranger["requestId"]


async def test_a_foreign_page_can_do_none_of_it_with_a_token_that_it_got(
    stage: Stage, foreign: Page
):
    caller = await registered(stage.site)
    (file_id,) = await caller.staged(Part(png(3, 2), "a.png", "image/png"))
    before = await stage.stored()
    own, token = caller.id, caller.token
    steps: list[tuple[str, list[Any], str]] = [
        ("register", [], "Failed to fetch"),
        ("upload", [own, token, MIB], "the upload failed"),
        ("watchBySocket", [f"{caller.path}/ws", ["bearer", token]], "closed with 1006"),
        ("watchBySocket", ["/ws", protocols("/ws", token)], "closed with 1006"),
        ("watchByStream", [f"{caller.path}/events", token], "Failed to fetch"),
        ("watchByStream", ["/events/stream", token], "Failed to fetch"),
        ("watchByEventSource", [f"{caller.path}/events", token], "no stream"),
        ("preview", [own, file_id, token], "Failed to fetch"),
        ("preview", [own, file_id, ADMIN_TOKEN], "Failed to fetch"),
        ("refusal", [own, token], "Failed to fetch"),
    ]

    for step, arguments, sentence in steps:
        with pytest.raises(Error, match=sentence):
            await call(foreign, step, stage, *arguments)
    blind = await call(foreign, "registerBlindly", stage)

    assert blind == "opaque"
    assert await stage.stored() == before


async def test_by_default_a_canvas_on_port_3000_may_use_a_server_on_loopback(
    cluster: str, browser: Browser, tmp_path: Path
):
    async with AsyncExitStack() as stack:
        try:
            port = await stack.enter_async_context(canvas(DEFAULT_PORT))
        except OSError:
            pytest.skip(f"port {DEFAULT_PORT} is taken")
        dsn = await stack.enter_async_context(cloned(cluster))
        site = await stack.enter_async_context(running_site(settings_for(dsn, tmp_path)))
        stage = Stage(site, port, browser)
        async with stage.page("localhost") as page:
            workspace = await call(page, "register", stage)
        async with stage.page("127.0.0.1") as page:
            with pytest.raises(Error, match="Failed to fetch"):
                await call(page, "register", stage)
        stored = await stage.stored()

    assert [str(row[0]) for row in stored["workspaces"]] == [workspace["id"]]
