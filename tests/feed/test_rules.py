"""The marks of a feed, and the `kind` of message parts."""

import copy
from typing import Any

from hypothesis import given, strategies as st

from restante.feed.rules import Marks, with_kinds

names = st.sampled_from(["type", "kind", "text", "parts", "message", "params", "method", "file"])
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


@given(kept=st.sets(st.integers(1, 12)), seq=st.integers(0, 15))
def test_a_cursor_is_valid_exactly_where_every_row_after_it_is_kept(kept: set[int], seq: int):
    """Rows are trimmed from the beginning, and appended at the end."""
    lowest, latest = (min(kept), max(kept)) if kept else (1, 0)
    marks = Marks(last_seq=latest, trimmed_seq=lowest - 1, acked_seq=0)

    valid = marks.all_kept_after(seq)

    assert marks.lowest_seq == lowest
    assert valid == (seq + 1 in {*range(lowest, latest + 1), latest + 1})
