"""Positions and their text, which tables and SQL compare bytewise."""

from uuid import UUID

import pytest
from hypothesis import given, strategies as st

from restante.oplog import positions
from restante.oplog.positions import START, Position

bigints = st.integers(0, 2**63 - 1)
any_position = st.builds(
    Position,
    era=bigints,
    xid=bigints,
    ulid=st.integers(0, 2**128 - 1).map(lambda number: UUID(int=number)),
    n=st.integers(0, positions.MAX_N),
)
TEXT = "000000000000000a-00000000000000ff-01ARZ3NDEKTSV4RRFFQ69G5FAV-00000003"


@given(any_position)
def test_a_position_survives_the_way_through_its_text(position: Position):
    assert positions.parsed(str(position)) == position


@given(any_position, any_position)
def test_texts_sort_bytewise_like_the_positions(one: Position, other: Position):
    assert (str(one).encode() < str(other).encode()) == (one < other)


@given(any_position)
def test_no_position_is_below_the_start_or_the_empty_text(position: Position):
    """The empty text stands for "nothing read yet"."""
    assert position >= START
    assert str(position) > ""


@given(st.text(max_size=90))
def test_any_other_text_is_no_position(text: str):
    found = positions.parsed(text)

    assert found is None or str(found) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        TEXT[:-1],
        TEXT + "0",
        TEXT.upper(),
        TEXT.replace("-", "_"),
        TEXT + "\n",
        "8" + TEXT[1:],  # the era, the transaction and the number must fit into Postgres's types
        TEXT.replace("-00000000000000ff-", "-ffffffffffffffff-"),
        TEXT[:-8] + "80000000",
        TEXT.replace("01ARZ", "91ARZ"),
        TEXT.replace("01ARZ", "01ARU"),
    ],
)
def test_a_text_that_is_almost_a_position_is_none(text: str):
    """A stored or sent position that is damaged counts as missing."""
    assert positions.parsed(TEXT) is not None

    assert positions.parsed(text) is None
