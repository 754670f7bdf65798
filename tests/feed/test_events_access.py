"""Who may watch a workspace, how a token is sent, and what ends with it."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import structlog
from callers import ADMIN, Caller, ask, bearer, registered
from sites import ADMIN_TOKEN, Site
from waiting import until
from watchers import (
    WAYS,
    append,
    choose,
    connected,
    gauge,
    nobody_watches,
    refused,
    revoke,
    streaming,
    watch,
)

pytestmark = pytest.mark.anyio

NOWHERE = "/workspaces/00000000-0000-4000-8000-000000000000"


@pytest.fixture
async def workspace(site: Site) -> Caller:
    return await registered(site)


async def test_a_stream_may_be_asked_for_with_head(workspace: Caller):
    answer = await workspace.ask("HEAD", "/events")

    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")
    assert answer.headers["Cache-Control"] == "no-store, no-transform"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("headers", "path", "expected"),
    [
        ({}, "{own}", (401, "not_authenticated")),
        (bearer("nonsense"), "{own}", (401, "not_authenticated")),
        (bearer("é"), "{own}", (401, "not_authenticated")),
        ("other", "{own}", (401, "not_authenticated")),
        ("own", "/workspaces/nonsense", (400, "bad_request")),
        ("own", NOWHERE, (401, "not_authenticated")),
        (ADMIN, NOWHERE, (404, "workspace_unknown")),
        (ADMIN, "/workspaces/nonsense", (400, "bad_request")),
    ],
)
async def test_refusals_are_json_problems_and_are_logged_without_a_warning(
    site: Site,
    workspace: Caller,
    caplog: pytest.LogCaptureFixture,
    *,
    way: str,
    headers: Any,
    path: str,
    expected: tuple[int, str],
):
    other = await registered(site)
    tokens = {"own": bearer(workspace.token), "other": bearer(other.token)}
    sent = tokens[headers] if isinstance(headers, str) else headers

    with structlog.testing.capture_logs() as logged:
        assert await refused(site, path.format(own=workspace.path), way, headers=sent) == expected

    await until(lambda: logged)
    (line,) = logged
    assert line["event"] == {"events": "request", "ws": "websocket"}[way]
    assert line["route"] == f"/workspaces/{{workspace_id}}/{way}"
    assert line.get("status", line.get("code")) == expected[0]
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
    assert await gauge(site, way) == 0


async def test_a_browser_may_send_the_token_in_the_url_of_a_stream(site: Site, workspace: Caller):
    for token in (workspace.token, ADMIN_TOKEN):
        async with streaming(site.http, workspace.path, params={"access_token": token}) as watcher:
            await append(workspace, "one")
            assert await watcher.summaries(1) == ["one"]

    params = {"access_token": "nonsense é"}
    assert (await refused(site, workspace.path, "events", params=params))[0] == 401
    params = {"access_token": workspace.token}
    assert (
        await refused(site, workspace.path, "events", params=params, headers=bearer("nonsense"))
    )[0] == 401


async def test_a_browser_may_offer_the_token_as_a_subprotocol(site: Site, workspace: Caller):
    for token in (workspace.token, ADMIN_TOKEN):
        async with connected(site.http, workspace.path, protocols=("bearer", token)) as watcher:
            assert watcher.way.protocol == "bearer"
            await append(workspace, "one")
            assert await watcher.summaries(1) == ["one"]

    for offered in ("bearer", "bearer, nonsense", f"other, {workspace.token}", workspace.token):
        headers = {"Sec-WebSocket-Protocol": offered}
        assert (await refused(site, workspace.path, "ws", headers=headers))[0] == 401
    params = {"access_token": workspace.token}
    assert (await refused(site, workspace.path, "ws", params=params))[0] == 401


async def test_tokens_reach_neither_logs_nor_metrics(site: Site, workspace: Caller):
    with structlog.testing.capture_logs() as logged:
        async with (
            streaming(site.http, workspace.path, params={"access_token": workspace.token}),
            connected(site.http, workspace.path, protocols=("bearer", workspace.token)),
        ):
            pass
        await nobody_watches(site)

    assert {"request", "websocket"} <= {line["event"] for line in logged}
    assert workspace.token not in str(logged)
    assert workspace.token not in (await ask(site, "GET", "/metrics")).body.decode()


async def remove(workspace: Caller) -> None:
    path = f"{workspace.path}?confirm=true"
    assert (await ask(workspace.site, "DELETE", path, headers=ADMIN)).status == 200


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("happens", "headers", "code"), [(revoke, {}, 4401), (remove, {}, 4401), (remove, ADMIN, 4404)]
)
async def test_a_watch_ends_when_its_permission_does(
    site: Site,
    workspace: Caller,
    *,
    way: str,
    happens: Callable[[Caller], Awaitable[None]],
    headers: dict[str, str],
    code: int,
):
    """At the next row, which is no longer sent."""
    choose(site, trust_seconds=0)
    async with watch(workspace, way, headers=headers) as watcher:
        await happens(workspace)
        await append(workspace, "not for you")

        assert await watcher.end() == (code if way == "ws" else None)
    await nobody_watches(site)


@pytest.mark.parametrize("way", WAYS)
async def test_a_quiet_watch_ends_when_its_permission_does(site: Site, workspace: Caller, way: str):
    choose(site, trust_seconds=0, heartbeat_seconds=0.01)
    async with watch(workspace, way) as watcher:
        await revoke(workspace)

        assert await watcher.end() == (4401 if way == "ws" else None)
    await nobody_watches(site)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("happens", [revoke, remove])
async def test_a_watch_ends_at_once_with_its_token_without_a_row_or_a_heartbeat(
    site: Site, workspace: Caller, way: str, happens: Callable[[Caller], Awaitable[None]]
):
    choose(site, trust_seconds=3600, heartbeat_seconds=3600)
    async with watch(workspace, way) as watcher:
        await happens(workspace)

        assert await watcher.end() == (4401 if way == "ws" else None)
    await nobody_watches(site)


async def test_the_operators_watch_outlives_the_workspaces_token(workspace: Caller):
    choose(workspace.site, trust_seconds=0)
    async with watch(workspace, "ws", headers=ADMIN) as watcher:
        await revoke(workspace)
        await append(workspace, "one")

        assert await watcher.summaries(1) == ["one"]
