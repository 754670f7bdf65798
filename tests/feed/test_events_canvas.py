"""Events as existing programs read them: their shape, `/ws`, `/events/stream`, and their tokens."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from uuid import uuid4

import pytest
import structlog
from callers import ADMIN, Caller, ask, bearer, registered
from sites import ADMIN_TOKEN, Site, SiteFactory
from watchers import (
    ANYWHERE,
    UPGRADE,
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
    watch_any,
)

pytestmark = pytest.mark.anyio

BOTH = pytest.mark.parametrize("way", WAYS)
REFUSED = (401, "not_authenticated")


@pytest.fixture
async def workspace(site: Site) -> Caller:
    return await registered(site)


def hexed(token: str) -> str:
    return f"molecule-auth.{token.encode().hex()}"


@BOTH
@pytest.mark.parametrize("anywhere", [True, False])
async def test_every_event_has_its_four_fields_and_the_time_of_its_row(
    site: Site, workspace: Caller, way: str, *, anywhere: bool
):
    headers = bearer(workspace.token)
    opened = watch_any(site, way, headers=headers) if anywhere else watch(workspace, way)
    async with opened as watcher:
        await append(workspace, "one")

        event = await watcher.event()

    (row,) = await workspace.feed()
    assert event == {
        "event": "ACTIVITY_LOGGED",
        "workspace_id": workspace.id,
        "timestamp": row["created_at"],
        "payload": row,
    }
    assert datetime.fromisoformat(event["timestamp"]).utcoffset() == UTC.utcoffset(None)


@BOTH
async def test_the_token_says_which_workspace(site: Site, workspace: Caller, way: str):
    other = await registered(site)
    async with watch_any(site, way, headers=bearer(workspace.token)) as watcher:
        await append(other, "not yours")
        await append(workspace, "yours")

        assert await watcher.summaries(1) == ["yours"]


@BOTH
@pytest.mark.parametrize("token", ["own", "admin"])
@pytest.mark.parametrize("as_header", [True, False])
async def test_a_workspace_may_be_named(
    site: Site, workspace: Caller, *, way: str, token: str, as_header: bool
):
    other = await registered(site)
    headers = ADMIN if token == "admin" else bearer(workspace.token)
    named = {"X-Workspace-ID": workspace.id} if as_header else {}
    params = {} if as_header else {"workspace_id": workspace.id}

    async with watch_any(site, way, headers={**headers, **named}, params=params) as watcher:
        await append(other, "not asked for")
        await append(workspace, "asked for")

        assert await watcher.summaries(1) == ["asked for"]


@BOTH
@pytest.mark.parametrize(
    ("token", "named", "expected"),
    [
        (None, None, REFUSED),
        ("nonsense", None, REFUSED),
        (ADMIN_TOKEN + "x", None, REFUSED),
        (None, "own", REFUSED),
        ("own", "other", REFUSED),
        ("own", "nobody", REFUSED),
        ("own", "nonsense", REFUSED),
        (ADMIN_TOKEN, "nonsense", (400, "bad_request")),
        (ADMIN_TOKEN, "nobody", (404, "workspace_unknown")),
    ],
)
async def test_refusals(
    site: Site,
    workspace: Caller,
    *,
    way: str,
    token: str | None,
    named: str | None,
    expected: tuple[int, str],
):
    other = await registered(site)
    ids = {"own": workspace.id, "other": other.id, "nobody": str(uuid4())}
    tokens = {"own": workspace.token}
    headers = bearer(tokens.get(token, token)) if token else {}
    if named:
        headers["X-Workspace-ID"] = ids.get(named, named)

    with structlog.testing.capture_logs() as logged:
        assert await refused(site, "", way, headers=headers) == expected

        if named:
            del headers["X-Workspace-ID"]
            params = {"workspace_id": ids.get(named, named)}
            assert await refused(site, "", way, headers=headers, params=params) == expected
    assert {line["route"] for line in logged} <= {ANYWHERE[way]}
    assert await gauge(site, way) == 0


@BOTH
async def test_nobody_learns_whether_a_workspace_exists(site: Site, workspace: Caller, way: str):
    other = await registered(site)
    upgrade = UPGRADE if way == "ws" else {}

    there, absent = [
        await ask(
            site,
            "GET",
            ANYWHERE[way],
            headers={**bearer(workspace.token), **upgrade, "X-Workspace-ID": named},
        )
        for named in (other.id, str(uuid4()))
    ]

    assert (there.status, there.body) == (absent.status, absent.body)
    assert there.status == 401


@pytest.mark.parametrize("spelling", [str.lower, str.upper])
@pytest.mark.parametrize("anywhere", [True, False])
async def test_a_token_may_be_offered_in_hexadecimal(
    site: Site, workspace: Caller, spelling: Callable[[str], str], *, anywhere: bool
):
    """The browser closes a WebSocket unless what it has offered is selected."""
    path = "" if anywhere else workspace.path
    for token in (workspace.token, ADMIN_TOKEN):
        offered = f"molecule-auth.{spelling(token.encode().hex())}"
        async with connected(site.http, path, protocols=("canvas", offered)) as watcher:
            assert watcher.way.protocol == offered
            await append(workspace, "one")
            assert await watcher.summaries(1) == ["one"]


async def test_a_token_may_be_offered_as_on_the_other_path(site: Site, workspace: Caller):
    async with connected(site.http, "", protocols=("bearer", workspace.token)) as watcher:
        assert watcher.way.protocol == "bearer"
        await append(workspace, "one")
        assert await watcher.summaries(1) == ["one"]


@pytest.mark.parametrize(
    "offered",
    [
        "molecule-auth.",
        "molecule-auth.zz",
        "molecule-auth.abc",
        "molecule-auth.ff",
        "molecule-auth.c3a9",
        "molecule-auth." + "61" * 1500,
        "molecule-auth",
        hexed("nonsense"),
        hexed(ADMIN_TOKEN)[:-2],
        f"{hexed('nonsense')}, {hexed(ADMIN_TOKEN)}",
    ],
)
async def test_an_offer_that_is_no_token_is_refused(site: Site, offered: str):
    headers = {"Sec-WebSocket-Protocol": offered}

    assert await refused(site, "", "ws", headers=headers) == REFUSED


async def test_an_offer_of_any_length_is_refused(site: Site):
    headers = {"Sec-WebSocket-Protocol": "molecule-auth." + "61" * 20_000}

    assert (await refused(site, "", "ws", headers=headers))[0] == 431


async def test_an_offered_token_does_not_open_another_workspace(site: Site, workspace: Caller):
    other = await registered(site)
    headers = {"Sec-WebSocket-Protocol": hexed(other.token)}

    assert await refused(site, workspace.path, "ws", headers=headers) == REFUSED
    params = {"workspace_id": workspace.id}
    assert await refused(site, "", "ws", headers=headers, params=params) == REFUSED


async def test_a_browser_may_send_the_token_in_the_url_of_a_stream(site: Site, workspace: Caller):
    params = {"access_token": workspace.token}
    async with streaming(site.http, "", params=params) as watcher:
        await append(workspace, "one")
        assert await watcher.summaries(1) == ["one"]

    assert await refused(site, "", "ws", params=params) == REFUSED
    assert await refused(site, "", "events", params={"access_token": "nonsense"}) == REFUSED


async def test_tokens_in_hexadecimal_are_not_logged(site: Site, workspace: Caller):
    with structlog.testing.capture_logs() as logged:
        async with connected(site.http, "", protocols=(hexed(workspace.token),)):
            pass
        await nobody_watches(site)

    (line,) = [line for line in logged if line["event"] == "websocket"]
    assert line["route"] == "/ws"
    assert workspace.token.encode().hex() not in str(logged)


@BOTH
async def test_a_watcher_of_one_workspace_resumes_after_its_last_row(
    site: Site, workspace: Caller, way: str
):
    for number in range(3):
        await append(workspace, str(number))
    first = (await workspace.feed())[-1]["id"]

    headers = {**bearer(workspace.token), "Last-Event-ID": first}
    async with watch_any(site, way, headers=headers) as watcher:
        assert await watcher.summaries(2) == ["1", "2"]
    headers["Last-Event-ID"] = str(uuid4())
    assert await refused(site, "", way, headers=headers) == (410, "cursor_gone")


async def remove(workspace: Caller) -> None:
    path = f"{workspace.path}?confirm=true"
    assert (await ask(workspace.site, "DELETE", path, headers=ADMIN)).status == 200


@BOTH
@pytest.mark.parametrize(
    ("happens", "is_admin", "code"),
    [(revoke, False, 4401), (remove, False, 4401), (remove, True, 4404)],
)
async def test_a_watch_ends_when_its_permission_does(
    site: Site,
    workspace: Caller,
    *,
    way: str,
    happens: Callable[[Caller], Awaitable[None]],
    is_admin: bool,
    code: int,
):
    choose(site, trust_seconds=0)
    named = {**ADMIN, "X-Workspace-ID": workspace.id}
    headers = named if is_admin else bearer(workspace.token)
    async with watch_any(site, way, headers=headers) as watcher:
        await happens(workspace)
        await append(workspace, "not for you")

        assert await watcher.end() == (code if way == "ws" else None)
    await nobody_watches(site)
    assert (await refused(site, "", way, headers=headers))[0] == code - 4000


@BOTH
async def test_watchers_count_among_the_requests_of_their_workspace(
    run_site: SiteFactory, way: str
):
    async with run_site(max_requests_per_workspace=2) as site:
        workspace, other = await registered(site), await registered(site)
        headers = bearer(workspace.token)
        async with (
            watch_any(site, way, headers=headers),
            watch_any(site, "ws", protocols=(hexed(workspace.token),)),
        ):
            expected = (429, "too_many_at_once")
            assert await refused(site, "", way, headers=headers) == expected
            async with watch_any(site, way, headers=bearer(other.token)):
                pass
        await nobody_watches(site)
