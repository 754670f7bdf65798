"""Applications that change records of a node at random."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import asyncpg
from oplog.served_nodes import GONE, Node

KEYS = [f"k{number:02}" for number in range(40)]


class Writer:
    """An application: changes records of one table of a node until it is told to stop."""

    def __init__(
        self,
        node: Node,
        chance: random.Random,
        *,
        table: str = "notes",
        longest_pause_seconds: float = 0.02,
        padding_bytes: int = 0,
    ) -> None:
        self.node = node
        self.is_writing = True
        self._chance = chance
        self._table = table
        self._longest_pause_seconds = longest_pause_seconds
        self._padding_bytes = padding_bytes

    async def run(self, may_write: asyncio.Event | None = None) -> None:
        """Write whenever the event is set."""
        while self.is_writing:
            try:
                connection = await self.node.connect()
            except (*GONE, TimeoutError):
                await asyncio.sleep(0.05)
                continue
            try:
                while self.is_writing:
                    if may_write:
                        await may_write.wait()
                    await self._change(connection)
                    await asyncio.sleep(self._chance.uniform(0, self._longest_pause_seconds))
            except asyncpg.IntegrityConstraintViolationError:
                pass
            except (*GONE, TimeoutError):
                await asyncio.sleep(0.05)
            finally:
                connection.terminate()

    async def _change(self, connection: asyncpg.Connection) -> None:
        """One transaction; its values count as committed once the commit was answered."""
        values: list[str] = []
        is_rolled_back = self._chance.random() < 0.1
        transaction = connection.transaction()
        await transaction.start()
        for _ in range(self._chance.choice((1, 1, 1, 3))):
            values += await self._statement(connection)
        if self._chance.random() < 0.1:
            await asyncio.sleep(self._chance.uniform(0, 0.3))
        if is_rolled_back:
            await transaction.rollback()
        else:
            await transaction.commit()
            self.node.acked += values

    async def _statement(self, connection: asyncpg.Connection) -> list[str]:
        self.node.number += 1
        value = f"{self.node.name}-{self.node.number}"
        if self._padding_bytes:
            value += " " + self._chance.randbytes(self._padding_bytes // 2).hex()
        key, other = self._chance.sample(KEYS, 2)
        match self._chance.randrange(10):
            case 0 | 1:
                await connection.execute(f"delete from {self._table} where id = $1", key)
                return []
            case 2:
                await connection.execute(
                    f"update {self._table} set id = $2 where id = $1 "
                    f"and not exists (select from {self._table} where id = $2)",
                    key,
                    other,
                )
                return []
            case 3:
                low, high = sorted((key, other))
                done = await connection.fetch(
                    f"update {self._table} set body = $3, size = coalesce(size, 0) + 1 "
                    "where id between $1 and $2 returning id",
                    low,
                    high,
                    value,
                )
                return [value] if done else []
            case _:
                await connection.execute(
                    f"insert into {self._table} values ($1, $2, $3) "
                    "on conflict (id) do update set body = excluded.body, size = excluded.size",
                    key,
                    value,
                    self._chance.randrange(10**6),
                )
                return [value]


async def writing(
    nodes: Sequence[Node],
    chance: random.Random,
    seconds: float,
    *,
    until: "asyncio.Task[Any] | None" = None,
) -> None:
    """Let applications write to all nodes for a while, and until a task has ended."""
    writers = [Writer(node, random.Random(chance.random())) for node in nodes for _ in range(2)]
    async with asyncio.TaskGroup() as group:
        for writer in writers:
            group.create_task(writer.run())
        await asyncio.sleep(seconds)
        if until:
            await until
        for writer in writers:
            writer.is_writing = False
