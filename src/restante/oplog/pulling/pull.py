"""
Pulls the logs of the peers: one task per peer, for as long as it is configured.

Several servers may share a database.  One of them pulls from a peer at a time, by an advisory lock
on a connection that it keeps; if it ends, another takes over.  Whoever loses the lock without
noticing does no harm: a page counts only if the cursor still stands where it was asked for.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import structlog

from restante.database import sql
from restante.database.pool import Connection, Database
from restante.errors import RestanteError
from restante.oplog import peers, tables
from restante.oplog.callbacks import Callbacks
from restante.oplog.peers import Peer
from restante.oplog.pulling.following import Follower
from restante.oplog.pulling.state import Pace
from restante.oplog.remote import Remote
from restante.oplog.snapshots.taking import Taker

log = structlog.get_logger()

queries = sql.load("restante.oplog.pulling", "pull")

# How long a change of the peers may take until it has an effect.
_LOOK_SECONDS = 1.0
_MAX_BACKOFF_SECONDS = 60.0
_PATIENCE = timedelta(seconds=0.5)


@dataclass(frozen=True, slots=True)
class _Task:
    config: Peer
    interrupted_for: datetime | None  # when a snapshot was wanted that had to wait
    task: "asyncio.Task[None]"


@dataclass(frozen=True, slots=True)
class Puller:
    """Pulls from all peers; `run` never ends by itself."""

    db: Database
    remote: Remote
    pace: Pace
    clock: Callable[[], datetime]
    callbacks: Callbacks = field(default_factory=Callbacks)
    _held: set[int] = field(default_factory=set[int])

    def pulls_from(self, peer: Peer) -> bool:
        """Whether it is this process that does."""
        return peer.id in self._held

    async def run(self) -> None:
        """Supervise one task per peer; a failure of the database is waited out."""
        pause_seconds = _LOOK_SECONDS
        while True:
            try:
                if await self._has_peers():
                    async with self.db.session() as connection:
                        await self._supervise(connection)
                pause_seconds = _LOOK_SECONDS
            except RestanteError as error:
                log.warning("pulling_interrupted", code=error.code, reason=str(error))
                pause_seconds = min(2 * pause_seconds, _MAX_BACKOFF_SECONDS)
            except Exception:
                log.exception("pulling_interrupted")
                pause_seconds = min(2 * pause_seconds, _MAX_BACKOFF_SECONDS)
            await asyncio.sleep(pause_seconds * random.uniform(0.9, 1.1))  # noqa: S311 - jitter

    async def _has_peers(self) -> bool:
        """Without any, no connection is kept."""
        async with self.db.connection() as connection:
            return bool(await peers.all_peers(connection))

    async def _supervise(self, connection: Connection) -> None:
        """
        Hold the locks on this connection: if it is lost, all tasks end.

        Returns when there are no peers any more.
        """
        own_host = await tables.own_host(connection)
        taker = Taker(self.db, self.remote, own_host, self.clock)
        follower = Follower(self.db, self.remote, taker, self.pace, self.clock, self.callbacks)
        tasks: dict[int, _Task] = {}
        try:
            while True:
                has_peers = await _adjust(connection, follower, tasks)
                self._held.clear()
                self._held.update(tasks)
                if not has_peers:
                    return
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self._held.clear()
            await _cancel([one.task for one in tasks.values()])


async def _adjust(connection: Connection, follower: Follower, tasks: dict[int, _Task]) -> bool:
    """Begin, end and begin again what has changed; returns whether there are peers."""
    own_host = follower.taker.own_host
    wanted = {
        peer.id: _config(peer)
        for peer in await peers.all_peers(connection)
        if not peers.is_same_node(peer.host, own_host)
    }
    rows = await connection.fetch(queries.waiting_snapshots, follower.clock() - _PATIENCE)
    wanted_at = {row["peer_id"]: row["wanted_at"] for row in rows}
    for peer_id, running in list(tasks.items()):
        # A snapshot that somebody wants does not wait for the end of a long poll.
        is_waiting = peer_id in wanted_at and running.interrupted_for != wanted_at[peer_id]
        if wanted.get(peer_id) != running.config or running.task.done() or is_waiting:
            await _cancel([running.task])
            del tasks[peer_id]
            await peers.stop_pull(connection, peer_id)
    for peer_id, config in wanted.items():
        if peer_id not in tasks and await peers.may_pull(connection, peer_id):
            follow = follower.follow(config.host)
            task = asyncio.create_task(follow, name=f"pull from {config.host}")
            tasks[peer_id] = _Task(config, wanted_at.get(peer_id), task)
    return bool(wanted)


def _config(peer: Peer) -> Peer:
    """What of a peer was configured; the rest changes while it is pulled from."""
    return replace(peer, cursor="", protocol=None, shown_later=frozenset())


async def _cancel(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        with suppress(asyncio.CancelledError):
            if error := task.exception():
                log.error("pull_crashed", task=task.get_name(), exc_info=error)
