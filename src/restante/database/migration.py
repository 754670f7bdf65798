"""What an operator does with migrations: look how far they are, and run them."""

from collections.abc import Sequence
from dataclasses import dataclass

from restante.database import migrate, rules
from restante.database.pool import dedicated
from restante.database.rules import BOTH_PHASES, Migration, Phase, Standing

_STATEMENT_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Status:
    """One migration and whether it has run."""

    migration: str
    state: str


async def run(dsn: str, *, pre_only: bool) -> list[Status]:
    """Run what is due and return it."""
    phases = {Phase.PRE} if pre_only else BOTH_PHASES
    ran = await migrate.apply(dsn, migrate.shipped(), phases=phases)
    return [Status(str(migration), "ran now") for migration in ran]


async def status(dsn: str) -> list[Status]:
    """Every migration that this release or the database knows; reads only."""
    async with dedicated(dsn, statement_timeout_seconds=_STATEMENT_SECONDS) as connection:
        return statuses(migrate.shipped(), await migrate.standing(connection))


def statuses(shipped: Sequence[Migration], standing: Standing) -> list[Status]:
    """The list in words, in order of the numbers."""
    known = {m.number: Status(str(m), _state(m, standing)) for m in shipped}
    for number, record in standing.applied.items():
        known.setdefault(number, Status(f"{number:04} {record.name}", "ran, by a newer release"))
    return [known[number] for number in sorted(known)]


def _state(migration: Migration, standing: Standing) -> str:
    if migration.number in standing.applied:
        return "ran"
    if rules.due([migration], standing, {Phase.PRE}):
        return "waits for `restante serve` or `restante migrate`"
    return "waits for `restante migrate`, after the older release has ended"
