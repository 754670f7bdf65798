"""Bodies of all generations of clients become one shape."""

import copy
from itertools import count
from typing import Any

import pytest
from hypothesis import given, strategies as st

from restante.errors import BadRequest
from restante.feed.jsonrpc import Object, Request, normalised, with_kinds

NAMES = ("type", "kind", "text", "parts", "content", "message", "params", "method", "file")
OTHERS = ("jsonrpc", "id", "role", "messageId")
names = st.sampled_from([*NAMES, *OTHERS])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=20,
)
bodies = st.dictionaries(names, values, max_size=5)


def as_specified(body: dict[str, Any]) -> dict[str, Any]:
    """The rule as the protocol states it: parts are in three places."""
    body = copy.deepcopy(body)
    params = body.get("params")
    message = params.get("message") if isinstance(params, dict) else None
    for holder in (body, params, message):
        parts = holder.get("parts") if isinstance(holder, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and "kind" not in part and "type" in part:
                part["kind"] = part.pop("type")
    return body


@given(bodies)
def test_the_type_of_each_part_becomes_its_kind_and_nothing_else_changes(body: dict[str, Any]):
    assert with_kinds(body) == as_specified(body)


@given(bodies)
def test_renaming_is_idempotent_and_does_not_change_its_argument(body: dict[str, Any]):
    before = copy.deepcopy(body)

    once = with_kinds(body)

    assert body == before
    assert with_kinds(once) == once


def test_a_part_keeps_the_order_of_its_fields():
    part = {"text": "a", "type": "text", "metadata": {}}

    renamed = with_kinds({"parts": [part]})["parts"][0]

    assert list(renamed) == ["text", "kind", "metadata"]


# The one shape


def shaped(sent: dict[str, Any]) -> Request:
    numbers = count(1)
    return normalised(sent, new_id=lambda: f"new {next(numbers)}")


def message(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "messageId": "m", "parts": [{"kind": "text", "text": "hi"}], **fields}


def whole(sent: dict[str, Any], **envelope: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": "message/send", **envelope, "params": sent}


HI = [{"kind": "text", "text": "hi"}]


def test_a_body_in_its_shape_is_not_changed():
    body = whole({"message": message(metadata={"type": "x"}), "configuration": {"type": "x"}}, x=1)

    assert shaped(body) == Request(body, "message/send", "m")


@pytest.mark.parametrize(
    ("sent", "parts"),
    [
        ({"content": "hi"}, HI),
        ({"content": ""}, [{"kind": "text", "text": ""}]),
        ({"content": [{"type": "text", "text": "hi"}]}, HI),
        ({"content": []}, []),
        ({"content": "hi", "parts": None}, HI),
        ({"parts": [{"type": "text", "text": "hi"}]}, HI),
        ({"parts": []}, []),
    ],
)
def test_content_becomes_parts(sent: dict[str, Any], parts: list[Any]):
    found = shaped(whole({"message": {"x": 1, **sent}})).body["params"]["message"]

    assert found == {"x": 1, "role": "user", "messageId": "new 2", "parts": parts}


def test_content_beside_parts_is_a_field_like_any_other():
    body = whole({"message": message(content="kept")})

    assert shaped(body).body == body


@pytest.mark.parametrize("missing", [{}, {"role": None, "messageId": None}, {"messageId": " "}])
def test_a_message_gets_a_role_and_an_id(missing: dict[str, Any]):
    found = shaped(whole({"message": {"parts": [], **missing}}))

    assert found.body["params"]["message"] == {"parts": [], "role": "user", "messageId": "new 2"}
    assert found.message_id is None


def test_a_role_and_an_id_that_were_sent_stay():
    found = shaped(whole({"message": message(role="agent", messageId="x" * 1_000_000)}))

    assert found.body["params"]["message"]["role"] == "agent"
    assert found.message_id == found.body["params"]["message"]["messageId"] == "x" * 1_000_000


def test_a_number_as_an_id_becomes_text():
    found = shaped(whole({"message": message(messageId=7)}))

    assert found.message_id == found.body["params"]["message"]["messageId"] == "7"


@pytest.mark.parametrize("message_id", [True, [], {"a": 1}])
def test_any_other_id_is_refused(message_id: Any):
    with pytest.raises(BadRequest, match="messageId"):
        shaped(whole({"message": message(messageId=message_id)}))


@pytest.mark.parametrize(
    "sent",
    [
        whole({"message": message()}),
        {"method": "message/send", "params": {"message": message()}},
        {"params": {"message": message()}},
        {"method": None, "params": {"message": message()}},
        {"method": "", "params": {"message": message()}},
        {"jsonrpc": None, "params": {"message": message()}},
        {"jsonrpc": "", "params": {"message": message()}},
        {"jsonrpc": None, "message": message()},
        {"message": message()},
        {"jsonrpc": "2.0", "message": message()},
        message(),
    ],
)
def test_what_is_missing_of_the_envelope_is_added(sent: dict[str, Any]):
    found = shaped(sent)

    identity = sent.get("id", "new 1")
    assert found == Request(whole({"message": message()}, id=identity), "message/send", "m")


def test_what_is_beside_a_bare_message_is_kept():
    found = shaped({"message": message(), "configuration": {"blocking": True}, "id": 5})

    params = {"message": message(), "configuration": {"blocking": True}}
    assert found.body == whole(params, id=5)


def test_params_that_are_an_older_message_themselves_become_one():
    """Older clients sent no `message` in the params."""
    sent = {"content": "hi", "contextId": "c", "configuration": {"blocking": True}}

    found = shaped(whole(sent))

    made = {"parts": HI, "contextId": "c", "messageId": "new 2", "role": "user"}
    assert found.body == whole({"configuration": {"blocking": True}, "message": made})


def test_the_id_of_params_that_are_an_older_message_is_its_id():
    assert shaped(whole({"content": "hi", "messageId": "own"})).message_id == "own"


def test_an_older_message_beside_the_envelope_becomes_one_too():
    envelope = {"jsonrpc": "2.0", "id": 1, "method": "message/send"}
    sent = {"content": "hi", "messageId": "own", "contextId": "c", "configuration": {"x": 1}}

    made = {"parts": HI, "messageId": "own", "contextId": "c", "role": "user"}
    expected = Request(
        whole({"configuration": {"x": 1}, "message": made}), "message/send", message_id="own"
    )
    assert shaped({**envelope, **sent}) == expected
    assert shaped({**envelope, **sent, "params": None, "parts": None}) == expected


def test_content_beside_other_params_becomes_parts_in_its_place():
    body = shaped(whole({"configuration": {}}, content="hi", messageId="own")).body

    assert body == whole({"configuration": {}}, parts=HI, messageId="own", role="user")


def test_parts_of_the_params_stay_where_they_are():
    """Receivers look for them there."""
    sent = whole({"parts": HI, "contextId": "c"})

    found = shaped(sent)

    filled = {"parts": HI, "contextId": "c", "messageId": "new 2", "role": "user"}
    assert found == Request(whole(filled), "message/send", None)


@pytest.mark.parametrize("message_id", ["own", 7])
@pytest.mark.parametrize("role", ["user", "agent"])
def test_a_message_has_its_own_id_and_role_wherever_its_parts_are(role: str, message_id: Any):
    said = message(messageId=message_id, role=role)
    filled, chosen = {**said, "messageId": str(message_id)}, str(message_id)
    envelope = {"jsonrpc": "2.0", "id": 1, "method": "message/stream"}

    for sent, body in (
        ({"params": said}, {"params": filled}),
        (said, filled),
        ({**said, "params": {}}, {**filled, "params": {}}),
    ):
        assert shaped({**envelope, **sent}) == Request(
            {**envelope, **body}, "message/stream", chosen
        )


def test_an_id_beside_the_message_is_not_its_id():
    """To lose a message is worse than to queue it twice."""
    sent = whole({"message": {"parts": HI}, "messageId": "beside"}, messageId="outside")

    assert shaped(sent).message_id is None


@pytest.mark.parametrize("version", ["1.0", "2", 2, 2.0, False, 0, []])
def test_another_version_is_refused(version: Any):
    with pytest.raises(BadRequest, match="jsonrpc"):
        shaped({"jsonrpc": version, "params": {"message": message()}})


def test_parts_beside_the_envelope_stay_where_they_are():
    sent = {"jsonrpc": "2.0", "id": 1, "method": "message/send", "parts": []}

    assert shaped(sent).body == {**sent, "messageId": "new 2", "role": "user"}


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"method": "message/send"},
        {"method": "message/stream", "params": {}},
        {"params": {"message": {}}},
        {"params": {"message": {"role": "user"}}},
        {"params": {"message": {"parts": None, "content": None}}},
        {"params": {"message": {"parts": "hi", "content": "hi"}}},
        {"params": {"message": {"content": {"text": "hi"}}}},
        {"params": {"message": "hi"}},
        {"params": [message()]},
        {"message": "hi"},
        {"parts": "hi"},
        {"jsonrpc": "2.0", "content": {"text": "hi"}},
        {"jsonrpc": "2.0", "content": "hi", "message": "hi"},
    ],
)
def test_a_message_that_says_nothing_is_refused(sent: dict[str, Any]):
    with pytest.raises(BadRequest, match="neither parts nor content"):
        shaped(sent)


