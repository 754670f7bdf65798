"""
How many requests of one caller run at once, event streams and WebSockets included.

A caller is a workspace, or a peer.  A request is charged when it is authenticated: to the one whose
token it carries, never to one that it only names.  So no caller can use up the requests of another,
or of the operator.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from restante.database import shares
from restante.errors import TooManyAtOnce

if TYPE_CHECKING:
    from restante.workspaces.rules import Workspace

# The keys of the ASGI scope that have a request's account, its connection and its size.
ACCOUNT = "restante.account"
PLACE = "restante.place"
RECEIVED = "restante.received"  # bytes of the body so far

_RETRY_AFTER_SECONDS = 1


class Place(Protocol):
    """A connection; before a request on it is authenticated, it counts for its address."""

    def authenticated(self) -> None: ...
    def request_began(self) -> None: ...
    def request_ended(self) -> None: ...


class Concurrency:
    """The running requests of each caller."""

    def __init__(self, limit: int, *, on_refusal: Callable[[], object]) -> None:
        self.limit = limit
        self._on_refusal = on_refusal
        self._running: Counter[Hashable] = Counter()

    @contextmanager
    def counted(self, scope: "dict[str, Any]") -> Iterator[None]:
        """Count a request while it runs, from the moment it is authenticated."""
        account = scope[ACCOUNT] = Account(self, scope.get(PLACE))
        try:
            yield
        finally:
            account.close()

    def enter(self, caller: Hashable) -> None:
        """Raises TooManyAtOnce."""
        if self._running[caller] >= self.limit:
            self._on_refusal()
            raise TooManyAtOnce(
                f"{self.limit} requests of this caller are running; let one of them end first.",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        self._running[caller] += 1

    def leave(self, caller: Hashable) -> None:
        self._running[caller] -= 1
        if not self._running[caller]:
            del self._running[caller]


class Account:
    """Whom one request is charged to."""

    __slots__ = ("_charged", "_concurrency", "_place", "workspace")

    def __init__(self, concurrency: Concurrency, place: Place | None) -> None:
        self._concurrency = concurrency
        self._place = place
        if place:
            place.request_began()
        self._charged: Hashable | None = None
        self.workspace: Workspace | None = None  # for the log: whom it is about, once it is known

    def charge(self, caller: Hashable) -> None:
        """Charge the caller, once; raises TooManyAtOnce."""
        if self._charged is None:
            self._concurrency.enter(caller)
            self._charged = caller
        self._authenticated_as(caller)

    def trust(self) -> None:
        """The operator is calling; these requests are charged to nobody."""
        self._authenticated_as(None)

    def _authenticated_as(self, caller: Hashable | None) -> None:
        shares.caller.set(caller)
        if self._place:
            self._place.authenticated()

    def close(self) -> None:
        """The request has ended."""
        if self._charged is not None:
            self._concurrency.leave(self._charged)
        if self._place:
            self._place.request_ended()
