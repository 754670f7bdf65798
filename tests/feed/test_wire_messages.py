"""Messages over HTTP: who may send them, which are accepted, and how they are stored."""

from typing import Any
from uuid import UUID, uuid4

import pytest
from callers import ADMIN, Caller, ask, bearer, registered, request_head, wire_to
from sites import Site, SiteFactory
from waiting import until

pytestmark = pytest.mark.anyio

HELLO = {"jsonrpc": "2.0", "id": 1, "method": "message/send", "params": {"message": {"parts": []}}}


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


async def test_a_message_becomes_a_row_of_the_feed(caller: Caller):
    sender = await registered(caller.site)

    answer = await sender.message(HELLO, to=caller)

    assert answer.status == 200
    assert answer.json == {"status": "queued", "delivery_mode": "poll", "method": "message/send"}
    await caller.staged()
    of_file, row = await caller.feed()
    assert set(row) == set(of_file)
    said = row["request_body"]["params"]["message"]
    assert UUID(said.pop("messageId"))
    assert said.pop("role") == "user"
    expected = {
        "activity_type": "a2a_receive",
        "method": "message/send",
        "request_body": HELLO,
        "source_id": sender.id,
        "target_id": caller.id,
        "status": "ok",
        "seq": 1,
    }
    assert {name: row[name] for name in expected} == expected


async def test_parts_with_a_type_are_stored_with_a_kind(caller: Caller):
    def parts(discriminator: str) -> list[Any]:
        return [
            {discriminator: "text", "text": "type", "data": {"type": "inner"}},
            {"kind": "file", "type": "kept"},
            "no object",
        ]

    def body(discriminator: str) -> dict[str, Any]:
        return {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "message/send",
            "parts": parts(discriminator),
            "params": {
                "type": "kept",
                "parts": parts(discriminator),
                "message": {
                    "type": "kept",
                    "role": "user",
                    "messageId": "m",
                    "parts": parts(discriminator),
                },
            },
        }

    await caller.message(body("type"), to=caller)

    (row,) = await caller.feed()
    assert row["request_body"] == body("kind")


@pytest.mark.parametrize(
    "sent",
    [
        {"jsonrpc": "2.0", "method": "message/send", "params": {"message": {"content": "hi"}}},
        {"params": {"message": {"content": [{"type": "text", "text": "hi"}]}}},
        {"message": {"content": "hi"}},
        {"parts": [{"type": "text", "text": "hi"}]},
        {"content": "hi"},
    ],
)
async def test_what_older_clients_send_is_stored_in_one_shape(caller: Caller, sent: dict[str, Any]):
    answer = await caller.message(sent, to=caller)

    assert answer.json == {"status": "queued", "delivery_mode": "poll", "method": "message/send"}
    (row,) = await caller.feed()
    body = row["request_body"]
    said = body["params"]["message"]
    assert UUID(body.pop("id"))
    assert UUID(said.pop("messageId"))
    assert body == {"jsonrpc": "2.0", "method": "message/send", "params": {"message": said}}
    assert said == {"role": "user", "parts": [{"kind": "text", "text": "hi"}]}


async def test_a_message_that_says_nothing_gets_a_sentence(caller: Caller):
    answer = await caller.message({"params": {"message": {"role": "user"}}}, to=caller)

    assert (answer.status, answer.json["code"]) == (400, "bad_request")
    assert "parts" in answer.json["error"]


async def test_other_methods_need_no_parts(caller: Caller):
    body = {"jsonrpc": "2.0", "id": 7, "method": "tasks/cancel", "params": {"id": "a task"}}

    answer = await caller.message(body, to=caller)

    assert answer.json == {"status": "queued", "delivery_mode": "poll", "method": "tasks/cancel"}
    assert (await caller.feed())[0]["request_body"] == body


async def test_the_body_is_stored_as_it_was_sent(caller: Caller):
    body = {
        "jsonrpc": "2.0",
        "id": "x",
        "method": "tasks/get",
        "params": [1, 2.5, None, "\0\u2028\U0001f600", 2**70, {"": []}],
        "extra": True,
    }

    await caller.message(body, to=caller)

    assert (await caller.feed())[0]["request_body"] == body


async def test_a_message_from_the_operator_comes_from_the_canvas(caller: Caller):
    answer = await ask(caller.site, "POST", f"{caller.path}/a2a", json=HELLO, headers=ADMIN)

    assert answer.status == 200
    assert [row["source_id"] for row in await caller.feed(source="canvas")] == [None]


