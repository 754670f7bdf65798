"""Workspaces register, register again, and send heartbeats."""

import hmac
from collections.abc import Callable
from uuid import UUID

import structlog

from restante import wire
from restante.database.outcomes import decided
from restante.database.pool import Connection, Database, transaction
from restante.errors import NotAuthenticated
from restante.ids import WorkspaceId
from restante.retention.disk import Disk
from restante.workspaces import rules, store
from restante.workspaces.auth import Access
from restante.workspaces.rates import Allowance
from restante.workspaces.rules import Changes, Details, Sender, Workspace

log = structlog.get_logger()

# What is replaced leaves its space to the next vacuum: an hour of this is what a workspace keeps.
_CARD_BYTES_PER_MINUTE = 16 * rules.MAX_CARD_BYTES
# For all callers together: nothing else tells them apart.
_OPEN_BYTES_PER_MINUTE = 16 * 1024 * 1024
_ROW_BYTES = 1024
_ANYBODY = UUID(int=0)

_NOT_YOURS = (
    "Send the token that this workspace was given; a new workspace needs the right to register."
)


class Registry:
    """The workspaces of this server."""

    def __init__(
        self,
        db: Database,
        access: Access,
        *,
        registration_token: str | None,
        is_open: bool,
        disk: Disk | None = None,
    ) -> None:
        self._db = db
        self._disk = disk or Disk(db)
        self._access = access
        self._cards = Allowance(_CARD_BYTES_PER_MINUTE, "bytes of registrations of one workspace")
        self._open = Allowance(_OPEN_BYTES_PER_MINUTE, "bytes of registrations without a token")
        self._registration_token = registration_token
        self._is_open = is_open

    def may_register(self, token: str | None) -> bool:
        """Whether the caller may register a new id: anyone on an open server, else by token."""
        if self._access.is_admin(token):
            return True
        if self._registration_token:
            given = (token or "").encode("utf-8", "surrogateescape")
            return hmac.compare_digest(self._registration_token.encode(), given)
        return self._is_open

    async def register(
        self,
        workspace_id: WorkspaceId,
        changes: Changes,
        *,
        token: str | None,
        sender: Sender | None = None,
    ) -> wire.Registered:
        """
        Register an id for the first time, or update an existing registration.

        Raises NotAuthenticated if the id is taken and the token is not its own, or if it is new and
        the caller may not register: the same answer, so that ids cannot be probed.  Raises DiskLow
        for a new id or a large card; a workspace that comes back must be able to fetch.  A caller
        without any token must be a program (a `sender` of None is one).  Raises TooManyMessages
        beyond a rate: of all such callers together, and of each workspace that registers again.
        """
        async with self._db.connection() as connection:
            stored = await store.get(connection, workspace_id)
        if stored and token and rules.token_matches(stored, token):
            return await self._register_again(stored, changes)
        if sender and self._is_open_to(token):
            rules.refuse_web_pages(sender)
            self._open.spend(_ANYBODY, _ROW_BYTES + len(changes.agent_card or ""))
        if stored is None or (stored.status == "removed" and self._access.is_admin(token)):
            return await self._register_new(workspace_id, stored, changes, token)
        raise NotAuthenticated(_NOT_YOURS)

    def _is_open_to(self, token: str | None) -> bool:
        is_open = self._is_open and not self._registration_token
        return is_open and not self._access.is_admin(token)

    async def _register_new(
        self,
        workspace_id: WorkspaceId,
        removed: Workspace | None,
        changes: Changes,
        token: str | None,
    ) -> wire.Registered:
        if not self.may_register(token):
            raise NotAuthenticated(_NOT_YOURS)
        details = rules.registered(workspace_id, removed, changes)
        self._disk.take(len(details.agent_card or ""))
        new_token, secret = rules.new_token(), rules.new_token()
        enter = store.revive if removed else store.insert
        token_hash = rules.token_hash(new_token)

        async def commit(connection: Connection) -> bool | Workspace:
            return await enter(connection, workspace_id, details, token_hash, secret)

        # The token is shown once: a registration whose reply is lost would lock its id.
        if not await decided(self._db, commit, lambda c: store.by_token(c, token_hash)):
            raise NotAuthenticated(_NOT_YOURS)
        log.info("workspace_registered", workspace=str(workspace_id), mode=details.delivery_mode)
        return _answer(details, secret, new_token)

    async def _register_again(self, stored: Workspace, changes: Changes) -> wire.Registered:
        self._take_again(stored.id, changes.agent_card or "")
        details = await update(
            self._db, stored.id, lambda current: rules.registered(stored.id, current, changes)
        )
        if details is None:
            raise NotAuthenticated(_NOT_YOURS)
        return _answer(details, stored.inbound_secret)

    def _take_again(self, workspace_id: WorkspaceId, card: str) -> None:
        """Each writes the row anew; on a low disk only a large card is refused."""
        if rules.is_large(card):
            self._disk.take(len(card))
        self._cards.spend(workspace_id, _ROW_BYTES + len(card))

    async def heartbeat(
        self, workspace: Workspace, active_tasks: int, current_task: str
    ) -> wire.HeartbeatNoted:
        """Record that the workspace is alive and what it is doing."""
        async with self._db.connection() as connection:
            await store.heartbeat(
                connection, workspace.id, active_tasks, rules.clean_label(current_task)
            )
        return wire.HeartbeatNoted("ok", workspace.inbound_secret)


async def update(
    db: Database, workspace_id: WorkspaceId, changed: Callable[[Workspace], Details]
) -> Details | None:
    """Write the details that follow from the stored ones; None if it is not active."""

    async def commit(connection: Connection) -> Details | None:
        async with transaction(connection) as tx:
            stored = await store.get_for_update(tx, workspace_id)
            if stored is None or stored.status != "active":
                return None
            details = changed(stored)
            await store.update(tx, workspace_id, details)
            return details

    return await decided(db, commit, commit)


def _answer(details: Details, secret: str, new_token: str | None = None) -> wire.Registered:
    older_name = secret if details.delivery_mode == "push" else None
    return wire.Registered("registered", details.delivery_mode, secret, new_token, older_name)
