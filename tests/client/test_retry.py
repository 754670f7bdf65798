"""Which failures the clients retry, and how long they wait between attempts."""

import random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from restante import errors
from restante.client.retry import Backoff, is_retryable
from restante.errors import RestanteError, ServerRefused, ServerUnreachable, TooManyMessages


def upper(_low: float, high: float) -> float:
    return high


def lower(low: float, _high: float) -> float:
    return low


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jitter that always picks the upper bound."""
    monkeypatch.setattr(random, "uniform", upper)


@pytest.fixture
def shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jitter that always picks the lower bound."""
    monkeypatch.setattr(random, "uniform", lower)


def test_delays_double_up_to_a_maximum(longest: None):
    """A server that is down for a day is asked once a minute, not a thousand times a second."""
    backoff = Backoff(max_seconds=5)

    assert [backoff.next_delay() for _ in range(6)] == [0.5, 1, 2, 4, 5, 5]


def test_jitter_takes_up_to_half_of_a_delay(shortest: None):
    """Clients that lost the server together must not come back together."""
    backoff = Backoff(max_seconds=5)

    assert [backoff.next_delay() for _ in range(6)] == [0.25, 0.5, 1, 2, 2.5, 2.5]


@given(st.integers(min_value=0, max_value=3000))
def test_a_delay_stays_within_bounds_after_any_number_of_failures(failures: int):
    """Doubling must not overflow."""
    backoff = Backoff()
    backoff.failures = failures

    delay = backoff.next_delay()

    assert 0.25 <= delay <= 60
    assert delay >= 30 or failures < 7


def test_delays_are_random():
    assert len({Backoff().next_delay() for _ in range(20)}) > 1


def test_a_success_resets_the_delay(longest: None):
    backoff = Backoff()
    first, *_ = [backoff.next_delay() for _ in range(9)]

    backoff.reset()

    assert backoff.next_delay() == first


@pytest.mark.parametrize(
    ("retry_after", "delay"), [(0, 0.5), (3, 3), (10, 10), (86_400, 10), (10**17, 10)]
)
def test_a_delay_is_at_least_retry_after_and_at_most_the_maximum(
    longest: None, retry_after: int, delay: float
):
    """A server cannot make a client sleep for a year."""
    backoff = Backoff(max_seconds=10)

    assert backoff.next_delay(TooManyMessages("Slow down.", retry_after=retry_after)) == delay


def test_an_error_without_retry_after_gets_the_usual_delay(longest: None):
    assert Backoff().next_delay(ServerUnreachable("Gone.")) == 0.5


@pytest.mark.parametrize(
    "error",
    [
        errors.ServerUnreachable,  # a laptop changed networks
        errors.NotReady,  # the server is starting
        errors.DatabaseUnavailable,  # Postgres is restarting
        errors.TooManyMessages,  # a rate limit
    ],
)
def test_a_temporary_failure_is_retryable(error: type[RestanteError]):
    assert is_retryable(error("It did not work."))


def test_an_unknown_outcome_is_retryable():
    """Only requests that are safe to repeat are repeated: an upload has its key."""
    assert is_retryable(errors.OutcomeUnknown("It may be stored."))


@pytest.mark.parametrize(
    "error",
    [
        errors.NotAuthenticated,  # a wrong token stays wrong
        errors.UploadGone,  # a deleted upload does not come back
        errors.FileTooLarge,
        errors.WorkspaceFull,  # frees up when the receiver fetches: the sender decides
        errors.AnswerInvalid,
        errors.FolderFull,
    ],
)
def test_a_permanent_failure_is_not_retryable(error: type[RestanteError]):
    assert not is_retryable(error("It did not work."))


@pytest.mark.parametrize(
    ("status", "retryable"),
    [(400, False), (404, False), (408, True), (418, False), (429, True), (500, True), (504, True)],
)
def test_a_refusal_without_a_known_code_is_judged_by_its_status(status: int, retryable: bool):
    """A gateway that lost its server answers 502 with a page of its own."""
    assert is_retryable(ServerRefused("Bad gateway.", status=status)) is retryable


@pytest.mark.parametrize("facts", [{}, {"status": "503"}], ids=str)
def test_a_refusal_without_a_numeric_status_is_not_retryable(facts: dict[str, Any]):
    assert not is_retryable(ServerRefused("What?", **facts))
