"""A JSON body is weighed before it is decoded, wherever the network cuts it."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from restante.errors import BadRequest, MessageTooLarge
from restante.http.weights import MAX_DIGITS, MAX_VALUES, Weight

ODD_TEXT = st.text(st.sampled_from('",[{\\}]:9é\n'), max_size=20)
JSON = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | ODD_TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(ODD_TEXT, inner),
    max_leaves=30,
)


def pieces(body: bytes, cuts: list[int]) -> Iterator[bytes]:
    edges = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    return (body[start:end] for start, end in itertools.pairwise(edges))


def weighed(body: bytes, cuts: list[int]) -> None:
    weight = Weight()
    for piece in pieces(body, cuts):
        weight.add(piece)


def marks(value: Any) -> int:
    """How many values are in it, and how many containers it is made of."""
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(len(inner) - 1, 0) + sum(marks(one) for one in inner)


@given(value=JSON, ascii_only=st.booleans(), cuts=st.lists(st.integers(0, 10_000)))
def test_values_are_counted_outside_of_strings(value: Any, ascii_only: bool, cuts: list[int]):
    """The count is exact: with one value less than allowed it is accepted, with one more not."""
    filling = [1] * (MAX_VALUES - marks(value) - 1)
    body = json.dumps([value, *filling], ensure_ascii=ascii_only).encode()

    weighed(body, cuts)

    with pytest.raises(MessageTooLarge):
        weighed(body[:-1] + b",1]", cuts)


@given(cuts=st.lists(st.integers(0, 2000)), sign=st.sampled_from(["", "-"]))
def test_a_number_nobody_can_mean_is_refused_before_it_is_decoded(cuts: list[int], sign: str):
    longest, text = sign + "9" * MAX_DIGITS, "9" * (2 * MAX_DIGITS)

    weighed(f'{{"a": {longest}, "b": "{text}"}}'.encode(), cuts)

    with pytest.raises(BadRequest):
        weighed(f'{{"a": {longest}9}}'.encode(), cuts)


@pytest.mark.parametrize("size", [1024, 1024 * 1024])
def test_quotes_are_counted_before_they_are_looked_at(size: int):
    """A body of quotes has hardly any values, and costs an object for each."""
    body = b'"' * (4 * MAX_VALUES + 5)

    with pytest.raises(MessageTooLarge):
        weighed(body, list(range(0, len(body), size)))


def test_a_body_of_strings_may_have_as_many_values_as_any_other():
    weighed(json.dumps({str(number): str(number) for number in range(MAX_VALUES)}).encode(), [])
