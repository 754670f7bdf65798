"""
The one translation of what the driver raises into errors of ours.

What is not translated is a bug, and passes unchanged.
"""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

from restante.errors import (
    DatabaseForbidden,
    DatabaseFull,
    DatabaseReadOnly,
    DatabaseRefused,
    DatabaseUnavailable,
    RestanteError,
    StatementTimedOut,
    TableBusy,
)

# A failover or a restart takes longer; a client that retries at once only adds load.
RETRY_AFTER_SECONDS = 5

CONNECTING = (
    OSError,
    TimeoutError,
    ssl.SSLError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    ValueError,  # a malformed database URL
    OverflowError,  # a port number out of range
)
# What releasing or closing a connection may raise; the connection is gone in any case.
BROKEN = (
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)
_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.TooManyConnectionsError,
    ConnectionError,
)
FROM_THE_DRIVER = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    *_LOST,
    TimeoutError,
)
# Postgres could not do what only it can do, such as a checkpoint; its own log says why.
INTERNAL = asyncpg.InternalServerError
# A value from outside is not one of the type that a column has.
BAD_VALUE = (asyncpg.DataError,)
_CLOSED = "The connection to the database was closed."

# The driver raises InterfaceError for lost connections and for programming errors; only the text
# tells them apart.  A connection that is lost while acquired is released to the pool at once.
_CONNECTION_LOST_TEXTS = ("closed", "closing", "released back to the pool")

# A new session that cannot write the cache of the catalog reports this as an internal error.
_NO_SPACE = "No space left on device"


@contextmanager
def unreachable_translated() -> Iterator[None]:
    """Turn every failure to connect into one sentence, without the password."""
    try:
        yield
    except CONNECTING as error:
        what = f"The database cannot be reached: {reason(error)}."
        if is_disk_full(error):
            raise DatabaseFull(f"{what} Free space on its disk.") from error
        raise DatabaseUnavailable(f"{what} Check RESTANTE_DATABASE_URL.") from error


@contextmanager
def translated() -> Iterator[None]:
    """Translate what the driver raises; other exceptions pass unchanged."""
    try:
        yield
    except FROM_THE_DRIVER as error:
        known = translation(error)
        if known is None:
            raise
        raise known from error


@contextmanager
def refusal_named() -> Iterator[None]:
    """For commands: turn what the server refuses, and is not translated, into a sentence too."""
    try:
        yield
    except asyncpg.PostgresError as error:
        raise DatabaseRefused(f"The database refused a statement: {full_reason(error)}") from error


def translation(error: BaseException) -> RestanteError | None:
    """The error as one of ours; None if it is a bug."""
    match error:
        case asyncpg.QueryCanceledError() | TimeoutError():
            return StatementTimedOut(f"The database took too long: {reason(error)}.")
        case _ if busy := _busy(error):
            return busy
        case _ if refusal := _refusal(error):
            return refusal
        case _ if isinstance(error, _LOST):
            return DatabaseUnavailable(f"The database went away: {reason(error)}.")
        case _ if _means_closed(error):
            return DatabaseUnavailable(_CLOSED)
        case _:
            return None


def _busy(error: BaseException) -> TableBusy | None:
    """A lock timeout, a deadlock, or a partition that was sealed between two statements."""
    if isinstance(error, asyncpg.LockNotAvailableError | asyncpg.DeadlockDetectedError):
        return TableBusy(f"Another session holds a lock; try again: {reason(error)}.")
    text = str(error)
    if isinstance(error, asyncpg.CheckViolationError) and (
        "no partition" in text or '"sealed"' in text
    ):
        return TableBusy(f"There is no open partition for this time; try again: {reason(error)}.")
    return None


def _refusal(error: BaseException) -> RestanteError | None:
    """The server answers, and does not let us write."""
    match error:
        case _ if is_disk_full(error) or isinstance(error, asyncpg.OutOfMemoryError):
            return DatabaseFull("The database has no space left; nothing was stored.")
        case asyncpg.ReadOnlySQLTransactionError():
            return DatabaseReadOnly(
                f"The database accepts no writes now: {reason(error)}.",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        case asyncpg.InsufficientPrivilegeError():
            return DatabaseForbidden(f"The database role lacks a right: {reason(error)}.")
        case _:
            return None


def is_disk_full(error: BaseException | None) -> bool:
    """Whether Postgres found no space on its disk."""
    return isinstance(error, asyncpg.DiskFullError) or (
        isinstance(error, asyncpg.PostgresError) and _NO_SPACE in str(error)
    )


def violates_key(error: BaseException, table: str) -> bool:
    """Whether a row was refused because a table, or a partition of it, has its key already."""
    if not isinstance(error, asyncpg.UniqueViolationError):
        return False
    name = error.table_name or ""
    return name == table or name.startswith(f"{table}_")


def record_fault(error: BaseException, *, own_schema: str) -> str | None:
    """
    Why a record cannot be in a table of somebody else; None if the record is not at fault.

    Our own tables refuse rows too, for example when they have no partition for them.
    """
    if isinstance(error, asyncpg.InsufficientPrivilegeError) or not isinstance(
        error, asyncpg.PostgresError
    ):
        return None
    if getattr(error, "schema_name", None) == own_schema:
        return None
    found = (name for kinds, name in _RECORD_FAULTS if isinstance(error, kinds))
    return next(found, None)


_RECORD_FAULTS = (
    ((asyncpg.ForeignKeyViolationError, asyncpg.RestrictViolationError), "foreign_key"),
    ((asyncpg.UniqueViolationError, asyncpg.ExclusionViolationError), "unique"),
    ((asyncpg.NotNullViolationError,), "not_null"),
    ((asyncpg.CheckViolationError,), "check"),
    ((asyncpg.DataError, asyncpg.DatatypeMismatchError, asyncpg.CannotCoerceError), "type"),
    ((asyncpg.ProgramLimitExceededError,), "too_large"),
    (
        (
            asyncpg.IntegrityConstraintViolationError,
            asyncpg.PLPGSQLError,  # a trigger of the table raises it
            asyncpg.SyntaxOrAccessError,  # such a trigger names what is not there
            asyncpg.TriggeredActionError,
            asyncpg.TriggeredDataChangeViolationError,
            asyncpg.WithCheckOptionViolationError,
            asyncpg.FeatureNotSupportedError,
        ),
        "other",
    ),
)

RECORD_FAULTS = tuple(name for _, name in _RECORD_FAULTS)


def is_uncertain(error: BaseException) -> bool:
    """Whether the server may have committed, although the driver raised this."""
    if isinstance(error, asyncpg.QueryCanceledError):
        return False
    return isinstance(error, (*_LOST, TimeoutError)) or _means_closed(error)


def casts_doubt(error: RestanteError) -> bool:
    """Whether the other connections may have the same fault: a demoted or a silent server."""
    return isinstance(error, DatabaseReadOnly) or isinstance(error.__cause__, TimeoutError)


def _means_closed(error: BaseException) -> bool:
    if isinstance(error, asyncpg.InternalClientError):
        # Postgres closes the connection while shutting down, and the driver misreads it.
        return True
    text = str(error)
    return isinstance(error, asyncpg.InterfaceError) and any(
        part in text for part in _CONNECTION_LOST_TEXTS
    )


def reason(error: BaseException) -> str:
    """The first line of the driver's message, to be part of a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def full_reason(error: BaseException) -> str:
    """The driver's message with its detail, as one sentence or two."""
    detail = getattr(error, "detail", None)
    return f"{reason(error)}. {detail}" if detail else f"{reason(error)}."
