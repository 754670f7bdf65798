"""
Builds every request of the protocol and parses its reply; does no I/O.

Both clients use it.  Everything in a reply is validated before it is used.
"""

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, cast
from urllib.parse import quote
from uuid import UUID, uuid4

import msgspec

from restante import wire
from restante.client.arguments import AnyId, workspace_id_of
from restante.client.http_replies import Reply, decoded, number_in, raise_for_status
from restante.delivery.rules import UNKNOWN_TYPE, clean_mimetype, clean_name, display_name
from restante.errors import AnswerInvalid, MessageTooLarge
from restante.ids import ActivityId, FileId, WorkspaceId

T = TypeVar("T")
U = TypeVar("U")

ROWS_PER_PAGE = 50

# A message to a push workspace is answered by that workspace; servers wait so long by default.
_PUSH_SECONDS = 60

_MAX_SEQ = 2**63 - 1
# Percent-encoded it must fit into the headers that servers accept.
_MAX_SENT_NAME = 255

# Follows the bytes of each part.
PART_END = b"\r\n"

_SHA256 = re.compile(r"sha-256=:([A-Za-z0-9+/=]+):")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request, and the function that parses its reply."""

    method: str
    path: str
    read: Callable[[Reply], T]
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes | None = None
    # Idempotent: safe to send again after a failure.
    repeatable: bool = False
    # How long the server may wait before it answers.
    wait_seconds: float = 0

    @property
    def is_repetition(self) -> bool:
        """Whether an earlier attempt may have reached the server."""
        return wire.ATTEMPT in self.headers

    def repeated(self, attempt: int) -> "Call[T]":
        """The same request after an attempt that may have reached the server."""
        return replace(self, headers={**self.headers, wire.ATTEMPT: str(attempt)})


@dataclass(frozen=True, slots=True, init=False)
class Credentials:
    """What a workspace needs to authenticate; keep the token secret: `repr` leaves it out."""

    url: str
    workspace_id: WorkspaceId
    token: str = field(repr=False)

    def __init__(self, url: str, workspace_id: AnyId, token: str) -> None:
        object.__setattr__(self, "url", url)
        object.__setattr__(self, "workspace_id", workspace_id_of(workspace_id))
        object.__setattr__(self, "token", token)


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a feed has been read: the last row's seq, and its id if known."""

    seq: int = 0
    id: ActivityId | None = None


@dataclass(frozen=True, slots=True)
class FeedPage:
    """Rows, oldest first, and the feed's bounds when they were read."""

    rows: Sequence[wire.ActivityRow]
    lowest_seq: int
    latest_seq: int
    acked_seq: int


@dataclass(frozen=True, slots=True)
class Part:
    """One file of an upload."""

    name: str
    mimetype: str
    size: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Where an answer's bytes start, the size of the whole file, and its SHA-256."""

    start: int
    size: int
    sha256: bytes


def register(
    workspace_id: WorkspaceId, name: str, *, card: Mapping[str, Any] | None = None
) -> Call[wire.Registered]:
    """Register a workspace in poll mode; not repeatable, because the token is returned once."""
    sent = wire.Registration(
        id=workspace_id, agent_card={**(card or {}), "name": name}, delivery_mode="poll"
    )
    return _post("/registry/register", wire.Registered, sent)


def heartbeat(workspace_id: WorkspaceId, active_tasks: int, current_task: str) -> Call[wire.Status]:
    """Report that the workspace is alive."""
    sent = wire.Heartbeat(workspace_id, active_tasks, current_task)
    return _post("/registry/heartbeat", wire.Status, sent, repeatable=True)


def workspaces(after: UUID | None) -> Call[wire.WorkspacePage]:
    """One page of all workspaces; needs the admin token."""
    query = {"limit": "500"} | ({"after": str(after)} if after else {})
    return Call(
        method="GET",
        path="/admin/workspaces",
        query=query,
        read=_reader(wire.WorkspacePage),
        repeatable=True,
    )


def feed(
    workspace_id: WorkspaceId, cursor: Cursor | None, *, wait_seconds: float = 0, limit: int
) -> Call[FeedPage]:
    """The rows after a cursor; without one, the newest rows."""
    query = {"limit": str(limit)}
    if wait_seconds:
        query["wait"] = f"{wait_seconds:g}"
    if cursor and cursor.id:
        query["since_id"] = str(cursor.id)
    elif cursor:
        query["since_seq"] = str(cursor.seq)
    return Call(
        method="GET",
        path=f"/workspaces/{workspace_id}/activity",
        query=query,
        read=_feed_page,
        repeatable=True,
        wait_seconds=wait_seconds,
    )


