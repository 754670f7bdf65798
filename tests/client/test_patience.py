"""How long the clients wait between tries, and which failures are worth one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restante import errors
from restante.client.patience import LONGEST_SECONDS, SHORTEST_SECONDS, Patience, is_passing
from restante.errors import RestanteError, ServerRefused, ServerUnreachable, TooManyMessages


def most(_low: float, high: float) -> float:
    return high


def least(low: float, _high: float) -> float:
    return low


def test_pauses_double_up_to_a_bound():
    """A server that is down for a day is asked once a minute, not a thousand times a second."""
    patience = Patience(longest_seconds=5, chance=most)

    assert [patience.failed() for _ in range(6)] == [0.5, 1, 2, 4, 5, 5]


def test_chance_takes_up_to_half_of_a_pause():
    """Clients that lost the server together must not come back together."""
    patience = Patience(longest_seconds=5, chance=least)

    assert [patience.failed() for _ in range(6)] == [0.25, 0.5, 1, 2, 2.5, 2.5]


@given(st.integers(min_value=0, max_value=3000))
def test_every_pause_lies_between_half_and_the_whole(failures: int):
    """However long it has been going on: doubling must not run over."""
    patience = Patience()
    patience.failures = failures

    pause = patience.failed()

    whole = min(SHORTEST_SECONDS * 2 ** min(failures, 100), LONGEST_SECONDS)
    assert whole / 2 <= pause <= whole
    assert patience.failures == failures + 1


def test_pauses_differ():
    assert len({Patience().failed() for _ in range(20)}) > 1


def test_success_makes_pauses_short_again():
    patience = Patience(chance=most)
    for _ in range(9):
        patience.failed()

    patience.succeeded()

    assert patience.failed() == SHORTEST_SECONDS


@pytest.mark.parametrize(
    ("asked", "pause"), [(0, 0.5), (3, 3), (10, 10), (86_400, 10), (10**17, 10)]
)
def test_no_sooner_than_the_server_asked_and_no_later_than_the_bound(asked: int, pause: float):
    """A server cannot send us to sleep for a year."""
    patience = Patience(longest_seconds=10, chance=most)

    assert patience.failed(TooManyMessages("Slow down.", retry_after=asked)) == pause


PASSING = {
    errors.DatabaseUnavailable,
    errors.NotReady,
    errors.ServerUnreachable,
    errors.StatementTimedOut,
    errors.TableBusy,
    errors.TooManyAtOnce,
    errors.TooManyMessages,
}
CLASSES = [
    item
    for item in vars(errors).values()
    if isinstance(item, type)
    and issubclass(item, RestanteError)
    and item not in {RestanteError, ServerRefused}
]


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.code)
def test_only_what_time_heals_is_worth_another_try(error: type[RestanteError]):
    """A wrong token does not become right; a full mailbox is for its sender to decide about."""
    assert is_passing(error("It did not work.")) is (error in PASSING)


@pytest.mark.parametrize(
    ("status", "passes"),
    [(400, False), (404, False), (408, True), (418, False), (429, True), (500, True), (504, True)],
)
def test_a_refusal_without_a_name_is_judged_by_its_number(status: int, passes: bool):
    """A gateway that has lost its server says 502 in words of its own."""
    assert is_passing(ServerRefused("Bad gateway.", status=status)) is passes


def test_a_number_that_is_none_does_not_pass():
    assert not is_passing(ServerRefused("What?", status="503"))
    assert not is_passing(ServerRefused("What?"))


def test_a_failure_without_facts_is_waited_for_all_the_same():
    assert Patience(chance=most).failed(ServerUnreachable("Gone.")) == SHORTEST_SECONDS
