"""ULIDs as text and as numbers, and which of them an honest clock can have made."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given, strategies as st

from restante.oplog import ulids

NOW = datetime(2026, 11, 17, 12, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)

any_ulid = st.integers(0, 2**128 - 1).map(lambda number: UUID(int=number))
any_moment = st.integers(0, 253_000_000_000_000).map(
    lambda milliseconds: datetime(1970, 1, 1, tzinfo=UTC) + milliseconds * MILLISECOND
)


@given(any_ulid)
def test_a_ulid_survives_the_way_through_its_text(ulid: UUID):
    text = ulids.text_of(ulid)

    assert len(text) == 26
    assert ulids.parsed(text) == ulid
    assert ulids.parsed(text.lower()) == ulid


@given(any_ulid, any_ulid)
def test_texts_sort_like_the_ulids(one: UUID, other: UUID):
    assert (ulids.text_of(one) < ulids.text_of(other)) == (one < other)


@given(st.text(max_size=30) | st.from_regex(r"[0-9A-Za-z]{26}", fullmatch=True))
def test_any_other_text_is_no_ulid(text: str):
    """Whatever it is, nothing is raised, and nothing but a ULID is read as one."""
    found = ulids.parsed(text)

    assert found is None or ulids.text_of(found) == text.upper()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0" * 25,
        "0" * 27,
        "8" + "0" * 25,  # more than 128 bits
        "0" * 25 + "U",  # letters that the alphabet leaves out
        "0" * 25 + "I",
        "0" * 25 + "L",
        "0" * 25 + "O",
        "0" * 25 + "\n",
        "0" * 25 + "\N{LATIN SMALL LETTER LONG S}",  # upper-cased it is an S
        "\N{ARABIC-INDIC DIGIT ZERO}" * 26,
    ],
)
def test_a_text_that_is_almost_a_ulid_is_none(text: str):
    assert ulids.parsed(text) is None


@given(any_moment)
def test_the_lowest_of_a_moment_is_of_that_moment(moment: datetime):
    lowest = ulids.lowest_at(moment)

    assert abs(ulids.moment_of(lowest) - moment) < MILLISECOND
    if lowest > ulids.LOWEST:
        assert ulids.moment_of(UUID(int=lowest.int - 1)) <= moment


@given(any_ulid)
def test_every_ulid_has_a_moment(ulid: UUID):
    """Even one that is later than any datetime, which a hostile peer may send."""
    assert ulids.moment_of(ulid) >= datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("moment", "is_plausible"),
    [
        (datetime(1970, 1, 1, tzinfo=UTC), False),
        (ulids.EARLIEST - MILLISECOND, False),
        (ulids.EARLIEST, True),
        (NOW, True),
        (NOW + ulids.MAX_AHEAD, True),
        (NOW + ulids.MAX_AHEAD + MILLISECOND, False),
        (datetime(9999, 12, 31, tzinfo=UTC), False),
    ],
)
def test_only_what_an_honest_clock_can_have_made_is_plausible(moment: datetime, is_plausible: bool):
    assert ulids.is_plausible(ulids.lowest_at(moment), now=NOW) is is_plausible


def test_the_greatest_ulid_is_not_plausible():
    assert not ulids.is_plausible(UUID(int=2**128 - 1), now=NOW)


@given(st.integers(0, 2**63 - 2), st.integers(0, 2**65 - 1))
def test_the_tick_above_a_ulid_makes_only_greater_ones(tick: int, rest: int):
    ulid = UUID(int=tick << 65 | rest)

    above = ulids.tick_above(ulid)

    assert UUID(int=above << 65) > ulid
    assert UUID(int=(above - 1) << 65) <= ulid


@given(st.integers(0, 2**128 - 2))
def test_the_following_ulid_is_the_next_greater_one(number: int):
    assert ulids.following(UUID(int=number)) == UUID(int=number + 1)
