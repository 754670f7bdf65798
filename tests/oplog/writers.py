"""Applications that change records of a node at random."""

import asyncio
import random

import asyncpg
from oplog.served_nodes import GONE, Node

KEYS = [f"k{number:02}" for number in range(40)]


class Writer:
    """An application: changes records of one node until it is told to stop."""

    def __init__(self, node: Node, chance: random.Random) -> None:
        self.node = node
        self.is_writing = True
        self._chance = chance

    async def run(self) -> None:
        while self.is_writing:
            try:
                connection = await self.node.connect()
            except (*GONE, AssertionError, TimeoutError):
                await asyncio.sleep(0.05)
                continue
            try:
                while self.is_writing:
                    await self._change(connection)
                    await asyncio.sleep(self._chance.uniform(0, 0.02))
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
        key, other = self._chance.sample(KEYS, 2)
        match self._chance.randrange(10):
            case 0 | 1:
                await connection.execute("delete from notes where id = $1", key)
                return []
            case 2:
                await connection.execute(
                    "update notes set id = $2 where id = $1 "
                    "and not exists (select from notes where id = $2)",
                    key,
                    other,
                )
                return []
            case 3:
                low, high = sorted((key, other))
                done = await connection.fetch(
                    "update notes set body = $3, size = coalesce(size, 0) + 1 "
                    "where id between $1 and $2 returning id",
                    low,
                    high,
                    value,
                )
                return [value] if done else []
            case _:
                await connection.execute(
                    "insert into notes values ($1, $2, $3) "
                    "on conflict (id) do update set body = excluded.body, size = excluded.size",
                    key,
                    value,
                    self._chance.randrange(10**6),
                )
                return [value]
