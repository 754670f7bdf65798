"""What a backup says about itself, and whether this release can restore it."""

from datetime import datetime

import msgspec

from restante.database import rules
from restante.database.rules import Migration, Record, SchemaState
from restante.errors import BackupUnusable, CodeTooOld

FORMAT = 1


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The first member of a backup."""

    format: int
    restante: str
    postgres: int  # the major version
    taken_at: datetime
    migrations: list[Record]
    oldest_code: int
    workspaces: int
    files: int
    file_bytes: int
    roles: list[str]  # beside our own, which own or may use something
    admin_token: str | None  # None: it was in a setting


class End(msgspec.Struct, frozen=True):
    """The last member; without it the file was cut off."""

    members: int
    bytes: int


def about(encoded: bytes) -> About:
    """Decode the first member; raises BackupUnusable for a format that is newer than this code."""
    try:
        found = msgspec.json.decode(encoded)
        if found["format"] > FORMAT:
            raise BackupUnusable(
                f"The backup was made by Restante {found['restante']}, in a format that this "
                "release does not know. Restore it with that release, or a newer one."
            )
        return msgspec.convert(found, About)
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError, RecursionError) as error:
        raise BackupUnusable("The first part of the backup is not readable.") from error


def end(encoded: bytes) -> End | None:
    """Decode the last member; None if it is not readable."""
    try:
        return msgspec.json.decode(encoded, type=End)
    except (msgspec.MsgspecError, RecursionError):
        return None


def check_restorable(backup: About, migrations: list[Migration], *, postgres: int) -> None:
    """Raise BackupUnusable if this release, or this Postgres, is too old for the backup."""
    applied = {record.number: record for record in backup.migrations}
    try:
        rules.check_compatible(migrations, SchemaState(applied, backup.oldest_code))
    except CodeTooOld as error:
        raise BackupUnusable(
            f"The backup was made by Restante {backup.restante}, and this release is too old for "
            "its tables. Restore it with that release, or a newer one."
        ) from error
    if backup.postgres > postgres:
        raise BackupUnusable(
            f"The backup was made from Postgres {backup.postgres}, and this is Postgres "
            f"{postgres}, which may not understand it. Install Postgres {backup.postgres} or "
            "newer, and name it with --postgres-bin."
        )