def acknowledge_feed(workspace_id: WorkspaceId, cursor: Cursor) -> Call[wire.FeedAcked]:
    """Record how far the feed has been handled."""
    path = f"/workspaces/{workspace_id}/activity/ack"
    return _post(path, wire.FeedAcked, wire.FeedAck(cursor.seq, cursor.id), repeatable=True)


def send_message(workspace_id: WorkspaceId, message: Mapping[str, Any]) -> Call[dict[str, Any]]:
    """
    Send a message; raises MessageTooLarge.

    A message without a `messageId` gets one: servers queue the same id of the same sender once, and
    forward no repetition, so the request is repeatable.  Any other JSON-RPC request is not.
    """
    sent = _with_id(message)
    path = f"/workspaces/{workspace_id}/a2a"
    call = _post(path, dict[str, Any], sent, repeatable=_has_id(sent), wait_seconds=_PUSH_SECONDS)
    check_message_size(len(call.body or b""))
    return call


def notify(
    workspace_id: WorkspaceId, text: str, attachments: Sequence[Mapping[str, Any]]
) -> Call[wire.Notified]:
    """Say something to the workspace's user; not repeatable, because the protocol has no id."""
    sent = {"message": text, "attachments": attachments}
    return _post(f"/workspaces/{workspace_id}/notify", wire.Notified, sent)


def check_message_size(size: int) -> None:
    """Raise MessageTooLarge for a message of more bytes than servers accept."""
    if size > wire.MAX_MESSAGE_BYTES:
        raise MessageTooLarge(
            f"The message has {size} bytes with its files; the limit is {wire.MAX_MESSAGE_BYTES}.",
            max=wire.MAX_MESSAGE_BYTES,
        )


def _has_id(body: Mapping[str, Any]) -> bool:
    message = _object((_object(body.get("params")) or {}).get("message")) or {}
    return isinstance(message.get("messageId"), str)


def _with_id(body: Mapping[str, Any]) -> Mapping[str, Any]:
    params = _object(body.get("params"))
    message = _object(params.get("message")) if params else None
    if not params or message is None or "messageId" in message:
        return body
    return {**body, "params": {**params, "message": {"messageId": str(uuid4()), **message}}}


def _object(value: Any) -> Mapping[str, Any] | None:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None


def pending(
    workspace_id: WorkspaceId, *, after: FileId | None = None, limit: int = ROWS_PER_PAGE
) -> Call[wire.PendingUploads]:
    """One page of pending uploads, oldest first."""
    query = {"limit": str(limit)} | ({"after": str(after)} if after else {})
    return Call(
        method="GET",
        path=f"/workspaces/{workspace_id}/pending-uploads",
        query=query,
        read=_reader(wire.PendingUploads),
        repeatable=True,
    )


def content(workspace_id: WorkspaceId, file_id: FileId, start: int) -> Call[Extent]:
    """Download a file from this byte on; only the headers of the answer are parsed here."""
    headers = {"Range": f"bytes={start}-"} if start else {}
    return Call(
        method="GET",
        path=_upload(workspace_id, file_id, "content"),
        headers=headers,
        read=_extent,
        repeatable=True,
    )


def acknowledge(workspace_id: WorkspaceId, file_id: FileId) -> Call[wire.Acked]:
    """Acknowledge a file."""
    path = _upload(workspace_id, file_id, "ack")
    return Call(method="POST", path=path, read=_reader(wire.Acked), repeatable=True)


def reopen(workspace_id: WorkspaceId, file_id: FileId) -> Call[wire.Status]:
    """Make an acknowledged file pending again."""
    path = _upload(workspace_id, file_id, "reopen")
    return Call(method="POST", path=path, read=_reader(wire.Status))


def upload_limits() -> Call[wire.UploadLimits]:
    """The largest file and request that the server accepts."""
    return Call(
        method="GET", path="/uploads/limits", read=_reader(wire.UploadLimits), repeatable=True
    )


