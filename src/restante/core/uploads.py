"""
What an upload is, which limits it has, and how its name and type are cleaned.

The name rule serves both sides: the server cleans what a sender gave, and the workspace applies the
same function to what the server says before it touches a disk.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from restante.ids import FileId, WorkspaceId

MIB = 1024 * 1024
MAX_FILE_BYTES = 25 * MIB
MAX_REQUEST_BYTES = 50 * MIB
MAX_FILES_PER_REQUEST = 64
CHUNK_BYTES = 256 * 1024

# What the row of a feed that announces a file has as its method.
UPLOAD_METHOD = "chat_upload_receive"

# How the name of a file begins that its workspace does not have yet.
PENDING = "platform-pending:"

_MAX_NAME = 100
_MAX_EXTENSION = 16
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]")
_MIME_TYPE = re.compile(r"[!-.0-~]+/[!-.0-~]+")
UNKNOWN_TYPE = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class NewUpload:
    """A file whose bytes have arrived and been hashed, about to be announced."""

    file_id: FileId
    name: str
    mimetype: str
    size: int
    sha256: bytes


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


# The states of a stored upload.
State = Literal["never_fetched", "fetched", "acked", "expired"]


@dataclass(frozen=True, slots=True)
class Standing:
    """An upload in any state, and in which."""

    upload: Upload
    state: State


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a file, CHUNK_BYTES long unless it is the last."""

    file_id: FileId
    seq: int
    bytes: bytes


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep of the uploads removed."""

    acked: int = 0
    expired: int = 0

    @property
    def total(self) -> int:
        return self.acked + self.expired

    def __add__(self, other: "Swept") -> "Swept":
        return Swept(self.acked + other.acked, self.expired + other.expired)


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


def clean_mimetype(mimetype: str) -> str:
    """A bare type without parameters; empty stays empty, and nonsense becomes octets."""
    bare = mimetype.partition(";")[0].strip()
    if not bare or _MIME_TYPE.fullmatch(bare):
        return bare
    return UNKNOWN_TYPE


def bucket_of(moment: datetime) -> datetime:
    """
    The key under which bytes that arrive at this moment are kept.

    It falls into whichever bucket covers the moment, so the width of buckets can be changed.
    """
    return moment.replace(microsecond=0)


def pending_uri(workspace_id: WorkspaceId, file_id: FileId) -> str:
    """How a staged file is named in messages until its workspace has it."""
    return f"{PENDING}{workspace_id}/{file_id}"


def fingerprint(files: Sequence[NewUpload]) -> bytes:
    """Tells whether a repeated request carries the same files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.mimetype}\0{file.size}\0".encode())
        digest.update(file.sha256)
    return digest.digest()


def time_allowed(
    declared_bytes: int, *, grace_seconds: float, min_bytes_per_second: int
) -> timedelta:
    """How long a body of this size may take to arrive; a trickle must not hold on for ever."""
    return timedelta(seconds=grace_seconds + declared_bytes / min_bytes_per_second)
