"""
Callbacks of the application for ops that were applied from peers, for transient ops, and for peers
that were evicted.

They run after the commit, one after the other, in a task of their own: a slow or failing one costs
others time, never the op.  They may miss ops: those that were applied when the process stopped, and
those that did not fit into the queue, which are counted.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import structlog

from restante.wire import EvictedPeer
from restante.wire.oplog import ActionName

log = structlog.get_logger()

MAX_WAITING_BYTES = 64 * 1024 * 1024
_MAX_EVICTED = 1000
_OVERHEAD_BYTES = 500


@dataclass(frozen=True, slots=True)
class AppliedOp:
    """A change of a peer; `records` are JSON texts, of a delete only their keys."""

    table: str
    action: ActionName
    records: tuple[str, ...]
    ulid: str
    host: str
    transient: bool = False


Callback = Callable[[AppliedOp], Awaitable[None] | None]
EvictionCallback = Callable[[EvictedPeer], Awaitable[None] | None]


class Callbacks:
    """Who wants to hear of ops, and the ops that wait to be told."""

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._of_table: defaultdict[str | None, list[Callback]] = defaultdict(list)
        self._of_evictions: list[EvictionCallback] = []
        self._evicted: deque[EvictedPeer] = deque(maxlen=_MAX_EVICTED)
        self._waiting: deque[tuple[AppliedOp, int]] = deque()
        self._max_bytes = max_waiting_bytes
        self._bytes = 0
        self._filled = asyncio.Event()
        self.failed = 0
        self.dropped = 0

    def on(self, table: str | None, callback: Callback) -> None:
        """Call it for each op of a table, or of all tables."""
        self._of_table[table].append(callback)

    def on_eviction(self, callback: EvictionCallback) -> None:
        """Call it for each peer that lost ops before it had read them."""
        self._of_evictions.append(callback)

    def wants(self, table: str) -> bool:
        """Whether anybody wants to hear of ops of this table."""
        return bool(self._of_table.get(table) or self._of_table.get(None))

    def put(self, op: AppliedOp) -> None:
        """Let the callbacks be called, as soon as possible."""
        if not self.wants(op.table):
            return
        size = sum(map(len, op.records)) + _OVERHEAD_BYTES
        if self._bytes + size > self._max_bytes and self._waiting:
            self.dropped += 1
            if self.dropped == 1 or self.dropped % 1000 == 0:
                log.warning("callbacks_too_slow", table=op.table, dropped=self.dropped)
            return
        self._bytes += size
        self._waiting.append((op, size))
        self._filled.set()

    def put_eviction(self, evicted: EvictedPeer) -> None:
        """The same for a peer that was evicted."""
        self._evicted.append(evicted)
        self._filled.set()

    async def run(self) -> None:
        """Call the callbacks until cancelled."""
        while True:
            await self._filled.wait()
            await self.call_waiting()

    async def call_waiting(self) -> None:
        """Call the callbacks for all that waits now."""
        self._filled.clear()
        while self._waiting:
            op, size = self._waiting.popleft()
            self._bytes -= size
            for callback in [*self._of_table.get(op.table, ()), *self._of_table.get(None, ())]:
                await self._call(partial(callback, op), table=op.table, ulid=op.ulid)
        while self._evicted:
            evicted = self._evicted.popleft()
            for callback in self._of_evictions:
                await self._call(partial(callback, evicted), peer=evicted.peer)

    async def _call(self, call: Callable[[], Awaitable[None] | None], **about: str) -> None:
        try:
            answer = call()
            if answer is not None:
                await answer
        except Exception:  # whatever the application's code raises
            self.failed += 1
            log.exception("callback_failed", **about)
