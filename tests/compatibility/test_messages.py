"""Text messages: the bodies that old and new clients send, and what the receiver is given."""

import json
from typing import Any
from uuid import UUID, uuid4

import pytest
from outsiders import Outsider, callback, joined, message

MIB = 1024 * 1024


def said(row: dict[str, Any]) -> dict[str, Any]:
    """The message of a row."""
    return row["request_body"]["params"]["message"]


def rpc(said: Any, **fields: Any) -> dict[str, Any]:
    """A body around a message."""
    body = {"jsonrpc": "2.0", "id": "1", "method": "message/send", "params": {"message": said}}
    return {name: value for name, value in (body | fields).items() if value is not ...}


def test_a_message_is_queued_and_becomes_a_row(workspace: Outsider, other: Outsider):
    sent = message()

    answer = other.send(sent, to=workspace)

    assert answer.status == 200
    assert answer.json == {"status": "queued", "delivery_mode": "poll", "method": "message/send"}
    (row,) = workspace.rows()
    assert (row["activity_type"], row["method"]) == ("a2a_receive", "message/send")
    assert (row["source_id"], row["target_id"]) == (other.id, workspace.id)
    assert row["request_body"] == sent


def test_a_legacy_discriminator_is_renamed(workspace: Outsider, admin: Outsider):
    parts = [{"type": "text", "text": "x"}, {"kind": "data", "data": {"type": "kept"}}]

    admin.send(message(parts=parts), to=workspace)

    (row,) = workspace.rows()
    assert said(row)["parts"] == [{"kind": "text", "text": "x"}, parts[1]]


def test_content_becomes_parts(workspace: Outsider, admin: Outsider):
    old = {"role": "user", "messageId": "m"}

    for content in ("hello", [{"type": "text", "text": "hello"}, {"kind": "text", "text": "you"}]):
        body = rpc(old | {"messageId": str(uuid4()), "content": content})
        assert admin.send(body, to=workspace).status == 200

    hello = {"kind": "text", "text": "hello"}
    of_list, of_string = (said(row) for row in workspace.rows())
    assert of_string["parts"] == [hello]
    assert of_list["parts"] == [hello, {"kind": "text", "text": "you"}]
    assert "content" not in of_string.keys() | of_list.keys()


def test_a_message_without_role_or_id_gets_them(workspace: Outsider, admin: Outsider):
    parts = [{"kind": "text", "text": "x"}]

    for absent in ({}, {"role": "", "messageId": ""}, {"role": None, "messageId": None}):
        assert admin.send(rpc({"parts": parts} | absent), to=workspace).status == 200, absent

    got = [said(row) for row in workspace.rows()]
    assert [one["role"] for one in got] == ["user"] * 3
    assert len({UUID(one["messageId"]) for one in got}) == 3


def test_a_role_that_was_sent_stays(workspace: Outsider, admin: Outsider):
    admin.send(message(role="agent", messageId="my-own"), to=workspace)

    (row,) = workspace.rows()
    assert (said(row)["role"], said(row)["messageId"]) == ("agent", "my-own")


@pytest.mark.parametrize("empty", [{}, {"parts": None}, {"content": None}], ids=str)
def test_a_message_with_neither_parts_nor_content_is_a_400(
    workspace: Outsider, admin: Outsider, empty: dict[str, Any]
):
    answer = admin.send(rpc({"role": "user"} | empty), to=workspace)

    assert answer.status == 400
    assert workspace.rows() == []


def body_of(size: int) -> dict[str, Any]:
    """A body of so many bytes."""
    body = message("")
    body["params"]["message"]["parts"][0]["text"] = "x" * (size - len(json.dumps(body)))
    assert len(json.dumps(body)) == size
    return body


def test_a_large_body_is_accepted(workspace: Outsider, other: Outsider):
    body = body_of(16 * MIB)

    answer = other.send(body, to=workspace)

    assert answer.status == 200, answer.body
    (row,) = workspace.rows()
    assert row["request_body"] == body


