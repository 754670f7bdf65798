"""Decoding requests: how deep JSON may be nested, and how ids are spelled."""

from typing import Annotated
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, strategies as st
from msgspec import Meta
from starlette.requests import Request

from restante.errors import BadRequest
from restante.http import operations
from restante.http.operations import MAX_DEPTH, is_too_deep


@given(depth=st.integers(0, 3 * MAX_DEPTH), inner=st.sampled_from([1, "x", None, {}, []]))
def test_depth_is_counted_through_objects_and_arrays(depth: int, inner: object):
    message = inner
    for level in range(depth):
        message = [message] if level % 2 else {"a": 1, "b": message}

    assert is_too_deep(message) == (depth >= MAX_DEPTH)


class Shape(msgspec.Struct):
    id: UUID
    parent: Annotated[UUID | None, Meta(description="x")] = None
    note: msgspec.Raw = msgspec.Raw(b"null")
    count: int = 0


AN_ID = UUID("5f0c6a52-3d1e-4b7a-9c1d-2e8f4a6b7c90")
SPELLINGS = [str(AN_ID), str(AN_ID).upper(), AN_ID.hex, f"{{{AN_ID}}}", AN_ID.urn]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_id_of_a_body_may_be_spelled_in_several_ways(spelling: str):
    body = msgspec.json.encode({"id": spelling, "parent": spelling, "count": 1})

    decoded = operations._decoded(body, Shape)

    assert (decoded.id, decoded.parent, decoded.count) == (AN_ID, AN_ID, 1)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_another_mistake_is_named_however_the_ids_are_spelled(spelling: str):
    for field, wrong in (("count", "x"), ("parent", "x"), ("parent", 5)):
        with pytest.raises(BadRequest, match=f"^{field} is wrong"):
            operations._decoded(msgspec.json.encode({"id": spelling, field: wrong}), Shape)


@pytest.mark.parametrize("body", [b"[]", b"5", b'"x"', b"{}", b'{"id": {}}', b'{"id": []}'])
def test_any_other_json_is_refused(body: bytes):
    with pytest.raises(BadRequest):
        operations._decoded(body, Shape)


def asked(query: bytes) -> Request:
    return Request({"type": "http", "query_string": query, "headers": []})


@pytest.mark.parametrize(
    ("query", "first", "count"),
    [(b"count=1&count=2", "1", 1), (b"count=1&count=x", "1", 1), (b"count=&count=2", "", 0)],
)
def test_the_first_of_several_parameters_with_one_name_counts(query: bytes, first: str, count: int):
    """Two servers that read a query differently see two different requests."""
    request = asked(b"id=" + AN_ID.hex.encode() + b"&" + query)

    assert operations.query_of(request, Shape).count == count
    assert operations.parameters(request)["count"] == first
