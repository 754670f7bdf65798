"""
The plan of a sweep, as pure functions of what was found in the tables.

The dry run prints the plan, the sweep carries it out, the status explains it: there is one planner.
What must stay is named: which partition, how many bytes, because of whom, until when.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from restante.database.partitions import Partition, PartitionState
from restante.retention.subjects import PartitionSubject, RowSubject, Subjects
from restante.wire import HeldSpace, PlanStep, RetentionPlan

GIB = 1024**3

FINISH_DETACH = "finish detaching"
DROP_DETACHED = "drop a leftover"

_INTERRUPTED = "an earlier pass was interrupted"
_LOCKED = "another session holds a lock on it"
_NO_ROOM_TO_MOVE = "its live files cannot be moved, because the disk is almost full"

_NO_ROOM_TO_REWRITE = "what stays of it cannot be written anew, because the disk is almost full"

_RESERVED_PART = 20  # of the filesystem, unless the operator has chosen the reserve
_MAX_RESERVE = GIB
# Moved bytes are written twice, to the table and to the WAL, and half of the room stays for others.
_ROOM_PER_MOVED_BYTE = 4


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that a plan depends on, at one moment."""

    now: datetime
    due: Sequence[tuple[RowSubject, Mapping[str, int]]]
    partitions: Sequence[Partition]
    contents: Mapping[str, Any]  # by the partition's name, as its subject describes them


def plan(picture: Picture, subjects: Subjects, *, scarce_bytes: int | None = None) -> RetentionPlan:
    """
    Decide what to do, in order.

    Due rows come first: a bucket that they leave empty is dropped in the same pass, and no trouble
    with a partition keeps them.  Interrupted removals are next, because Postgres detaches one
    partition of a table at a time.  Whole partitions follow.

    On a disk that is almost full, `scarce_bytes` is what is left of it.  Then what frees most for
    the fewest bytes written comes first.
    """
    rows = [step for subject, due in picture.due for step in subject.plan(due)]
    removals = list[Sequence[PlanStep]]()
    held = list[HeldSpace]()
    for partition in sorted(picture.partitions, key=_age):
        decided = _decided(partition, subjects.of_partition(partition), picture)
        if isinstance(decided, HeldSpace):
            held.append(decided)
        elif decided and partition.is_locked:
            held.append(_kept(partition, decided[0], _LOCKED))
        elif scarce_bytes is not None and not _can_move(decided, scarce_bytes):
            held.append(_kept(partition, decided[0], _NO_ROOM_TO_MOVE))
        elif scarce_bytes is not None and not _can_rewrite(
            _rewritten(partition, subjects, picture), scarce_bytes
        ):
            held.append(_kept(partition, decided[0], _NO_ROOM_TO_REWRITE))
        elif decided:
            removals.append(decided)
    steps = [*rows, *(step for removal in removals for step in removal)]
    if scarce_bytes is not None:
        emptying = {subject.name for subject, _ in picture.due if subject.empties_partitions}
        ordered = {
            one.name: one.parent or "" for one in picture.partitions if _is_ordered(one, subjects)
        }
        steps = _cheapest_first(rows, removals, emptying, ordered)
    return RetentionPlan(steps, held, sum(step.bytes for step in steps))


def _age(one: Partition) -> tuple[bool, str, str]:
    """What is half removed comes first, and of each table the oldest."""
    return one.is_attached, one.table, one.span.start.isoformat() if one.span else ""


def _is_ordered(one: Partition, subjects: Subjects) -> bool:
    return one.is_attached and subjects.of_partition(one).is_ordered


def _can_move(removal: Sequence[PlanStep], free_bytes: int) -> bool:
    return _can_rewrite(-sum(step.bytes for step in removal if step.bytes < 0), free_bytes)


def _can_rewrite(size: int, free_bytes: int) -> bool:
    return size * _ROOM_PER_MOVED_BYTE <= free_bytes


def _rewritten(partition: Partition, subjects: Subjects, picture: Picture) -> int:
    contents = picture.contents.get(partition.name)
    return 0 if contents is None else subjects.of_partition(partition).rewritten_bytes(contents)


def _cheapest_first(
    rows: Sequence[PlanStep],
    removals: Sequence[Sequence[PlanStep]],
    emptying: Collection[str],
    ordered: Mapping[str, str],  # parents of partitions that go in their own order
) -> list[PlanStep]:
    """
    The order on a disk that is almost full.

    A detached partition is dropped with hardly a write.  Rows that keep buckets are deleted before
    the buckets; other rows free nothing, and wait.  Moving files writes, so such buckets come last.
    """

    def cost(removal: Sequence[PlanStep]) -> tuple[int, int]:
        kinds = (DROP_DETACHED, FINISH_DETACH)
        first = removal[0]
        kind = kinds.index(first.action) if first.action in kinds else 2 + (first.bytes < 0)
        return kind, -sum(step.bytes for step in removal)

    cheapest = _in_their_order(sorted(removals, key=cost), removals, ordered)
    leftovers = [one for one in cheapest if one[0].action in {DROP_DETACHED, FINISH_DETACH}]
    whole = cheapest[len(leftovers) :]
    return [
        *(step for removal in leftovers for step in removal),
        *(step for step in rows if step.subject in emptying),
        *(step for removal in whole for step in removal),
        *(step for step in rows if step.subject not in emptying),
    ]


def _in_their_order(
    cheapest: Sequence[Sequence[PlanStep]],
    removals: Sequence[Sequence[PlanStep]],
    ordered: Mapping[str, str],
) -> list[Sequence[PlanStep]]:
    """The cheapest first, but in the places of one parent's partitions the oldest of them first."""
    waiting = defaultdict[str, deque[Sequence[PlanStep]]](deque)
    for one in removals:
        if (name := one[0].partition or "") in ordered:
            waiting[ordered[name]].append(one)
    return [
        waiting[ordered[name]].popleft() if (name := one[0].partition or "") in ordered else one
        for one in cheapest
    ]


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


def _kept(partition: Partition, step: PlanStep, why: str) -> HeldSpace:
    return HeldSpace(partition.name, partition.bytes, why, subject=step.subject, action=step.action)


@dataclass(frozen=True, slots=True)
class Room:
    """The size of a filesystem, and how much of it is free for Postgres."""

    total: int
    free: int


def reserve_of(total_bytes: int, chosen: int | None) -> int:
    """What stays free of a filesystem, for acknowledgements and sweeps."""
    if chosen is not None:
        return chosen
    return min(total_bytes // _RESERVED_PART, _MAX_RESERVE)


def tightest(rooms: Sequence[Room], chosen: int | None) -> Room | None:
    """The filesystem that reaches its reserve first; None if none can be seen."""
    return min(rooms, key=lambda room: room.free - reserve_of(room.total, chosen), default=None)


def is_low(room: Room, chosen: int | None, *, written: int = 0) -> bool:
    """Whether less than the reserve is free, if so much was written since the look."""
    return room.free - written < reserve_of(room.total, chosen)


def days_until_full(free_bytes: int | None, growth_bytes_per_day: float | None) -> float | None:
    """When the disk is full at this growth; None if that is unknown, or never."""
    if free_bytes is None or growth_bytes_per_day is None or growth_bytes_per_day <= 0:
        return None
    return free_bytes / growth_bytes_per_day