@pytest.mark.parametrize("method", [" ", 5, [], True])
def test_a_method_must_be_a_name(method: Any):
    with pytest.raises(BadRequest, match="method"):
        shaped({"method": method, "params": {"message": message()}})


@pytest.mark.parametrize(
    "sent",
    [
        {"method": "tasks/cancel"},
        {"method": "tasks/cancel", "content": "hi"},
        {"method": "tasks/cancel", "params": {"content": "hi"}},
        {"method": "tasks/cancel", "params": {"messageId": ["x"], "parts": []}},
        {"method": "tasks/cancel", "params": {"id": "x", "message": {"content": "hi"}}},
        {"method": "tasks/get", "params": [1], "jsonrpc": "2.0", "id": None},
    ],
)
def test_other_methods_pass_as_they_are(sent: dict[str, Any]):
    assert shaped(sent).body == sent


noise = st.dictionaries(st.sampled_from(["type", "kind", "text", "file", "metadata"]), values)
parts = st.lists(noise | values, max_size=3)
said = st.fixed_dictionaries({"parts": parts}) | st.fixed_dictionaries(
    {"content": parts | st.text(max_size=5)}
)
identity = st.fixed_dictionaries(
    {}, optional={"role": st.none() | st.just("agent"), "messageId": st.text() | st.integers()}
)
messages = st.builds(
    lambda *made: {k: v for one in made for k, v in one.items()}, noise, identity, said
)
envelopes = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.sampled_from(["2.0", "", None]),
        "id": st.integers() | st.none(),
        "method": st.sampled_from(["message/send", "message/stream", None]),
    },
)


