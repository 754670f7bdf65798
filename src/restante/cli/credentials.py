"""
Which server and which token `restante connect` uses: those of the folder, or new ones.

A token goes to no other address than the folder's, unless the user says that the server has moved.
"""

import getpass
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from restante.cli.lines import shell_command
from restante.errors import (
    AnswerInvalid,
    BadRequest,
    NotAuthenticated,
    ServerRefused,
    ServerUnreachable,
    WorkspaceUnknown,
)

if TYPE_CHECKING:
    from restante.client.aio import AsyncClient
    from restante.client.calls import Credentials
    from restante.client.folder import Folder

_MAX_TOKEN = 4096


@dataclass(frozen=True, slots=True)
class Target:
    """What the command line says about the server, the folder and the token."""

    url: str | None
    dir: Path | None
    into: Path | None
    is_moved: bool = False
    new_token: str | None = None

    @property
    def root(self) -> Path:
        """The folder with the credentials."""
        return self.dir or self.into or Path()

    @property
    def is_changed(self) -> bool:
        """Whether the folder gets another address or token."""
        return self.is_moved or self.new_token is not None

    def command(self, *words: str, url: str | None = None) -> str:
        """The command that connects this folder, with more flags."""
        named = [("--dir", self.dir), ("--into", self.into)]
        folder = [word for flag, path in named if path for word in (flag, str(path))]
        return shell_command(["connect", *([url] if url else []), *folder, *words])


def credentials_for(target: Target) -> "Credentials | None":
    """
    The credentials to use, None to register at `new_server`; stores nothing.

    An exported RESTANTE_URL does not count for a folder that knows its server.
    """
    from restante.client.addresses import server_url
    from restante.client.folder import kept_credentials

    kept = kept_credentials(target.root)
    if kept is None:
        if target.is_changed:
            raise BadRequest(f"{target.root} is not connected yet: leave out --moved, --new-token.")
        return None
    url = server_url(target.url) if target.url else kept.url
    if target.is_moved and not target.url:
        raise BadRequest("Say where the server is now: restante connect URL --moved.")
    if url != kept.url and not target.is_moved:
        raise BadRequest(
            f"{target.root} belongs to a workspace at {kept.url}. If that server is now at {url}, "
            f"run `{target.command('--moved', url=url)}`; otherwise use another --dir."
        )
    return replace(kept, url=url, token=target.new_token or kept.token)


def new_server(target: Target) -> str:
    """The server at which to register."""
    url = target.url or os.environ.get("RESTANTE_URL")
    if not url:
        raise BadRequest("Say which server to connect to, for example http://127.0.0.1:8080.")
    return url


def given_token() -> str:
    """The token in RESTANTE_NEW_TOKEN, or on standard input; other users could see a flag."""
    token = os.environ.get("RESTANTE_NEW_TOKEN") or _token_read()
    token = token.strip()
    if not token or not token.isprintable() or len(token) > _MAX_TOKEN:
        raise BadRequest("There is no token: set RESTANTE_NEW_TOKEN, or give it on standard input.")
    return token


def _token_read() -> str:
    if sys.stdin.isatty():
        with suppress(EOFError):
            return getpass.getpass("New token of the workspace: ")
    return sys.stdin.readline(_MAX_TOKEN + 1)


async def introduce(
    client: "AsyncClient",
    target: Target,
    folder: "Folder",
    name: str,
    registration_token: str | None = None,
) -> None:
    """Register, or check a new address or token; store what the server has accepted."""
    from restante.client.connection import speaks_tls

    credentials = credentials_for(target)
    try:
        if credentials is None:
            folder.keep(await client.register(name, registration_token=registration_token))
        elif target.is_changed:
            await _check(client)
            folder.keep(credentials)
    except (AnswerInvalid, ServerRefused, ServerUnreachable) as error:
        if not error.facts.get("is_unsent") and await speaks_tls(client.url):
            encrypted = client.url.replace("http:", "https:", 1)
            raise BadRequest(f"{client.url} expects TLS. Its address is {encrypted}.") from error
        raise


async def _check(client: "AsyncClient") -> None:
    """Raise unless this is the workspace's own token there; that of the admin is refused too."""
    try:
        await client.heartbeat()
    except (NotAuthenticated, WorkspaceUnknown) as error:
        raise NotAuthenticated(
            f"{client.url} does not accept this token for the workspace {client.workspace_id}. "
            "The folder is unchanged."
        ) from error
