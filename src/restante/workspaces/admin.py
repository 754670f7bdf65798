"""The operator lists workspaces, changes and removes them, and issues and revokes their tokens."""

from collections.abc import Callable, Collection, Sequence
from uuid import UUID

import structlog

from restante import wire
from restante.database.outcomes import decided
from restante.database.pool import Connection, Database, transaction
from restante.errors import BadRequest, WorkspaceUnknown
from restante.ids import WorkspaceId, as_uuid
from restante.text import MAX_QUOTED, printable
from restante.workspaces import registry, rules, store
from restante.workspaces.rules import Changes, Workspace

log = structlog.get_logger()


class WorkspaceAdmin:
    """
    Acts on workspaces for the operator.

    `permissions_changed` is called after each commit that makes a token invalid, so that the open
    requests of that token end.
    """

    def __init__(self, db: Database, permissions_changed: Callable[[WorkspaceId], object]) -> None:
        self._db = db
        self._permissions_changed = permissions_changed

    async def change(self, workspace_id: WorkspaceId, changes: Changes) -> None:
        """Apply the operator's changes; raises WorkspaceUnknown."""
        details = await registry.update(
            self._db, workspace_id, lambda current: rules.details_of(current, changes)
        )
        if details is None:
            raise WorkspaceUnknown
        log.info("workspace_changed", workspace=str(workspace_id), mode=details.delivery_mode)

    async def rename(self, workspace_id: WorkspaceId, name: str) -> str:
        """
        Give the workspace another name; returns the name as it is stored.

        Raises BadRequest for a name that could not be typed in its place: another workspace has it,
        or it looks like an id.
        """
        name = rules.new_name(name)
        others = [one for one in await self.named(name) if one.id != workspace_id]
        if others:
            raise BadRequest(
                f"The workspace {others[0].id} is named {_quoted(name)} already; choose another."
            )
        await self.change(workspace_id, Changes(name=name))
        return name

    async def remove(self, workspace_id: WorkspaceId) -> None:
        """Remove the workspace; its files stay until they expire or are swept."""

        async def commit(connection: Connection) -> bool:
            return await store.remove(connection, workspace_id)

        async def look_up(connection: Connection) -> bool | None:
            stored = await store.get(connection, workspace_id)
            return True if stored is None or stored.status == "removed" else None

        if not await decided(self._db, commit, look_up):
            raise WorkspaceUnknown
        self._permissions_changed(workspace_id)
        log.info("workspace_removed", workspace=str(workspace_id))

    async def reissue_token(self, workspace_id: WorkspaceId) -> wire.IssuedToken:
        """Give the workspace a new token; the old one stops working."""
        new_token = rules.new_token()
        token_hash = rules.token_hash(new_token)

        async def commit(connection: Connection) -> Workspace | None:
            async with transaction(connection) as tx:
                workspace = await store.get_for_update(tx, workspace_id)
                if not await store.set_token(tx, workspace_id, token_hash):
                    raise WorkspaceUnknown
                return workspace

        workspace = await decided(self._db, commit, lambda c: store.by_token(c, token_hash))
        self._permissions_changed(workspace_id)
        log.info("token_reissued", workspace=str(workspace_id))
        if workspace and workspace.delivery_mode == "push":
            return wire.IssuedToken(new_token, workspace.inbound_secret)
        return wire.IssuedToken(new_token)

    async def revoke_token(self, workspace_id: WorkspaceId) -> None:
        """Delete the workspace's token; it stays registered and still receives."""

        async def commit(connection: Connection) -> bool:
            return await store.set_token(connection, workspace_id, None)

        if not await decided(self._db, commit, commit):
            raise WorkspaceUnknown
        self._permissions_changed(workspace_id)
        log.info("token_revoked", workspace=str(workspace_id))

    async def show(self, workspace_id: WorkspaceId) -> wire.WorkspaceView:
        """The workspace in any state; raises WorkspaceUnknown."""
        async with self._db.connection() as connection:
            found = await store.view(connection, workspace_id)
        if found is None:
            raise WorkspaceUnknown
        return found

    async def page(self, *, after: UUID, limit: int) -> list[wire.WorkspaceEntry]:
        """Workspaces in any state, in order of their ids."""
        async with self._db.connection() as connection:
            return await store.page(connection, after=after, limit=limit)

    async def recent(self, *, limit: int, with_removed: bool) -> list[wire.WorkspaceEntry]:
        """The workspaces that were seen last, those first."""
        async with self._db.connection() as connection:
            return await store.recent(connection, limit=limit, with_removed=with_removed)

    async def named(self, name: str) -> list[wire.WorkspaceEntry]:
        """Some of the active workspaces of this name, those first that were seen last."""
        if not name.isprintable():  # no stored name is like that, and Postgres may refuse it
            return []
        async with self._db.connection() as connection:
            return await store.recent(connection, limit=rules.MAX_CANDIDATES + 1, name=name)

    async def labels(self, ids: Collection[UUID | None]) -> dict[UUID, str]:
        """What to call these workspaces in print: by their names, if nobody else has them."""
        wanted = {one for one in ids if one is not None}
        async with self._db.connection() as connection:
            return rules.labels(wanted, await store.names(connection, wanted))

    async def id_of(self, text: str) -> WorkspaceId:
        """
        The workspace with this id, in any state, or the only active one of this name.

        A text that can be an id is never taken for a name.  Raises WorkspaceUnknown; and BadRequest
        with the ids, if several have the name.
        """
        if found := as_uuid(text):
            async with self._db.connection() as connection:
                if await store.get(connection, WorkspaceId(found)):
                    return WorkspaceId(found)
            raise WorkspaceUnknown(_unknown_id(text, await self.named(text)))
        named = await self.named(text)
        if not named:
            raise WorkspaceUnknown(
                f"There is no workspace with the id or name {_quoted(text)}; "
                "`restante workspaces list` shows them."
            )
        if len(named) > 1:
            raise BadRequest(rules.ambiguous(text, named))
        return WorkspaceId(named[0].id)


def _unknown_id(text: str, named: Sequence[wire.WorkspaceEntry]) -> str:
    hint = f" One is named so: use its id {named[0].id}." if named else ""
    return f"There is no workspace with the id {_quoted(text)}.{hint}"


def _quoted(text: str) -> str:
    return printable(text, max_length=MAX_QUOTED)
