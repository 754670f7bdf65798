"""`restante notify`: say something to the user of a workspace."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Group, Parameter

from restante.cli.access import Access, client_of_folder
from restante.cli.lines import print_file
from restante.cli.output import Console
from restante.cli.words import STANDARD_INPUT, text_given
from restante.delivery.rules import display_name
from restante.errors import BadRequest
from restante.ids import WorkspaceId, as_uuid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restante.client.aio import AsyncClient
    from restante.client.sending import Outgoing


def register(app: App, group: Group) -> None:
    """Add the command."""
    app.command(notify, group=group)


def _no_flag(_type: object, text: str | None) -> None:
    """A mistyped flag must not be said to the user."""
    if text and text != STANDARD_INPUT and text.startswith("-") and len(text.split()) == 1:
        raise ValueError(f"{text} is not a flag of this command; to say it, pipe it into notify -")


def notify(
    text: Annotated[str | None, Parameter(allow_leading_hyphen=True, validator=_no_flag)] = None,
    /,
    *,
    file: Annotated[tuple[Path, ...], Parameter(negative=(), show_default=False)] = (),
    dir: Path = Path(),  # noqa: A002 - the flag's name
    workspace: str | None = None,
    access: Access = Access(),  # noqa: B008 - frozen
) -> None:
    """
    Say something to the user of a workspace, as that workspace.

    It appears at the canvas, and in `restante inbox`.

    Example: restante notify "The report is ready." --file report.pdf --dir inbox

    Parameters
    ----------
    text
        What to say; - reads it from standard input, as does no text in a pipe.
    file
        A file for the user; repeat the flag for more. They wait for the user until they expire.
    dir
        A connected folder: use its workspace and its token.
    workspace
        The workspace's id, with its token in --token, instead of a folder.
    """
    from restante.client.choosing import refuse_unfit
    from restante.client.sending import Outgoing

    for path in file:
        refuse_unfit(path)
    files = [Outgoing.of(path) for path in file]
    said = text_given(text)
    client = _client(dir, workspace, access)
    asyncio.run(_notify(client, said, files))
    for part in (one.part for one in files):
        print_file(Console(), "sent", part.size, part.name, renamed=display_name(part.name))
    print(f"told the user of {client.workspace_id}")


def _client(folder: Path, workspace: str | None, access: Access) -> "AsyncClient":
    if workspace is None:
        return client_of_folder(folder, access)
    workspace_id = as_uuid(workspace)
    if workspace_id is None:
        raise BadRequest(f"{workspace} is not a workspace id.")
    return access.client(WorkspaceId(workspace_id))


async def _notify(client: "AsyncClient", text: str, files: "Sequence[Outgoing]") -> None:
    async with client:
        await client.notify(text, files=files)
