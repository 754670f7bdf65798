"""An incoming record on its way into a table: what the sender says of it, and what we have."""

from dataclasses import dataclass
from datetime import datetime

from restante.oplog.applying.records import Fact
from restante.oplog.peers import Peer
from restante.oplog.positions import Position
from restante.oplog.rules import Action, Channel, OwnName, Version
from restante.oplog.tables import TrackedTable


@dataclass(frozen=True, slots=True)
class Source:
    """Where ops come from."""

    peer: Peer
    channel: Channel
    server_cursor: Position | None = None  # how far the peer has read our log


@dataclass(frozen=True, slots=True)
class Head:
    """What all records of one incoming op have in common."""

    index: int  # in its page
    version: Version
    origin: int  # the number of its host
    action: Action
    is_approximate: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """One record of an incoming op that passed the boundary."""

    head: Head
    table: TrackedTable
    data: str
    columns: frozenset[str]
    key: str  # a JSON object of the key columns
    is_newest_there: bool = True


@dataclass(frozen=True, slots=True)
class Context:
    """Where the records come from, and where they go to."""

    channel: Channel
    server_cursor: Position | None  # how far the sender has read our log
    own: OwnName
    now: datetime

    @property
    def own_host(self) -> str:
        return self.own.host


@dataclass(frozen=True, slots=True)
class Met:
    """A record together with what this node has of its key."""

    record: Record
    fact: Fact

    @property
    def version(self) -> Version:
        return self.record.head.version

    @property
    def is_delete(self) -> bool:
        return self.record.head.action == "d"
