"""
What an upload is, which limits it has, and how its name and type are cleaned.

The name rule serves both sides: the server cleans what a sender gave, and the workspace applies the
same function to what the server says before it touches its disk.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from restante.errors import (
    BadRequest,
    FileTooLarge,
    QuotaTooSmall,
    RequestTooLarge,
    ServerFull,
    WorkspaceFull,
)
from restante.ids import FileId, WorkspaceId
from restante.limits import MAX_FILE_BYTES, MAX_REQUEST_BYTES
from restante.text import cut, without_invisible

MIB = 1024 * 1024
MAX_FILES_PER_REQUEST = 64
CHUNK_BYTES = 256 * 1024

# The names, headers and boundaries of a form around its files: at most, and as a rule.
MAX_FORM_BYTES = MIB
_USUAL_FORM_BYTES = 4096

# How much room an upload claims beyond what has arrived.
_MAX_CLAIMED_AHEAD = 4 * MIB

# When to ask again if the server is full: nobody knows who acknowledges when.
_SERVER_RETRY_SECONDS = 60

_LEAST_COPIES_KEPT = timedelta(hours=1)

# The method of the feed row that announces a file.
UPLOAD_METHOD = "chat_upload_receive"

# The scheme of the URI of a file that its workspace has not fetched yet.
PENDING = "platform-pending:"

_MAX_NAME = 100
_MAX_EXTENSION = 16
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]")

_MAX_DISPLAY_NAME = 255
_FOLDERS = re.compile(r".*[/\\]", re.DOTALL)
_MAX_TYPE = 255  # twice the 127 characters of RFC 6838, and a slash
_MIME_TYPE = re.compile(r"[!-.0-~]+/[!-.0-~]+")
UNKNOWN_TYPE = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Upload:
    """One staged file as the store has it."""

    workspace_id: WorkspaceId
    file_id: FileId
    bucket: datetime
    name: str
    mimetype: str
    size: int
    sha256: bytes
    created_at: datetime
    fetched_at: datetime | None
    acked_at: datetime | None
    expires_at: datetime
    display_name: str
    source_id: WorkspaceId | None  # the workspace that sent it; None: the canvas


class Chunk(NamedTuple):
    """A piece of a file, CHUNK_BYTES long unless it is the last."""

    file_id: FileId
    seq: int
    bytes: bytes


@dataclass(slots=True)
class IncomingFile:
    """A file that is being received: hashed, and cut into chunks."""

    name: str
    display_name: str
    mimetype: str
    file_id: FileId = field(default_factory=lambda: FileId(uuid4()))
    size: int = 0
    sha256: bytes = b""  # set when the file has ended
    _hash: Any = field(default_factory=hashlib.sha256)
    _pieces: list[bytes] = field(default_factory=list[bytes])
    _pending_bytes: int = 0
    _next_seq: int = 0

    def add(self, piece: bytes) -> list[Chunk]:
        """Add bytes; returns the chunks that are full now."""
        self._hash.update(piece)
        self._pieces.append(piece)
        self._pending_bytes += len(piece)
        return self._cut() if self._pending_bytes >= CHUNK_BYTES else []

    def end(self) -> list[Chunk]:
        """The file is complete; returns its last chunk, unless the file ended with a full one."""
        self.sha256 = self._hash.digest()
        last = b"".join(self._pieces)
        return [Chunk(self.file_id, self._next_seq, last)] if last else []

    def _cut(self) -> list[Chunk]:
        """Turn the pending bytes into full chunks; the rest stays pending."""
        pending, chunks = b"".join(self._pieces), list[Chunk]()
        full = len(pending) - len(pending) % CHUNK_BYTES
        for at in range(0, full, CHUNK_BYTES):
            chunks.append(Chunk(self.file_id, self._next_seq, pending[at : at + CHUNK_BYTES]))
            self._next_seq += 1
        rest = pending[full:]
        self._pieces, self._pending_bytes = ([rest] if rest else []), len(rest)
        return chunks


def clean_name(name: str) -> str:
    """A base name that is safe on every filesystem and in every header."""
    clean = _NOT_IN_A_NAME.sub("_", name.rpartition("/")[2])
    if len(clean) > _MAX_NAME:
        clean = _shortened(clean)
    return "file" if clean in {"", ".", ".."} else clean


def _shortened(name: str) -> str:
    stem, dot, extension = name.rpartition(".")
    suffix = dot + extension
    if not stem or not dot or len(suffix) > _MAX_EXTENSION:
        return name[:_MAX_NAME]
    return name[: _MAX_NAME - len(suffix)] + suffix


def display_name(raw: str) -> str:
    """
    The name of a file for people: the base name on any system, as it was written.

    It is not normalised, because it must stay equal to what its sender has.
    """
    shown = without_invisible(_FOLDERS.sub("", raw)).strip()
    if len(shown) > _MAX_DISPLAY_NAME:
        shown = _shortened_display(shown)
    return clean_name(raw) if shown in {"", ".", ".."} else shown


def _shortened_display(name: str) -> str:
    stem, dot, extension = name.rpartition(".")
    suffix = dot + extension if stem and len(extension) < _MAX_EXTENSION else ""
    return cut(name, _MAX_DISPLAY_NAME - len(suffix)).rstrip() + suffix


def clean_mimetype(mimetype: str) -> str:
    """The type without parameters; a malformed or too long one becomes octet-stream."""
    bare = mimetype.partition(";")[0].strip()
    if not bare or (len(bare) <= _MAX_TYPE and _MIME_TYPE.fullmatch(bare)):
        return bare
    return UNKNOWN_TYPE


def bucket_of(moment: datetime) -> datetime:
    """
    The partition key of bytes that arrive at this moment.

    It falls into whichever bucket covers the moment, so the width of buckets can be changed.
    """
    return moment.replace(microsecond=0)


def pending_uri(workspace_id: WorkspaceId, file_id: FileId) -> str:
    """How messages refer to a file until its workspace has it."""
    return f"{PENDING}{workspace_id}/{file_id}"


def announcement(workspace_id: WorkspaceId, file: IncomingFile | Upload) -> str:
    """The body of the feed row that announces a file, as JSON."""
    body = {
        "file_id": str(file.file_id),
        "name": file.name,
        "display_name": file.display_name,
        "mimeType": file.mimetype,
        "size": file.size,
        "uri": pending_uri(workspace_id, file.file_id),
    }
    return msgspec.json.encode(body).decode()


def fingerprint(files: Sequence[IncomingFile]) -> bytes:
    """Tells whether a repeated request carries the same files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.mimetype}\0{file.size}\0".encode())
        digest.update(file.sha256)
    return digest.digest()


