"""Ids: activity ids are ordered by time, and only the usual spelling of a UUID is accepted."""

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from hypothesis import given, strategies as st

from restante.ids import as_uuid, lowest_activity_id, moment_of, new_activity_id

MILLISECOND = timedelta(milliseconds=1)
moments = st.datetimes(
    datetime(2000, 1, 1),  # noqa: DTZ001 - the strategy adds the timezone
    datetime(9999, 12, 30),  # noqa: DTZ001
    timezones=st.just(UTC),
)


@given(moments, moments)
def test_activity_ids_are_ordered_by_the_millisecond_they_were_made_in(
    one: datetime, other: datetime
):
    """The feed's partitions are ranges of ids, so a later row must not get a lower range."""
    earlier, later = sorted([one, other])
    if later - earlier >= MILLISECOND:
        assert new_activity_id(earlier) < new_activity_id(later)


@given(moments)
def test_the_moment_of_an_activity_id_is_its_millisecond(moment: datetime):
    difference = moment - moment_of(new_activity_id(moment))

    assert abs(difference) <= MILLISECOND


@given(moments)
def test_no_activity_id_of_a_moment_is_below_its_lowest(moment: datetime):
    """A partition begins with the lowest id of its first moment."""
    assert lowest_activity_id(moment) <= new_activity_id(moment)
    assert new_activity_id(moment - MILLISECOND) < lowest_activity_id(moment + MILLISECOND)


def test_activity_ids_of_one_moment_are_different():
    now = datetime.now(UTC)

    assert len({new_activity_id(now) for _ in range(1000)}) == 1000


def test_the_usual_spelling_of_a_uuid_is_accepted_in_either_case():
    wanted = uuid4()

    assert as_uuid(str(wanted)) == wanted
    assert as_uuid(str(wanted).upper()) == wanted


@pytest.mark.parametrize("spelling", ["{{{0}}}", "urn:uuid:{0}", "{0} ", " {0}", "{0}\n", "x{0}"])
def test_other_spellings_of_a_uuid_are_not_accepted(spelling: str):
    """Python's UUID takes them; then one id would have several names."""
    assert as_uuid(spelling.format(uuid4())) is None


def test_a_uuid_without_dashes_is_not_accepted():
    assert as_uuid(uuid4().hex) is None


@given(st.text())
def test_any_text_is_a_uuid_or_none(text: str):
    found = as_uuid(text)

    assert found is None or isinstance(found, UUID)
