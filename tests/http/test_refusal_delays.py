"""Only a caller that is refused again and again waits for its refusals."""

from hypothesis import given, strategies as st

from restante.http import refusal_delays as module
from restante.http.refusal_delays import RefusalDelays


def test_the_first_refusals_are_not_delayed_and_more_come_at_a_steady_rate():
    delays = RefusalDelays()

    first = [delays.next("a workspace", now=100) for _ in range(module._AT_ONCE)]
    more = [delays.next("a workspace", now=100) for _ in range(10)]

    assert max(first) < 1e-6
    steps = [round(number / module._PER_SECOND, 6) for number in range(1, 11)]
    assert [round(delay, 6) for delay in more] == steps


def test_nobody_waits_for_the_refusals_of_another_nor_does_the_operator():
    delays = RefusalDelays()
    for _ in range(1000):
        delays.next("hostile", now=100)

    assert delays.next("quiet", now=100) == 0
    assert delays.next(None, now=100) == 0


def test_after_a_pause_they_come_at_once_again():
    delays = RefusalDelays()
    for _ in range(1000):
        delays.next("a workspace", now=100)

    later = 100 + module._MAX_SECONDS + module._AT_ONCE / module._PER_SECOND
    assert delays.next("a workspace", now=later) == 0


@given(nows=st.lists(st.floats(0, 100), max_size=500).map(sorted))
def test_no_refusal_waits_too_long(nows: list[float]):
    delays = RefusalDelays()

    assert all(
        0 <= delays.next("a workspace", now=now) <= module._MAX_SECONDS + 1e-6 for now in nows
    )


def test_the_callers_that_are_remembered_are_bounded():
    delays = RefusalDelays()

    for number in range(module._MAX_CALLERS * 3):
        delays.next(f"address {number}", now=number)

    assert len(delays._due) <= module._MAX_CALLERS + 1
