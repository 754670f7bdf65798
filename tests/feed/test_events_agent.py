"""What an agent says to its user is an event of its own, before that of its row."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from callers import ADMIN, Caller, ask, bearer, registered
from sites import Site
from watchers import WAYS, Watcher, append, id_of, watch, watch_any

from restante.ids import new_activity_id

pytestmark = pytest.mark.anyio

BOTH = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
async def workspace(site: Site) -> Caller:
    return await registered(site)


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


async def test_a_watcher_that_resumes_between_the_two_events_of_a_row_gets_both_again(
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
