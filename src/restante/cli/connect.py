"""`restante connect`: receive files and messages for a workspace into a folder."""

import asyncio
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Group, Parameter
from cyclopts.validators import Number

from restante.cli.access import send_hint
from restante.cli.credentials import Target, credentials_for, given_token, introduce, new_server
from restante.cli.display import Display, display_for
from restante.cli.interrupting import until_interrupted
from restante.cli.output import Console
from restante.errors import BadRequest, NotAuthenticated, RestanteError
from restante.text import number_of_files

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
    dir: Path | None = None,  # noqa: A002 - the flag's name
    into: Path | None = None,
    name: str | None = None,
    moved: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    new_token: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    once: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    exec: str | None = None,  # noqa: A002 - the flag's name
    on_message: str | None = None,
    reply: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    max_file_bytes: Annotated[
        int | None,
        Parameter(
            validator=Number(gte=1),
            env_var="RESTANTE_CONNECT_MAX_FILE_BYTES",
            show_env_var=True,
        ),
    ] = None,
    registration_token: Annotated[
        str | None, Parameter(env_var="RESTANTE_REGISTRATION_TOKEN", show_env_var=True)
    ] = None,
) -> None:
    """
    Receive files and messages into a folder, until Ctrl-C.

    The first run registers a workspace and stores its credentials in the folder; later runs resume
    where the last one stopped. Files are saved to .molecule/chat-uploads in the folder, or with
    --into to a directory of your choice under their original names, and acknowledged once they are
    complete and verified. If the network or the server fails, it retries until they are back.

    Example: restante connect http://127.0.0.1:8080 --into inbox

    Parameters
    ----------
    url
        The server's URL. Not needed for a folder that was connected before, which also ignores the
        variable. [env: RESTANTE_URL]
    dir
        The folder. [default: the directory of --into, else the current one]
    into
        Put files into this directory, under their original names: report.pdf, and report (2).pdf
        if that exists. No file is replaced.
    name
        A display name for the workspace. [default: this machine's name]
    moved
        The server of this folder has moved to the URL: check that it knows the workspace, store the
        new address, and receive.
    new_token
        The workspace has a new token: read it from RESTANTE_NEW_TOKEN or from standard input, check
        and store it, and receive.
    once
        Receive what is waiting, then exit: 0 if everything was received, 1 if not.
    exec
        Run this command for each file, with the file's path as its last argument. The file is
        acknowledged only if the command succeeds; otherwise it is retried later.
    on_message
        Run this command for each message, with the feed row as JSON on standard input. The next
        message follows only after the command has succeeded.
    reply
        Send what the command of --on-message prints as the answer, to the user or to the workspace
        that sent the message. If it prints nothing, there is no answer.
    max_file_bytes
        Refuse larger files. [default: what the server accepts]
    registration_token
        The token that the server requires to register a workspace, if any.
    """
    from restante.client import commands
    from restante.client.folder import Folder

    if reply and on_message is None:
        raise BadRequest("--reply sends what a command prints: say which with --on-message.")
    options = _Options(
        name=name,
        registration_token=registration_token,
        once=once,
        file_command=commands.words_of(exec) if exec is not None else (),
        message_command=commands.words_of(on_message) if on_message is not None else (),
        answers=reply,
        max_file_bytes=max_file_bytes,
    )
    target = Target(url, dir, into, is_moved=moved, new_token=given_token() if new_token else None)
    _client(target)  # refuse a wrong URL before creating the folder
    with Folder.open(target.root, into) as folder, display_for(Console()) as display:
        work = _receive(target, folder, display, options)
        left = asyncio.run(until_interrupted(work))
    display.summary()
    if left is None and once:
        sys.exit(130)
    if left:
        files = number_of_files(left)
        wait = "waits" if left == 1 else "wait"
        print(f"restante: {files} could not be taken and still {wait}.", file=sys.stderr)
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class _Options:
    """The flags of one run."""

    name: str | None
    registration_token: str | None
    once: bool
    file_command: Sequence[str]
    message_command: Sequence[str]
    answers: bool
    max_file_bytes: int | None


def _client(target: Target) -> "AsyncClient":
    """A client for the workspace of this folder, or one that is not registered yet."""
    from restante.client.aio import AsyncClient

    credentials = credentials_for(target)
    return AsyncClient.of(credentials) if credentials else AsyncClient(new_server(target))


async def _receive(target: Target, folder: "Folder", display: Display, options: _Options) -> int:
    """Register if necessary, then receive; returns how many files could not be received."""
    from restante.client.addresses import is_exposed
    from restante.client.receiving import Handlers, Receiver

    async with _client(target) as client:
        if is_exposed(client.url):
            display.warn(
                f"{client.url} is not encrypted: others on the network can read the token "
                "and the files."
            )
        is_known = client.is_registered
        name = options.name or platform.node() or "workspace"
        await introduce(client, target, folder, name, options.registration_token)
        given_name = options.name if is_known else name
        display.began(client.url, client.workspace_id, folder.new_files.path, given_name)
        if not options.once:
            display.hint(send_hint(client, folder.root))
        handlers = Handlers(options.file_command, options.message_command, options.answers)
        receiver = Receiver(client, folder, display, handlers, max_bytes=options.max_file_bytes)
        try:
            if is_known and options.name:
                await _rename(client, display, options.name)
            return await (receiver.run_once() if options.once else receiver.run())
        except NotAuthenticated as error:
            raise NotAuthenticated(
                f"{client.url} no longer accepts the token of this workspace: it was replaced or "
                f"revoked, or the workspace was removed. If you have a new token, run "
                f"`{target.command('--new-token')}`, which asks for it; otherwise use another "
                "--dir to register again."
            ) from error


async def _rename(client: "AsyncClient", display: Display, name: str) -> None:
    """Rename the workspace; a failure is only a warning, because receiving matters more."""
    from restante.client.receiving import FINAL

    try:
        await client.rename(name)
    except FINAL:
        raise
    except RestanteError as error:
        display.warn(f"the workspace was not renamed. {error}")
