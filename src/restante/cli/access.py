"""The server URL and the token of a client command."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from restante import wire
from restante.cli.lines import shell_command
from restante.errors import BadRequest, NotAuthenticated, WorkspaceUnknown
from restante.ids import WorkspaceId, as_uuid
from restante.secret_files import with_secrets
from restante.text import MAX_QUOTED, printable

if TYPE_CHECKING:
    from restante.client.aio import AsyncClient

_DEFAULT_URL = "http://127.0.0.1:8080"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Access:
    """
    The server and the token.

    Parameters
    ----------
    url
        The server's URL. [default: http://127.0.0.1:8080] [env: RESTANTE_URL]
    token
        The admin token or the workspace's own token. For a server on this machine, the admin token
        is read from its data directory. [env: RESTANTE_TOKEN; for a server on this machine also
        RESTANTE_ADMIN_TOKEN]
    data_dir
        The server's data directory, which holds the admin token. [env: RESTANTE_DATA_DIR]
    """

    url: Annotated[str | None, Parameter(show_default=False)] = None
    token: Annotated[str | None, Parameter(show_default=False)] = None
    data_dir: Annotated[Path | None, Parameter(show_default=False)] = None

    def client(self, workspace_id: WorkspaceId | None = None) -> "AsyncClient":
        """A client with the given token, or with the admin token of this machine."""
        from restante.client.aio import AsyncClient

        return AsyncClient(self.address, token=self._required_token(), workspace_id=workspace_id)

    @property
    def address(self) -> str:
        return self.url or os.environ.get("RESTANTE_URL") or _DEFAULT_URL

    def _required_token(self) -> str:
        token = self.token or os.environ.get("RESTANTE_TOKEN") or self._local_admin_token()
        if not token:
            raise NotAuthenticated(
                "A token is required: use --token or set RESTANTE_TOKEN. The admin token is in the "
                "file admin-token in the server's data directory."
            )
        return token

    def _local_admin_token(self) -> str | None:
        """The admin token of a server on this machine, None if there is none we can read."""
        from restante.client.addresses import is_here, server_url

        # Never send this machine's admin token to another machine by mistake.
        if self.data_dir is None and not is_here(server_url(self.address)):
            return None
        if self.data_dir is None and (
            given := with_secrets(os.environ).get("RESTANTE_ADMIN_TOKEN")
        ):
            return given
        directory = self.data_dir or os.environ.get("RESTANTE_DATA_DIR") or _default_directory()
        if not directory:
            return None
        try:
            return (Path(directory).expanduser() / "admin-token").read_text().strip()
        except (OSError, ValueError):
            return None


def client_of_folder(folder: Path, access: Access) -> "AsyncClient":
    """A client with the workspace and the token of a connected folder."""
    from restante.client.addresses import server_url
    from restante.client.aio import AsyncClient
    from restante.client.folder import kept_credentials

    kept = kept_credentials(folder)
    if kept is None:
        raise BadRequest(f"{folder} is not connected: run `restante connect` there first.")
    if access.token is not None:
        raise BadRequest(f"{folder} has its own token: leave out --token, or --dir.")
    if access.url is not None and server_url(access.url) != kept.url:
        raise BadRequest(
            f"{folder} belongs to a workspace at {kept.url}: leave out --url, or --dir."
        )
    return AsyncClient.of(kept)


def send_hint(client: "AsyncClient", folder: Path) -> str:
    """A command that sends to this workspace, and needs no other token than that of its folder."""
    words = ["send", str(client.workspace_id), "--message", "hello", "--dir", str(folder)]
    return shell_command(words)


def _default_directory() -> Path | None:
    try:
        from restante.postgres.datadir import DataDirectory
    except ImportError:  # only the client is installed
        return None
    return DataDirectory.default()


async def workspace_named(client: "AsyncClient", text: str) -> WorkspaceId:
    """The workspace with this id, or the one active workspace of this name."""
    from restante.workspaces.rules import ambiguous

    workspace_id = as_uuid(text)
    if workspace_id:
        return WorkspaceId(workspace_id)
    shown = printable(text, max_length=MAX_QUOTED)
    try:
        found = await _active_named(client, text)
    except NotAuthenticated as error:
        raise BadRequest(
            f"{shown} is not a workspace id; only the admin can look one up by its name. Use the "
            "id, or check the token."
        ) from error
    if not found:
        raise WorkspaceUnknown(f"There is no workspace with the id or name {shown}.")
    if len(found) > 1:
        raise BadRequest(ambiguous(text, found))
    return WorkspaceId(found[0].id)


async def _active_named(client: "AsyncClient", name: str) -> list[wire.WorkspaceEntry]:
    """Those first that were seen last."""
    found = [
        workspace
        async for workspace in client.workspaces()
        if workspace.name == name and workspace.status == "active"
    ]
    return sorted(found, key=lambda one: (one.last_seen_at, one.created_at), reverse=True)
