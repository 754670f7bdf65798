"""
Whether the database's disk has room, and what is done when it has not.

Nothing new is stored once the free space reaches the reserve.  Acknowledgements, fetches and sweeps
go on and use the reserve, so a full disk can empty itself.  If another program takes the reserve
too, the ballast is given up, piece by piece; the last one only to a sweep, or to start Postgres.

The disk can be seen only if it is on this machine.  Otherwise an error of Postgres tells that it is
full, and counts until a while has passed without another one.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog

from restante.database.pool import Connection, Database
from restante.errors import DatabaseFull, DiskLow
from restante.retention import rules, store
from restante.retention.rules import Room

log = structlog.get_logger()

T = TypeVar("T")

_FRESH_SECONDS = 1.0
# What arrives is written twice, to the WAL and to its table.
_WRITTEN_PER_BYTE = 2
_FULL_SECONDS = 10.0
_PROBE_AFTER_SECONDS = 5.0
_RETRY_AFTER_SECONDS = 30


class Ballast(Protocol):
    """Space that can be given up, in pieces."""

    @property
    def piece_bytes(self) -> int: ...
    def in_place(self) -> int: ...
    def make_room(self, needed: int, *, keep_last: bool = False) -> bool: ...
    def release(self) -> bool: ...
    def is_complete(self) -> bool: ...
    def refill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DiskState:
    """For the status and the metrics; None: the disk cannot be seen from here."""

    is_low: bool
    free_bytes: int | None
    reserve_bytes: int | None
    ballast_bytes: int


class Disk:
    """The disk of one database, as this process sees it."""

    def __init__(
        self, db: Database, *, reserve_bytes: int | None = None, ballast: Ballast | None = None
    ) -> None:
        self._db = db
        self._chosen_reserve = reserve_bytes
        self._ballast = ballast
        self._directories: Sequence[str] = ()
        self._room: Room | None = None
        self._read_at = -_FRESH_SECONDS
        self._taken = 0  # accepted since the disk was read
        self._was_low = False

    async def locate(self, connection: Connection) -> None:
        """Find the directories of the database; none if they are on another machine."""
        self._directories = await store.directories(connection)
        self._forget()

    @property
    def room(self) -> Room | None:
        """The fuller of its filesystems, read at most once a second."""
        now = time.monotonic()
        if now - self._read_at >= _FRESH_SECONDS:
            found = [room for path in self._directories if (room := _room_of(path))]
            self._room = rules.tightest(found, self._chosen_reserve)
            self._read_at, self._taken = now, 0
        return self._room

    def _forget(self) -> None:
        self._read_at = -_FRESH_SECONDS

    @property
    def is_low(self) -> bool:
        """Whether nothing new is stored: the reserve is reached, or Postgres has found it full."""
        room, written = self.room, _WRITTEN_PER_BYTE * self._taken
        if room and rules.is_low(room, self._chosen_reserve, written=written):
            return True
        return self._seconds_since_full() < _FULL_SECONDS

    @property
    def scarce_bytes(self) -> int | None:
        """How much is left, if it is little; None if there is no need to save."""
        if not self.is_low:
            return None
        return self._room.free if self._room else 0

    def _seconds_since_full(self) -> float:
        return time.monotonic() - self._db.disk_full_at

    def check(self) -> None:
        """Raise DiskLow if nothing new is stored now."""
        if self.is_low:
            raise DiskLow(
                "The server's disk is almost full, so it stores nothing new; try again later.",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )

    def take(self, size: int) -> None:
        """The same, and so much is written now: it counts until the disk is read again."""
        self.check()
        self._taken += size

    async def with_room(self, write: Callable[[], Awaitable[T]]) -> T:
        """Run an idempotent write that must not fail on a full disk: give up ballast for it."""
        try:
            return await write()
        except DatabaseFull:
            if not self._make_room(keep_last=True):
                raise
            return await write()

    def make_room_for_sweep(self) -> bool:
        """Give up ballast if hardly anything is free; False if that is not possible."""
        return self._make_room(keep_last=False)

    def _make_room(self, *, keep_last: bool) -> bool:
        """
        The same; what does not free space must leave the last piece to what does.

        Any number of acknowledgements would use it up, and then nothing could be swept.
        """
        if self._ballast is None:
            return False
        needed = max(self._ballast.piece_bytes // 2, 1)
        has_room = self._ballast.make_room(needed, keep_last=keep_last)
        self._forget()
        return has_room

    async def tend(self) -> DiskState:
        """Keep the ballast as it should be, and find out whether an unseen disk is still full."""
        if self.is_low:
            # A Postgres that has just started writes before it accepts a session, also the sweep's.
            self._make_room(keep_last=not self._db.refuses_sessions)
            await self._probe_if_unseen()
        else:
            await self._refill()
        return self._noted(self.state())

    def state(self) -> DiskState:
        is_low, room = self.is_low, self._room
        return DiskState(
            is_low,
            room and room.free,
            room and rules.reserve_of(room.total, self._chosen_reserve),
            self._ballast.in_place() if self._ballast else 0,
        )

    def _noted(self, state: DiskState) -> DiskState:
        """Log that it has become low, or has recovered."""
        if state.is_low and not self._was_low:
            log.warning("disk_almost_full", free=state.free_bytes, reserve=state.reserve_bytes)
        if self._was_low and not state.is_low:
            log.warning("disk_recovered", free=state.free_bytes)
        self._was_low = state.is_low
        return state

    async def keep_ballast(self) -> None:
        """Create what is missing of the ballast, for a command that has used and freed space."""
        before = -1
        while self._ballast and not self.is_low and self._ballast.in_place() > before:
            before = self._ballast.in_place()
            await self._refill(reserves=1)

    async def _refill(self, *, reserves: int = 2) -> None:
        """
        Create one piece of the ballast if so many reserves are left without it.

        More than one, or a server near its reserve would create and give up pieces all the time.
        """
        ballast, room = self._ballast, self.room
        if ballast is None or room is None or ballast.is_complete():
            return
        reserve = rules.reserve_of(room.total, self._chosen_reserve)
        if room.free - ballast.piece_bytes >= reserves * reserve:
            with suppress(OSError):  # another program was faster; the metric shows what is missing
                await asyncio.to_thread(ballast.refill)
            self._forget()

    async def _probe_if_unseen(self) -> None:
        if self._room is None and self._seconds_since_full() > _PROBE_AFTER_SECONDS:
            # An error counts like any other, and keeps the disk full for another while.
            with suppress(DatabaseFull):
                async with self._db.transaction(readonly=True) as tx:
                    await store.probe(tx)

    async def checkpoint(self) -> None:
        """Let Postgres remove WAL that is no longer needed, if this role may ask for that."""
        async with self._db.connection() as connection:
            await store.checkpoint(connection)


def _room_of(path: str) -> Room | None:
    try:
        disk = os.statvfs(path)
    except OSError:
        return None
    return Room(disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize)
