"""Decides which failures to retry and how long to wait before the next attempt."""

import random

from restante import errors
from restante.errors import RestanteError

_FIRST_SECONDS = 0.5
_MAX_SECONDS = 60.0

_RETRYABLE = (
    errors.DatabaseReadOnly,
    errors.DatabaseUnavailable,
    errors.NotReady,
    errors.OutcomeUnknown,  # a second attempt with the same key can tell what became of the first
    errors.ServerUnreachable,
    errors.StatementTimedOut,
    errors.TableBusy,
    errors.TooManyAtOnce,
    errors.TooManyConnections,
    errors.TooManyMessages,
)


def is_retryable(error: RestanteError) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, errors.OutcomeUnknown) and error.facts.get("delivery_mode") == "push":
        return False  # nobody can tell: the server keeps nothing of what it forwards
    if isinstance(error, errors.ServerRefused):
        status = error.facts.get("status", 0)
        return isinstance(status, int) and (status >= 500 or status in {408, 429})
    return isinstance(error, _RETRYABLE)


class Backoff:
    """
    Exponential back-off with jitter.

    Each delay is between half of the current ceiling and the ceiling, so that clients that lost the
    same server do not reconnect all at once.
    """

    def __init__(self, *, max_seconds: float = _MAX_SECONDS) -> None:
        self._max_seconds = max_seconds
        self.failures = 0

    def reset(self) -> None:
        """Start again with the shortest delay, after a success."""
        self.failures = 0

    def next_delay(self, error: RestanteError | None = None) -> float:
        """Count a failure and return the seconds to wait; at least the server's Retry-After."""
        ceiling = min(_FIRST_SECONDS * 2 ** min(self.failures, 30), self._max_seconds)
        self.failures += 1
        retry_after = error.facts.get("retry_after", 0) if error else 0
        floor = min(float(retry_after), self._max_seconds)
        return max(floor, random.uniform(ceiling / 2, ceiling))  # noqa: S311 - jitter
