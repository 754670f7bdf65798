"""
How many ops and bytes a peer may be sent, and send, in a minute.

Who only uses the name of a peer, without its token, has the same limits, but spends nothing of it.
What is served is known only afterwards.  So a peer may get into debt, and waits until it is paid.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass

from restante.errors import TooManyMessages
from restante.oplog.peers import Peer

_MAX_PEERS = 10_000


@dataclass(slots=True)
class _Bucket:
    level: float
    filled_at: float

    def fill(self, per_minute: int, now: float) -> None:
        earned = (now - self.filled_at) * per_minute / 60
        self.level = min(self.level + earned, per_minute)
        self.filled_at = now


class PeerRates:
    """What each peer has left of its minute."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[tuple[int, str, str], _Bucket] = OrderedDict()

    def check(self, peer: Peer, network: str = "") -> None:
        """
        Raises TooManyMessages with the seconds until the peer may go on.

        `network` is from where somebody asks who has not proved to be the peer.
        """
        for what, per_minute in _limits(peer).items():
            level = self._filled((peer.id, network, what), per_minute).level
            if level < 0:
                seconds = int(-level * 60 / per_minute) + 1
                raise TooManyMessages(
                    f"This peer may exchange {per_minute} {what} a minute; "
                    f"try again in {seconds} s.",
                    retry_after_seconds=seconds,
                )

    def spend(self, peer: Peer, network: str = "", *, ops: int, size: int) -> None:
        """Count what was sent or received."""
        spent = {"ops": ops, "bytes": size}
        for what, per_minute in _limits(peer).items():
            self._filled((peer.id, network, what), per_minute).level -= spent[what]

    def _filled(self, key: tuple[int, str, str], per_minute: int) -> _Bucket:
        now = time.monotonic()
        bucket = self._buckets.setdefault(key, _Bucket(per_minute, now))
        bucket.fill(per_minute, now)
        self._buckets.move_to_end(key)
        if len(self._buckets) > 2 * _MAX_PEERS:
            self._buckets.popitem(last=False)
        return bucket


def _limits(peer: Peer) -> dict[str, int]:
    limits = {"ops": peer.max_ops_per_minute, "bytes": peer.max_bytes_per_minute}
    return {what: limit for what, limit in limits.items() if limit is not None}
