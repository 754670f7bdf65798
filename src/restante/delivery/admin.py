"""The operator looks at uploads in any state and of any workspace, and acts on single ones."""

from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

import structlog
from msgspec import UNSET
from msgspec.structs import replace

from restante import wire
from restante.database.outcomes import decided
from restante.database.pool import Connection
from restante.delivery import acknowledge, store
from restante.delivery.fetch import GONE
from restante.delivery.receive import Receiver
from restante.delivery.store import Wanted
from restante.errors import UploadGone, WorkspaceUnknown
from restante.ids import FileId, WorkspaceId
from restante.workspaces import store as workspaces

log = structlog.get_logger()


_EXPIRED_AT_ONCE = 1000


class Expiry(NamedTuple):
    """An upload that has expired, and whether it did so just now."""

    upload: wire.UploadView
    is_first: bool


class UploadAdmin:
    """Finds uploads by their file id alone."""

    def __init__(self, receiver: Receiver, *, ack_retention: timedelta) -> None:
        self._db = receiver.db
        self._receiver = receiver
        self._ack_retention = ack_retention

    async def page(
        self,
        workspace_id: WorkspaceId | None = None,
        *,
        state: wire.UploadState | None = None,
        after: FileId | None = None,
        limit: int,
        now: datetime,
    ) -> wire.UploadPage:
        """
        Uploads, oldest first, after the given one.

        Raises UploadGone if that one does not exist, and WorkspaceUnknown.
        """
        async with self._db.connection() as connection:
            await _check_exists(connection, workspace_id)
            start = store.BEGINNING
            if after:
                last = await self._find(connection, after, None, now=now)
                start = (last.created_at, UUID(int=after.int))
            found = await store.in_any_state(
                connection,
                Wanted(workspace_id=workspace_id, state=state),
                after=start,
                limit=limit + 1,
                ack_retention=self._ack_retention,
                now=now,
            )
        shown = found[:limit]
        return wire.UploadPage(shown, shown[-1].file_id if len(found) > limit else UNSET)

    async def show(
        self, file_id: FileId, workspace_id: WorkspaceId | None = None, *, now: datetime
    ) -> wire.UploadView:
        """Everything about one upload; raises UploadGone and WorkspaceUnknown."""
        async with self._db.connection() as connection:
            await _check_exists(connection, workspace_id)
            found = await self._find(connection, file_id, workspace_id, now=now)
            return replace(found, partition=await store.partition_of(connection, found))

    async def reopen(
        self, file_id: FileId, workspace_id: WorkspaceId | None = None, *, now: datetime
    ) -> wire.UploadView:
        """
        Make an acknowledged file fetchable again and announce it again.

        Raises UploadGone with the reason if it is not kept; DiskLow, FeedFull and TooMuchWritten.
        """
        before = await self.show(file_id, workspace_id, now=now)
        _check_is_reopenable(before, now=now)
        owner = WorkspaceId(before.workspace_id)
        await acknowledge.reopen(
            self._receiver, owner, file_id, ack_retention=self._ack_retention, now=now
        )
        return await self.show(file_id, owner, now=now)

    async def expire(
        self, file_id: FileId, workspace_id: WorkspaceId | None = None, *, now: datetime
    ) -> Expiry:
        """
        Let a file expire now: it cannot be fetched any more, and the next sweep deletes it.

        Idempotent.  Raises UploadGone if it does not exist or was acknowledged.
        """
        before = await self.show(file_id, workspace_id, now=now)
        owner = WorkspaceId(before.workspace_id)

        async def commit(connection: Connection) -> store.Expired | None:
            return await store.expire(connection, owner, file_id, now=now)

        expired = await decided(self._db, commit, commit)
        if expired is None:
            raise UploadGone(GONE)
        if expired.acked_at:
            raise UploadGone(
                f"The file was acknowledged at {expired.acked_at:%Y-%m-%d %H:%M:%S} UTC, so it "
                "does not expire; a sweep deletes it when its retention is over."
            )
        if expired.is_first:
            log.info(
                "upload_expired",
                workspace=str(before.workspace_id),
                file=str(file_id),
                size=expired.size,
                name=expired.name,
            )
        after = replace(before, state="expired", expires_at=expired.expired_at)
        return Expiry(after, expired.is_first)

    async def held_for(self, workspace_id: WorkspaceId, *, now: datetime) -> wire.HeldFiles:
        """The files that are kept for a workspace, in any state of the workspace."""
        async with self._db.connection() as connection:
            return await store.held_for(connection, workspace_id, now=now)

    async def expire_waiting(self, workspace_id: WorkspaceId, *, now: datetime) -> int:
        """Let all files that wait for a workspace expire now; idempotent; returns how many."""
        expired = 0
        while True:
            async with self._db.connection() as connection:
                batch = await store.expire_waiting(
                    connection, workspace_id, now=now, limit=_EXPIRED_AT_ONCE
                )
            expired += batch
            if batch < _EXPIRED_AT_ONCE:
                break
        if expired:
            log.info("uploads_expired", workspace=str(workspace_id), files=expired)
        return expired

    async def _find(
        self,
        connection: Connection,
        file_id: FileId,
        workspace_id: WorkspaceId | None,
        *,
        now: datetime,
    ) -> wire.UploadView:
        wanted = Wanted(workspace_id=workspace_id, file_id=file_id)
        for found in await store.in_any_state(
            connection, wanted, limit=1, ack_retention=self._ack_retention, now=now
        ):
            return found
        where = f"in workspace {workspace_id}" if workspace_id else "here"
        raise UploadGone(f"There is no upload {file_id} {where}, or no longer.")


async def _check_exists(connection: Connection, workspace_id: WorkspaceId | None) -> None:
    """A mistyped id must not give an empty list."""
    if workspace_id and await workspaces.get(connection, workspace_id) is None:
        raise WorkspaceUnknown(f"There is no workspace {workspace_id}.")


def _check_is_reopenable(upload: wire.UploadView, *, now: datetime) -> None:
    if upload.reopenable_until is None:
        raise UploadGone(
            f"Upload {upload.file_id} was never acknowledged, so it cannot be reopened; its state "
            f"is {upload.state}, and it expires at {upload.expires_at:%Y-%m-%d %H:%M:%S} UTC."
        )
    if upload.reopenable_until < now:
        raise UploadGone(
            f"Upload {upload.file_id} could be reopened until "
            f"{upload.reopenable_until:%Y-%m-%d %H:%M:%S} UTC; the next sweep deletes it."
        )
