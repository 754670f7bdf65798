"""
The open connections of this process: how many there may be, and who has them.

A connection counts for its address, except while an authenticated request runs on it.  So a proxy,
whose address all clients share, is limited only in connections on which nobody has shown a token.
Those of a proxy that the operator lists count for nobody; a request on one counts for the client
that it names, until it is authenticated.
"""

import resource
import sys
from collections import Counter
from dataclasses import dataclass

import structlog

from restante.http.networks import AddressRanges, network_of
from restante.http.refusal_delays import RefusalDelays
from restante.server.lingering import DiscardPace
from restante.server.metrics import ConnectionMetrics

log = structlog.get_logger()

# Refused connections that are answered a moment later, as a share of the total; beyond it they are
# aborted.
_REFUSED_SHARE = 1 / 8

# Files that are not connections of clients: the pool, calls to push workspaces, sockets, logs.
_OTHER_FILES = 128

# Shares of the total at which it is called nearly used up, and no longer so.
_NEARLY, _NO_LONGER = 0.8, 0.6


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections may be open at once."""

    total: int
    per_address: int  # without an authenticated request; 0: no limit
    per_workspace: int  # with one

    @property
    def refused(self) -> int:
        """Those that are refused, and open until they are answered."""
        return max(1, int(self.total * _REFUSED_SHARE))

    def within(self, open_files: int, *, pool_size: int) -> "ConnectionLimits":
        """
        What of these limits holds in a process that may open so many files.

        One address, or one workspace, never gets all of the total.
        """
        for_clients = int((open_files - pool_size - _OTHER_FILES) / (1 + _REFUSED_SHARE))
        total = max(2, min(self.total, for_clients))
        return ConnectionLimits(
            total, min(self.per_address, total // 2), min(self.per_workspace, max(1, total // 4))
        )


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one; returns what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS refuses a soft limit above another, undocumented one
        return soft
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def limits_within_open_files(wanted: ConnectionLimits, *, pool_size: int) -> ConnectionLimits:
    """The wanted limits, as far as this process may open files."""
    open_files = raise_open_files()
    limits = wanted.within(open_files, pool_size=pool_size)
    if limits.total < wanted.total:
        log.warning(
            "open_files_too_few",
            open_files=open_files,
            max_connections=wanted.total,
            accepted=limits.total,
        )
    return limits


class Connections:
    """Counts connections, refuses those beyond the limits, and reports both."""

    def __init__(
        self,
        limits: ConnectionLimits,
        metrics: ConnectionMetrics,
        refusal_delays: RefusalDelays,
        proxies: AddressRanges | None = None,
    ) -> None:
        self._limits = limits
        self._proxies = proxies or AddressRanges()
        self.refusal_delays = refusal_delays
        self.discard_pace = DiscardPace()
        self._open = 0
        self._refused = 0  # open too, until their client has read the refusal
        self._is_nearly_full = False
        self._unauthenticated: Counter[str] = Counter()
        self.metrics = metrics
        metrics.limit.set(limits.total)

    def enter(self, host: str) -> "Place":
        """
        Count a new connection; the place says whether it is refused.

        A refused one takes no place of others, or one address could use up the total.
        """
        network = None if self._proxies.includes(host) else network_of(host)
        place = Place(self, network, self._refused_for(network))
        if place.refused_for:
            self.metrics.refused.labels(place.refused_for).inc()
            self._refused += 1
        else:
            place.begin_to_count()
            self._count_open(+1)
        return place

    def _refused_for(self, network: str | None) -> str | None:
        if self._open >= self._limits.total:
            return "total"
        return None if network is None or self.has_room_for(network) else "address"

    def has_room_for(self, network: str) -> bool:
        """Whether an address may have another connection without an authenticated request."""
        limit = self._limits.per_address
        return limit == 0 or self._unauthenticated[network] < limit

    def has_room_to_refuse(self) -> bool:
        """Whether a refused connection can wait to be answered."""
        return self._refused <= self._limits.refused

    def changed(self, by: int, network: str) -> None:
        """An address has one connection without an authenticated request more, or less."""
        self._unauthenticated[network] += by
        if not self._unauthenticated[network]:
            del self._unauthenticated[network]

    def left(self, *, was_refused: bool) -> None:
        """A connection was closed."""
        if was_refused:
            self._refused -= 1
        else:
            self._count_open(-1)

    def _count_open(self, by: int) -> None:
        self._open += by
        self.metrics.open.set(self._open)
        self._warn_when_nearly_full()

    def _warn_when_nearly_full(self) -> None:
        """Log once per rise."""
        share = self._open / self._limits.total
        if share >= _NEARLY and not self._is_nearly_full:
            self._is_nearly_full = True
            log.warning("connections_nearly_full", open=self._open, limit=self._limits.total)
        elif share < _NO_LONGER:
            self._is_nearly_full = False


class Place:
    """
    One connection, until it is closed and nobody works on a request of it any more.

    A client that sends requests and closes without waiting would otherwise be bounded by nothing.
    """

    __slots__ = (
        "_connections",
        "_counts_for",
        "_is_open",
        "_requests",
        "network",
        "refused_for",
    )

    def __init__(
        self, connections: Connections, network: str | None, refused_for: str | None
    ) -> None:
        self._connections = connections
        self._counts_for: str | None = None
        self._is_open = True
        self._requests = 0  # that are being handled
        self.network = network  # None: a listed proxy's
        self.refused_for = refused_for  # a refused connection has no requests

    def begin_to_count(self) -> None:
        """Nothing on it is authenticated yet."""
        self._count_for(self.network)

    def admits(self, client: str) -> bool:
        """Count a request that a proxy passes on for this client, unless it has too many."""
        if self.network is not None:
            return True
        if not self._connections.has_room_for(client):
            self._connections.metrics.refused.labels("address").inc()
            return False
        self._count_for(client)
        return True

    def authenticated(self) -> None:
        """A request on it has shown a valid token."""
        self._count_for(None)

    def request_began(self) -> None:
        self._requests += 1

    def request_ended(self) -> None:
        """It may end after its connection."""
        self._requests -= 1
        if self._is_open:
            self._count_for(self.network)
        else:
            self._give_up()

    def leave(self) -> None:
        """It was closed."""
        self._is_open = False
        self._give_up()

    def _give_up(self) -> None:
        if self._requests:
            return
        self._count_for(None)
        self._connections.left(was_refused=bool(self.refused_for))

    def _count_for(self, network: str | None) -> None:
        for one, by in ((self._counts_for, -1), (network, +1)):
            if one is not None:
                self._connections.changed(by, one)
        self._counts_for = network