class Pace(NamedTuple):
    """How fast a body must arrive."""

    grace_seconds: float  # however small it is
    min_bytes_per_second: int
    idle_seconds: float = 20.0  # without a single byte


def time_allowed(declared_bytes: int, pace: Pace) -> timedelta:
    """How long a body of this size may take to arrive."""
    return timedelta(seconds=pace.grace_seconds + declared_bytes / pace.min_bytes_per_second)


def seconds_allowed(arrived: int, declared: int, pace: Pace) -> float:
    """
    How long a body may take in all, once this much of it has arrived.

    A large one must keep the pace: its bucket stays for as long as it arrives, so who declares much
    and sends little would keep the bytes of others for days.
    """
    return time_allowed(min(declared, arrived + MAX_REQUEST_BYTES), pace).total_seconds()


def copies_kept(sweep_interval: timedelta) -> timedelta:
    """
    How long the copy of a file that is being moved is kept without progress.

    Long enough for the pass after the next one, because the next one may fail.
    """
    return max(3 * sweep_interval, _LEAST_COPIES_KEPT)


@dataclass(frozen=True, slots=True)
class Quota:
    """The most unacknowledged bytes and files, of one workspace or of the server."""

    max_bytes: int
    max_files: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Unacknowledged bytes and files, with those that are reserved for uploads in progress."""

    bytes: int
    files: int

    def fits(self, quota: Quota, extra: "Usage") -> bool:
        """Whether there is room for that much more."""
        return (
            self.bytes + extra.bytes <= quota.max_bytes
            and self.files + extra.files <= quota.max_files
        )


NOTHING = Usage(0, 0)


def claim_for(arrived: int, declared: int | None, quota: Quota) -> int:
    """
    How many bytes an upload claims: what has arrived and as much again, up to a few MiB.

    Never what was only declared: a sender must send to take room from others.
    """
    ahead = arrived + min(arrived, _MAX_CLAIMED_AHEAD)
    return max(arrived, min(ahead, quota.max_bytes, ahead if declared is None else declared))


def check_fits_ever(quota: Quota, declared: int) -> None:
    """Raise QuotaTooSmall for a body that is too large for the quota, whatever its form takes."""
    if declared - MAX_FORM_BYTES > quota.max_bytes:
        raise quota_too_small(quota, bytes=declared, files=1)


def is_too_large_for(quota: Quota, declared: int) -> bool:
    """Whether the files of such a body are most likely too large for an empty workspace."""
    return declared - _USUAL_FORM_BYTES > quota.max_bytes


def file_too_large(file: IncomingFile, max_bytes: int, *, is_complete: bool = True) -> FileTooLarge:
    """The refusal of a file that has too many bytes; of one that goes on, those that arrived."""
    size = f"{file.size} bytes" if is_complete else f"at least {file.size} bytes"
    return FileTooLarge(
        f"The file {file.name} has {size}; {max_bytes} are allowed.",
        filename=file.name,
        size=file.size,
        max=max_bytes,
    )


def request_too_large(max_bytes: int) -> RequestTooLarge:
    """The refusal of a request whose files have too many bytes."""
    return RequestTooLarge(f"A request carries at most {max_bytes} bytes of files.", max=max_bytes)


def quota_too_small(quota: Quota, *, bytes: int, files: int) -> QuotaTooSmall:  # noqa: A002
    """The refusal of a request that no amount of waiting makes room for."""
    return QuotaTooSmall(
        f"This request has {files} files of {bytes} bytes; a workspace may have at most "
        f"{quota.max_files} unacknowledged files of {quota.max_bytes} bytes.",
        size=bytes,
        max=quota.max_bytes,
    )


def workspace_full(
    usage: Usage, quota: Quota, frees_at: datetime | None, *, now: datetime
) -> WorkspaceFull:
    """The refusal when a workspace has too many unacknowledged files."""
    seconds = max(1, math.ceil((frees_at - now).total_seconds())) if frees_at else None
    return WorkspaceFull(
        f"This workspace has {usage.files} unacknowledged files of {usage.bytes} bytes; at most "
        f"{quota.max_files} files of {quota.max_bytes} bytes are allowed. There is room again when "
        f"it acknowledges some, or when the first of them expires.",
        waiting_bytes=usage.bytes,
        waiting_files=usage.files,
        max_bytes=quota.max_bytes,
        max_files=quota.max_files,
        frees_at=frees_at.isoformat() if frees_at else None,
        retry_after_seconds=seconds,
    )


def server_full() -> ServerFull:
    """The refusal when the server holds as much as it may; it says nothing about workspaces."""
    return ServerFull(
        "This server has no room for more files at the moment.",
        retry_after_seconds=_SERVER_RETRY_SECONDS,
    )


def server_stored_full() -> ServerFull:
    """The refusal when dead and live bytes together take all the disk that they may."""
    return ServerFull(
        "This server has no disk space for more files until deleted ones are swept.",
        retry_after_seconds=_SERVER_RETRY_SECONDS,
    )


@dataclass(frozen=True, slots=True)
class ReceivePolicy:
    """What the operator has set."""

    ttl: timedelta
    ttl_min: timedelta
    ttl_max: timedelta
    quota: Quota  # of each workspace
    server_quota: Quota
    server_max_stored_bytes: int  # on disk, dead bytes too
    answers_kept: timedelta
    pace: Pace
    max_file_bytes: int = MAX_FILE_BYTES
    max_request_bytes: int = MAX_REQUEST_BYTES

    @property
    def max_body_bytes(self) -> int:
        """Of a request, with the form around its files."""
        return self.max_request_bytes + MAX_FORM_BYTES

    def check_ttl(self, ttl: timedelta) -> None:
        """Raise BadRequest for a TTL outside of the operator's limits."""
        if not self.ttl_min <= ttl <= self.ttl_max:
            raise BadRequest(
                f"ttl_seconds is wrong: this server keeps files from "
                f"{self.ttl_min.total_seconds():.0f} to {self.ttl_max.total_seconds():.0f} s."
            )
