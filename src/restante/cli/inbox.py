"""`restante inbox`: show a workspace's conversation without changing anything."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

from cyclopts import App, Group, Parameter

from restante import wire
from restante.cli.access import Access, client_of_folder, workspace_named
from restante.cli.conversation import line_of
from restante.cli.lines import wrapped
from restante.cli.output import Console, json_text
from restante.errors import BadRequest, CursorGone, RestanteError
from restante.ids import ActivityId, WorkspaceId

if TYPE_CHECKING:
    from restante.client.aio import AsyncClient
    from restante.client.calls import Cursor, FeedPage

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
    Show the newest rows of a workspace's feed, oldest first: both sides of the conversation.

    The canvas, other workspaces by their id, and the agent; in a folder of your own, the agent is
    you. Read-only: nothing is fetched, acknowledged or marked as handled.

    Example: restante inbox laptop --follow

    Parameters
    ----------
    workspace
        The workspace's id or name. Not needed with --dir.
    dir
        A connected folder: use its workspace and its token.
    limit
        Maximum number of rows, up to 500.
    follow
        Keep running and show new rows, until Ctrl-C.
    json
        Print one line of JSON per row.
    """
    if not 1 <= limit <= 500:
        raise BadRequest("--limit must be from 1 to 500.")
    show = _show_json if json else partial(_show_line, agent="you" if dir else "agent")
    asyncio.run(_show_feed(workspace, dir, access, limit, show, follow=follow))


async def _show_feed(
    workspace: str | None,
    folder: Path | None,
    access: Access,
    limit: int,
    show: Show,
    *,
    follow: bool,
) -> None:
    async with client_of_folder(folder, access) if folder else access.client() as client:
        workspace_id = await _workspace_id(client, workspace)
        newest = await client.feed(limit=limit, of=workspace_id)
        await _show_older(client, workspace_id, newest, limit, show)
        _show_rows(newest.rows, show)
        if follow:
            await _follow(client, workspace_id, _end_of(newest), limit, show)


async def _show_older(
    client: "AsyncClient", workspace_id: WorkspaceId, newest: "FeedPage", limit: int, show: Show
) -> None:
    """Show the rows that were too large to be on the page of the newest."""
    from restante.client.calls import Cursor

    first = newest.rows[0].seq if newest.rows else 0
    seq = max(newest.latest_seq - limit, newest.lowest_seq - 1)
    while seq < first - 1:
        page = await client.feed(Cursor(seq), limit=first - 1 - seq, of=workspace_id)
        if not page.rows:
            return
        _show_rows(page.rows, show)
        seq = page.rows[-1].seq


async def _follow(
    client: "AsyncClient", workspace_id: WorkspaceId, cursor: "Cursor", limit: int, show: Show
) -> NoReturn:
    """Show new rows; retry when the server is away, go on after a gap."""
    from restante.client.retry import Backoff, is_retryable

    backoff = Backoff()
    while True:
        try:
            page = await client.feed(cursor, wait_seconds=_WAIT_SECONDS, of=workspace_id)
        except CursorGone as gone:
            print(f"restante: {gone}", file=sys.stderr)
            cursor = _after_gap(cursor, gone, limit)
            await asyncio.sleep(backoff.next_delay())
        except RestanteError as error:
            if not is_retryable(error):
                raise
            print(f"restante: {error}", file=sys.stderr)
            await asyncio.sleep(backoff.next_delay(error))
        else:
            backoff.reset()
            _show_rows(page.rows, show)
            cursor = _end_of(page) if page.rows else cursor


def _end_of(page: "FeedPage") -> "Cursor":
    from restante.client.calls import Cursor

    if not page.rows:
        return Cursor(page.latest_seq)
    return Cursor(page.rows[-1].seq, ActivityId(page.rows[-1].id))


def _after_gap(cursor: "Cursor", gone: CursorGone, limit: int) -> "Cursor":
    """The lowest row of a trimmed feed; for a restored one, its newest rows as at the start."""
    from restante.client.calls import Cursor

    lowest = max(int(gone.facts.get("lowest_seq", 1)), 1)
    if lowest > cursor.seq:
        return Cursor(lowest - 1)
    print(
        "restante: The feed was restored from a backup; its newest rows are shown again.",
        file=sys.stderr,
    )
    return Cursor(max(int(gone.facts.get("latest_seq", 0)) - limit, lowest - 1))


async def _workspace_id(client: "AsyncClient", workspace: str | None) -> WorkspaceId:
    if workspace is not None:
        return await workspace_named(client, workspace)
    if not client.is_registered:
        raise BadRequest("Say which workspace: give its id or name, or its folder with --dir.")
    return client.workspace_id


def _show_rows(rows: Sequence[wire.ActivityRow], show: Show) -> None:
    for row in rows:
        show(row)
    sys.stdout.flush()


def _show_json(row: wire.ActivityRow) -> None:
    print(json_text(row))


def _show_line(row: wire.ActivityRow, *, agent: str) -> None:
    for line in wrapped(line_of(row, agent=agent), Console()):
        print(line)
