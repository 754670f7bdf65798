"""
Every failure we raise on purpose, with its public code.

A message is a whole sentence: what happened, and where there is a choice, what to do.
Nothing here knows an HTTP status; `web.problems` has that table.
"""

from typing import ClassVar


class RestanteError(Exception):
    """Base of every failure we raise on purpose."""

    code: ClassVar[str]  # public and stable; clients branch on it


class SettingsInvalid(RestanteError):
    """The environment or the flags ask for something that cannot be."""

    code = "settings_invalid"


class AddressTaken(RestanteError):
    """The host and port we were told to listen on cannot be had."""

    code = "address_taken"


class DataDirectoryUnusable(RestanteError):
    """The data directory cannot be made, written or owned."""

    code = "data_directory_unusable"


class DataDirectoryInUse(RestanteError):
    """Another running Restante owns the data directory."""

    code = "data_directory_in_use"


class PostgresUnusable(RestanteError):
    """The embedded Postgres cannot be found or does not start."""

    code = "postgres_unusable"


class DatabaseUnavailable(RestanteError):
    """The database cannot be reached, or has no connection to spare, right now."""

    code = "database_unavailable"


class DatabaseTooOld(RestanteError):
    """The server at the other end is older than the SQL we speak."""

    code = "database_too_old"


class StatementTimedOut(RestanteError):
    """A statement was cut off because it took longer than it may."""

    code = "statement_timed_out"


class CodeTooOld(RestanteError):
    """A newer release has moved the database on, and it no longer serves this one."""

    code = "code_too_old"


class MigrationFailed(RestanteError):
    """A migration could not be applied; the ones before it were."""

    code = "migration_failed"


class NotReady(RestanteError):
    """The server runs but cannot do its work yet."""

    code = "not_ready"


class DatabaseFull(RestanteError):
    """Postgres could not write because its disk is full."""

    code = "database_full"
