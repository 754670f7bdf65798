"""Rows of the feed: announcements, and the renaming in messages."""

import copy
import json
from typing import Any
from uuid import UUID, uuid4

from hypothesis import given
from hypothesis import strategies as st

from restante.delivery.rules import NewUpload
from restante.feed.rules import (
    MAX_DEPTH,
    Marks,
    announcement,
    is_too_deep,
    new_activity_id,
    with_kinds,
)
from restante.ids import FileId, WorkspaceId

names = st.sampled_from(["type", "kind", "text", "parts", "message", "params", "method", "file"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=20,
)
bodies = st.dictionaries(names, values, max_size=5)


def as_said(body: dict[str, Any]) -> dict[str, Any]:
    """The rule as WIRE says it, slowly: three places hold parts."""
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
def test_each_parts_legacy_discriminator_is_renamed_and_nothing_else(body: dict[str, Any]):
    assert with_kinds(body) == as_said(body)


@given(bodies)
def test_renaming_twice_changes_nothing_and_the_body_is_left_alone(body: dict[str, Any]):
    before = copy.deepcopy(body)

    once = with_kinds(body)

    assert body == before
    assert with_kinds(once) == once


def test_a_part_keeps_the_order_of_its_fields():
    part = {"text": "a", "type": "text", "metadata": {}}

    renamed = with_kinds({"parts": [part]})["parts"][0]

    assert list(renamed) == ["text", "kind", "metadata"]


def test_an_announcement_says_all_that_is_needed_to_fetch():
    workspace_id, file_id = WorkspaceId(uuid4()), FileId(uuid4())

    row = announcement(workspace_id, NewUpload(file_id, "a.txt", "text/plain", 5, bytes(32)))

    assert (row.activity_type, row.method, row.status) == (
        "a2a_receive",
        "chat_upload_receive",
        "ok",
    )
    assert row.summary == "chat_upload_receive: a.txt"
    assert row.source_id is None
    assert json.loads(row.request_body) == {
        "file_id": str(file_id),
        "name": "a.txt",
        "mimeType": "text/plain",
        "size": 5,
        "uri": f"platform-pending:{workspace_id}/{file_id}",
    }


def test_activity_ids_are_ordered_by_time_and_unique():
    ids = [new_activity_id() for _ in range(1000)]

    assert len(set(ids)) == 1000
    milliseconds = [UUID(str(one)).int >> 80 for one in ids]
    assert milliseconds == sorted(milliseconds)


@given(kept=st.sets(st.integers(1, 12)), seq=st.integers(0, 15))
def test_a_cursor_holds_exactly_where_every_row_after_it_is_kept(kept: set[int], seq: int):
    """Rows are trimmed from the beginning, and given on at the end."""
    lowest, latest = (min(kept), max(kept)) if kept else (1, 0)
    marks = Marks(last_seq=latest, trimmed_seq=lowest - 1, acked_seq=0)

    holds = marks.all_kept_after(seq)

    assert marks.lowest_seq == lowest
    assert holds == (seq + 1 in {*range(lowest, latest + 1), latest + 1})


@given(depth=st.integers(0, 300), inner=st.sampled_from([1, "x", None, {}, []]))
def test_depth_is_counted_through_objects_and_arrays(depth: int, inner: object):
    message = inner
    for level in range(depth):
        message = [message] if level % 2 else {"a": 1, "b": message}

    assert is_too_deep(message) == (depth >= MAX_DEPTH)
