"""
How many requests of one workspace run at once, event streams and WebSockets included.

A request is charged when it is authenticated: to the workspace whose token it carries, never to one
that it only names.  So no workspace can use up the requests of another, or of the operator.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from restante.database import shares
from restante.errors import TooManyAtOnce
from restante.ids import WorkspaceId

# The keys of the ASGI scope that have a request's account and its connection.
ACCOUNT = "restante.account"
PLACE = "restante.place"

_RETRY_AFTER_SECONDS = 1


class Place(Protocol):
    """A connection; before a request on it is authenticated, it counts for its address."""

    def authenticated(self) -> None: ...
    def request_began(self) -> None: ...
    def request_ended(self) -> None: ...


class Concurrency:
    """The running requests of each workspace."""

    def __init__(self, limit: int, *, on_refusal: Callable[[], object]) -> None:
        self.limit = limit
        self._on_refusal = on_refusal
        self._running: Counter[WorkspaceId] = Counter()

    @contextmanager
    def counted(self, scope: "dict[str, Any]") -> Iterator[None]:
        """Count a request while it runs, from the moment it is authenticated."""
        account = scope[ACCOUNT] = Account(self, scope.get(PLACE))
        try:
            yield
        finally:
            account.close()

    def enter(self, workspace_id: WorkspaceId) -> None:
        """Raises TooManyAtOnce."""
        if self._running[workspace_id] >= self.limit:
            self._on_refusal()
            raise TooManyAtOnce(
                f"{self.limit} requests of this workspace are running; let one of them end first.",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        self._running[workspace_id] += 1

    def leave(self, workspace_id: WorkspaceId) -> None:
        self._running[workspace_id] -= 1
        if not self._running[workspace_id]:
            del self._running[workspace_id]


class Account:
    """Whom one request is charged to."""

    __slots__ = ("_charged", "_concurrency", "_place")

    def __init__(self, concurrency: Concurrency, place: Place | None) -> None:
        self._concurrency = concurrency
        self._place = place
        if place:
            place.request_began()
        self._charged: WorkspaceId | None = None

    def charge(self, workspace_id: WorkspaceId) -> None:
        """Charge the workspace, once; raises TooManyAtOnce."""
        if self._charged is None:
            self._concurrency.enter(workspace_id)
            self._charged = workspace_id
        self._authenticated_as(workspace_id)

    def trust(self) -> None:
        """The operator is calling; these requests are charged to nobody."""
        self._authenticated_as(None)

    def _authenticated_as(self, caller: WorkspaceId | None) -> None:
        shares.caller.set(caller)
        if self._place:
            self._place.authenticated()

    def close(self) -> None:
        """The request has ended."""
        if self._charged is not None:
            self._concurrency.leave(self._charged)
        if self._place:
            self._place.request_ended()
