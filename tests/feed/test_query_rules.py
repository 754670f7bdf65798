"""How the text of a query is understood."""

import re
from datetime import datetime, timedelta, timezone

from hypothesis import given, strategies as st

from restante.feed import rules
from restante.ids import lowest_activity_id


@given(st.integers(1, 10**40), st.sampled_from(["", "+", "0", "+000"]))
def test_a_positive_number_is_the_size_of_a_page_up_to_the_most(number: int, prefix: str):
    assert rules.page_size(f"{prefix}{number}") == min(number, rules.MAX_PAGE)


@given(
    st.text() | st.sampled_from(["0", "-1", "1.5", "1_0", "null", "\u0665", "\u00b2", "++1", ""])
)
def test_any_text_is_the_size_of_a_page(text: str):
    """What is not a positive number counts as not sent."""
    size = rules.page_size(text)

    assert 1 <= size <= rules.MAX_PAGE
    if not re.fullmatch(r"\+?0*[1-9][0-9]*", text):
        assert size == rules.DEFAULT_PAGE


@given(
    st.datetimes(datetime(1971, 1, 2), datetime(8999, 12, 30)),  # noqa: DTZ001 - the zone is added
    st.integers(-23 * 60, 23 * 60),
)
def test_a_time_in_any_zone_is_that_time(at: datetime, minutes: int):
    given = at.replace(tzinfo=timezone(timedelta(minutes=minutes)))

    assert rules.moment(given.isoformat()) == given
    assert rules.moment(given.isoformat().replace("+", " ")) == given


@given(st.text() | st.from_regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}(Z|[+-][0-9]{2}:[0-9]{2})"))
def test_any_text_is_a_time_or_none(text: str):
    """A time that is one can be made into an id, with an hour to spare."""
    at = rules.moment(text)

    assert at is None or lowest_activity_id(at - timedelta(hours=1)) < lowest_activity_id(
        at + timedelta(hours=1)
    )
