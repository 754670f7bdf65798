"""Says whether this server can do its work: the database answers, and is migrated far enough."""

import asyncio
from collections.abc import Sequence

from restante.database import migrate, rules
from restante.database.pool import Database
from restante.database.rules import Migration
from restante.errors import NotReady, RestanteError

# A probe that waits longer than its caller tells nobody anything.
_ANSWER_WITHIN_SECONDS = 2.0


class Readiness:
    """Looks at the database each time it is asked; remembers nothing."""

    def __init__(self, db: Database, migrations: Sequence[Migration]) -> None:
        self._db = db
        self._migrations = migrations

    async def check(self) -> None:
        """Raise NotReady with the reason, or return."""
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_SECONDS), self._db.connection() as connection:
                standing = await migrate.standing(connection)
                rules.check_compatible(self._migrations, standing)
        except TimeoutError as error:
            raise NotReady(
                f"The database did not answer within {_ANSWER_WITHIN_SECONDS:g} s."
            ) from error
        except RestanteError as error:
            raise NotReady(str(error)) from error
        missing = rules.due(self._migrations, standing, {rules.Phase.PRE})
        if missing:
            raise NotReady(f"Migration {missing[0]} has not run; run `restante migrate`.")
