"""
The plan of a sweep, as pure functions of what was found in the tables.

The dry run prints the plan, the sweep carries it out, the status explains it: there is one planner.
What must stay is named: which partition, how many bytes, because of whom, until when.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from restante.database.partitions import Partition, PartitionState
from restante.retention.subjects import PartitionSubject, RowSubject, Subjects
from restante.wire import HeldSpace, PlanStep, RetentionPlan

FINISH_DETACH = "finish detaching"
DROP_DETACHED = "drop a leftover"

_INTERRUPTED = "an earlier pass was interrupted"
_LOCKED = "another session holds a lock on it"


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that a plan depends on, at one moment."""

    now: datetime
    due: Sequence[tuple[RowSubject, Mapping[str, int]]]
    partitions: Sequence[Partition]
    contents: Mapping[str, Any]  # by the partition's name, as its subject describes them


def plan(picture: Picture, subjects: Subjects) -> RetentionPlan:
    """
    Decide what to do, in order.

    Due rows come first: a bucket that they leave empty is dropped in the same pass, and no trouble
    with a partition keeps them.  Interrupted removals are next, because Postgres detaches one
    partition of a table at a time.  Whole partitions follow.
    """
    steps = [step for subject, due in picture.due for step in subject.plan(due)]
    held = list[HeldSpace]()
    for partition in sorted(picture.partitions, key=lambda one: one.is_attached):
        subject = subjects.of_partition(partition)
        decided = _decided(partition, subject, picture)
        if isinstance(decided, HeldSpace):
            held.append(decided)
        elif decided and partition.is_locked:
            held.append(_locked(partition, decided[0]))
        else:
            steps += decided
    return RetentionPlan(steps, held, sum(step.bytes for step in steps))


def _decided(
    partition: Partition, subject: PartitionSubject[Any], picture: Picture
) -> Sequence[PlanStep] | HeldSpace:
    match partition.state:
        case PartitionState.DETACHING:
            return [_finish(FINISH_DETACH, partition, subject)]
        case PartitionState.DETACHED:
            return [_finish(DROP_DETACHED, partition, subject)]
        case _:
            contents = picture.contents.get(partition.name)
            return subject.decide(partition, contents, now=picture.now)


def _finish(action: str, partition: Partition, subject: PartitionSubject[Any]) -> PlanStep:
    return PlanStep(action, partition.name, 0, partition.bytes, _INTERRUPTED, subject.name)


def _locked(partition: Partition, step: PlanStep) -> HeldSpace:
    return HeldSpace(
        partition.name, partition.bytes, _LOCKED, subject=step.subject, action=step.action
    )


def days_until_full(free_bytes: int | None, growth_bytes_per_day: float | None) -> float | None:
    """When the disk is full at this growth; None if that is unknown, or never."""
    if free_bytes is None or growth_bytes_per_day is None or growth_bytes_per_day <= 0:
        return None
    return free_bytes / growth_bytes_per_day
