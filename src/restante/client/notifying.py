"""
Says something to the user of a workspace, once.

The protocol gives these words no id, so a second request would be shown twice.  But they are a row
of the workspace's own feed: after a lost answer the feed tells whether they arrived.
"""

from contextlib import suppress
from typing import TYPE_CHECKING

from restante import wire
from restante.client import calls
from restante.client.calls import Cursor, FeedPage
from restante.client.messages import Said, is_same, notified
from restante.errors import CursorGone, OutcomeUnknown, ServerUnreachable
from restante.ids import ActivityId

if TYPE_CHECKING:
    from restante.client.aio import AsyncClient


# For a request that was cut off while the server was still working on it.
_LATE_SECONDS = 2


async def say(client: "AsyncClient", said: Said, since: Cursor | None) -> None:
    """
    Send it; raises if it is not in the feed after a lost answer.  It may still appear there later.

    If it is in the feed after `since` already, nothing is sent.
    """
    if since and await _has_said(client, said, since):
        return
    since = since or await end_of_feed(client)
    try:
        await client.send(calls.notify(client.workspace_id, said.text, said.files))
    except (ServerUnreachable, OutcomeUnknown):
        if not await _has_said(client, said, since, wait_seconds=_LATE_SECONDS):
            raise


async def end_of_feed(client: "AsyncClient") -> Cursor:
    """The newest row of the workspace's feed."""
    return Cursor((await client.feed(limit=1)).latest_seq)


async def _has_said(
    client: "AsyncClient", said: Said, since: Cursor, *, wait_seconds: float = 0
) -> bool:
    """Whether the feed has it after a row; False also if the row is gone and nobody can tell."""
    with suppress(CursorGone):
        while fresh := _after(since, await client.feed(since, wait_seconds=wait_seconds)):
            if any(is_same(said, notified(row)) for row in fresh):
                return True
            since = Cursor(fresh[-1].seq, ActivityId(fresh[-1].id))
    return False


def _after(cursor: Cursor, page: FeedPage) -> list[wire.ActivityRow]:
    """The rows after the cursor; a server that repeats older ones must not keep us for ever."""
    return [row for row in page.rows if row.seq > cursor.seq]
