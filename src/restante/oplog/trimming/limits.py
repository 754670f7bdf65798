"""How long ops are kept, and how much they may take."""

from dataclasses import dataclass
from datetime import timedelta

# Few enough to read the log fast, many enough to trim it finely.
_PARTITIONS_KEPT = 7


@dataclass(frozen=True, slots=True)
class Policy:
    """How long ops of one table are kept; None: for ever, and whatever they take."""

    retention: timedelta | None = None
    cap_age: timedelta | None = None
    cap_bytes: int | None = None

    @property
    def is_off(self) -> bool:
        return self.retention is None and self.cap_age is None and self.cap_bytes is None


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds for the whole log; the policy is for tables that have none of their own."""

    policy: Policy = Policy()  # its bytes are those of all tables together
    margin: timedelta = timedelta(hours=1)
    dormant_after: timedelta | None = None


def width(policy: Policy, widest: timedelta) -> timedelta:
    """How wide partitions are, so that little more is kept than the retention says."""
    kept = [one for one in (policy.retention, policy.cap_age) if one is not None]
    if not kept:
        return widest
    days = min(kept) / _PARTITIONS_KEPT // timedelta(days=1)
    return min(max(timedelta(days=days), timedelta(days=1)), widest)
