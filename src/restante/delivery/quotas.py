"""How much may wait, and what to say when it is too much."""

import math
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from restante.errors import QuotaTooSmall, ServerFull, WorkspaceFull
from restante.ids import WorkspaceId


@dataclass(frozen=True, slots=True)
class Quota:
    """The most bytes and files that may wait in one place."""

    max_bytes: int
    max_files: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What waits, and what has been promised room, in one place."""

    waiting_bytes: int
    waiting_files: int
    reserved_bytes: int = 0
    reserved_files: int = 0

    @property
    def all_bytes(self) -> int:
        return self.waiting_bytes + self.reserved_bytes

    @property
    def all_files(self) -> int:
        return self.waiting_files + self.reserved_files


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room promised to an upload that is still arriving."""

    id: UUID
    workspace_id: WorkspaceId
    bucket: datetime  # not to be dropped meanwhile
    bytes: int
    files: int
    expires_at: datetime


def fits(usage: Usage, *, extra_bytes: int, extra_files: int, quota: Quota) -> bool:
    """Whether there is room for that much more."""
    return (
        usage.all_bytes + extra_bytes <= quota.max_bytes
        and usage.all_files + extra_files <= quota.max_files
    )


def check_can_ever_fit(*, extra_bytes: int, extra_files: int, quota: Quota) -> None:
    """Refuse at once what no amount of waiting will make room for."""
    if extra_bytes > quota.max_bytes or extra_files > quota.max_files:
        raise QuotaTooSmall(
            f"This request brings {extra_files} files of {extra_bytes} bytes, and no more than "
            f"{quota.max_files} files of {quota.max_bytes} bytes may ever wait for this workspace.",
            size=extra_bytes,
            max=quota.max_bytes,
        )


def workspace_full(
    usage: Usage, quota: Quota, frees_at: datetime | None, *, now: datetime
) -> WorkspaceFull:
    """The refusal when a workspace has not fetched what waits for it."""
    return WorkspaceFull(
        f"{usage.all_files} files of {usage.all_bytes} bytes wait for this workspace already; "
        f"no more than {quota.max_files} files of {quota.max_bytes} bytes may. "
        f"There is room again when it acknowledges some, or when the first of them expires.",
        waiting_bytes=usage.all_bytes,
        waiting_files=usage.all_files,
        max_bytes=quota.max_bytes,
        max_files=quota.max_files,
        frees_at=frees_at.isoformat() if frees_at else None,
        retry_after_seconds=_seconds_until(frees_at, now),
    )


def _seconds_until(frees_at: datetime | None, now: datetime) -> int | None:
    return max(1, math.ceil((frees_at - now).total_seconds())) if frees_at else None


def server_full(
    usage: Usage, quota: Quota, frees_at: datetime | None, *, now: datetime
) -> ServerFull:
    """The refusal when the whole server holds as much as it may."""
    return ServerFull(
        f"This server holds as much as it may: {usage.all_bytes} of {quota.max_bytes} bytes "
        f"and {usage.all_files} of {quota.max_files} files wait for all workspaces together.",
        waiting_bytes=usage.all_bytes,
        waiting_files=usage.all_files,
        max_bytes=quota.max_bytes,
        max_files=quota.max_files,
        frees_at=frees_at.isoformat() if frees_at else None,
        retry_after_seconds=_seconds_until(frees_at, now),
    )
