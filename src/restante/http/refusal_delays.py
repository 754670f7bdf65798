"""
Delays refusals of callers that get many of them.

A client that repeats what was refused, without a pause and on many connections, would otherwise use
up the event loop.  Nobody else waits: only refusals are delayed, and only this caller's.
"""

import random
from collections.abc import Hashable

_AT_ONCE = 50
_PER_SECOND = 25.0
_MAX_SECONDS = 5.0
_MAX_CALLERS = 10_000


class RefusalDelays:
    """When the next refusal of each caller is due."""

    def __init__(self) -> None:
        self._due: dict[Hashable, float] = {}

    def next(self, caller: Hashable | None, *, now: float) -> float:
        """How long the next refusal is held back, in seconds; the operator's (None) are not."""
        if caller is None:
            return 0.0
        earliest = now - _AT_ONCE / _PER_SECOND
        due = max(self._due.get(caller, earliest), earliest) + 1 / _PER_SECOND
        # Random, so that clients that were refused together do not come back together.
        latest = now + random.uniform(_MAX_SECONDS / 2, _MAX_SECONDS)  # noqa: S311 - not a secret
        self._due[caller] = min(due, now + _MAX_SECONDS)
        if len(self._due) > _MAX_CALLERS:
            self._due = {one: at for one, at in self._due.items() if at > now}
        return max(0.0, min(due, latest) - now)
