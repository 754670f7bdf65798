"""
JSON shapes and header names that the server and its clients share.

Handlers decode into these types and answer with them, and OpenAPI is generated from them: what
is written here is on the wire.  Where a field's Python name is newer than its name on the wire, the
struct's `rename` has both.
"""

from restante.wire.common import (
    Alive as Alive,
)
from restante.wire.common import (
    Moment as Moment,
)
from restante.wire.common import (
    Problem as Problem,
)
from restante.wire.common import (
    Ready as Ready,
)
from restante.wire.common import (
    Status as Status,
)
from restante.wire.feed import (
    ACKED_SEQ as ACKED_SEQ,
)
from restante.wire.feed import (
    LATEST_SEQ as LATEST_SEQ,
)
from restante.wire.feed import (
    LOWEST_SEQ as LOWEST_SEQ,
)
from restante.wire.feed import (
    ActivityRow as ActivityRow,
)
from restante.wire.feed import (
    Event as Event,
)
from restante.wire.feed import (
    FeedAck as FeedAck,
)
from restante.wire.feed import (
    FeedAcked as FeedAcked,
)
from restante.wire.feed import (
    Message as Message,
)
from restante.wire.feed import (
    Queued as Queued,
)
from restante.wire.retention import (
    HeldSpace as HeldSpace,
)
from restante.wire.retention import (
    LagView as LagView,
)
from restante.wire.retention import (
    PartitionSpaceView as PartitionSpaceView,
)
from restante.wire.retention import (
    PinView as PinView,
)
from restante.wire.retention import (
    PlanStep as PlanStep,
)
from restante.wire.retention import (
    PostponedStep as PostponedStep,
)
from restante.wire.retention import (
    RetentionPlan as RetentionPlan,
)
from restante.wire.retention import (
    SpaceView as SpaceView,
)
from restante.wire.retention import (
    SweepReport as SweepReport,
)
from restante.wire.retention import (
    TableSpaceView as TableSpaceView,
)
from restante.wire.retention import (
    UploadStates as UploadStates,
)
from restante.wire.retention import (
    WorkspaceSpaceView as WorkspaceSpaceView,
)
from restante.wire.uploads import (
    IDEMPOTENCY_KEY as IDEMPOTENCY_KEY,
)
from restante.wire.uploads import (
    MAX_IDEMPOTENCY_KEY as MAX_IDEMPOTENCY_KEY,
)
from restante.wire.uploads import (
    Acked as Acked,
)
from restante.wire.uploads import (
    PendingUpload as PendingUpload,
)
from restante.wire.uploads import (
    PendingUploads as PendingUploads,
)
from restante.wire.uploads import (
    StagedFile as StagedFile,
)
from restante.wire.uploads import (
    UploadAnswer as UploadAnswer,
)
from restante.wire.uploads import (
    UploadPage as UploadPage,
)
from restante.wire.uploads import (
    UploadState as UploadState,
)
from restante.wire.uploads import (
    UploadView as UploadView,
)
from restante.wire.workspaces import (
    CALLER_ID as CALLER_ID,
)
from restante.wire.workspaces import (
    Heartbeat as Heartbeat,
)
from restante.wire.workspaces import (
    IssuedToken as IssuedToken,
)
from restante.wire.workspaces import (
    Mode as Mode,
)
from restante.wire.workspaces import (
    Registered as Registered,
)
from restante.wire.workspaces import (
    Registration as Registration,
)
from restante.wire.workspaces import (
    WorkspaceChanges as WorkspaceChanges,
)
from restante.wire.workspaces import (
    WorkspacePage as WorkspacePage,
)
from restante.wire.workspaces import (
    WorkspaceView as WorkspaceView,
)
