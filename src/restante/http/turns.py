"""
Fair turns on the event loop: nobody waits behind the many requests of somebody else.

A request begins with a turn.  It pauses while it waits for its client, or for news, and takes the
next turn to go on.  Callers get turns in rotation; the requests of one caller are first come, first
served.  No turn is longer than a few milliseconds, whatever its request waits for.
"""

import asyncio
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from restante.database import shares

_AT_ONCE = 4
_AT_ONCE_PER_CALLER = 2
_MAX_SECONDS = 0.005


@dataclass(slots=True)
class _Caller:
    name: Hashable
    running: int = 0
    queue: deque[asyncio.Future[None]] = field(default_factory=deque[asyncio.Future[None]])
    is_in_rotation: bool = False  # if somebody is queued, and one more may run


class Turns:
    """The callers that work now, and those that wait."""

    def __init__(self, *, at_once: int = _AT_ONCE, per_caller: int = _AT_ONCE_PER_CALLER) -> None:
        self._free = at_once
        self._per_caller = per_caller
        self._callers: dict[Hashable, _Caller] = {}
        self._rotation: deque[_Caller] = deque()

    def __len__(self) -> int:
        """How many callers work or wait."""
        return len(self._callers)

    async def begin(self, name: Hashable) -> None:
        """Wait until it is this caller's turn; there must be an `end` for it."""
        caller = self._callers.setdefault(name, _Caller(name))
        # A free turn means that nobody waits who may have it.
        if self._free and caller.running < self._per_caller:
            self._start(caller)
            return
        given = asyncio.get_running_loop().create_future()
        caller.queue.append(given)
        self._rotate(caller)
        try:
            await given
        except asyncio.CancelledError:
            if given.cancelled():
                self._forget(caller)
            else:  # it was given in the same moment
                self.end(name)
            raise

    def end(self, name: Hashable) -> None:
        """A turn of this caller is over; the next one begins."""
        caller = self._callers[name]
        caller.running -= 1
        self._free += 1
        self._rotate(caller)
        while self._free and self._rotation:
            self._give(self._rotation.popleft())
        self._forget(caller)

    def _give(self, caller: _Caller) -> None:
        caller.is_in_rotation = False
        while caller.queue and caller.queue[0].done():
            caller.queue.popleft()  # it was cancelled while it waited
        if caller.queue:
            self._start(caller)
            caller.queue.popleft().set_result(None)
            self._rotate(caller)
        else:
            self._forget(caller)

    def _start(self, caller: _Caller) -> None:
        self._free -= 1
        caller.running += 1

    def _rotate(self, caller: _Caller) -> None:
        may_run = caller.queue and caller.running < self._per_caller
        if may_run and not caller.is_in_rotation:
            caller.is_in_rotation = True
            self._rotation.append(caller)

    def _forget(self, caller: _Caller) -> None:
        is_idle = not caller.running and all(one.done() for one in caller.queue)
        # It may have been forgotten already, and be back as another one of the same name.
        if is_idle and not caller.is_in_rotation and self._callers.get(caller.name) is caller:
            del self._callers[caller.name]


class Turn:
    """The turn of one request."""

    __slots__ = ("_holder", "_timer", "_turns")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._holder: Hashable | None = None  # the caller that it was given to
        self._timer: asyncio.TimerHandle | None = None

    async def take(self) -> None:
        """Go on, or wait for the next turn of this caller; the operator never waits."""
        caller = shares.caller.get()
        if caller is not None and self._holder is None:
            await self._turns.begin(caller)
            self._holder = caller
            self._timer = asyncio.get_running_loop().call_later(_MAX_SECONDS, self.end)

    def end(self) -> None:
        """Let others go on; a turn ends once."""
        if self._holder is not None:
            holder, self._holder = self._holder, None
            # Not at once: requests that never wait would all run before anybody else could.
            asyncio.get_running_loop().call_soon(self._turns.end, holder)
        if self._timer is not None:
            self._timer.cancel()


_current: ContextVar[Turn | None] = ContextVar("turn", default=None)


@contextmanager
def one_request(turns: Turns) -> Iterator[None]:
    """All that is done inside is one request; it has no turn yet."""
    turn = Turn(turns)
    before = _current.set(turn)
    try:
        yield
    finally:
        turn.end()
        _current.reset(before)


def pause() -> None:
    """The request is about to wait: let others go on."""
    if turn := _current.get():
        turn.end()


async def resume() -> None:
    """The request goes on: wait for its turn, unless it has one."""
    if turn := _current.get():
        await turn.take()


async def next_turn() -> None:
    """Let everything else that is ready go on first."""
    pause()
    await asyncio.sleep(0)
    await resume()
