"""
JSON shapes and header names that the server and its clients share.

The handlers decode into these types and answer with them, and the OpenAPI document is made of them:
what is written here is what is on the wire.
"""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

LOWEST_SEQ = "X-Restante-Lowest-Seq"
LATEST_SEQ = "X-Restante-Latest-Seq"
ACKED_SEQ = "X-Restante-Acked-Seq"
IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_IDEMPOTENCY_KEY = 255
CALLER_ID = "X-Workspace-ID"

Mode = Literal["poll", "push"]
Moment = Annotated[datetime, Meta(tz=True)]

_CARD = {
    "required": ["name"],
    "properties": {"name": {"type": "string", "pattern": r"\S"}},
    "examples": [{"name": "laptop"}],
}
_PARAMS = {"message": {"role": "user", "parts": [{"kind": "text", "text": "Good morning."}]}}


class Problem(Struct, frozen=True):
    """Every refusal and failure."""

    error: Annotated[str, Meta(description="What happened and what to do, as a sentence.")]
    code: Annotated[str, Meta(description="Stable; programs branch on it.")]


class Registration(Struct, frozen=True):
    """A workspace presents itself."""

    id: Annotated[UUID, Meta(description="Chosen by the workspace, and kept by it.")]
    agent_card: Annotated[
        dict[str, Any],
        Meta(description="What it says about itself; a name at least.", extra_json_schema=_CARD),
    ]
    delivery_mode: Annotated[
        Mode | None,
        Meta(
            description="Whether it polls or is called at its url; push if it never said.",
            examples=["poll"],
        ),
    ] = None
    url: Annotated[
        str | None, Meta(description="Where a push workspace is called, http or https.")
    ] = None


class Registered(Struct, frozen=True, omit_defaults=True):
    """The secrets appear only when they are issued, on the first registration."""

    status: Literal["registered"]
    delivery_mode: Mode
    auth_token: str | None = None
    inbound_secret: Annotated[
        str | None, Meta(description="What we send as bearer when we call a push workspace.")
    ] = None


class Heartbeat(Struct, frozen=True):
    """A sign of life."""

    workspace_id: UUID
    active_tasks: Annotated[
        int, Meta(ge=0, le=2**31 - 1, description="How many it works on.", examples=[1])
    ] = 0
    current_task: Annotated[
        str, Meta(description="What it is doing, for people.", examples=["reading a report"])
    ] = ""


