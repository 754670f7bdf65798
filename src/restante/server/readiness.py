"""Whether a server or a command can work with the database."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from restante.database import migrate, rules
from restante.database.pool import Database
from restante.database.rules import Migration
from restante.errors import NotReady, RestanteError
from restante.server.single_flight import SingleFlight

# A probe that takes longer counts as failed anyway.
_ANSWER_WITHIN_SECONDS = 2.0
_BETWEEN_PROBES_SECONDS = 0.1


class Readiness:
    """Whether the database answers, is migrated far enough, and accepts writes."""

    def __init__(self, db: Database, migrations: Sequence[Migration]) -> None:
        self._db = db
        self._migrations = migrations
        self._probe = SingleFlight(self._look, at_most_every_seconds=_BETWEEN_PROBES_SECONDS)

    async def probe(self) -> None:
        """Check everything, or raise NotReady; anyone may ask, as often as they like."""
        await self._probe.result()

    async def _look(self) -> None:
        await self.check()
        await self.check_writable()

    async def check(self) -> None:
        """Raise NotReady with the reason, or return.  Enough for a command that reads."""
        async with _answering():
            async with self._db.connection() as connection:
                state = await migrate.schema_state(connection)
            rules.check_compatible(self._migrations, state)
        missing = rules.due(self._migrations, state, {rules.Phase.PRE})
        if missing:
            raise NotReady(f"Migration {missing[0]} has not run; run `restante migrate`.")

    async def check_writable(self) -> None:
        """Raise NotReady if the database accepts no writes."""
        async with _answering():
            await self._db.check_writable()


@asynccontextmanager
async def _answering() -> AsyncIterator[None]:
    """Turn every failure of the database, and a slow answer, into NotReady."""
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_SECONDS):
            yield
    except TimeoutError as error:
        raise NotReady(
            f"The database did not answer within {_ANSWER_WITHIN_SECONDS:g} s."
        ) from error
    except RestanteError as error:
        raise NotReady(str(error)) from error