def test_a_larger_body_is_refused(workspace: Outsider, admin: Outsider):
    """By one byte."""
    answer = admin.send(body_of(16 * MIB + 1), to=workspace)

    assert (answer.status, answer.json["max"]) == (413, 16 * MIB)
    assert workspace.rows() == []


def test_a_repeated_message_is_queued_once(workspace: Outsider, other: Outsider, admin: Outsider):
    for sender in (other, admin):
        body = message(f"from {sender.id or 'the user'}")

        first, second = sender.send(body, to=workspace), sender.send(body, to=workspace)

        assert first.status == second.status == 200
        assert first.body == second.body
    assert len(workspace.rows()) == 2


def test_the_same_id_from_another_sender_is_another_message(
    workspace: Outsider, other: Outsider, admin: Outsider
):
    body = message()

    for sender in (workspace, other, admin):
        assert sender.send(body, to=workspace).status == 200

    assert len(workspace.rows()) == 3


def test_a_repetition_to_another_receiver_is_another_message(
    workspace: Outsider, other: Outsider, admin: Outsider
):
    body = message()

    for receiver in (workspace, other):
        assert admin.send(body, to=receiver).status == 200

    assert [len(receiver.rows()) for receiver in (workspace, other)] == [1, 1]


@pytest.mark.parametrize("absent", [..., "", None])
def test_a_body_without_a_method_is_message_send(workspace: Outsider, admin: Outsider, absent: Any):
    body = message() | {"method": absent}
    if absent is ...:
        del body["method"]

    answer = admin.send(body, to=workspace)

    assert (answer.status, answer.json["method"]) == (200, "message/send")
    (row,) = workspace.rows()
    assert row["method"] == "message/send"


def test_other_methods_need_no_message(workspace: Outsider, admin: Outsider):
    body = {"jsonrpc": "2.0", "id": 7, "method": "tasks/get", "params": {"id": "t"}}

    answer = admin.send(body, to=workspace)

    assert (answer.status, answer.json["method"]) == (200, "tasks/get")
    (row,) = workspace.rows()
    assert (row["method"], row["request_body"]) == ("tasks/get", body)


def test_the_sender_is_the_workspace_of_the_token(
    workspace: Outsider, other: Outsider, admin: Outsider
):
    own = other.send(message(), to=workspace, X_Workspace_ID=other.id)
    loud = other.send(message(), to=workspace, X_Workspace_ID=other.id.upper())
    forged = other.send(message(), to=workspace, X_Workspace_ID=workspace.id)
    of_admin = admin.send(message(), to=workspace)
    nobody = admin.with_token("").send(message(), to=workspace)

    statuses = [answer.status for answer in (own, loud, forged, of_admin, nobody)]
    assert statuses == [200, 200, 401, 200, 401]
    assert [row["source_id"] for row in workspace.rows()] == [None, other.id, other.id]


def test_a_push_workspace_is_sent_the_message_and_its_answer_relayed(url: str, admin: Outsider):
    with callback() as pushed:
        workspace = joined(url, delivery_mode="push", url=pushed.url)
        pushed.answer = b'{"jsonrpc": "2.0", "id": "1", "result": {"kind": "message"}}'
        sent = message()

        answer = admin.send(sent, to=workspace)

    assert (answer.status, answer.body) == (200, pushed.answer)
    (delivered,) = pushed.delivered
    assert delivered.json == sent


def test_an_old_body_is_turned_into_a_new_one_in_push_mode_too(url: str, admin: Outsider):
    with callback() as pushed:
        workspace = joined(url, delivery_mode="push", url=pushed.url)

        admin.send(rpc({"content": "hello"}, method=...), to=workspace)
        refused = admin.send(rpc({"role": "user"}), to=workspace)

    assert refused.status == 400
    (delivered,) = pushed.delivered
    assert delivered.json["method"] == "message/send"
    got = delivered.json["params"]["message"]
    assert got["parts"] == [{"kind": "text", "text": "hello"}]
    assert got["role"] == "user"
    assert UUID(got["messageId"])
