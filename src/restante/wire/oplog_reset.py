"""What `oplog reset` asks a peer, and what it would do and has done."""

from datetime import datetime
from typing import Annotated

from msgspec import Meta, Struct

from restante.wire.oplog_digests import VerifyReport

CURSORS_PATH = "/internal/oplog/cursors"
MAX_HOSTS = 1000


class CursorsRequest(Struct, frozen=True):
    """Nodes that the asking node reads from."""

    hosts: Annotated[list[str], Meta(max_length=MAX_HOSTS)]


class CursorOn(Struct, frozen=True, kw_only=True):
    """How far a node has read the log of another one."""

    host: str
    cursor: Annotated[str, Meta(description="A position of that log; empty: nothing.")]
    tables: Annotated[
        list[str],
        Meta(description="What it reads from there, of the tables that the asking node may see."),
    ]
    takes_any_host: Annotated[bool, Meta(description="Ops of any host, not only of some.")]
    has_parked: Annotated[bool, Meta(description="Ops from there could not be applied yet.")]


class CursorsAnswer(Struct, frozen=True, kw_only=True):
    """How far a node has read; the cursors are read before the head."""

    cursors: Annotated[
        list[CursorOn], Meta(description="On those of the nodes that it reads from, too.")
    ]
    cursor_on_you: Annotated[str, Meta(description="On the asking node, of all tables.")]
    head: Annotated[str, Meta(description="The last position of its own log; empty: no op.")]


class ResetTable(Struct, frozen=True, kw_only=True):
    """The log of one table."""

    name: str
    is_reset: bool
    why_not: str = ""
    ops: int = 0  # as Postgres estimates them
    bytes: int = 0
    partitions: int = 0


class PeerLoss(Struct, frozen=True, kw_only=True):
    """Ops that would go although a peer has not read them."""

    host: str
    standing: str  # readable, missing, unreadable, implausible, evicted or away
    tables: list[str]
    ops: int
    bytes: int
    is_more: bool  # only so many were counted
    since: datetime | None  # when the first of them arrived
    has_read: bool  # it has them, but we have not read what it wrote before it did
    takes_snapshot: bool  # False: it never gets them
    is_accepted: bool  # it is evicted, was already, or may be by its own limit
    spared_until: datetime | None = None  # it has just taken a snapshot, and is not evicted


class SeededCursor(Struct, frozen=True, kw_only=True):
    """Our cursor on a third node, and that of the reference."""

    host: str
    before: str
    after: str  # equal to `before` if it stays
    why_not: str = ""


class ResetPlan(Struct, frozen=True, kw_only=True):
    """What a reset would do, and what is in its way."""

    peer: str
    verified: VerifyReport
    up_to: str  # the last position that may go; empty: nobody knows yet
    tables: list[ResetTable]
    peers: list[PeerLoss]
    cursors: list[SeededCursor]
    refusals: list[str]

    @property
    def bytes(self) -> int:
        """What the logs take that would be emptied."""
        return sum(table.bytes for table in self.tables if table.is_reset)


class ResetReport(Struct, frozen=True, kw_only=True):
    """What a reset has done."""

    peer: str
    tables: list[str]
    ops: int  # as Postgres estimates them
    partitions: int
    bytes: int  # of the files that were dropped, less those that were written anew
    filesystem_bytes: int | None  # more free than before; None: it cannot be seen from here
    evicted: list[str]
    seeded: list[SeededCursor]
    left: list[str]  # what could not be done, and why
    seconds: float