async def test_the_senders_id_must_match_its_token(caller: Caller):
    sender = await registered(caller.site)

    right = await sender.message(HELLO, to=caller, X_Workspace_ID=sender.id)
    wrong = [
        await sender.message(HELLO, to=caller, X_Workspace_ID=claimed)
        for claimed in (caller.id, str(uuid4()), "x")
    ]
    empty = await sender.message(HELLO, to=caller, X_Workspace_ID="")

    assert (right.status, empty.status) == (200, 200)
    assert {answer.status for answer in wrong} == {401}
    assert [row["source_id"] for row in await caller.feed()] == [sender.id] * 2


async def test_a_message_needs_a_token_and_a_receiver(caller: Caller):
    path = f"{caller.path}/a2a"

    for headers in ({}, bearer("x")):
        answer = await ask(caller.site, "POST", path, json=HELLO, headers=headers)
        assert answer.status == 401
    nobody = Caller(caller.site, str(uuid4()), "")
    assert (await caller.message(HELLO, to=nobody)).status == 404
    assert await caller.feed() == []


async def test_a_body_that_is_not_json_rpc_is_a_400(caller: Caller):
    for body in (
        {},
        {"method": ""},
        {"method": 5},
        {"method": None},
        {"jsonrpc": "1.0", "method": "x"},
        {"params": {"message": {"role": "user"}}},
        {"message": {"parts": [], "messageId": []}},
        [HELLO],
        "x",
        None,
    ):
        answer = await caller.message(body, to=caller)  # pyright: ignore[reportArgumentType]
        assert answer.status == 400, body
    assert await caller.feed() == []


async def test_the_bytes_of_the_messages_of_one_sender_are_limited_per_minute(
    run_site: SiteFactory,
):
    """Few messages can be as much as many."""
    large = {"message": {"content": "x" * 900_000}}
    async with run_site(message_bytes_per_minute=1024 * 1024) as site:
        caller, other = await registered(site), await registered(site)

        answers = [await other.message(large, to=caller) for _ in range(2)]
        from_another = await caller.message(large, to=other)

    assert [answer.status for answer in answers] == [200, 429]
    refusal = answers[1]
    assert refusal.json["code"] == "too_many_messages"
    assert "bytes of messages" in refusal.json["error"]
    assert 1 <= int(refusal.headers["Retry-After"]) <= 60
    assert from_another.status == 200


async def test_the_bytes_of_messages_count_as_they_arrive(run_site: SiteFactory):
    """They wait in memory, and a sender may withhold the last one of each body."""
    async with run_site(message_bytes_per_minute=1024 * 1024) as site, wire_to(site) as wire:
        caller = await registered(site)
        path = f"{caller.path}/a2a"
        head = request_head("POST", path, token=caller.token, length=900_001)
        await wire.send(head + b" " * 900_000)
        await until(lambda: bytes_left(caller) < 200_000)

        refused = await caller.message({"message": {"content": "x" * 200_000}}, to=caller)
        small = await caller.message(HELLO, to=caller)

    assert (refused.status, refused.json["code"]) == (429, "too_many_messages")
    assert small.status == 200


def bytes_left(caller: Caller) -> float:
    return caller.site.state.message_rate._bytes._filled(UUID(caller.id)).level


async def test_the_messages_of_one_sender_are_limited_per_minute(run_site: SiteFactory):
    async with run_site(messages_per_minute=3) as site:
        caller, other = await registered(site), await registered(site)

        answers = [await other.message(HELLO, to=caller) for _ in range(4)]
        from_another = await caller.message(HELLO, to=caller)

    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    refusal = answers[3]
    assert refusal.json["code"] == "too_many_messages"
    assert int(refusal.headers["Retry-After"]) == refusal.json["retry_after_seconds"] >= 1
    assert from_another.status == 200


async def test_who_may_not_send_does_not_learn_which_workspaces_exist(caller: Caller):
    other = await registered(caller.site)
    strangers = ({}, bearer("guessed"), {**bearer(other.token), "X-Workspace-ID": caller.id})

    for headers in strangers:
        answers = [
            await ask(caller.site, "POST", f"/workspaces/{to}/a2a", json=HELLO, headers=headers)
            for to in (caller.id, uuid4())
        ]
        assert [answer.status for answer in answers] == [401, 401]
        assert answers[0].body == answers[1].body


async def test_a_wrong_recipient_counts_against_the_senders_rate(run_site: SiteFactory):
    """Else a workspace could try ids as fast as the server answers."""
    async with run_site(messages_per_minute=3) as site:
        sender = await registered(site)
        answers = [
            await ask(
                site, "POST", f"/workspaces/{uuid4()}/a2a", json=HELLO, headers=bearer(sender.token)
            )
            for _ in range(4)
        ]

    assert [answer.status for answer in answers] == [404, 404, 404, 429]
