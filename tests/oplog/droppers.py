"""Drops partitions of the log at every moment between two statements of somebody else."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from oplog.trimmed import now
from oplog.turns import Turns
from sweeps import state_of
from waiting import until

from restante.database import partitions
from restante.database.partitions import Partition
from restante.database.pool import Database
from restante.oplog.positions import Position
from restante.oplog.tables import OPS
from restante.oplog.trimming import drops, picture
from restante.oplog.trimming.drops import Drop
from restante.oplog.trimming.fates import Cause, Fate
from restante.oplog.trimming.limits import Limits


@dataclass
class Work:
    """What a step of a sweep works with."""

    connection: Any
    now: Any
    is_out_of_time: bool = False
    bytes_moved: int = 0
    bytes_freed: int = 0

    def moved(self, size: int) -> None:
        self.bytes_moved += size

    def freed(self, size: int) -> None:
        self.bytes_freed += size

    async def detach_and_drop(self, partition: Partition) -> None:
        await partitions.detach(self.connection, partition)
        await partitions.drop(self.connection, partition.name)


@dataclass
class Dropper:
    """Drops one partition, step by step."""

    connection: Any
    name: str
    drop: Drop
    last: Position
    detaching: "asyncio.Task[None] | None" = None

    async def raise_marks(self) -> None:
        async with self.connection.transaction():
            await drops._note(self.connection, self.drop, self.last)  # pyright: ignore[reportPrivateUsage]

    async def detach(self) -> None:
        """Begin it; it ends when nobody reads any more."""
        detach = partitions.detach(self.connection, self.drop.partition)
        self.detaching = asyncio.create_task(detach)
        await until(self._is_out_of_sight)

    async def _is_out_of_sight(self) -> bool:
        assert self.detaching is not None
        return self.detaching.done() or await state_of(self._looking, self.name) == "detaching"

    async def finish(self) -> None:
        assert self.detaching is not None
        await self.detaching
        await partitions.drop(self.connection, self.name)

    _looking: Any = None


async def dropper(connection: Any, looking: Any, name: str) -> Dropper:
    """Ready to drop a partition."""
    found = await partitions.partitions_of(connection, [OPS])
    seen = await picture.look(connection, found, Limits(), now=now())
    (log,) = seen.logs
    piece = next(one for one in log.decided.pieces if one.name == name)
    assert piece.last is not None
    drop = Drop(log, piece.partition, Fate(Cause.RETENTION), 2, 0, now())
    await partitions.seal(connection, name)
    return Dropper(connection, name, drop, piece.last, _looking=looking)


async def at_every_moment(
    reading: Callable[[Database], Awaitable[Any]],
    made: Callable[[int], Awaitable[Dropper]],
    check: Callable[[Any], Awaitable[None]],
    db: Database,
) -> int:
    """Read while the marks are raised before one statement, and the ops go then or one later."""
    counting = Turns(db)
    await reading(counting.as_database)
    numbers = range(counting.statements + 1)
    moments = [(one, then) for one in numbers for then in (one, one + 1)]
    for number, (marks_at, detach_at) in enumerate(moments):
        one, turns = await made(number), Turns(db)
        turns.before(marks_at, one.raise_marks)
        turns.before(detach_at, one.detach)
        result = await reading(turns.as_database)
        await turns.end()
        await one.finish()
        await check(result)
    return len(moments)
