"""
Which migrations are due, and whether this code may run on this database.

Two releases run side by side during an upgrade.  `pre` files only add, so the older release keeps
working after them.  `post` files remove what it needed, and say so with `oldest code`.  The level
of a release is the number of the newest migration it knows.
"""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from restante.errors import CodeTooOld, MigrationFailed

_FILE_NAME = re.compile(r"(?P<number>\d{4})_(?P<phase>pre|post)_(?P<name>[a-z0-9_]+)\.sql")
_OLDEST_CODE = re.compile(r"^-- oldest code: *(\d+)\b", re.MULTILINE)
_NO_TRANSACTION = re.compile(r"^-- transaction: none\b", re.MULTILINE)


class Phase(StrEnum):
    """When a migration may run."""

    PRE = "pre"  # before the new code starts; the old code keeps working
    POST = "post"  # after the last old process has stopped


BOTH_PHASES = frozenset(Phase)


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of SQL that changes the schema."""

    number: int
    phase: Phase
    name: str
    sql: str
    checksum: str
    in_transaction: bool
    oldest_code: int | None  # the lowest level that still works after it; None: no change

    def __str__(self) -> str:
        return f"{self.number:04}_{self.phase}_{self.name}"


@dataclass(frozen=True, slots=True)
class Record:
    """What the database has recorded of a migration that ran."""

    number: int
    name: str
    checksum: str


@dataclass(frozen=True, slots=True)
class SchemaState:
    """What the database has recorded: the migrations that ran, and the oldest level it serves."""

    applied: Mapping[int, Record]
    oldest_code: int


EMPTY = SchemaState(applied={}, oldest_code=0)


def parse(file_name: str, text: str) -> Migration:
    """Parse a migration file: its name, and the directives in its comments."""
    match = _FILE_NAME.fullmatch(file_name)
    if match is None:
        raise MigrationFailed(f"{file_name} is not named like 0001_pre_what_it_does.sql.")
    oldest = _OLDEST_CODE.search(text)
    return Migration(
        number=int(match["number"]),
        phase=Phase(match["phase"]),
        name=match["name"],
        sql=text,
        checksum=hashlib.sha256(text.encode()).hexdigest(),
        in_transaction=_NO_TRANSACTION.search(text) is None,
        oldest_code=int(oldest[1]) if oldest else None,
    )


def level(migrations: Sequence[Migration]) -> int:
    """The level of the release that ships these migrations."""
    return max((migration.number for migration in migrations), default=0)


def due(
    migrations: Sequence[Migration], state: SchemaState, phases: Collection[Phase]
) -> list[Migration]:
    """
    The migrations to run now, in order.

    An empty database gets all of them: no older release can be running on it.
    """
    wanted = phases if state.applied else BOTH_PHASES
    return sorted(
        (m for m in migrations if m.number not in state.applied and m.phase in wanted),
        key=lambda m: m.number,
    )


def check_compatible(migrations: Sequence[Migration], state: SchemaState) -> None:
    """
    Refuse to run on a database that no longer serves this release.

    Migrations that only a newer release knows do not matter by themselves: the database records
    which releases it still serves.  Raises CodeTooOld, or MigrationFailed when a file that already
    ran has been edited since.
    """
    if level(migrations) < state.oldest_code:
        raise CodeTooOld(
            f"A newer Restante has migrated this database: it serves schema level "
            f"{state.oldest_code} and above, and this release is at level {level(migrations)}. "
            f"Install the newer release, or restore the backup made before the upgrade."
        )
    for migration in migrations:
        record = state.applied.get(migration.number)
        if record is not None and record.checksum != migration.checksum:
            raise MigrationFailed(
                f"Migration {migration} has run in this database with other contents. Files that "
                f"have run are never edited: restore the file, and make the change in a new one."
            )