def upload(
    workspace_id: WorkspaceId,
    parts: Sequence[Part],
    *,
    key: str,
    ttl_seconds: int | None,
    caller: WorkspaceId | None = None,
) -> Call[wire.UploadAnswer]:
    """
    Upload files; the key is the idempotency key and the multipart boundary.

    `caller` is the workspace if it uploads them itself, for its user.
    """
    ends = len(PART_END) * len(parts) + len(body_end(key))
    length = sum(len(part_head(key, part)) + part.size for part in parts) + ends
    return Call(
        method="POST",
        path=f"/workspaces/{workspace_id}/chat/uploads",
        query={} if ttl_seconds is None else {"ttl_seconds": str(ttl_seconds)},
        headers={
            "Content-Type": f"multipart/form-data; boundary={key}",
            "Content-Length": str(length),
            wire.IDEMPOTENCY_KEY: key,
            **({wire.CALLER_ID: str(caller)} if caller else {}),
        },
        read=_reader(wire.UploadAnswer),
        repeatable=True,
    )


def part_head(key: str, part: Part) -> bytes:
    """
    The boundary and headers before the bytes of a part.

    Name and type are cleaned with the server's rules, so that nothing in them needs escaping.  The
    original name is beside it, percent-encoded; servers that do not know that form ignore it.
    """
    name, kind = clean_name(part.name), clean_mimetype(part.mimetype) or UNKNOWN_TYPE
    sent = part.name if len(part.name) <= _MAX_SENT_NAME else display_name(part.name)
    encoded = quote(sent, safe="", errors="replace")
    original = "" if encoded in {"", name} else f"; filename*=UTF-8''{encoded}"
    return (
        f'--{key}\r\nContent-Disposition: form-data; name="files"; filename="{name}"{original}\r\n'
        f"Content-Type: {kind}\r\n\r\n"
    ).encode()


def body_end(key: str) -> bytes:
    """The boundary after the last part."""
    return f"--{key}--\r\n".encode()


def _upload(workspace_id: WorkspaceId, file_id: FileId, what: str) -> str:
    return f"/workspaces/{workspace_id}/pending-uploads/{quote(str(file_id))}/{what}"


def _post(
    path: str,
    answer: type[T],
    sent: object,
    *,
    repeatable: bool = False,
    wait_seconds: float = 0,
) -> Call[T]:
    return Call(
        method="POST",
        path=path,
        headers={"Content-Type": "application/json"},
        body=msgspec.json.encode(sent),
        read=_reader(answer),
        repeatable=repeatable,
        wait_seconds=wait_seconds,
    )


def _reader(answer: type[U]) -> Callable[[Reply], U]:
    def read(reply: Reply) -> U:
        raise_for_status(reply)
        return decoded(reply.body, answer)

    return read


def _feed_page(reply: Reply) -> FeedPage:
    raise_for_status(reply)
    rows = decoded(reply.body, list[wire.ActivityRow])
    if not all(0 < row.seq <= _MAX_SEQ for row in rows):
        raise AnswerInvalid("The server's feed has rows with an invalid seq.")
    rows.sort(key=lambda row: row.seq)
    highest = rows[-1].seq if rows else 0
    return FeedPage(
        rows,
        lowest_seq=number_in(reply, wire.LOWEST_SEQ, 1),
        latest_seq=number_in(reply, wire.LATEST_SEQ, highest),
        acked_seq=number_in(reply, wire.ACKED_SEQ, 0),
    )


def _extent(reply: Reply) -> Extent:
    """Parse which bytes follow; raises AnswerInvalid for missing or contradictory headers."""
    raise_for_status(reply)
    length = number_in(reply, "Content-Length", -1)
    start, size = 0, length
    if reply.status == 206:
        found = _CONTENT_RANGE.fullmatch(reply.headers.get("content-range", ""))
        start, last, size = (int(number) for number in found.groups()) if found else (0, -1, -1)
        length = -1 if last + 1 != size or length != size - start else length
    if length < 0:
        raise AnswerInvalid("The server's headers do not give the length of the file.")
    return Extent(start, size, _digest(reply))


def _digest(reply: Reply) -> bytes:
    found = _SHA256.search(reply.headers.get("repr-digest", ""))
    try:
        digest = base64.b64decode(found.group(1), validate=True) if found else b""
    except binascii.Error:
        digest = b""
    if len(digest) != 32:
        raise AnswerInvalid("The server's headers do not give the SHA-256 of the file.")
    return digest
