"""An agent tells its user something: rows of its own feed, which its poller skips."""

import io
from typing import Any
from uuid import UUID, uuid4

import pytest
from callers import ADMIN, Answer, Caller, ask, bearer, everything, registered
from sites import Site, SiteFactory

from restante.client.aio import AsyncClient

pytestmark = pytest.mark.anyio

FILE = {"uri": "platform-pending:x/y", "name": "a plan.pdf"}


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


async def notify(caller: Caller, message: Any = "done", **other: Any) -> Answer:
    return await caller.ask("POST", "/notify", json={"message": message, **other})


async def test_a_notification_becomes_a_row_of_the_own_feed(caller: Caller):
    whole = {**FILE, "mimeType": "application/pdf", "size": 7}

    answer = await notify(caller, "It is done.", attachments=[FILE, whole])

    assert (answer.status, answer.json) == (200, {"status": "sent"})
    (row,) = await caller.feed()
    expected = {
        "activity_type": "a2a_receive",
        "method": "notify",
        "summary": "Agent message: It is done.",
        "source_id": None,
        "target_id": caller.id,
        "request_body": None,
        "response_body": {
            "result": "It is done.",
            "parts": [{"kind": "file", "file": FILE}, {"kind": "file", "file": whole}],
        },
        "status": "ok",
        "seq": 1,
    }
    assert {name: row[name] for name in expected} == expected


@pytest.mark.parametrize("attachments", [{}, {"attachments": None}, {"attachments": []}])
async def test_without_attachments_there_are_no_parts(caller: Caller, attachments: dict[str, Any]):
    await notify(caller, "hi", **attachments)

    assert (await caller.feed())[0]["response_body"] == {"result": "hi", "parts": []}


async def test_the_canvas_finds_it_in_the_conversation(caller: Caller):
    """The canvas reads what it sent and what it was told with one filter."""
    await ask(caller.site, "POST", f"{caller.path}/a2a", json={"content": "hi"}, headers=ADMIN)
    await notify(caller)
    await (await registered(caller.site)).message({"content": "from an agent"}, to=caller)

    rows = await caller.feed(source="canvas", type="a2a_receive")

    assert [row["method"] for row in rows] == ["notify", "message/send"]


async def test_the_summary_has_the_first_80_characters(caller: Caller):
    """Characters, not bytes, and none that a terminal would interpret."""
    await notify(caller, "\x1b\n" + "\U0001f600" * 100)

    (row,) = await caller.feed()
    assert row["summary"] == "Agent message: " + "  " + "\U0001f600" * 78
    assert row["response_body"]["result"] == "\x1b\n" + "\U0001f600" * 100


async def test_what_is_incomplete_is_refused_and_nothing_is_stored(
    caller: Caller, connections: Any
):
    connection = await connections()
    before = await everything(connection)
    for body in (
        {},
        {"message": ""},
        {"message": None},
        {"message": 5},
        {"attachments": [FILE]},
        *(
            {"message": "m", "attachments": attachments}
            for attachments in (
                {},
                "x",
                [None],
                [{}],
                [{"uri": "u"}],
                [{"name": "n"}],
                [{**FILE, "uri": ""}],
                [{**FILE, "name": ""}],
                [{**FILE, "name": 7}],
                [{**FILE, "size": -1}],
                [{**FILE, "mimeType": 7}],
                [FILE] * 65,
            )
        ),
        [],
    ):
        answer = await caller.ask("POST", "/notify", json=body)
        assert (answer.status, answer.json["code"]) == (400, "bad_request"), body
    assert await everything(connection) == before
    assert (await notify(caller, attachments=[FILE] * 64)).status == 200


async def test_only_the_workspace_itself_may_notify(caller: Caller):
    other = await registered(caller.site)
    for headers in ({}, ADMIN, bearer(other.token)):
        for to in (caller.id, uuid4()):
            path = f"/workspaces/{to}/notify"
            answer = await ask(caller.site, "POST", path, json={"message": "m"}, headers=headers)
            assert answer.status == 401
    assert await caller.feed() == []


async def test_a_notification_is_bounded(run_site: SiteFactory):
    async with run_site(messages_per_minute=3, workspace_max_feed_bytes=1000) as site:
        caller = await registered(site)
        large = b'{"message": "%s"}' % (b"x" * 1024 * 1024)
        too_large = await caller.ask("POST", "/notify", data=io.BytesIO(large))
        full = await notify(caller, "x" * 1000)
        small = await notify(caller)
        too_many = await notify(caller)

    assert (too_large.status, too_large.json["code"]) == (413, "message_too_large")
    assert (full.status, full.json["code"]) == (429, "feed_full")
    assert small.status == 200
    assert (too_many.status, too_many.json["code"]) == (429, "too_many_messages")


async def test_its_response_body_counts_in_the_feed(caller: Caller, connections: Any):
    await notify(caller, "x" * 5000)

    row = await (await connections()).fetchrow("select feed_bytes, unacked_bytes from feeds")
    assert 5000 < row["feed_bytes"] == row["unacked_bytes"] < 6000


async def test_a_workspace_that_does_not_poll_may_notify_for_ever(run_site: SiteFactory):
    """Nobody acknowledges its feed, so that what it said itself would fill it."""
    async with run_site(workspace_max_feed_bytes=1000) as site:
        caller = await registered(site, delivery_mode="push", url="http://127.0.0.1:9/")
        answers = [await notify(caller, "x" * 500) for _ in range(4)]

    assert [answer.status for answer in answers] == [200] * 4


async def test_what_waits_for_the_workspace_is_not_acknowledged_with_it(run_site: SiteFactory):
    """It polled before, and may do so again."""
    async with run_site() as site:
        caller = await registered(site)
        await caller.staged()
        change = {"delivery_mode": "push", "url": "http://127.0.0.1:9/"}
        assert (await ask(site, "PATCH", caller.path, json=change, headers=ADMIN)).status == 200
        await notify(caller)
        feed = await caller.read_feed()

    assert feed.headers["X-Restante-Acked-Seq"] == "0"


async def test_our_poller_skips_it_and_moves_on(caller: Caller):
    """Before, between and after what is for it; nothing counts as missed."""
    await notify(caller)
    await caller.message({"content": "one"}, to=caller)
    for _ in range(2):
        await notify(caller)
    await caller.message({"content": "two"}, to=caller)
    await notify(caller)
    async with AsyncClient(
        caller.site.url, token=caller.token, workspace_id=UUID(caller.id)
    ) as client:
        inbox = client.inbox(once=True)
        seqs = [item.seq async for item in inbox]
        page = await client.feed(limit=1)

    assert (seqs, inbox.missed) == ([2, 5], 0)
    assert page.acked_seq == 6


async def test_another_workspace_cannot_hide_a_message_from_our_poller(caller: Caller):
    stranger = await registered(caller.site)
    assert (await stranger.message({"method": "notify"}, to=caller)).status == 200
    async with AsyncClient(
        caller.site.url, token=caller.token, workspace_id=UUID(caller.id)
    ) as client:
        assert [item.seq async for item in client.inbox(once=True)] == [1]
