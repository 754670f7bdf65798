"""File URIs in messages: from the place on the server to the place in the workspace."""

import copy
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given, strategies as st

from restante.client.messages import pending_file, rewritten, text_of
from restante.ids import WorkspaceId

WORKSPACE = WorkspaceId(UUID("11111111-2222-3333-4444-555555555555"))
FILE = UUID("aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee")
PENDING = f"platform-pending:{WORKSPACE}/{FILE}"
PLACES = {PENDING: "workspace:/home/me/a.pdf"}
KNOWN = PLACES.get


def part(uri: Any) -> dict[str, Any]:
    return {"kind": "file", "file": {"uri": uri, "name": "a.pdf"}, "metadata": {"uri": uri}}


SHAPES: dict[str, Callable[[list[Any]], dict[str, Any]]] = {
    "parts": lambda parts: {"role": "user", "parts": parts},
    "params.parts": lambda parts: {"id": 1, "params": {"parts": parts, "x": 1}},
    "params.message.parts": lambda parts: {"params": {"message": {"parts": parts, "role": "user"}}},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_known_uris_are_rewritten_in_each_shape(shape: Callable[[list[Any]], dict[str, Any]]):
    """Nothing else in the message changes."""
    text = {"kind": "text", "text": PENDING}
    body = shape([text, part(PENDING), part("platform-pending:other"), part(PENDING)])

    got = rewritten(body, KNOWN)

    here = part(PENDING) | {"file": {"uri": "workspace:/home/me/a.pdf", "name": "a.pdf"}}
    assert got == shape([text, here, part("platform-pending:other"), here])


def test_a_message_with_all_shapes_is_rewritten_in_all():
    body = {
        "parts": [part(PENDING)],
        "params": {"parts": [part(PENDING)], "message": {"parts": [part(PENDING)]}},
    }

    got = rewritten(body, KNOWN)

    places = (got, got["params"], got["params"]["message"])
    assert [place["parts"][0]["file"]["uri"] for place in places] == list(PLACES.values()) * 3


def test_the_original_is_not_modified():
    """The caller may still use it."""
    body = {"params": {"message": {"parts": [part(PENDING)]}}}
    before = copy.deepcopy(body)

    rewritten(body, KNOWN)

    assert body == before


def test_parts_elsewhere_are_ignored():
    """The protocol defines three places; anything deeper is user data."""
    body = {"result": {"parts": [part(PENDING)]}, "params": {"other": {"parts": [part(PENDING)]}}}

    assert rewritten(body, KNOWN) == body


@pytest.mark.parametrize(
    "body",
    [
        None,
        7,
        "text",
        [],
        [part(PENDING)],
        {"parts": {"0": part(PENDING)}},
        {"parts": [None, 1, "x", [], {}, {"file": None}, {"file": PENDING}, {"file": [PENDING]}]},
        {"parts": [part(None), part(7), part([PENDING]), part({"uri": PENDING})]},
        {"params": [part(PENDING)]},
        {"params": {"message": [part(PENDING)]}},
        {"params": {"message": None, "parts": None}},
    ],
    ids=str,
)
def test_invalid_messages_are_not_changed(body: Any):
    """An invalid message must not block the ones behind it."""
    assert rewritten(body, lambda _: "workspace:/x") == body
    assert isinstance(text_of(body), str)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["parts", "params", "message", "file", "uri", "text"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=30,
)


@given(JSON)
def test_any_json_can_be_rewritten_and_displayed(body: Any):
    before = copy.deepcopy(body)

    assert rewritten(body, lambda _: None) == before
    rewritten(body, lambda _: "workspace:/x")
    assert body == before
    assert text_of(body)


@given(st.lists(st.sampled_from([PENDING, "platform-pending:x", "https://example.org"])))
def test_rewriting_is_idempotent(uris: list[str]):
    body = {"parts": [part(uri) for uri in uris]}

    once = rewritten(body, KNOWN)

    assert rewritten(once, KNOWN) == once


# URIs of pending files


def test_a_pending_uri_refers_to_its_file():
    assert pending_file(PENDING, WORKSPACE) == FILE
    assert pending_file(PENDING.upper().replace("PLATFORM-PENDING", "platform-pending"), WORKSPACE)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "platform-pending:",
        f"platform-pending:{WORKSPACE}",
        f"platform-pending:{WORKSPACE}/",
        f"platform-pending:{WORKSPACE}/../{FILE}",
        f"platform-pending:{WORKSPACE}/{FILE}/",
        f"platform-pending:{WORKSPACE}/{FILE}x",
        f"platform-pending:{FILE}",
        f"platform-pending://{WORKSPACE}/{FILE}",
        f"{WORKSPACE}/{FILE}",
        f"workspace:{WORKSPACE}/{FILE}",
        f" {PENDING}",
    ],
)
def test_other_uris_refer_to_no_file(uri: str):
    assert pending_file(uri, WORKSPACE) is None


def test_a_uri_of_another_workspace_is_ignored():
    """A sender could combine another workspace with one of our file ids."""
    assert pending_file(PENDING, WorkspaceId(uuid4())) is None


# Display


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([], "(no text)"),
        (
            [{"kind": "text", "text": "Good"}, {"kind": "text", "text": "morning."}],
            "Good\nmorning.",
        ),
        ([part(PENDING)], "(no text) (+1 file)"),
        ([{"text": "See"}, part(PENDING), part("x")], "See (+2 files)"),
        ([{"text": 7}, {"text": None}], "(no text)"),
    ],
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_text_of_a_message(
    shape: Callable[[list[Any]], dict[str, Any]], parts: list[Any], text: str
):
    assert text_of(shape(parts)) == text
