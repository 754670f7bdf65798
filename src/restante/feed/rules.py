"""What a row of a workspace's feed is, and how files and messages become one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast
from uuid import UUID

import msgspec
from ulid import ULID

from restante.delivery.rules import UPLOAD_METHOD, NewUpload, Upload, pending_uri
from restante.ids import ActivityId, WorkspaceId

RECEIVED = "a2a_receive"
MAX_PAGE = 500
DEFAULT_PAGE = 100
LONGEST_LOOK_BACK_SECONDS = 30 * 24 * 3600
LONGEST_WAIT_SECONDS = 60
MAX_DEPTH = 100


@dataclass(frozen=True, slots=True)
class NewActivity:
    """A row about to be appended; its seq is given by the commit."""

    method: str
    summary: str
    request_body: bytes  # JSON
    source_id: UUID | None = None
    activity_type: str = RECEIVED
    status: str = "ok"


@dataclass(frozen=True, slots=True)
class Activity:
    """A row of the feed as it is read."""

    id: ActivityId
    workspace_id: WorkspaceId
    seq: int
    activity_type: str
    source_id: UUID | None
    target_id: UUID | None
    method: str | None
    summary: str | None
    request_body: str | None  # JSON
    response_body: str | None  # JSON
    duration_ms: int | None
    status: str
    error_detail: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Marks:
    """Where a feed stands: its newest row, how far it was trimmed, how far it was handled."""

    last_seq: int
    trimmed_seq: int
    acked_seq: int

    @property
    def lowest_seq(self) -> int:
        """The lowest seq that is still kept, or the next one where nothing is."""
        return self.trimmed_seq + 1

    def all_kept_after(self, seq: int) -> bool:
        """
        Whether a reader that has dealt with this seq can go on without missing a row.

        Below the trim rows are gone; a seq that was never given is from before a restore, and a
        reader that waited for it to be passed would step over rows.
        """
        return self.trimmed_seq <= seq <= self.last_seq


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rows of a feed a reader wants."""

    activity_type: str | None = None
    from_agents: bool | None = None  # None: from anyone; False: from the canvas only
    not_before: datetime | None = None


EVERYTHING = Filter()


@dataclass(frozen=True, slots=True)
class Page:
    """Rows, and the marks as they stood after the rows were read."""

    rows: Sequence[Activity]
    marks: Marks


def new_activity_id() -> ActivityId:
    """Ordered by time, so that it finds its leaf."""
    return ActivityId(ULID().to_uuid())


def announcement(workspace_id: WorkspaceId, file: NewUpload | Upload) -> NewActivity:
    """The row that tells a workspace of a staged file."""
    body = {
        "file_id": str(file.file_id),
        "name": file.name,
        "mimeType": file.mimetype,
        "size": file.size,
        "uri": pending_uri(workspace_id, file.file_id),
    }
    return NewActivity(
        method=UPLOAD_METHOD,
        summary=f"{UPLOAD_METHOD}: {file.name}",
        request_body=msgspec.json.encode(body),
    )


def is_too_deep(message: object) -> bool:
    """
    Whether a message is nested deeper than anybody means.

    Readers have limits of their own: a row that one of them cannot take would stop it for good.
    """
    level = [message]
    for _ in range(MAX_DEPTH):
        level = [inner for holder in level for inner in _inside(holder)]
        if not level:
            return False
    return True


def _inside(holder: object) -> Iterable[object]:
    if isinstance(holder, dict):
        return cast("dict[str, object]", holder).values()
    return cast("list[object]", holder) if isinstance(holder, list) else ()


def with_kinds(message: Mapping[str, Any]) -> dict[str, Any]:
    """
    A JSON-RPC body whose message parts say `kind`, as today's readers expect.

    Older senders call the discriminator `type`; a part that has both keeps its `kind`.
    """
    body = dict(message)
    params = body.get("params")
    if isinstance(params, dict):
        body["params"] = _renamed_in(cast("dict[str, Any]", params))
    return _with_parts_renamed(body)


def _renamed_in(params: Mapping[str, Any]) -> dict[str, Any]:
    renamed = _with_parts_renamed(params)
    message = renamed.get("message")
    if isinstance(message, dict):
        renamed["message"] = _with_parts_renamed(cast("dict[str, Any]", message))
    return renamed


def _with_parts_renamed(holder: Mapping[str, Any]) -> dict[str, Any]:
    parts = holder.get("parts")
    if not isinstance(parts, list):
        return dict(holder)
    return {**holder, "parts": [_renamed(part) for part in cast("list[Any]", parts)]}


def _renamed(part: Any) -> Any:
    if not isinstance(part, dict) or "type" not in part or "kind" in part:
        return cast("Any", part)
    return {
        ("kind" if key == "type" else key): value
        for key, value in cast("dict[str, Any]", part).items()
    }
