"""
What a sweep would do: pure functions from a picture of the tables to a plan.

The dry run prints the plan, the sweep carries it out, the status page explains it: there is one
planner.  What it may not take, it names: which leaf, how many bytes, because of whom, until when.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from restante.database.spans import Span
from restante.ids import WorkspaceId

_INTERRUPTED = "an earlier pass was interrupted"


class LeafState(StrEnum):
    """Where a leaf is on its way out."""

    ATTACHED = "attached"
    SEALED = "sealed"  # takes no more rows
    DETACHING = "detaching"  # a detach began and did not end
    DETACHED = "detached"  # a table of its own that nobody reads


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has most of what still lives in a leaf."""

    workspace_id: WorkspaceId
    bytes: int
    files: int
    since: datetime
    until: datetime


@dataclass(frozen=True, slots=True)
class Live:
    """What still lives in a bucket; `counted` is False when there was too much to count."""

    files: int
    bytes: int
    counted: bool = True
    holder: Holder | None = None


@dataclass(frozen=True, slots=True)
class Leaf:
    """One partition as the catalogue has it."""

    table: str
    name: str
    state: LeafState
    bytes: int
    span: Span | None  # unknown once its detaching began
    live: Live = Live(0, 0)
    arriving: int = 0  # uploads on their way into it
    is_locked: bool = False  # somebody has locked it against everybody; its bytes are not known


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything the decisions depend on, as it was at one moment."""

    now: datetime
    acked_due: int
    expired_due: int
    leaves: Sequence[Leaf]


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator chose."""

    ack_retention: timedelta
    feed_retention: timedelta
    # Bytes may be on their way into a bucket for this long after its time is over.
    settling: timedelta
    # Files are moved out of a bucket when no more than this part of it still lives.
    move_below: float = 0.3


class Kind(StrEnum):
    """What a step does."""

    DELETE_UPLOADS = "delete uploads"
    FINISH_DETACH = "finish detaching"
    DROP_DETACHED = "drop what was left over"
    MOVE_FILES = "move live files"
    DROP_BUCKET = "drop a bucket"
    TRIM_FEED = "trim the feed"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do, with what it removes and what comes back to the filesystem."""

    kind: Kind
    leaf: Leaf | None = None
    rows: int = 0
    bytes: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """Space that has to stay, and because of whom."""

    leaf: str
    bytes: int
    why: str
    by: Holder | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps in their order, and what they leave alone."""

    steps: Sequence[Step]
    held: Sequence[Held]

    @property
    def steps_on_rows(self) -> list[Step]:
        """They come first."""
        return [step for step in self.steps if step.leaf is None]

    @property
    def steps_on_leaves(self) -> list[Step]:
        return [step for step in self.steps if step.leaf]

    @property
    def bytes_to_come_back(self) -> int:
        return sum(step.bytes for step in self.steps)


def plan(picture: Picture, policy: Policy) -> Plan:
    """
    Decide what to do.

    The rows that are due come first: a bucket that this empties goes in the same pass, and nothing
    that is wrong with a leaf can keep them.  Then what an earlier pass left half done, because
    Postgres detaches one leaf of a table at a time; then whole leaves.
    """
    steps, held = list(_due_uploads(picture)), list[Held]()
    for leaf in sorted(picture.leaves, key=_is_attached):
        decided = _decided(leaf, picture.now, policy)
        if isinstance(decided, Held):
            held.append(decided)
        elif decided and leaf.is_locked:
            held.append(Held(leaf.name, leaf.bytes, "somebody has it locked just now"))
        else:
            steps += decided
    return Plan(steps, held)


def _is_attached(leaf: Leaf) -> bool:
    return leaf.state in {LeafState.ATTACHED, LeafState.SEALED}


def _decided(leaf: Leaf, now: datetime, policy: Policy) -> Sequence[Step] | Held:
    """The steps on one leaf, none while it is in use; or why it has to stay."""
    if leaf.state is LeafState.DETACHING:
        return [Step(Kind.FINISH_DETACH, leaf, bytes=leaf.bytes, why=_INTERRUPTED)]
    if leaf.state is LeafState.DETACHED:
        return [Step(Kind.DROP_DETACHED, leaf, bytes=leaf.bytes, why=_INTERRUPTED)]
    if leaf.span is None:
        return []
    if leaf.table == "chunks":
        return _bucket(leaf, leaf.span, now, policy)
    return _feed(leaf, leaf.span, now, policy)


def _due_uploads(picture: Picture) -> Iterator[Step]:
    due = picture.acked_due + picture.expired_due
    if due:
        why = f"{picture.acked_due} acknowledged, {picture.expired_due} expired"
        yield Step(Kind.DELETE_UPLOADS, rows=due, why=why)


def _bucket(leaf: Leaf, span: Span, now: datetime, policy: Policy) -> Sequence[Step] | Held:
    """Drop it, empty it and drop it, or say who is in the way."""
    if now < span.end + policy.settling:
        return []
    if leaf.arriving:
        return Held(leaf.name, leaf.bytes, f"{leaf.arriving} uploads are still arriving in it")
    live = leaf.live
    if live.files == 0:
        return [Step(Kind.DROP_BUCKET, leaf, bytes=leaf.bytes, why="nothing lives in it")]
    if live.counted and live.bytes <= policy.move_below * leaf.bytes:
        why = f"{live.bytes} of {leaf.bytes} bytes live"
        return [
            Step(Kind.MOVE_FILES, leaf, rows=live.files, bytes=-live.bytes, why=why),
            Step(Kind.DROP_BUCKET, leaf, bytes=leaf.bytes, why="its live files have moved"),
        ]
    return Held(leaf.name, leaf.bytes, f"{live.files} files live in it", live.holder)


def _feed(leaf: Leaf, span: Span, now: datetime, policy: Policy) -> Sequence[Step]:
    if span.end > now - policy.feed_retention:
        return []
    why = f"its last row is older than {policy.feed_retention.total_seconds() / 86400:g} days"
    return [Step(Kind.TRIM_FEED, leaf, bytes=leaf.bytes, why=why)]
