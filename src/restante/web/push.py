"""Requests that are handed through to push-mode workspaces."""

from starlette.requests import Request
from starlette.responses import Response

from restante.core.workspaces import Workspace
from restante.errors import WorkspaceUnreachable


async def upload(request: Request, workspace: Workspace) -> Response:
    raise WorkspaceUnreachable("workspace unreachable")


async def message(request: Request, workspace: Workspace, body: bytes) -> Response:
    raise WorkspaceUnreachable("workspace unreachable")
