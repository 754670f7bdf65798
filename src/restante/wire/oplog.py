"""Ops and the headers of the op log's protocol, shared by the nodes."""

from typing import Literal

from msgspec import Raw, Struct

# What the existing program sends and reads.
RETENTION_GAP = "X-Mediorum-Retention-Gap"
AVAILABLE_MIN_ULID = "X-Mediorum-Available-Min-Ulid"
LAST_SCANNED_ULID = "X-Crud-Sweep-Last-Scanned-Ulid"
LIMITED = "X-Crud-Sweep-Limited"

# Ours.  Both sides send the first one, so that our nodes recognise each other.
OPLOG_VERSION = "Restante-Oplog"
NEXT_POSITION = "Restante-Next-Position"
CURSOR_ON_YOU = "Restante-Cursor-On-You"  # how far the server has read the reader's log
GAP_TABLES = "Restante-Gap-Tables"  # of these the reader needs a snapshot, as a JSON array
NEW_TABLES = "Restante-New-Tables"  # so it does of these, which it could not see before
NODE_HOST = "Restante-Host"  # who is answering: a node notices that it is asking itself
SERVER_TIME = "Restante-Time"  # Unix milliseconds, to notice clocks that differ

ActionName = Literal["create", "update", "delete"]


class Op(Struct, omit_defaults=True):
    """
    One change of one or more records of a table.

    The fields after `transient` travel between our own nodes only.
    """

    ulid: str
    host: str
    action: ActionName
    table: str
    data: list[Raw]
    transient: bool | None = None  # always written; the default is for readers
    approximate: bool = False
    newest: list[bool] | None = None  # per record; None: all are
    position: str = ""


class SnapshotRequest(Struct):
    """Begin a snapshot of a table; one that the peer had begun before is forgotten."""

    table: str


class SnapshotStart(Struct):
    """A snapshot has begun: afterwards the log is read from `start`."""

    start: str
    host: str
    columns: list[str]
    cursor_on_you: str | None = None  # how far the server has read the taker's log
    unlogged: str = ""  # before this position, changes of the table may have no op


class SnapshotPageRequest(Struct):
    """Ask for a page: deletes in the order of the server, records in the order of their keys."""

    table: str
    start: str
    phase: Literal["deletes", "records"]
    after: str = ""


class SnapshotKeysRequest(Struct):
    """Ask which of these keys the server has no record of."""

    table: str
    start: str
    keys: list[Raw]


class SnapshotEntry(Struct, omit_defaults=True):
    """
    A record, or a key without one, with the newest op of its key.

    Without a ULID the log has no op of the key, and what is there is older than the floor.
    """

    data: Raw
    ulid: str = ""
    n: int = 0  # which record of that op
    host: str = ""
    approximate: bool = False
    deleted: bool = False  # the newest op is a delete


class SnapshotPage(Struct):
    """Some entries, and where to go on; None: there are no more."""

    entries: list[SnapshotEntry]
    floor: str
    floor_origin: str
    next: str | None = None
