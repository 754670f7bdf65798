"""Files on their way in and out, and uploads as the operator sees them."""

from typing import Annotated, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Struct, UnsetType

from restante.wire.common import Moment

IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_IDEMPOTENCY_KEY = 255

UploadState = Literal["never_fetched", "fetched", "acked", "expired"]


class StagedFile(Struct, frozen=True, rename={"mime_type": "mimeType"}):
    """One accepted file."""

    uri: str
    name: str
    mime_type: str
    size: int
    display_name: Annotated[str, Meta(description="The name for people.")] | UnsetType = UNSET


class UploadAnswer(Struct, frozen=True):
    """The accepted files, in the order of the parts."""

    files: list[StagedFile]


class UploadLimits(Struct, frozen=True):
    """The most that an upload can have on this server."""

    per_file_bytes: int
    per_request_bytes: int
    max_attachments_per_message: Annotated[int, Meta(description="Files in one request.")]


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
    display_name: Annotated[str, Meta(description="The name for people.")] | UnsetType = UNSET
    source_id: Annotated[
        UUID | None,
        Meta(
            description="The workspace that sent it; null: from the canvas. Your own id: it is for "
            "your user, so do not fetch it."
        ),
    ] = None


class PendingUploads(Struct, frozen=True):
    """Unacknowledged files, oldest first; `next_after` is missing on the last page."""

    uploads: list[PendingUpload]
    next_after: UUID | UnsetType = UNSET


class Acked(Struct, frozen=True, omit_defaults=True):
    """The workspace has the file; `raced` if the sweep deleted the row in the same moment."""

    acked: bool
    raced: bool = False


class HeldFiles(Struct, frozen=True, kw_only=True):
    """The files that are kept for one workspace: those that wait, and those it has acknowledged."""

    waiting_files: int = 0
    waiting_bytes: int = 0
    waiting_until: Moment | None = None
    acked_files: int = 0
    acked_bytes: int = 0


class UploadView(
    Struct, frozen=True, kw_only=True, rename={"mime_type": "mimeType", "partition": "leaf"}
):
    """An upload as the operator sees it, in any state."""

    file_id: UUID
    workspace_id: UUID
    name: str
    display_name: str
    mime_type: str
    size: int
    sha256: str
    state: UploadState
    created_at: Moment
    fetched_at: Moment | None
    acked_at: Moment | None
    expires_at: Moment
    reopenable_until: Moment | None
    bucket: Moment
    partition: str | UnsetType | None = UNSET


class UploadPage(Struct, frozen=True):
    """Uploads, oldest first; `next_after` is missing on the last page."""

    uploads: list[UploadView]
    next_after: UUID | UnsetType = UNSET
