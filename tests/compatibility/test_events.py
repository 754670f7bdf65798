"""Live events as an existing canvas watches them, and the answers of agents."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse, StreamReader, WSServerHandshakeError
from callers import Part, bearer
from outsiders import Outsider, message

pytestmark = pytest.mark.anyio

WAYS = ["ws", "stream"]


class Watch:
    """An open watch, by either way."""

    def __init__(self, source: ClientWebSocketResponse | StreamReader) -> None:
        self._source = source

    async def next(self) -> dict[str, Any]:
        """The next event; comments and other fields of a stream are skipped."""
        async with asyncio.timeout(10):
            if isinstance(self._source, ClientWebSocketResponse):
                return await self._source.receive_json()
            while not (line := await self._source.readline()).startswith(b"data:"):
                assert line, "the stream has ended"
            return json.loads(line.removeprefix(b"data:"))

    async def named(self, event: str) -> dict[str, Any]:
        """The next event with this name."""
        while (found := await self.next())["event"] != event:
            pass
        return found


@asynccontextmanager
async def watching(
    url: str, way: str, headers: Mapping[str, str], protocols: Sequence[str] = ()
) -> AsyncIterator[Watch]:
    """Watch by `/ws` or by `/events/stream`; it has begun when this yields."""
    async with ClientSession(url, headers=headers) as session:
        if way == "ws":
            async with session.ws_connect("/ws", protocols=protocols) as socket:
                assert not protocols or socket.protocol in protocols
                yield Watch(socket)
        else:
            async with session.get("/events/stream") as answer:
                assert (answer.status, answer.content_type) == (200, "text/event-stream")
                yield Watch(answer.content)


async def refusal(url: str, way: str, headers: Mapping[str, str]) -> int:
    """The status of a watch that is refused."""
    async with ClientSession(url, headers=headers) as session:
        if way == "stream":
            async with session.get("/events/stream") as answer:
                return answer.status
        try:
            async with session.ws_connect("/ws"):
                return 101
        except WSServerHandshakeError as refused:
            return refused.status


@pytest.mark.parametrize("way", WAYS)
async def test_every_row_is_one_event_with_four_fields(workspace: Outsider, way: str):
    async with watching(workspace.url, way, bearer(workspace.token)) as watch:
        await asyncio.to_thread(workspace.upload, Part(name="a"), Part(name="b"))
        events = [await watch.next() for _ in range(2)]

    rows = workspace.rows()[::-1]
    for event, row in zip(events, rows, strict=True):
        assert event.keys() == {"event", "workspace_id", "timestamp", "payload"}
        assert (event["event"], event["workspace_id"]) == ("ACTIVITY_LOGGED", workspace.id)
        assert datetime.fromisoformat(event["timestamp"]).utcoffset() == timedelta(0)
        assert event["payload"] == row


async def test_the_token_may_be_a_subprotocol_in_hex(workspace: Outsider):
    """A browser cannot set a header, and refuses an answer without one of its protocols."""
    protocol = f"molecule-auth.{workspace.token.encode().hex()}"

    async with watching(workspace.url, "ws", {}, [protocol]) as watch:
        await asyncio.to_thread(workspace.file)
        event = await watch.next()

    assert event["workspace_id"] == workspace.id


@pytest.mark.parametrize("way", WAYS)
async def test_a_workspace_watches_itself_and_no_other(
    workspace: Outsider, other: Outsider, way: str
):
    own = bearer(workspace.token)

    async with watching(workspace.url, way, own | {"X-Workspace-ID": workspace.id}) as watch:
        await asyncio.to_thread(other.file)
        await asyncio.to_thread(workspace.file)
        event = await watch.next()

    assert event["workspace_id"] == workspace.id
    assert await refusal(workspace.url, way, own | {"X-Workspace-ID": other.id}) == 401


@pytest.mark.parametrize("way", WAYS)
async def test_the_admin_watches_all_workspaces_or_one(
    workspace: Outsider, other: Outsider, admin: Outsider, way: str
):
    one = bearer(admin.token) | {"X-Workspace-ID": workspace.id}

    async with (
        watching(admin.url, way, bearer(admin.token)) as all_of_them,
        watching(admin.url, way, one) as one_of_them,
    ):
        for sender in (other, workspace):
            await asyncio.to_thread(sender.file)
        seen = [(await all_of_them.next())["workspace_id"] for _ in range(2)]
        first = (await one_of_them.next())["workspace_id"]

    assert sorted(seen) == sorted([workspace.id, other.id])
    assert first == workspace.id


@pytest.mark.parametrize("way", WAYS)
async def test_nobody_watches_without_a_token(url: str, way: str):
    for headers in ({}, bearer("stale"), {"Sec-WebSocket-Protocol": "molecule-auth.zz"}):
        assert await refusal(url, way, headers) == 401, headers


async def test_a_message_is_an_event_too(workspace: Outsider, other: Outsider):
    async with watching(workspace.url, "ws", bearer(workspace.token)) as watch:
        await asyncio.to_thread(other.send, message("hello"), to=workspace)
        event = await watch.next()

    assert event["payload"]["source_id"] == other.id
    assert event["payload"]["method"] == "message/send"


# The answers of agents

ATTACHED = {"uri": "platform-pending:a/b", "name": "plan.pdf", "mimeType": "image/x", "size": 7}


def notify(workspace: Outsider, body: Any) -> Any:
    return workspace.post(f"{workspace.path}/notify", body)


def test_an_answer_is_sent_and_becomes_a_row(workspace: Outsider):
    text = "I have sorted your mail. " * 10

    answer = notify(workspace, {"message": text, "attachments": [ATTACHED]})

    assert (answer.status, answer.json) == (200, {"status": "sent"})
    (row,) = workspace.rows()
    assert (row["activity_type"], row["method"]) == ("a2a_receive", "notify")
    assert row["summary"] == f"Agent message: {text[:80]}"
    assert row["response_body"]["result"] == text
    (part,) = row["response_body"]["parts"]
    assert part["kind"] == "file"
    assert ATTACHED.items() <= part["file"].items()


@pytest.mark.parametrize("none", [{}, {"attachments": None}, {"attachments": []}], ids=str)
def test_an_answer_needs_no_attachments(workspace: Outsider, none: dict[str, Any]):
    assert notify(workspace, {"message": "done"} | none).json == {"status": "sent"}

    (row,) = workspace.rows()
    assert (row["summary"], row["response_body"]["result"]) == ("Agent message: done", "done")


def test_an_attachment_needs_a_uri_and_a_name_and_no_more(workspace: Outsider):
    short = {"uri": "platform-pending:a/b", "name": "plan.pdf"}

    for attached in (short, short | {"mimeType": "", "size": 0}, short | {"size": None}):
        sent = notify(workspace, {"message": "here", "attachments": [attached]})
        assert sent.status == 200, attached


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"message": ""},
        {"message": None},
        {"message": "x", "attachments": [{"uri": "u"}]},
        {"message": "x", "attachments": [{"name": "n"}]},
        {"message": "x", "attachments": [ATTACHED, {"uri": "", "name": "n"}]},
        b"not json",
    ],
    ids=str,
)
def test_an_incomplete_answer_is_a_400(workspace: Outsider, body: Any):
    assert notify(workspace, body).status == 400
    assert workspace.rows() == []


def test_an_answer_needs_the_token_of_its_workspace(workspace: Outsider, other: Outsider):
    for token in ("", "stale", other.token):
        assert notify(workspace.with_token(token), {"message": "x"}).status == 401
    assert workspace.rows() == []


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_is_an_event_for_the_canvas(workspace: Outsider, way: str):
    body = {"message": "done", "attachments": [ATTACHED]}
    async with watching(workspace.url, way, bearer(workspace.token)) as watch:
        await asyncio.to_thread(notify, workspace, body)
        event = await watch.named("AGENT_MESSAGE")

    assert event.keys() == {"event", "workspace_id", "timestamp", "payload"}
    assert event["workspace_id"] == workspace.id
    payload = event["payload"]
    assert payload.keys() == {"message", "workspace_id", "name", "attachments"}
    assert (payload["message"], payload["workspace_id"]) == ("done", workspace.id)
    assert payload["name"] == "old client"
    (attached,) = payload["attachments"]
    assert ATTACHED.items() <= attached.items()


async def test_an_answer_is_also_logged_as_a_row(workspace: Outsider):
    async with watching(workspace.url, "ws", bearer(workspace.token)) as watch:
        await asyncio.to_thread(notify, workspace, {"message": "done"})
        events = {event["event"]: event for event in [await watch.next() for _ in range(2)]}

    assert events.keys() == {"ACTIVITY_LOGGED", "AGENT_MESSAGE"}
    assert events["ACTIVITY_LOGGED"]["payload"]["method"] == "notify"
