"""Who is calling, and may they touch this workspace."""

from uuid import UUID

from starlette.requests import HTTPConnection

from restante import wire
from restante.errors import BadRequest, NotAuthenticated, WorkspaceUnknown
from restante.ids import FileId, WorkspaceId, as_uuid
from restante.server.context import context
from restante.workspaces.rules import Workspace, opens

_REFUSED = "Send the token of this workspace as `Authorization: Bearer <token>`."
_REFUSED_ADMIN = "Send the admin token as `Authorization: Bearer <token>`."


def bearer(request: HTTPConnection) -> str | None:
    """The bearer token, if one was sent."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def workspace_id(request: HTTPConnection) -> WorkspaceId:
    """The workspace that the address names."""
    found = as_uuid(request.path_params["workspace_id"])
    if found is None:
        raise BadRequest("invalid workspace ID")
    return WorkspaceId(found)


def file_id(request: HTTPConnection) -> FileId:
    """The file that the address names."""
    found = as_uuid(request.path_params["file_id"])
    if found is None:
        raise BadRequest("invalid file_id")
    return FileId(found)


def admin(request: HTTPConnection) -> None:
    """Let only the operator pass."""
    token = bearer(request)
    if token is None or not context(request).registry.is_admin(token):
        raise NotAuthenticated(_REFUSED_ADMIN)


def is_admin(request: HTTPConnection) -> bool:
    """Whether the operator is calling."""
    token = bearer(request)
    return token is not None and context(request).registry.is_admin(token)


async def owner(request: HTTPConnection) -> Workspace:
    """Let only the workspace itself pass; one that does not exist is refused in the same words."""
    wanted = workspace_id(request)
    token = bearer(request)
    found = await context(request).registry.find(wanted) if token else None
    if token is None or found is None or not opens(found, token):
        raise NotAuthenticated(_REFUSED)
    return found


async def owner_or_admin(request: HTTPConnection) -> Workspace:
    """Let the workspace itself or the operator pass; only the operator learns what is not there."""
    if not is_admin(request):
        return await owner(request)
    return await _existing(request, workspace_id(request))


async def _existing(request: HTTPConnection, wanted: WorkspaceId) -> Workspace:
    found = await context(request).registry.find(wanted)
    if found is None:
        raise WorkspaceUnknown("There is no such workspace.")
    return found


async def sender(request: HTTPConnection) -> tuple[UUID | None, Workspace]:
    """
    Who sends a message, and to whom: any workspace with its own token, or the operator.

    The sender is None for the operator, whose messages come from the canvas.
    """
    wanted = workspace_id(request)
    if is_admin(request):
        return None, await _existing(request, wanted)
    token = bearer(request)
    caller = await context(request).registry.by_token(token) if token else None
    claimed = request.headers.get(wire.CALLER_ID)
    if caller is None or (claimed is not None and as_uuid(claimed) != caller.id):
        raise NotAuthenticated(
            "Send your own workspace's token as `Authorization: Bearer <token>`; "
            f"{wire.CALLER_ID}, if sent, must be its id."
        )
    return caller.id, await _existing(request, wanted)
