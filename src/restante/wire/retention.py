"""Plans and reports of the sweep, and the space account."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from msgspec import Meta, Struct


class PlanStep(Struct, frozen=True, rename={"partition": "leaf"}):
    """One step of a sweep; `bytes` go back to the filesystem, or are written if negative."""

    action: str
    partition: str | None
    rows: int
    bytes: int
    why: str
    subject: Annotated[str, Meta(description="Which bounded thing the step is about.")] = ""


class HeldSpace(Struct, frozen=True, omit_defaults=True, rename={"partition": "leaf"}):
    """Space that cannot be freed yet, and because of whom."""

    partition: str
    bytes: int
    why: str
    workspace_id: UUID | None = None
    workspace_bytes: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    subject: str = ""
    reclaimable_bytes: Annotated[
        int, Meta(description="How many of the bytes belong to no file that is kept.")
    ] = 0
    action: Annotated[
        str, Meta(description="The step that a lock of another session prevents, if one does.")
    ] = ""


class RetentionPlan(Struct, frozen=True):
    """What a sweep would do now, in order."""

    steps: list[PlanStep]
    held: list[HeldSpace]
    bytes_to_come_back: int


class PostponedStep(Struct, frozen=True):
    """A step that was not carried out, and why; the next pass tries again."""

    step: PlanStep
    reason: str


class SweepReport(Struct, frozen=True):
    """What one pass of the sweep did."""

    acked: int
    expired: int
    bytes_back: Annotated[
        int,
        Meta(description="Bytes given back to the filesystem, less those rewritten to move files."),
    ]
    seconds: float
    done: list[PlanStep]
    postponed: list[PostponedStep]
    deleted: Annotated[
        dict[str, int], Meta(description="Rows deleted, by kind; acked and expired are uploads.")
    ]


class UploadStates(Struct, frozen=True):
    """How many uploads are in each state."""

    never_fetched: int
    fetched: int
    acked: int
    expired: int


class WorkspaceSpaceView(Struct, frozen=True):
    """The files of one workspace."""

    workspace_id: UUID
    uploads: UploadStates
    waiting_bytes: int
    waiting_since: datetime | None
    held_bytes: Annotated[
        int, Meta(description="Of all its files, acknowledged and expired ones included.")
    ] = 0


class TableSpaceView(Struct, frozen=True, rename={"partitions": "leaves"}):
    """The bytes of one table on disk, partitions included."""

    name: str
    bytes: int
    dead_rows: int
    partitions: int
    subjects: Annotated[
        list[str], Meta(description="Which bounded things keep this table from growing.")
    ]
    growth_bytes_per_day: Annotated[
        float | None, Meta(description="Over the last week; null until there is an hour of it.")
    ] = None


class PartitionSpaceView(Struct, frozen=True):
    """The bytes of one partition on disk; for a bucket also how many of them are live."""

    name: str
    bytes: int
    live_bytes: int | None
    dead_bytes: int | None


class LagView(Struct, frozen=True):
    """How many feed rows a workspace has not acknowledged."""

    workspace_id: UUID
    behind: int


class WriterView(Struct, frozen=True):
    """What was written for one workspace, whatever became of it, and what its feed keeps."""

    workspace_id: UUID
    this_hour_bytes: int
    total_bytes: int
    feed_bytes: int


class PinView(Struct, frozen=True):
    """Something that keeps space from being freed: who, how much, and the way out."""

    who: str
    what: str
    way_out: str
    bytes: int
    seconds: float
    workspace_id: Annotated[
        UUID | None, Meta(description="The workspace that it names, if it names one.")
    ] = None


class SpaceView(Struct, frozen=True, kw_only=True, rename={"partitions": "leaves"}):
    """What takes space, what keeps it, and the state of deliveries."""

    total_bytes: int
    live_bytes: int
    dead_bytes: int
    growth_bytes_per_day: float | None
    free_bytes: int | None
    reserve_bytes: Annotated[
        int | None, Meta(description="Nothing new is stored when less than this is free.")
    ]
    is_disk_low: bool
    days_until_full: float | None
    lead_seconds: dict[str, float]
    tables: list[TableSpaceView]
    partitions: list[PartitionSpaceView]
    uploads: UploadStates
    workspaces_active: int
    workspaces: Annotated[
        list[WorkspaceSpaceView], Meta(description="Those with most unacknowledged bytes.")
    ]
    lags: list[LagView]
    writers: Annotated[
        list[WriterView],
        Meta(description="Those for which most was written, aborted and acknowledged included."),
    ]
    feed_bytes: Annotated[int, Meta(description="What the feeds of all workspaces keep.")]
    max_feed_bytes: Annotated[
        int, Meta(description="Messages are refused when all feeds would keep more than this.")
    ]
    pins: list[PinView]
    plan: Annotated[
        RetentionPlan | None,
        Meta(description="What the next sweep does, what it frees, and what must stay."),
    ] = None
