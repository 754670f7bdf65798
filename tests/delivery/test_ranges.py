"""Byte ranges and entity tags, compared with a simple implementation."""

import pytest
from hypothesis import example, given, strategies as st

from restante.delivery.ranges import ByteRange, matches_tag, wanted_range
from restante.errors import RangeNotSatisfiable

sizes = st.integers(1, 300)
numbers = st.none() | st.integers(0, 400)
CONTENT = bytes(range(256)) * 2


def expected_positions(first: int | None, last: int | None, size: int) -> list[int] | str | None:
    """The requested positions; "nothing" if there are none; None for the whole file."""
    if first is None and last is None:
        return None
    positions = range(size)
    if first is None:
        assert last is not None
        return [p for p in positions if p >= size - last] or "nothing"
    if last is not None and last < first:
        return None
    return [p for p in positions if p >= first and (last is None or p <= last)] or "nothing"


@given(numbers, numbers, sizes)
@example(None, 0, 1)
@example(0, 0, 1)
@example(1, None, 1)
def test_a_range_has_the_requested_positions(first: int | None, last: int | None, size: int):
    said = ["" if number is None else str(number) for number in (first, last)]
    expected = expected_positions(first, last, size)
    header = f"bytes={said[0]}-{said[1]}"

    if expected == "nothing":
        with pytest.raises(RangeNotSatisfiable) as refused:
            wanted_range(header, size)
        assert refused.value.facts["size"] == size
        return
    found = wanted_range(header, size)

    if found is None:
        assert expected is None
    else:
        assert list(range(found.first, found.last + 1)) == expected
        assert found.length == len(expected or "")


@given(st.text(max_size=40) | st.from_regex(r"bytes=[0-9, -]{0,12}", fullmatch=True), sizes)
@example("bytes=" + "9" * 5000 + "-", 5)
@example("bytes=٣-", 5)
@example("bytes=1-2\n", 5)
def test_any_header_gives_a_range_inside_the_file_the_whole_file_or_a_refusal(
    header: str, size: int
):
    try:
        found = wanted_range(header, size)
    except RangeNotSatisfiable:
        return

    if found is not None:
        assert 0 <= found.first <= found.last < size


@pytest.mark.parametrize("header", [None, "", "bytes=0-1,3-4", "bytes=0-1,", "octets=0-1", "0-1"])
def test_a_header_that_is_not_one_range_asks_for_the_whole_file(header: str | None):
    assert wanted_range(header, 10) is None


def test_spaces_and_case_do_not_matter():
    assert wanted_range("BYTES= 2-3 ", 10) == ByteRange(2, 3)


tags = st.text("abc", min_size=1, max_size=3).map(lambda text: f'"{text}"')


@given(st.lists(tags, max_size=4), tags, st.booleans())
def test_a_tag_matches_if_it_is_listed(listed: list[str], tag: str, weak: bool):
    header = " , ".join(("W/" if weak else "") + one for one in listed)

    assert matches_tag(header, tag) == (tag in listed)


def test_a_star_matches_every_tag_and_a_missing_header_none():
    assert matches_tag("*", '"x"')
    assert not matches_tag(None, '"x"')
    assert not matches_tag("", '"x"')
