"""Rows of a feed, messages, and events."""

from typing import Annotated, Any, Literal
from uuid import UUID

from msgspec import Meta, Raw, Struct

from restante.wire.common import Moment

LOWEST_SEQ = "X-Restante-Lowest-Seq"
LATEST_SEQ = "X-Restante-Latest-Seq"
ACKED_SEQ = "X-Restante-Acked-Seq"
READ_SEQ = "X-Restante-Read-Seq"

# Above 1: an earlier attempt with the same request may have reached the server.
ATTEMPT = "X-Restante-Attempt"

# The method of a row with which an agent answers its user.
NOTIFY = "notify"

# A message with all that is in it, as JSON.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

_PARAMS = {"message": {"role": "user", "parts": [{"kind": "text", "text": "Good morning."}]}}


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


class FeedAck(Struct, frozen=True, omit_defaults=True):
    """The last row that the workspace has handled."""

    acked_seq: Annotated[
        int,
        Meta(ge=0, le=2**63 - 1, description="The seq of the last row handled.", examples=[42]),
    ]
    acked_id: Annotated[
        UUID | None,
        Meta(
            description="The id of that row. If the server has another row with this seq, because "
            "it was restored from a backup, the mark does not move."
        ),
    ] = None


class FeedAcked(Struct, frozen=True):
    """The mark after the request."""

    acked_seq: int
    last_acked_seq: Annotated[int | None, Meta(description="The same.")] = None


class Message(Struct, frozen=True):
    """A JSON-RPC 2.0 request; other fields are stored unchanged."""

    params: Annotated[
        Any, Meta(description="An object, in most methods; other fields stay.", examples=[_PARAMS])
    ]
    method: Annotated[
        str,
        Meta(pattern=r"\S", description="What is asked for.", examples=["message/send"]),
    ] = "message/send"
    jsonrpc: Literal["2.0"] = "2.0"
    id: Annotated[Any, Meta(description="The sender's own; kept as it is.")] = None


class Attachment(Struct, frozen=True, omit_defaults=True, rename={"mime_type": "mimeType"}):
    """A file that an agent refers to; other fields are dropped."""

    uri: Annotated[str, Meta(min_length=1, examples=["platform-pending:<workspace>/<file>"])]
    name: Annotated[str, Meta(min_length=1, description="For people.", examples=["plan.pdf"])]
    mime_type: str | None = None
    size: Annotated[int, Meta(ge=0)] | None = None


class Notification(Struct, frozen=True):
    """What an agent tells its user."""

    message: Annotated[str, Meta(min_length=1, examples=["The report is done."])]
    attachments: Annotated[list[Attachment], Meta(max_length=64)] | None = None


class Notified(Struct, frozen=True):
    """The notification is in the feed."""

    status: Literal["sent"]


class Queued(Struct, frozen=True):
    """The message is in the feed."""

    status: Literal["queued"]
    delivery_mode: Literal["poll"]
    method: str


class Event(Struct, frozen=True):
    """Sent to those who watch a workspace, once for each new row."""

    event: Literal["ACTIVITY_LOGGED"]
    workspace_id: UUID
    timestamp: Annotated[Moment, Meta(description="When the row was stored.")]
    payload: ActivityRow


class AgentMessage(Struct, frozen=True):
    """What the agent of a workspace tells its user."""

    message: str
    workspace_id: UUID
    name: Annotated[str, Meta(description="The name of the workspace.")]
    attachments: list[Attachment]


class AgentEvent(Struct, frozen=True):
    """Sent before the `Event` of a row with the method `notify`."""

    event: Literal["AGENT_MESSAGE"]
    workspace_id: UUID
    timestamp: Annotated[Moment, Meta(description="When the row was stored.")]
    payload: AgentMessage


class EvictedPeer(Struct, frozen=True, kw_only=True):
    """A peer of the op log that lost ops before it had read them."""

    peer: str
    table: str
    cause: Annotated[
        str,
        Meta(
            description="`cap_age`, `cap_bytes`, `reset`; or `retention`, `dormant` after a long "
            "absence."
        ),
    ]
    ops: Annotated[int, Meta(description="About how many were dropped.")]
    bytes: int


class NodeEvent(Struct, frozen=True):
    """Sent to the operator who watches all workspaces; it belongs to none of them."""

    event: Literal["OPLOG_PEER_EVICTED"]
    workspace_id: Literal[""]
    timestamp: Annotated[Moment, Meta(description="When it happened.")]
    payload: EvictedPeer
