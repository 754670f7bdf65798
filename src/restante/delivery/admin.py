"""The uploads as an operator finds them: in any state, whosever they are; and what can be done."""

from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from restante import wire
from restante.database.pool import Database, Tx
from restante.delivery import store as uploads
from restante.delivery.fetch import Delivery
from restante.delivery.rules import Standing, State
from restante.delivery.store import Wanted
from restante.errors import UploadGone, WorkspaceUnknown
from restante.ids import FileId, WorkspaceId
from restante.workspaces import store as workspaces

_BEGINNING = (datetime.fromtimestamp(0, UTC), UUID(int=0))


@dataclass(frozen=True, slots=True)
class Expiry:
    """An upload that has expired, and whether it did so just now."""

    upload: wire.UploadView
    first_time: bool


class Inventory:
    """Finds uploads by their file id alone, and acts on single ones."""

    def __init__(self, db: Database, delivery: Delivery) -> None:
        self._db = db
        self._delivery = delivery

    async def page(
        self,
        workspace_id: WorkspaceId | None = None,
        *,
        state: State | None = None,
        after: FileId | None = None,
        limit: int,
    ) -> wire.UploadPage:
        """
        Uploads, oldest first, after the given one.

        Raises UploadGone if that one is not there, and WorkspaceUnknown.
        """
        wanted = Wanted(workspace_id=workspace_id, state=state)
        async with self._db.connection() as connection:
            await _check_exists(connection, workspace_id)
            start = await _place_of(connection, after) if after else _BEGINNING
            found = await uploads.standing(
                connection, wanted, after=start, limit=limit + 1, now=datetime.now(UTC)
            )
        shown = [self._view(one) for one in found[:limit]]
        return wire.UploadPage(shown, shown[-1].file_id if len(found) > limit else UNSET)

    async def show(
        self, file_id: FileId, workspace_id: WorkspaceId | None = None
    ) -> wire.UploadView:
        """Everything about one upload; raises UploadGone and WorkspaceUnknown."""
        async with self._db.connection() as connection:
            await _check_exists(connection, workspace_id)
            found = await _found(connection, file_id, workspace_id)
            leaf = await uploads.leaf_of(connection, found.upload)
        return self._view(found, leaf)

    async def reopen(
        self, file_id: FileId, workspace_id: WorkspaceId | None = None
    ) -> wire.UploadView:
        """Let an acknowledged file wait again; raises UploadGone with the reason if it cannot."""
        before = await self.show(file_id, workspace_id)
        _check_is_reopenable(before, now=datetime.now(UTC))
        owner = WorkspaceId(before.workspace_id)
        await self._delivery.reopen(owner, file_id)
        return await self.show(file_id, owner)

    async def expire(self, file_id: FileId, workspace_id: WorkspaceId | None = None) -> Expiry:
        """Let a file wait no longer; raises UploadGone if it is not there or was acknowledged."""
        before = await self.show(file_id, workspace_id)
        expired = await self._delivery.expire(WorkspaceId(before.workspace_id), file_id)
        after = replace(before, state="expired", expires_at=expired.expired_at)
        return Expiry(after, expired.first_time)

    def _view(self, standing: Standing, leaf: str | UnsetType | None = UNSET) -> wire.UploadView:
        upload = standing.upload
        return wire.UploadView(
            file_id=upload.file_id,
            workspace_id=upload.workspace_id,
            name=upload.name,
            mime_type=upload.mimetype,
            size=upload.size,
            sha256=upload.sha256.hex(),
            state=standing.state,
            created_at=upload.created_at,
            fetched_at=upload.fetched_at,
            acked_at=upload.acked_at,
            expires_at=upload.expires_at,
            reopenable_until=self._delivery.reopenable_until(upload),
            bucket=upload.bucket,
            leaf=leaf,
        )


async def _check_exists(connection: Tx, workspace_id: WorkspaceId | None) -> None:
    """A list that is empty because of a mistyped id would look like good news."""
    if workspace_id and await workspaces.get(connection, workspace_id) is None:
        raise WorkspaceUnknown(f"There is no workspace {workspace_id}.")


async def _found(
    connection: Tx, file_id: FileId, workspace_id: WorkspaceId | None = None
) -> Standing:
    wanted = Wanted(workspace_id=workspace_id, file_id=file_id)
    now = datetime.now(UTC)
    for found in await uploads.standing(connection, wanted, after=_BEGINNING, limit=1, now=now):
        return found
    where = f"in workspace {workspace_id}" if workspace_id else "here"
    raise UploadGone(f"There is no upload {file_id} {where}, or no longer.")


async def _place_of(connection: Tx, file_id: FileId) -> tuple[datetime, UUID]:
    """Where a page that goes on after this upload begins."""
    found = await _found(connection, file_id)
    return found.upload.created_at, file_id


def _check_is_reopenable(upload: wire.UploadView, *, now: datetime) -> None:
    if upload.reopenable_until is None:
        raise UploadGone(
            f"Upload {upload.file_id} was never acknowledged, so it cannot be reopened; "
            f"it is {upload.state}, with its time until {upload.expires_at:%Y-%m-%d %H:%M:%S} UTC."
        )
    if upload.reopenable_until < now:
        raise UploadGone(
            f"Upload {upload.file_id} could be reopened until "
            f"{upload.reopenable_until:%Y-%m-%d %H:%M:%S} UTC; the next sweep deletes it."
        )
