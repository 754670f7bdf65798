"""Events as existing programs read them: their shape, `/ws`, `/events/stream`, and their tokens."""

import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
import structlog
from callers import ADMIN, Caller, ask, bearer, registered
from sites import ADMIN_TOKEN, Site, SiteFactory
from watchers import (
    ANYWHERE,
    UPGRADE,
    WAYS,
    Watcher,
    append,
    choose,
    connected,
    gauge,
    id_of,
    nobody_watches,
    refused,
    revoke,
    streaming,
    watch,
    watch_any,
)

from restante.ids import new_activity_id

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


FILES = [
    {"uri": "platform-pending:a/b", "name": "a.txt", "mimeType": "text/plain", "size": 5},
    {"uri": "workspace:/b", "name": "b"},
]


async def answered(connection: Any, workspace: Caller, body: Any, *, method: str = "notify") -> str:
    """A row with which the agent of a workspace answers, and its wake-up; the row's id."""
    now = datetime.now(UTC)
    row_id = new_activity_id(now)
    async with connection.transaction():
        await connection.execute(
            "with counter as (update feeds set last_seq = last_seq + 1 where workspace_id = $1"
            " returning last_seq)"
            " insert into feed (id, workspace_id, seq, activity_type, target_id, method, summary,"
            " response_body, status, created_at)"
            " select $2, $1, last_seq, 'a2a_receive', $1, $3, 'Agent message: hello', $4, 'ok', $5"
            " from counter",
            UUID(workspace.id),
            row_id,
            method,
            json.dumps(body),
            now,
        )
    workspace.site.state.wakeups.grew(id_of(workspace))
    return str(row_id)


@BOTH
@pytest.mark.parametrize("who", ["own path", "own", "admin"])
@pytest.mark.parametrize("files", [[], FILES])
async def test_an_answer_of_the_agent_is_an_event_of_its_own(
    site: Site,
    workspace: Caller,
    connections: Callable[[], Any],
    *,
    way: str,
    who: str,
    files: list[Any],
):
    connection = await connections()
    headers = ADMIN if who == "admin" else bearer(workspace.token)
    opened = watch(workspace, way) if who == "own path" else watch_any(site, way, headers=headers)
    parts = [{"kind": "file", "file": file} for file in files]
    async with opened as watcher:
        await answered(connection, workspace, {"result": "hello", "parts": parts})

        events = [await watcher.event(), await watcher.event()]

    (row,) = await workspace.feed()
    assert [event["event"] for event in events] == ["AGENT_MESSAGE", "ACTIVITY_LOGGED"]
    assert events[0] == {
        "event": "AGENT_MESSAGE",
        "workspace_id": workspace.id,
        "timestamp": row["created_at"],
        "payload": {
            "message": "hello",
            "workspace_id": workspace.id,
            "name": "tester",
            "attachments": files,
        },
    }
    assert events[1]["payload"] == row


@pytest.mark.parametrize("body", [None, {}, {"result": 1}, {"result": "x", "parts": "y"}, ["x"]])
async def test_a_row_that_says_nothing_is_no_message_of_the_agent(
    workspace: Caller, connections: Callable[[], Any], body: Any
):
    connection = await connections()
    async with watch(workspace, "ws") as watcher:
        await answered(connection, workspace, body)
        await answered(connection, workspace, {"result": "x"}, method="message/send")

        assert [(await watcher.event())["event"] for _ in range(2)] == ["ACTIVITY_LOGGED"] * 2


async def test_nobody_else_can_speak_for_an_agent(site: Site, workspace: Caller):
    """A message has the method that its sender chooses."""
    other = await registered(site)
    body = {"method": "notify", "result": "x", "params": {"message": {"parts": [{"text": "x"}]}}}
    async with watch(workspace, "ws") as watcher:
        sent = await other.message(body, to=workspace)
        await append(workspace, "the end")

        expected = ["x", "the end"] if sent.status == 200 else ["the end"]
        for _ in expected:
            assert (await watcher.event())["event"] == "ACTIVITY_LOGGED"


async def test_the_name_is_the_one_that_the_workspace_has_now(
    site: Site, workspace: Caller, connections: Callable[[], Any]
):
    connection = await connections()
    async with watch(workspace, "ws") as watcher:
        await ask(site, "PATCH", workspace.path, json={"name": "renamed"}, headers=ADMIN)
        await answered(connection, workspace, {"result": "hello", "parts": []})

        assert (await watcher.event())["payload"]["name"] == "renamed"


async def test_who_resumes_between_the_two_events_of_a_row_gets_both_again(
    workspace: Caller, connections: Callable[[], Any]
):
    connection = await connections()

    async def names(watcher: Watcher, count: int) -> list[str]:
        return [(await watcher.event())["event"] for _ in range(count)]

    async with watch(workspace, "events") as watcher:
        await append(workspace, "before")
        before = (await watcher.row())["id"]
        row_id = await answered(connection, workspace, {"result": "hello", "parts": []})
        assert await names(watcher, 1) == ["AGENT_MESSAGE"]
        assert watcher.last_id == before
    async with watch(workspace, "events", headers={"Last-Event-ID": watcher.last_id}) as watcher:
        assert await names(watcher, 2) == ["AGENT_MESSAGE", "ACTIVITY_LOGGED"]
        assert watcher.last_id == row_id
    async with watch(workspace, "events", headers={"Last-Event-ID": watcher.last_id}) as watcher:
        await append(workspace, "after")
        assert await watcher.summaries(1) == ["after"]
