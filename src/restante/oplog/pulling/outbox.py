"""
Pushes ops to peers, best effort: the pull is what guarantees delivery.

Transient ops are in no log, so they go to every peer.  Fresh ops of this node go to peers that do
not wait for them in a long poll.  A queue is bounded and forgets its oldest op; an op that fails is
not tried again, because a later one may have been sent by then.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import structlog

from restante.database.pool import Database
from restante.errors import PeerUnreachable, RestanteError
from restante.oplog import peers, tables
from restante.oplog.peers import Peer
from restante.oplog.positions import START, Position
from restante.oplog.remote import Remote
from restante.oplog.serving import log as oplog
from restante.oplog.serving.encoding import PageEncoder
from restante.oplog.serving.log import Log, Record
from restante.oplog.serving.watch import Watcher
from restante.wire.oplog import Op

log = structlog.get_logger()

MAX_OPS = 500
MAX_BYTES = 4 * 1024 * 1024
# A peer that takes no pushes from us is left alone for so long.
REFUSED_SECONDS = 600.0

_LOOK_SECONDS = 60.0
_PAUSE_AFTER_FAILURE_SECONDS = 5.0
_WINDOW_RECORDS = 500
_TAKES_NO_PUSHES = frozenset({401, 403, 404, 405, 501})

_OPS = msgspec.json.Decoder(list[Op])


@dataclass(slots=True)
class _Queue:
    """The ops that wait for one peer."""

    peer: Peer
    waiting: deque[tuple[Op, int]] = field(default_factory=deque[tuple[Op, int]])
    bytes: int = 0
    refused_until: float = 0.0  # monotonic

    def put(self, op: Op, size: int) -> int:
        """Queue an op; returns how many had to go for it."""
        if size > MAX_BYTES or time.monotonic() < self.refused_until:
            return 1
        self.waiting.append((op, size))
        self.bytes += size
        dropped = 0
        while len(self.waiting) > MAX_OPS or self.bytes > MAX_BYTES:
            self.bytes -= self.waiting.popleft()[1]
            dropped += 1
        return dropped

    def take(self) -> Op:
        op, size = self.waiting.popleft()
        self.bytes -= size
        return op


class Outbox:
    """The queues of this process, and what sends them."""

    def __init__(self, db: Database, watcher: Watcher) -> None:
        self._db = db
        self._watcher = watcher
        self._remote: Remote | None = None  # while it runs
        self._queues: dict[int, _Queue] = {}
        self._senders: dict[int, asyncio.Task[None]] = {}
        self.sent = 0
        self.failed = 0
        self.dropped_by = Counter[str]()  # host of the peer

    @property
    def dropped(self) -> int:
        """Ops that were never sent, of all peers."""
        return self.dropped_by.total()

    async def send_transient(self, op: Op) -> int:
        """Queue an op that is in no log for every peer that may see it; returns for how many."""
        async with self._db.connection() as connection:
            everybody = await peers.all_peers(connection)
        interested = [peer for peer in everybody if peer.may_see(op.table)]
        size = len(msgspec.json.encode(op))
        for peer in interested:
            self._put(peer, op, size)
        return len(interested)

    async def run(self, remote: Remote, pushes_to: Callable[[Peer], bool]) -> None:
        """
        Push until cancelled; what is queued then is lost.

        Of several servers one pushes the log to a peer: two would do it in two orders.
        """
        self._remote = remote
        for queue in self._queues.values():
            self._start(queue)
        try:
            while True:
                try:
                    await self._follow_log(pushes_to)
                except RestanteError as error:
                    log.warning("outbox_interrupted", code=error.code, reason=str(error))
                except Exception:
                    log.exception("outbox_interrupted")
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_SECONDS)
        finally:
            self._remote = None
            senders = list(self._senders.values())
            for sender in senders:
                sender.cancel()
            await asyncio.gather(*senders, return_exceptions=True)

    async def _follow_log(self, pushes_to: Callable[[Peer], bool]) -> None:
        """From the present end of the log on."""
        position: Position | None = None
        while True:
            listeners = [peer for peer in await self._without_long_poll() if pushes_to(peer)]
            if not listeners:
                position = None
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_SECONDS)
                continue
            async with self._watcher.waiting() as waiting:
                position = await self._queue_after(position, listeners)
                await waiting.next(_LOOK_SECONDS)
                if waiting.is_over:
                    return

    async def _without_long_poll(self) -> list[Peer]:
        """The peers that do not wait for news themselves."""
        async with self._db.connection() as connection:
            everybody = await peers.all_peers(connection)
        return [peer for peer in everybody if peer.protocol == "ulid"]

    async def _queue_after(self, after: Position | None, listeners: list[Peer]) -> Position:
        """Queue what this node has logged since; returns the position up to which it was read."""
        async with oplog.reading(self._db) as connection:
            below = await oplog.horizon(connection)
            own_host = await tables.own_host(connection)
            every = await oplog.logged_tables(connection)
            if after is None:
                head = await oplog.head(connection, below)
                return head.position if head else START
            visible = Log(connection, every, below)
            found = await visible.window(after, limit=_WINDOW_RECORDS, max_bytes=MAX_BYTES)
        if not found:
            return after
        own = [one for one in found if one.host == own_host and one.data is not None]
        for op in _ops(own, every):
            size = sum(len(bytes(record)) for record in op.data)
            for peer in listeners:
                if peer.may_see(op.table):
                    self._put(peer, op, size)
        return found[-1].position

    def _put(self, peer: Peer, op: Op, size: int) -> None:
        queue = self._queues.setdefault(peer.id, _Queue(peer))
        queue.peer = peer
        self.dropped_by[peer.host] += queue.put(op, size)
        self._start(queue)

    def _start(self, queue: _Queue) -> None:
        sender = self._senders.get(queue.peer.id)
        if self._remote is not None and (sender is None or sender.done()):
            sending = self._send(queue, self._remote)
            self._senders[queue.peer.id] = asyncio.create_task(sending)

    async def _send(self, queue: _Queue, remote: Remote) -> None:
        """Send what waits, one after the other; ends when nothing does."""
        while queue.waiting:
            op = queue.take()
            try:
                await remote.push(queue.peer, op)
                self.sent += 1
            except PeerUnreachable as error:
                self.failed += 1
                if error.facts.get("status") in _TAKES_NO_PUSHES:
                    queue.refused_until = time.monotonic() + REFUSED_SECONDS
                    self.dropped_by[queue.peer.host] += len(queue.waiting)
                    queue.waiting.clear()
                    queue.bytes = 0


def _ops(records: list[Record], every: list[oplog.LoggedTable]) -> list[Op]:
    """The ops as a page for these peers has them."""
    encoder = PageEncoder(every, is_ours=False)
    return _OPS.decode(encoder.add(records) + encoder.end())
