"""
How many requests of one workspace run at once, event streams and WebSockets included.

A request is charged when it is authenticated: to the workspace whose token it carries, never to one
that it only names.  So no workspace can use up the requests of another, or of the operator.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol
from weakref import WeakValueDictionary

from restante.errors import TooManyAtOnce
from restante.ids import WorkspaceId

# The keys of the ASGI scope that have a request's account and its connection.
ACCOUNT = "restante.account"
PLACE = "restante.place"

_RETRY_AFTER_SECONDS = 1
_TURNS_AT_ONCE = 4
_TURN_SECONDS = 5.0


class Place(Protocol):
    """A connection; before a request on it is authenticated, it counts for its address."""

    def authenticated(self) -> None: ...
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


class Turns:
    """
    Lets in a few requests with the same token at a time; the others wait, in order.

    Every request begins with a look-up of its token.  Without turns, a thousand requests of one
    workspace would stand before everybody else's in the queue for a database connection.
    """

    def __init__(self) -> None:
        self._by_token: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, token: str) -> AsyncIterator[None]:
        """Raises TooManyAtOnce if it takes too long."""
        turns = self._by_token.get(token)
        if turns is None:
            turns = self._by_token[token] = asyncio.Semaphore(_TURNS_AT_ONCE)
        try:
            async with asyncio.timeout(_TURN_SECONDS):
                await turns.acquire()
        except TimeoutError as error:
            raise TooManyAtOnce(
                "Too many requests with this token wait for the database; send fewer at once.",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            ) from error
        try:
            yield
        finally:
            turns.release()


class Account:
    """Whom one request is charged to."""

    __slots__ = ("_charged", "_concurrency", "_place")

    def __init__(self, concurrency: Concurrency, place: Place | None) -> None:
        self._concurrency = concurrency
        self._place = place
        self._charged: WorkspaceId | None = None

    def charge(self, workspace_id: WorkspaceId) -> None:
        """Charge the workspace, once; raises TooManyAtOnce."""
        if self._charged is None:
            self._concurrency.enter(workspace_id)
            self._charged = workspace_id
        self.trust()

    def trust(self) -> None:
        """The request is authenticated; the operator's requests are charged to nobody."""
        if self._place:
            self._place.authenticated()

    def close(self) -> None:
        """The request has ended."""
        if self._charged is not None:
            self._concurrency.leave(self._charged)
        if self._place:
            self._place.request_ended()
