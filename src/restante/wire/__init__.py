"""
JSON shapes and header names that the server and its clients share.

Handlers decode into these types and answer with them, and OpenAPI is generated from them: what
is written here is on the wire.  Where a field's Python name is newer than its name on the wire, the
struct's `rename` has both.
"""

from restante.wire.common import (
    Alive as Alive,
    Moment as Moment,
    Problem as Problem,
    Ready as Ready,
    Status as Status,
)
from restante.wire.feed import (
    ACKED_SEQ as ACKED_SEQ,
    ATTEMPT as ATTEMPT,
    LATEST_SEQ as LATEST_SEQ,
    LOWEST_SEQ as LOWEST_SEQ,
    MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES,
    NOTIFY as NOTIFY,
    READ_SEQ as READ_SEQ,
    ActivityRow as ActivityRow,
    AgentEvent as AgentEvent,
    AgentMessage as AgentMessage,
    Attachment as Attachment,
    Event as Event,
    EvictedPeer as EvictedPeer,
    FeedAck as FeedAck,
    FeedAcked as FeedAcked,
    Message as Message,
    NodeEvent as NodeEvent,
    Notification as Notification,
    Notified as Notified,
    Queued as Queued,
)
from restante.wire.retention import (
    HeldSpace as HeldSpace,
    LagView as LagView,
    PartitionSpaceView as PartitionSpaceView,
    PinView as PinView,
    PlanStep as PlanStep,
    PostponedStep as PostponedStep,
    RetentionPlan as RetentionPlan,
    SpaceView as SpaceView,
    SweepReport as SweepReport,
    TableSpaceView as TableSpaceView,
    UploadStates as UploadStates,
    WorkspaceSpaceView as WorkspaceSpaceView,
    WriterView as WriterView,
)
from restante.wire.uploads import (
    IDEMPOTENCY_KEY as IDEMPOTENCY_KEY,
    MAX_IDEMPOTENCY_KEY as MAX_IDEMPOTENCY_KEY,
    Acked as Acked,
    HeldFiles as HeldFiles,
    PendingUpload as PendingUpload,
    PendingUploads as PendingUploads,
    StagedFile as StagedFile,
    UploadAnswer as UploadAnswer,
    UploadLimits as UploadLimits,
    UploadPage as UploadPage,
    UploadState as UploadState,
    UploadView as UploadView,
)
from restante.wire.workspaces import (
    CALLER_ID as CALLER_ID,
    Heartbeat as Heartbeat,
    HeartbeatNoted as HeartbeatNoted,
    IssuedToken as IssuedToken,
    Mode as Mode,
    Registered as Registered,
    Registration as Registration,
    WorkspaceChanges as WorkspaceChanges,
    WorkspaceEntry as WorkspaceEntry,
    WorkspacePage as WorkspacePage,
    WorkspaceView as WorkspaceView,
)
