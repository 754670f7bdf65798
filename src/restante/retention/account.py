"""What the tables take, what holds it, and how long it will go on like this."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from restante.ids import WorkspaceId


@dataclass(frozen=True, slots=True)
class TableSpace:
    """One table with its leaves, as the filesystem sees it."""

    name: str
    bytes: int
    dead_rows: int
    leaves: int


@dataclass(frozen=True, slots=True)
class LeafSpace:
    """One leaf: what it takes, and of a bucket how much of that lives."""

    name: str
    bytes: int
    live_bytes: int | None  # None: not a bucket

    @property
    def dead_bytes(self) -> int | None:
        return None if self.live_bytes is None else max(self.bytes - self.live_bytes, 0)


@dataclass(frozen=True, slots=True)
class States:
    """How many uploads are in each state."""

    never_fetched: int
    fetched: int  # but not acknowledged
    acked: int
    expired: int


@dataclass(frozen=True, slots=True)
class WorkspaceSpace:
    """What one workspace has waiting."""

    workspace_id: WorkspaceId
    states: States
    waiting_bytes: int
    waiting_since: datetime | None


@dataclass(frozen=True, slots=True)
class Lag:
    """How many rows a workspace has not handled yet."""

    workspace_id: WorkspaceId
    behind: int


@dataclass(frozen=True, slots=True)
class Pin:
    """Something that keeps space from coming back: who, how much, and the way out."""

    who: str
    what: str
    way_out: str
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Space:
    """The whole picture, for one screen."""

    tables: Sequence[TableSpace]
    leaves: Sequence[LeafSpace]
    live_bytes: int
    states: States
    workspaces_active: int
    workspaces: Sequence[WorkspaceSpace]  # those with most bytes waiting
    lags: Sequence[Lag]
    pins: Sequence[Pin]
    lead_seconds: dict[str, float]  # how far ahead of the clock each table has leaves
    growth_bytes_per_day: float | None  # None: not known yet
    free_bytes: int | None  # None: the database is on another machine

    @property
    def total_bytes(self) -> int:
        return sum(table.bytes for table in self.tables)

    @property
    def chunk_bytes(self) -> int:
        return sum(table.bytes for table in self.tables if table.name == "chunks")

    @property
    def dead_bytes(self) -> int:
        """What the chunks take beyond the files that live."""
        return max(self.chunk_bytes - self.live_bytes, 0)

    @property
    def days_until_full(self) -> float | None:
        return days_until_full(self.free_bytes, self.growth_bytes_per_day)


def days_until_full(free_bytes: int | None, growth_bytes_per_day: float | None) -> float | None:
    """When the disk is full if it goes on like this; None if that is not known, or never."""
    if free_bytes is None or growth_bytes_per_day is None or growth_bytes_per_day <= 0:
        return None
    return free_bytes / growth_bytes_per_day
