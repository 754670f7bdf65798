"""Decoding requests: how deep JSON may be nested."""

from hypothesis import given, strategies as st

from restante.http.operations import MAX_DEPTH, is_too_deep


@given(depth=st.integers(0, 3 * MAX_DEPTH), inner=st.sampled_from([1, "x", None, {}, []]))
def test_depth_is_counted_through_objects_and_arrays(depth: int, inner: object):
    message = inner
    for level in range(depth):
        message = [message] if level % 2 else {"a": 1, "b": message}

    assert is_too_deep(message) == (depth >= MAX_DEPTH)
