"""`restante inbox`: look at a workspace's feed without taking anything from it."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

from cyclopts import App, Group, Parameter

from restante import wire
from restante.cli.access import Access, workspace_named
from restante.cli.lines import json_text
from restante.cli.sizes import shown_bytes
from restante.errors import BadRequest, CursorGone, RestanteError
from restante.ids import WorkspaceId
from restante.text import printable

if TYPE_CHECKING:
    from restante.client.aio import AsyncClient

_WAIT_SECONDS = 30

Show = Callable[[wire.ActivityRow], None]


def register(app: App, group: Group) -> None:
    """Add the command."""
    app.command(inbox, group=group)


def inbox(
    workspace: str | None = None,
    /,
    *,
    dir: Path | None = None,  # noqa: A002 - the flag's name
    limit: Annotated[int, Parameter(show_default=True)] = 20,
    follow: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    access: Access = Access(),  # noqa: B008 - frozen
) -> None:
    """
    Show the newest rows of a workspace's feed, oldest of them first.

    It only looks: nothing is fetched, acknowledged or marked as handled.

    Example: restante inbox laptop --follow

    Parameters
    ----------
    workspace
        The workspace's id or name. Not needed with --dir.
    dir
        A folder that was connected: shows its own workspace, with its own token.
    limit
        How many rows, at most 500.
    follow
        Go on and show rows as they come, until Ctrl-C.
    json
        Print each row as one line of JSON.
    """
    if not 1 <= limit <= 500:
        raise BadRequest("--limit must be from 1 to 500.")
    show = _show_json if json else _show_line
    asyncio.run(_look(workspace, dir, access, limit, show, follow=follow))


async def _look(
    workspace: str | None,
    folder: Path | None,
    access: Access,
    limit: int,
    show: Show,
    *,
    follow: bool,
) -> None:
    async with _client(access, folder) as client:
        whose = await _whose(client, workspace)
        page = await client.feed(limit=limit, of=whose)
        _show_rows(page.rows, show)
        if follow:
            await _follow(client, whose, page.latest_seq, show)


async def _follow(client: "AsyncClient", whose: WorkspaceId, seq: int, show: Show) -> NoReturn:
    """Show rows as they come; wait for a lost server, read a trimmed feed from where it begins."""
    from restante.client.calls import Cursor
    from restante.client.retry import Backoff, is_retryable

    backoff = Backoff()
    while True:
        try:
            page = await client.feed(Cursor(seq), wait_seconds=_WAIT_SECONDS, of=whose)
        except CursorGone as gone:
            print(f"restante: {gone}", file=sys.stderr)
            seq = max(int(gone.facts.get("lowest_seq", 1)) - 1, 0)
            await asyncio.sleep(backoff.next_delay())
        except RestanteError as error:
            if not is_retryable(error):
                raise
            print(f"restante: {error}", file=sys.stderr)
            await asyncio.sleep(backoff.next_delay(error))
        else:
            backoff.reset()
            _show_rows(page.rows, show)
            seq = page.rows[-1].seq if page.rows else seq


def _client(access: Access, folder: Path | None) -> "AsyncClient":
    from restante.client.aio import AsyncClient
    from restante.client.folder import kept_credentials

    if folder is None:
        return access.client()
    kept = kept_credentials(folder)
    if kept is None:
        raise BadRequest(f"{folder} has not been connected: run `restante connect` there first.")
    return AsyncClient.of(kept)


async def _whose(client: "AsyncClient", workspace: str | None) -> WorkspaceId:
    if workspace is not None:
        return await workspace_named(client, workspace)
    if not client.is_registered:
        raise BadRequest("Say which workspace: give its id or name, or --dir of its folder.")
    return client.workspace_id


def _show_rows(rows: Sequence[wire.ActivityRow], show: Show) -> None:
    for row in rows:
        show(row)
    sys.stdout.flush()


def _show_json(row: wire.ActivityRow) -> None:
    print(json_text(row))


def _show_line(row: wire.ActivityRow) -> None:
    from restante.client.calls import body_of
    from restante.client.messages import text_of
    from restante.client.poller import announced

    file = announced(row)
    what = f"file {file.name} ({shown_bytes(file.size)})" if file else f"message {row.method}"
    words = "" if file else f": {text_of(body_of(row))}"
    sender = f" from {row.source_id}" if row.source_id else ""
    print(f"{row.seq:>6}  {row.created_at:%Y-%m-%d %H:%M:%S}  " + printable(what + sender + words))
