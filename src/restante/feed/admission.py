"""
Decides what a watcher may watch: the token, the workspace, and the row to resume after.

The path names a workspace, or else the header `X-Workspace-ID` or the parameter `workspace_id`, or
else the token itself; the operator's token alone means all of them.  Where a header cannot be set,
`last_event_id` stands for `Last-Event-ID`.

A watcher that does not read what it is sent is disconnected.
"""

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TypeAlias

import structlog
from starlette.requests import HTTPConnection

from restante import wire
from restante.database import shares
from restante.errors import BadRequest, RestanteError
from restante.feed.batches import TooSlow, WatchPolicy
from restante.feed.watch import Watch, watching
from restante.feed.watch_all import WatchAll, horizon_of, watching_all
from restante.http.disconnect import TRANSPORT
from restante.http.operations import parameters
from restante.ids import ActivityId, WorkspaceId, as_uuid
from restante.workspaces import auth

log = structlog.get_logger()

# The key of the ASGI scope that has what the connection watches.
_WATCHED = "restante.watched"
_ALL = "all"
# How many times its size a row takes while it is sent.  A WebSocket's text is a `str`, in which one
# character outside of the BMP makes all of them 4 bytes wide.
_COPIES = {"http": 1, "websocket": 4}

Watching: TypeAlias = AbstractAsyncContextManager[Watch | WatchAll]


async def admitted(connection: HTTPConnection, token: str | None) -> Watching:
    """
    A watch for an authorized caller; it begins when it is entered.

    The token is the one that was sent elsewhere than as a header.
    """
    caller = _with_token(connection, token)
    # Whose share of the database it uses was decided by the header.
    shares.caller.set(auth.access(caller).caller(caller))
    wanted = await _watched(caller)
    connection.scope[_WATCHED] = str(wanted or _ALL)
    return _all(caller) if wanted is None else await _one(caller, wanted)


async def _one(caller: HTTPConnection, wanted: WorkspaceId) -> Watching:
    await auth.owner_or_admin_of(caller, wanted)
    return watching(
        caller.app.state.feed,
        wanted,
        after=_row(_last_event_id(caller)),
        check=lambda: auth.owner_or_admin_of(caller, wanted),
        policy=_policy(caller),
    )


def _all(caller: HTTPConnection) -> Watching:
    sent, state = _last_event_id(caller), caller.app.state
    after = horizon_of(sent) if sent else None
    return watching_all(state.feed, state.db, after=after, policy=_policy(caller))


def _with_token(connection: HTTPConnection, token: str | None) -> HTTPConnection:
    """The connection with the token as its header; an Authorization header that was sent wins."""
    if token is None or "authorization" in connection.headers:
        return connection
    header = (b"authorization", f"Bearer {token}".encode("latin-1", "replace"))
    return HTTPConnection({**connection.scope, "headers": [*connection.scope["headers"], header]})


async def _watched(caller: HTTPConnection) -> WorkspaceId | None:
    """The workspace that is asked for; None: all of them, which the operator alone may watch."""
    if "workspace_id" in caller.path_params:
        return auth.workspace_id(caller)
    claimed = caller.headers.get(wire.CALLER_ID) or parameters(caller).get("workspace_id") or None
    if not auth.is_admin(caller):
        return (await auth.owner_by_token(caller, claimed)).id
    if claimed is None:
        return None
    found = as_uuid(claimed)
    if found is None:
        raise BadRequest("invalid workspace ID")
    return WorkspaceId(found)


def _last_event_id(caller: HTTPConnection) -> str | None:
    """The header wins: a browser that reconnects sends it with the URL of its first attempt."""
    return caller.headers.get("last-event-id") or parameters(caller).get("last_event_id") or None


def _row(sent: str | None) -> ActivityId | None:
    if sent is None:
        return None
    found = as_uuid(sent)
    if found is None:
        raise BadRequest("last_event_id is wrong: it must be the id of a row, a UUID.")
    return ActivityId(found)


def policy_of(connection: HTTPConnection) -> WatchPolicy:
    """How its watchers are served."""
    return connection.app.state.watch_policy


def _policy(caller: HTTPConnection) -> WatchPolicy:
    return replace(policy_of(caller), copies=_COPIES[caller.scope["type"]])


async def in_time(connection: HTTPConnection, sending: Awaitable[None], size: int = 0) -> None:
    """Send something of this size; raises TooSlow."""
    policy = policy_of(connection)
    try:
        async with asyncio.timeout(policy.send_seconds + size / policy.bytes_per_second):
            await sending
    except TimeoutError as error:
        raise TooSlow from error


def abort(connection: HTTPConnection) -> bool:
    """
    Abort a watcher's connection; False if we do not have its transport.

    What is buffered for it is discarded.  A normal close would wait for the watcher to read it.
    """
    scope = connection.scope
    log.warning("watcher_dropped", workspace=scope[_WATCHED], way=scope["type"])
    connection.app.state.metrics.connections.cut_off.labels("slow_reader").inc()
    transport = scope.get(TRANSPORT)
    if transport is not None:
        transport.abort()
    return transport is not None


def log_ended(connection: HTTPConnection, error: RestanteError) -> None:
    """Log why the server has ended a watch."""
    log.info("watching_ended", workspace=connection.scope[_WATCHED], code=error.code)
