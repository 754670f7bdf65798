"""
What a bounded thing tells the planner, the executor, the status page and the metrics.

Everything that grows registers one of two kinds of subject.  Rows are deleted in batches that skip
locked rows, so any number of servers may do it at once.  Partitions are dropped, by one server at a
time.  The planner knows no table by name: a table without a subject is an error.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from restante import wire
from restante.database.partitions import Partition, PartitionedTable
from restante.database.pool import Connection
from restante.wire import HeldSpace, PlanStep

OUT_OF_TIME = "this pass has used up its time"

Contents = TypeVar("Contents")


@dataclass(frozen=True, slots=True)
class Account:
    """What one subject adds to the status page."""

    live_bytes: Mapping[str, int] = field(default_factory=dict[str, int])  # by partition
    live_total: int | None = None  # None: it does not tell live bytes from dead ones
    pins: Sequence[wire.PinView] = ()
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of `wire.SpaceView`


NOTHING = Account()


class Subject(ABC):
    """Something that would grow without bound."""

    name: ClassVar[str]  # in plans, reports, the status and metrics
    tables: ClassVar[Sequence[str]]  # what it keeps bounded

    async def account(
        self, connection: Connection, found: Sequence[Partition], *, now: datetime
    ) -> Account:
        """What the status page shows of it beyond the sizes of its tables."""
        return NOTHING


class RowSubject(Subject):
    """Bounded by deleting rows."""

    action: ClassVar[str]  # what a plan calls its step
    outcomes: ClassVar[Sequence[str]]  # what deleted rows are counted as
    batch_size: ClassVar[int] = 1000
    is_prompt: ClassVar[bool] = False  # deleted every minute, not only with the sweep
    is_routine: ClassVar[bool] = False  # due at every pass, so not worth a log line
    empties_partitions: ClassVar[bool] = False  # deleting them may let a partition go

    @abstractmethod
    async def count_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        """How many rows are due, by outcome, up to a limit.  Runs on every pass, so it is cheap."""

    @abstractmethod
    async def delete_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        """Delete one batch; returns how many rows, by outcome.  Waits for no lock."""

    def plan(self, due: Mapping[str, int]) -> list[PlanStep]:
        """The step that deletes these rows, if there are any."""
        rows = sum(due.values())
        why = ", ".join(f"{count} {outcome}" for outcome, count in due.items())
        return [PlanStep(self.action, None, rows, 0, why, self.name)] if rows else []


class Work(Protocol):
    """What a step on a partition works with: one connection that holds the sweep's lock."""

    connection: Connection
    now: datetime

    @property
    def is_out_of_time(self) -> bool: ...
    def moved(self, size: int) -> None: ...
    def freed(self, size: int) -> None: ...
    async def detach_and_drop(self, partition: Partition) -> None: ...


class PartitionSubject(Subject, Generic[Contents]):
    """Bounded by dropping partitions."""

    table: PartitionedTable
    width: timedelta  # of new partitions
    least_lead = timedelta(hours=6)  # so far ahead of the clock there are partitions at least
    is_ordered = False  # of each parent the oldest goes first, however large the others are
    # Rows may still be written to a partition for this long after its range has ended.
    settling = timedelta(seconds=5)

    async def parents(self, connection: Connection) -> Sequence[str]:
        """The tables that partitions are attached to; more than one if there are two levels."""
        return [self.table.name]

    async def widths(self, connection: Connection) -> Mapping[str, timedelta]:
        """How wide new partitions of each parent are."""
        return dict.fromkeys(await self.parents(connection), self.width)

    async def contents(
        self, connection: Connection, past: Sequence[Partition], *, now: datetime, closely: bool
    ) -> Mapping[str, Contents]:
        """
        What the decision depends on beside the range, by the partition's name.

        Unless it is to look closely, it asks of each partition no more than whether it is empty.
        """
        return {}

    @abstractmethod
    def decide(
        self, partition: Partition, contents: Contents | None, *, now: datetime
    ) -> Sequence[PlanStep] | HeldSpace:
        """The steps on an attached partition, none while in use, or why it must stay.  Pure."""

    def rewritten_bytes(self, contents: Contents) -> int:
        """How much the steps write anew before they free anything; moved files are steps."""
        return 0

    @abstractmethod
    async def carry_out(self, step: PlanStep, partition: Partition, work: Work) -> str | None:
        """Carry out a step of `decide`; returns the reason if it must wait for the next pass."""

    def is_looked_at(self, partition: Partition, *, now: datetime) -> bool:
        """Whether `decide` is asked about it; unless a subject says otherwise, once it is past."""
        return self.is_past(partition, now=now)

    def is_past(self, partition: Partition, *, now: datetime) -> bool:
        """Whether no more rows are written to it; true of a partition that is half removed."""
        return partition.span is None or partition.span.end + self.settling <= now


class Subjects:
    """All subjects of a server.  The order of registration is the order of a plan."""

    def __init__(self, *subjects: Subject) -> None:
        self._subjects = subjects
        for names in ([one.name for one in subjects], self._outcomes(subjects)):
            if len(names) != len(set(names)):
                raise ValueError(f"two subjects share a name: {', '.join(names)}")
        self.rows = [one for one in subjects if isinstance(one, RowSubject)]
        self.partitions: list[PartitionSubject[Any]] = [
            one for one in subjects if isinstance(one, PartitionSubject)
        ]

    def __iter__(self) -> Iterator[Subject]:
        return iter(self._subjects)

    @property
    def partitioned_tables(self) -> list[PartitionedTable]:
        return [subject.table for subject in self.partitions]

    @property
    def outcomes(self) -> list[str]:
        """Everything that deleted rows are counted as."""
        return self._outcomes(self._subjects)

    @staticmethod
    def _outcomes(subjects: Sequence[Subject]) -> list[str]:
        return [
            outcome
            for subject in subjects
            if isinstance(subject, RowSubject)
            for outcome in subject.outcomes
        ]

    async def lead_seconds(
        self, connection: Connection, found: Sequence[Partition], *, now: datetime
    ) -> dict[str, float]:
        """
        How far ahead of the clock each table has partitions, at the parent with the fewest.

        A table without parents needs none, so it has a whole one.
        """
        lead: dict[str, float] = {}
        for subject in self.partitions:
            ends = dict.fromkeys(await subject.parents(connection), now)
            for one in found:
                if one.span and one.parent in ends:
                    ends[one.parent] = max(ends[one.parent], one.span.end)
            lead[subject.table.name] = (
                min(ends.values(), default=now + subject.width) - now
            ).total_seconds()
        return lead

    def of_partition(self, partition: Partition) -> PartitionSubject[Any]:
        """Who decides about this partition; raises LookupError for an unknown table."""
        for subject in self.partitions:
            if subject.table.name == partition.table:
                return subject
        raise LookupError(f"no subject is registered for the partitioned table {partition.table}")

    def of_table(self, table: str) -> list[str]:
        """The names of the subjects that keep this table bounded."""
        return [subject.name for subject in self._subjects if table in subject.tables]