class WorkspaceChanges(Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator can change about a workspace."""

    name: Annotated[str | None, Meta(examples=["the laptop in the attic"])] = None
    url: str | None = None
    delivery_mode: Mode | None = None
    parent_id: UUID | None = None


class Status(Struct, frozen=True):
    """That something was done."""

    status: str


class Alive(Struct, frozen=True):
    """The process runs."""

    status: Literal["alive"]


class Ready(Struct, frozen=True):
    """The server can do its work."""

    status: Literal["ready"]


class WorkspaceView(Struct, frozen=True):
    """A workspace as the operator sees it; never its secrets."""

    id: UUID
    name: str
    delivery_mode: Mode
    url: str | None
    agent_card: Raw
    parent_id: UUID | None
    status: Literal["active", "removed"]
    has_token: bool
    active_tasks: int
    current_task: str
    created_at: Moment
    last_seen_at: Moment


class WorkspacePage(Struct, frozen=True):
    """Workspaces in the order of their ids; `next_after` is missing on the last page."""

    workspaces: list[WorkspaceView]
    next_after: UUID | UnsetType = UNSET


class IssuedToken(Struct, frozen=True, omit_defaults=True):
    """A new token; it is shown this once.  A push workspace's secret comes with it."""

    auth_token: str
    inbound_secret: str | None = None


class StagedFile(Struct, frozen=True, rename={"mime_type": "mimeType"}):
    """One accepted file."""

    uri: str
    name: str
    mime_type: str
    size: int


class UploadAnswer(Struct, frozen=True):
    """The accepted files, in the order of the parts."""

    files: list[StagedFile]


class ActivityRow(Struct, frozen=True):
    """A row of a feed."""

    id: UUID
    workspace_id: UUID
    activity_type: Annotated[str, Meta(description="`a2a_receive` for files and messages.")]
    source_id: Annotated[
        UUID | None, Meta(description="The workspace that sent it; null: from the canvas.")
    ]
    target_id: UUID | None
    method: Annotated[
        str | None, Meta(description="`chat_upload_receive` for a file, else the message's own.")
    ]
    summary: str | None
    request_body: Annotated[
        Raw,
        Meta(
            description="The message; for a file its `file_id`, `name`, `mimeType`, `size`, `uri`."
        ),
    ]
    response_body: Raw
    duration_ms: int | None
    status: str
    error_detail: str | None
    created_at: Moment
    seq: Annotated[int, Meta(description="Grows by one from row to row of a feed.")]


class FeedAck(Struct, frozen=True):
    """How far the workspace has handled its feed."""

    acked_seq: Annotated[
        int,
        Meta(ge=0, le=2**63 - 1, description="The seq of the last row handled.", examples=[42]),
    ]


class FeedAcked(Struct, frozen=True):
    """Where the mark stands now."""

    acked_seq: int


class Message(Struct, frozen=True):
    """A JSON-RPC 2.0 request; fields that are not named here are kept as they are."""

    method: Annotated[
        str,
        Meta(pattern=r"\S", description="What is asked for.", examples=["message/send"]),
    ]
    jsonrpc: Literal["2.0"] = "2.0"
    id: Annotated[Any, Meta(description="The sender's own; kept as it is.")] = None
    params: Annotated[
        Any, Meta(description="An object or an array; kept as it is.", examples=[_PARAMS])
    ] = None


class Queued(Struct, frozen=True):
    """A message waits in the feed."""

    status: Literal["queued"]
    delivery_mode: Literal["poll"]
    method: str


class PendingUpload(Struct, frozen=True, rename={"mime_type": "mimeType"}):
    """A file that waits to be fetched."""

    file_id: UUID
    uri: str
    name: str
    mime_type: str
    size: int
    sha256: Annotated[str, Meta(description="Of the contents, as hex.")]
    created_at: Moment
    fetched_at: Moment | None
    expires_at: Moment


class PendingUploads(Struct, frozen=True):
    """What waits, oldest first; `next_after` is missing on the last page."""

    uploads: list[PendingUpload]
    next_after: UUID | UnsetType = UNSET


class Acked(Struct, frozen=True, omit_defaults=True):
    """The workspace has the file; `raced` when the sweep was faster than this answer."""

    acked: bool
    raced: bool = False


class Event(Struct, frozen=True):
    """What watchers of a workspace are sent for each new row."""

    event: Literal["ACTIVITY_LOGGED"]
    workspace_id: UUID
    payload: ActivityRow


class PlanStep(Struct, frozen=True):
    """One thing a sweep does; `bytes` is what the filesystem gets back, negative where it takes."""

    action: str
    leaf: str | None
    rows: int
    bytes: int
    why: str


class HeldSpace(Struct, frozen=True, omit_defaults=True):
    """Space that has to stay, and because of whom."""

    leaf: str
    bytes: int
    why: str
    workspace_id: UUID | None = None
    workspace_bytes: int | None = None
    since: datetime | None = None
    until: datetime | None = None


class RetentionPlan(Struct, frozen=True):
    """What a sweep would do now."""

    steps: list[PlanStep]
    held: list[HeldSpace]
    bytes_to_come_back: int


class PostponedStep(Struct, frozen=True):
    """A step that found somebody in its way, or another server at it; the next pass tries again."""

    step: PlanStep
    reason: str


class SweepReport(Struct, frozen=True):
    """What one pass did."""

    acked: int
    expired: int
    bytes_back: Annotated[
        int,
        Meta(
            description="As the filesystem sees it: without what was written again to move files."
        ),
    ]
    seconds: float
    done: list[PlanStep]
    postponed: list[PostponedStep]


class UploadStates(Struct, frozen=True):
    """How many uploads are in each state."""

    never_fetched: int
    fetched: int
    acked: int
    expired: int


class WorkspaceSpaceView(Struct, frozen=True):
    """What one workspace has waiting."""

    workspace_id: UUID
    uploads: UploadStates
    waiting_bytes: int
    waiting_since: datetime | None


class UploadView(Struct, frozen=True, kw_only=True, rename={"mime_type": "mimeType"}):
    """An upload as the operator sees it, in any state."""

    file_id: UUID
    workspace_id: UUID
    name: str
    mime_type: str
    size: int
    sha256: str
    state: Literal["never_fetched", "fetched", "acked", "expired"]
    created_at: Moment
    fetched_at: Moment | None
    acked_at: Moment | None
    expires_at: Moment
    reopenable_until: Moment | None
    bucket: Moment
    leaf: str | UnsetType | None = UNSET


class UploadPage(Struct, frozen=True):
    """Uploads, oldest first; `next_after` is missing on the last page."""

    uploads: list[UploadView]
    next_after: UUID | UnsetType = UNSET


class TableSpaceView(Struct, frozen=True):
    """What one table takes on disk, with its leaves."""

    name: str
    bytes: int
    dead_rows: int
    leaves: int


class LeafSpaceView(Struct, frozen=True):
    """What one leaf takes on disk, and of a bucket how much of that lives."""

    name: str
    bytes: int
    live_bytes: int | None
    dead_bytes: int | None


class LagView(Struct, frozen=True):
    """How many rows a workspace has not handled yet."""

    workspace_id: UUID
    behind: int


class PinView(Struct, frozen=True):
    """Something that keeps space from coming back."""

    who: str
    what: str
    way_out: str
    bytes: int
    seconds: float


class SpaceView(Struct, frozen=True):
    """What takes space, what holds it, and how deliveries stand."""

    total_bytes: int
    live_bytes: int
    dead_bytes: int
    growth_bytes_per_day: float | None
    free_bytes: int | None
    days_until_full: float | None
    lead_seconds: dict[str, float]
    tables: list[TableSpaceView]
    leaves: list[LeafSpaceView]
    uploads: UploadStates
    workspaces_active: int
    workspaces: Annotated[
        list[WorkspaceSpaceView], Meta(description="Those with most bytes waiting.")
    ]
    lags: list[LagView]
    pins: list[PinView]
