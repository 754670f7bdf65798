"""Rate limits: token buckets that refill with time."""

import time
from collections import OrderedDict
from dataclasses import dataclass
from uuid import UUID

from restante.errors import TooManyMessages

_MAX_SENDERS = 10_000


@dataclass(slots=True)
class _Bucket:
    level: float
    filled_at: float


class Rate:
    """
    Allows so many messages, and bytes of them, per minute and sender.

    A sender that was quiet may send that much at once.
    """

    def __init__(self, messages_per_minute: int, bytes_per_minute: int) -> None:
        self._messages = Allowance(messages_per_minute, "messages from one workspace")
        self._bytes = Allowance(bytes_per_minute, "bytes of messages from one workspace")

    def spend(self, sender: UUID) -> None:
        """Count a message; raises TooManyMessages with the seconds until the next one."""
        self._messages.spend(sender, 1)

    def spend_bytes(self, sender: UUID | None, size: int) -> None:
        """Count bytes of a message; raises TooManyMessages.  The operator (None) has no limit."""
        if sender is not None:
            self._bytes.spend(sender, size)


class Allowance:
    """So much per minute for each sender; one that was quiet may spend that much at once."""

    def __init__(self, per_minute: int, what: str) -> None:
        self._per_minute = per_minute
        self._what = what
        self._buckets: OrderedDict[UUID, _Bucket] = OrderedDict()

    def spend(self, sender: UUID, tokens: int) -> None:
        """Raises TooManyMessages with the seconds until there is enough."""
        bucket = self._filled(sender)
        if bucket.level < tokens:
            wait_seconds = int((tokens - bucket.level) * 60 / self._per_minute) + 1
            raise TooManyMessages(
                f"At most {self._per_minute} {self._what} are accepted a minute; "
                f"try again in {wait_seconds} s.",
                retry_after_seconds=wait_seconds,
            )
        bucket.level -= tokens

    def _filled(self, sender: UUID) -> _Bucket:
        now = time.monotonic()
        bucket = self._buckets.setdefault(sender, _Bucket(self._per_minute, now))
        earned = (now - bucket.filled_at) * self._per_minute / 60
        bucket.level = min(bucket.level + earned, self._per_minute)
        bucket.filled_at = now
        self._buckets.move_to_end(sender)
        if len(self._buckets) > _MAX_SENDERS:
            self._buckets.popitem(last=False)
        return bucket