def in_params(message: Object, beside: Object, envelope: Object) -> Object:
    return {**envelope, "params": {**beside, "message": message}}


def without_params(message: Object, beside: Object, envelope: Object) -> Object:
    return {**beside, **envelope, "message": message}


def as_params(message: Object, envelope: Object) -> Object:
    return {**envelope, "params": message}


def beside(message: Object, envelope: Object) -> Object:
    return {**message, **envelope}


accepted = (
    st.builds(in_params, messages, noise, envelopes)
    | st.builds(as_params, messages, envelopes)
    | st.builds(without_params, messages, noise, envelopes)
    | st.builds(beside, messages, envelopes)
    | messages
)


@given(accepted)
def test_a_shape_does_not_change_any_more(sent: dict[str, Any]):
    before = copy.deepcopy(sent)
    once = shaped(sent)

    again = normalised(once.body, new_id=lambda: "another")

    assert sent == before
    assert again.body == once.body


def leaves(value: Any) -> list[str]:
    """All texts and numbers, wherever they are."""
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in leaves(inner)]
    return [str(value)] if str(value or "").strip() else []


@given(accepted)
def test_nothing_that_was_sent_gets_lost(sent: dict[str, Any]):
    kept = leaves(shaped(sent).body)

    for leaf in leaves(sent):
        kept.remove(leaf)


@given(st.dictionaries(st.text("xyz", min_size=1, max_size=3), values, max_size=3))
def test_unknown_fields_survive_at_every_level(extra: dict[str, Any]):
    sent = {
        "params": {"message": {"content": [{"text": "hi", **extra}], **extra}, **extra},
        **extra,
    }

    body = shaped(sent).body

    for holder in (body, body["params"], body["params"]["message"]):
        assert extra.items() <= holder.items()
    assert body["params"]["message"]["parts"] == [{"text": "hi", **extra}]
