"""Which server a client command speaks to, and as whom."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

from cyclopts import Parameter

from restante.errors import BadRequest, NotAuthenticated, WorkspaceUnknown
from restante.ids import WorkspaceId, as_uuid

if TYPE_CHECKING:
    from restante.client.aio import AsyncClient

_HERE = "http://127.0.0.1:8080"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Access:
    """
    Where and as whom.

    Parameters
    ----------
    url
        The server. [default: http://127.0.0.1:8080] [env: RESTANTE_URL]
    token
        The token to speak with: the admin's, or the workspace's own. On the machine of the server
        the admin's token is found by itself. [env: RESTANTE_TOKEN; for a server on this machine
        also RESTANTE_ADMIN_TOKEN]
    data_dir
        The server's data directory, to find the admin's token in. [env: RESTANTE_DATA_DIR]
    """

    url: Annotated[str | None, Parameter(show_default=False)] = None
    token: Annotated[str | None, Parameter(show_default=False)] = None
    data_dir: Annotated[Path | None, Parameter(show_default=False)] = None

    def client(self) -> "AsyncClient":
        """A client with the token that was given or found."""
        from restante.client.aio import AsyncClient

        return AsyncClient(self.address, token=self._found_token())

    @property
    def address(self) -> str:
        return self.url or os.environ.get("RESTANTE_URL") or _HERE

    def _found_token(self) -> str:
        found = self.token or os.environ.get("RESTANTE_TOKEN") or self._kept_token()
        if not found:
            raise NotAuthenticated(
                "A token is needed: give --token, or set RESTANTE_TOKEN. The admin's is in the "
                "file admin-token of the server's data directory."
            )
        return found

    def _kept_token(self) -> str | None:
        """The admin's token, where this machine has a server and we may read it."""
        from restante.client.addresses import is_here, server_url

        # Nobody else's server is to see it by mistake.
        if self.data_dir is None and not is_here(server_url(self.address)):
            return None
        if self.data_dir is None and (given := os.environ.get("RESTANTE_ADMIN_TOKEN")):
            return given
        directory = self.data_dir or os.environ.get("RESTANTE_DATA_DIR") or _default_directory()
        if not directory:
            return None
        try:
            return (Path(directory).expanduser() / "admin-token").read_text().strip()
        except (OSError, ValueError):
            return None


def _default_directory() -> Path | None:
    try:
        from restante.postgres.datadir import DataDirectory
    except ImportError:  # the server is not installed here
        return None
    return DataDirectory.default()


async def workspace_named(client: "AsyncClient", text: str) -> WorkspaceId:
    """The workspace with this id, or the one active workspace of this name."""
    given = as_uuid(text)
    if given:
        return WorkspaceId(given)
    try:
        found = await _of_name(client, text)
    except NotAuthenticated as error:
        raise BadRequest(
            f"{text} is not the id of a workspace; only the admin can look one up by its name."
        ) from error
    if not found:
        raise WorkspaceUnknown(f"There is no workspace with the id or name {text}.")
    if len(found) > 1:
        ids = ", ".join(str(workspace_id) for workspace_id in found)
        raise BadRequest(f"Several workspaces are called {text}: {ids}. Say which by its id.")
    return WorkspaceId(found[0])


async def _of_name(client: "AsyncClient", name: str) -> list[UUID]:
    return [
        workspace.id
        async for workspace in client.workspaces()
        if workspace.name == name and workspace.status == "active"
    ]
