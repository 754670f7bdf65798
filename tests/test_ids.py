"""Ids: activity ids are ordered by time, and the known spellings of a UUID are accepted."""

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


@pytest.mark.parametrize("spelling", ["{0}", "{{{0}}}", "urn:uuid:{0}", "{0.hex}", "{{{0.hex}}}"])
def test_the_known_spellings_of_a_uuid_are_accepted_in_either_case(spelling: str):
    wanted = uuid4()
    written = spelling.format(wanted)

    assert as_uuid(written) == wanted
    assert as_uuid(written.upper()) == wanted


@pytest.mark.parametrize(
    "spelling",
    [
        "", "{0} ", " {0}", "{0}\n", "x{0}", "{{{0}", "{0}}}", "({0})", "uuid:{0}",
        "urn:uuid:{{{0}}}", "urn:{0}", "urn:uuid:urn:uuid:{0}", "-{0.hex}", "{0}-", "{{{{{0}}}}}",
        "0x{0.hex}",
    ],
)  # fmt: skip
def test_other_spellings_of_a_uuid_are_not_accepted(spelling: str):
    """Python's UUID takes many of them."""
    assert as_uuid(spelling.format(uuid4())) is None


@pytest.mark.parametrize(
    "text",
    [
        "12345678_1234_1234_1234_123456789012",
        "1234567_81234123412341234567890_12",
        "1234-5678-12341234-1234-123456789012",
        "+1234567812341234123412345678901",
        "\uff11" * 32,
    ],
)
def test_numbers_that_only_python_takes_for_a_uuid_are_not_accepted(text: str):
    assert as_uuid(text) is None


@given(st.text())
def test_any_text_is_a_uuid_or_none(text: str):
    found = as_uuid(text)

    assert found is None or isinstance(found, UUID)
