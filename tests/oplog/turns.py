"""A database whose statements are counted, so that something can happen before the nth of them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from restante.database.pool import Database

Action = Callable[[], Awaitable[object]]


@dataclass
class Turns:
    """Stands for a database; actions run before the statements with these numbers."""

    db: Database
    actions: dict[int, list[Action]] = field(default_factory=dict[int, list[Action]])
    statements: int = 0

    def before(self, number: int, action: Action) -> None:
        self.actions.setdefault(number, []).append(action)

    async def turn(self) -> None:
        for action in self.actions.pop(self.statements, []):
            await action()
        self.statements += 1

    async def end(self) -> None:
        """What was to happen after the last statement."""
        for number in sorted(self.actions):
            for action in self.actions.pop(number):
                await action()

    @property
    def as_database(self) -> Database:
        return cast("Database", self)

    def wrapped(self, connection: Any) -> Any:
        """A connection whose statements are counted."""
        return _Connection(connection, self)

    @asynccontextmanager
    async def transaction(self, **given: Any) -> AsyncIterator[Any]:
        async with self.db.transaction(**given) as tx:
            yield self.wrapped(tx)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        async with self.db.connection() as connection:
            yield self.wrapped(connection)


class _Connection:
    """Waits for its turn before each statement."""

    def __init__(self, inner: Any, turns: Turns) -> None:
        self._inner, self._turns = inner, turns

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in {"execute", "fetch", "fetchrow", "fetchval"}:
            return found

        async def in_turn(*values: Any, **given: Any) -> Any:
            await self._turns.turn()
            return await found(*values, **given)

        return in_turn
