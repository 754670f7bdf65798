"""Which failures pass by themselves, and how long to wait before the next try."""

import random
from collections.abc import Callable

from restante import errors
from restante.errors import RestanteError

SHORTEST_SECONDS = 0.5
LONGEST_SECONDS = 60.0

_PASSING = (
    errors.DatabaseUnavailable,
    errors.NotReady,
    errors.ServerUnreachable,
    errors.StatementTimedOut,
    errors.TableBusy,
    errors.TooManyAtOnce,
    errors.TooManyMessages,
)


def is_passing(error: RestanteError) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, errors.ServerRefused):
        status = error.facts.get("status", 0)
        return isinstance(status, int) and (status >= 500 or status in {408, 429})
    return isinstance(error, _PASSING)


class Patience:
    """
    Pauses that double from try to try, each with some chance in it.

    Many clients that lost the same server come back spread out, and not at its first breath.
    """

    def __init__(
        self,
        *,
        longest_seconds: float = LONGEST_SECONDS,
        chance: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._longest_seconds = longest_seconds
        self._chance = chance
        self.failures = 0

    def succeeded(self) -> None:
        """Begin anew with short pauses."""
        self.failures = 0

    def failed(self, error: RestanteError | None = None) -> float:
        """The seconds to wait after this failure; no less than the server asked for."""
        ceiling = min(SHORTEST_SECONDS * 2 ** min(self.failures, 30), self._longest_seconds)
        self.failures += 1
        asked = error.facts.get("retry_after", 0) if error else 0
        floor = min(float(asked), self._longest_seconds)
        return max(floor, self._chance(ceiling / 2, ceiling))
