"""Workspaces come, say that they live, change, and go; and who may act for them."""

import hmac
from dataclasses import dataclass
from uuid import UUID

import structlog

from restante.database.pool import Database
from restante.errors import NotAuthenticated, WorkspaceUnknown
from restante.ids import WorkspaceId
from restante.workspaces import rules
from restante.workspaces import store as workspaces
from restante.workspaces.rules import Changes, Details, Workspace

log = structlog.get_logger()

_UNKNOWN = "There is no such workspace."
_NOT_YOURS = "Send the token that this workspace was given; a new one needs leave to register here."


@dataclass(frozen=True, slots=True)
class Registered:
    """The answer to a registration; the secrets appear only when they are issued."""

    delivery_mode: rules.Mode
    auth_token: str | None = None
    inbound_secret: str | None = None


@dataclass(frozen=True, slots=True)
class Issued:
    """A new token, and for a push workspace the secret that it is called with."""

    auth_token: str
    inbound_secret: str | None


class Registry:
    """The workspaces of this server."""

    def __init__(
        self, db: Database, *, admin_token: str, registration_token: str | None, is_open: bool
    ) -> None:
        self._db = db
        self._admin_token = admin_token
        self._registration_token = registration_token
        self._is_open = is_open

    def is_admin(self, token: str) -> bool:
        """Whether the token is the operator's."""
        return _same(self._admin_token, token)

    def may_register(self, token: str | None) -> bool:
        """Whether the caller may bring a new workspace: anyone on an open server, else by token."""
        if token and self.is_admin(token):
            return True
        if self._registration_token:
            return bool(token) and _same(self._registration_token, token)
        return self._is_open

    async def find(self, workspace_id: WorkspaceId) -> Workspace | None:
        """The workspace, unless it was removed."""
        async with self._db.connection() as connection:
            found = await workspaces.get(connection, workspace_id)
        return found if found and found.status == "active" else None

    async def by_token(self, token: str) -> Workspace | None:
        """The workspace that this token belongs to."""
        async with self._db.connection() as connection:
            return await workspaces.by_token(connection, rules.token_hash(token))

    async def register(
        self, workspace_id: WorkspaceId, changes: Changes, *, token: str | None
    ) -> Registered:
        """
        Register an id for the first time, or renew what it says about itself.

        Raises NotAuthenticated if the id is taken and the token is not its own, or if it is new and
        the caller may not bring new ones: the same answer, so that ids cannot be probed.
        """
        async with self._db.connection() as connection:
            stored = await workspaces.get(connection, workspace_id)
        if stored is None or (stored.status == "removed" and token and self.is_admin(token)):
            return await self._register_new(workspace_id, stored, changes, token)
        if token is None or not rules.opens(stored, token):
            raise NotAuthenticated(_NOT_YOURS)
        return await self._renew(stored, changes)

    async def _register_new(
        self,
        workspace_id: WorkspaceId,
        removed: Workspace | None,
        changes: Changes,
        token: str | None,
    ) -> Registered:
        if not self.may_register(token):
            raise NotAuthenticated(_NOT_YOURS)
        details = rules.details_of(removed, changes)
        fresh, secret = rules.new_token(), rules.new_token()
        enter = workspaces.revive if removed else workspaces.insert
        async with self._db.connection() as connection:
            entered = await enter(
                connection, workspace_id, details, rules.token_hash(fresh), secret
            )
        if not entered:
            raise NotAuthenticated(_NOT_YOURS)
        log.info("workspace_registered", workspace=str(workspace_id), mode=details.delivery_mode)
        return Registered(
            details.delivery_mode, fresh, secret if details.delivery_mode == "push" else None
        )

    async def _renew(self, stored: Workspace, changes: Changes) -> Registered:
        details = await self._write(stored.id, changes)
        if details is None:
            raise NotAuthenticated(_NOT_YOURS)
        becomes_push = details.delivery_mode == "push" and stored.delivery_mode != "push"
        return Registered(
            details.delivery_mode, inbound_secret=stored.inbound_secret if becomes_push else None
        )

    async def change(self, workspace_id: WorkspaceId, changes: Changes) -> None:
        """The operator's changes; raises WorkspaceUnknown."""
        details = await self._write(workspace_id, changes)
        if details is None:
            raise WorkspaceUnknown(_UNKNOWN)
        log.info("workspace_changed", workspace=str(workspace_id), mode=details.delivery_mode)

    async def _write(self, workspace_id: WorkspaceId, changes: Changes) -> Details | None:
        """Change what was said and keep the rest, as it is now; None if the workspace is gone."""
        async with self._db.transaction() as tx:
            stored = await workspaces.get_to_change(tx, workspace_id)
            if stored is None or stored.status != "active":
                return None
            details = rules.details_of(stored, changes)
            await workspaces.update(tx, workspace_id, details)
            return details

    async def heartbeat(self, workspace: Workspace, active_tasks: int, current_task: str) -> None:
        """A sign of life."""
        async with self._db.connection() as connection:
            await workspaces.heartbeat(
                connection, workspace.id, active_tasks, rules.clean_label(current_task)
            )

    async def remove(self, workspace_id: WorkspaceId) -> None:
        """Remove the workspace; what waits for it leaves by its own time."""
        async with self._db.connection() as connection:
            if not await workspaces.remove(connection, workspace_id):
                raise WorkspaceUnknown(_UNKNOWN)
        log.info("workspace_removed", workspace=str(workspace_id))

    async def reissue_token(self, workspace_id: WorkspaceId) -> Issued:
        """Give the workspace a new token; the old one is worth nothing from now on."""
        fresh = rules.new_token()
        await self._set_token(workspace_id, rules.token_hash(fresh))
        log.info("token_reissued", workspace=str(workspace_id))
        workspace = await self.show(workspace_id)
        is_push = workspace.delivery_mode == "push"
        return Issued(fresh, workspace.inbound_secret if is_push else None)

    async def revoke_token(self, workspace_id: WorkspaceId) -> None:
        """Take the workspace's token away; it stays registered and gets what is sent to it."""
        await self._set_token(workspace_id, None)
        log.info("token_revoked", workspace=str(workspace_id))

    async def _set_token(self, workspace_id: WorkspaceId, token_hash: bytes | None) -> None:
        async with self._db.connection() as connection:
            if not await workspaces.set_token(connection, workspace_id, token_hash):
                raise WorkspaceUnknown(_UNKNOWN)

    async def show(self, workspace_id: WorkspaceId) -> Workspace:
        """The workspace in any state, for the operator; raises WorkspaceUnknown."""
        async with self._db.connection() as connection:
            found = await workspaces.get(connection, workspace_id)
        if found is None:
            raise WorkspaceUnknown(_UNKNOWN)
        return found

    async def page(self, *, after: UUID, limit: int) -> list[Workspace]:
        """Workspaces in any state, in the order of their ids."""
        async with self._db.connection() as connection:
            return await workspaces.page(connection, after=after, limit=limit)


def _same(secret: str, given: str | None) -> bool:
    return hmac.compare_digest(secret.encode(), (given or "").encode("utf-8", "surrogateescape"))
