"""`restante connect`: receive the files and messages of a workspace into a folder."""

import asyncio
import os
import platform
import signal
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter
from rich.console import Console

from restante.cli.display import Display, display_for
from restante.errors import BadRequest, NotAuthenticated, RestanteError

if TYPE_CHECKING:
    from restante.client.aio import AsyncClient
    from restante.client.folder import Folder


def register(app: App, group: Group) -> None:
    """Add the command."""
    app.command(connect, group=group)


def connect(
    url: str | None = None,
    /,
    *,
    dir: Path = Path(),  # noqa: A002 - the flag's name
    name: str | None = None,
    once: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    exec: str | None = None,  # noqa: A002 - the flag's name
    on_message: str | None = None,
    registration_token: Annotated[
        str | None, Parameter(env_var="RESTANTE_REGISTRATION_TOKEN", show_env_var=True)
    ] = None,
) -> None:
    """
    Receive files and messages into a folder, until Ctrl-C.

    The first time this registers a workspace and keeps its credentials in the folder; later it goes
    on where it stopped. Files appear in .molecule/chat-uploads below the folder, whole and checked,
    and only then does the server hear that they have arrived. It waits out a lost network and a
    server that is restarted.

    Example: restante connect http://127.0.0.1:8080 --dir inbox

    Parameters
    ----------
    url
        The server. Not needed when the folder has been connected before. [env: RESTANTE_URL]
    dir
        The folder.
    name
        What the workspace is called, for people. [default: this machine's name]
    once
        Receive what is there, then end: with 0 if nothing was left behind, else with 1.
    exec
        Run this command for each file, with the file's path as its last argument. The file is
        acknowledged only if it succeeds, and tried again later if not.
    on_message
        Run this command for each message, with the row of the feed as JSON on standard input. Until
        it succeeds, no later message is handed over.
    registration_token
        The token that the server wants from new workspaces, if it wants one.
    """
    from restante.client import commands
    from restante.client.folder import Folder

    wish = _Wish(
        name=name,
        registration_token=registration_token,
        once=once,
        file_command=commands.words_of(exec) if exec is not None else (),
        message_command=commands.words_of(on_message) if on_message is not None else (),
    )
    address = url or os.environ.get("RESTANTE_URL") or None
    _client(dir, address)  # a mistake is refused before a folder is made for it
    with Folder.open(dir) as folder, display_for(Console()) as display:
        client = _client(folder.root, address)
        left = asyncio.run(_until_interrupted(_receive(client, folder, display, wish)))
    display.summary()
    if left is None and once:
        sys.exit(130)
    if left:
        print(f"restante: {left} files could not be taken and still wait.", file=sys.stderr)
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class _Wish:
    """What was asked for."""

    name: str | None
    registration_token: str | None
    once: bool
    file_command: Sequence[str]
    message_command: Sequence[str]


def _client(root: Path, url: str | None) -> "AsyncClient":
    """The client of the workspace that the folder belongs to, or one that has to register yet."""
    from restante.client.addresses import server_url
    from restante.client.aio import AsyncClient
    from restante.client.folder import kept_credentials

    kept = kept_credentials(root)
    if kept is None:
        if url is None:
            raise BadRequest("Say which server to connect to, such as http://127.0.0.1:8080.")
        return AsyncClient(url)
    if url is not None and server_url(url) != kept.url:
        raise BadRequest(
            f"{root} belongs to a workspace at {kept.url}: use another --dir for {server_url(url)}."
        )
    return AsyncClient.of(kept)


async def _receive(client: "AsyncClient", folder: "Folder", display: Display, wish: _Wish) -> int:
    """Register if need be, then receive; returns how many files were left behind."""
    from restante.client.addresses import is_exposed
    from restante.client.receiving import Handlers, Receiver

    async with client:
        if is_exposed(client.url):
            display.warn(
                f"{client.url} is not encrypted: the token and the files can be read on the way."
            )
        is_known = client.is_registered
        if not is_known:
            name = wish.name or platform.node() or "workspace"
            folder.keep(await client.register(name, registration_token=wish.registration_token))
        display.began(client.url, client.workspace_id, folder.uploads.path)
        handlers = Handlers(wish.file_command, wish.message_command)
        receiver = Receiver(client, folder, display, handlers)
        try:
            if is_known and wish.name:
                await _rename(client, display, wish.name)
            return await (receiver.run_once() if wish.once else receiver.run())
        except NotAuthenticated as error:
            raise NotAuthenticated(
                f"{client.url} no longer accepts the token of this workspace: it was replaced or "
                f"revoked, or the workspace was removed. Write a new token into "
                f"{folder.credentials_path}, or use another --dir to register anew."
            ) from error


async def _rename(client: "AsyncClient", display: Display, name: str) -> None:
    """What the workspace is called matters less than what waits for it."""
    from restante.client.receiving import FINAL

    try:
        await client.rename(name)
    except FINAL:
        raise
    except RestanteError as error:
        display.warn(f"the workspace keeps its name for now. {error}")


async def _until_interrupted(work: Coroutine[Any, Any, int]) -> int | None:
    """Its result, or None after Ctrl-C or SIGTERM: what is half done then is finished next time."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None
