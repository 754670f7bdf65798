"""A workspace reads its feed, waits for it, and says how far it has handled it."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw
from starlette.requests import Request
from starlette.responses import Response

from restante import wire
from restante.delivery.download import until_gone
from restante.errors import (
    BadRequest,
    CursorGone,
    NotAuthenticated,
    TooManyAtOnce,
    WorkspaceUnknown,
)
from restante.feed import rules
from restante.feed.rules import Activity, Filter, Page
from restante.feed.service import Query
from restante.http.operations import BODY_REFUSALS, json_body, operation, query_of
from restante.http.problems import json_response
from restante.ids import ActivityId, as_uuid
from restante.server.context import context
from restante.workspaces import auth

_NULL = Raw(b"null")


class FeedQuery(msgspec.Struct, frozen=True):
    """Which rows of a feed, and how long to wait for them."""

    since_id: Annotated[
        str | None,
        Meta(
            description="The id of the last row consumed; rows after it, oldest first.",
            extra_json_schema={"format": "uuid"},
        ),
    ] = None
    since_seq: Annotated[
        Annotated[int, Meta(ge=0, le=2**63 - 1)] | None,
        Meta(description="The same by seq; 0 is before the first row. Not beside since_id."),
    ] = None
    type: Annotated[
        Annotated[str, Meta(pattern="^[^\\x00]*$")] | None,
        Meta(description="Only rows of this activity_type."),
    ] = None
    source: Annotated[
        Literal["canvas", "agent"] | None, Meta(description="Only rows from the canvas, or not.")
    ] = None
    since_secs: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Only rows this recent, at most 30 days."),
    ] = None
    limit: Annotated[int, Meta(ge=1, le=rules.MAX_PAGE, description="How many at most.")] = (
        rules.DEFAULT_PAGE
    )
    wait: Annotated[
        float,
        Meta(ge=0, le=rules.LONGEST_WAIT_SECONDS, description="Seconds to wait for a first row."),
    ] = 0


@operation(
    summary="Read the feed: newest first, or after a row, oldest first.",
    caller="workspace or admin",
    query=FeedQuery,
    details="With `wait` the answer is held back until a row arrives or the time is over; an empty "
    "array then means that there was none. A 410 says with `lowest_seq` and `latest_seq` which "
    "rows are kept: start over with `since_seq` one below the lowest, or without a cursor.",
    answers={200: list[wire.ActivityRow]},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown, CursorGone, TooManyAtOnce),
    gives={
        wire.LOWEST_SEQ: "The lowest seq that is still kept; rows below it are gone.",
        wire.LATEST_SEQ: "The seq of the newest row; 0 if there was never one.",
        wire.ACKED_SEQ: "How far the workspace has said that it handled the feed.",
    },
)
async def read(request: Request) -> Response:
    workspace = await auth.owner_or_admin(request)
    query = _query(query_of(request, FeedQuery))
    reading = context(request).feed.read(workspace.id, query)
    if query.wait_seconds:
        page = await _unless_gone(request, asyncio.ensure_future(reading))
        await auth.owner_or_admin(request)  # a token may be revoked while its request waits
    else:
        page = await reading
    if page is None:
        return Response(status_code=204)  # nobody is there to read it
    return json_response([row_of(row) for row in page.rows], headers=_headers(page))


async def _unless_gone(request: Request, reading: "asyncio.Future[Page]") -> Page | None:
    """Wait for the page, but not for a reader that has gone."""
    leaving = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await reading if reading.done() else None
    finally:
        leaving.cancel()
        reading.cancel()


def _query(sent: FeedQuery) -> Query:
    if sent.since_id is not None and sent.since_seq is not None:
        raise BadRequest("since_seq is wrong: send since_id or since_seq, not both.")
    return Query(
        since_id=_since_id(sent.since_id),
        since_seq=sent.since_seq,
        wanted=_filter(sent),
        limit=sent.limit,
        wait_seconds=sent.wait,
    )


def _since_id(sent: str | None) -> ActivityId | None:
    if sent is None:
        return None
    since = as_uuid(sent)
    if since is None:
        raise BadRequest("since_id is wrong: it must be the id of a row, a UUID.")
    return ActivityId(since)


def _filter(sent: FeedQuery) -> Filter:
    not_before = None
    if sent.since_secs is not None:
        seconds = min(sent.since_secs, rules.LONGEST_LOOK_BACK_SECONDS)
        not_before = datetime.now(UTC) - timedelta(seconds=seconds)
    from_agents = None if sent.source is None else sent.source == "agent"
    return Filter(sent.type, from_agents, not_before)


def row_of(row: Activity) -> wire.ActivityRow:
    """A row as it goes over the wire."""
    return wire.ActivityRow(
        id=row.id,
        workspace_id=row.workspace_id,
        activity_type=row.activity_type,
        source_id=row.source_id,
        target_id=row.target_id,
        method=row.method,
        summary=row.summary,
        request_body=_raw(row.request_body),
        response_body=_raw(row.response_body),
        duration_ms=row.duration_ms,
        status=row.status,
        error_detail=row.error_detail,
        created_at=row.created_at,
        seq=row.seq,
    )


def _raw(json: str | None) -> Raw:
    return _NULL if json is None else Raw(json.encode())


def _headers(page: Page) -> dict[str, str]:
    """Enough for a reader to see a gap."""
    return {
        wire.LOWEST_SEQ: str(page.marks.lowest_seq),
        wire.LATEST_SEQ: str(page.marks.last_seq),
        wire.ACKED_SEQ: str(page.marks.acked_seq),
    }


@operation(
    summary="Say how far the feed has been handled; a stale mark changes nothing.",
    caller="workspace",
    body=wire.FeedAck,
    answers={200: wire.FeedAcked},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown, *BODY_REFUSALS),
)
async def acknowledge(request: Request) -> Response:
    workspace = await auth.owner(request)
    sent = await json_body(request, wire.FeedAck)
    mark = await context(request).feed.acknowledge(workspace.id, sent.acked_seq)
    return json_response(wire.FeedAcked(mark))
