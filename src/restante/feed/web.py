"""Read the feed, wait for new rows, and acknowledge what was handled."""

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Literal
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from restante import wire
from restante.errors import (
    BadRequest,
    CursorGone,
    NotAuthenticated,
    TooManyAtOnce,
    WorkspaceUnknown,
)
from restante.feed import rules
from restante.feed.answer import PageAnswer
from restante.feed.rules import Filter, Query
from restante.feed.service import Feed
from restante.http.operations import BODY_REFUSALS, json_body, operation, query_of
from restante.http.problems import json_response
from restante.ids import ActivityId, as_uuid
from restante.retention.disk import Disk
from restante.workspaces import auth

TAG = "feed"


def _feed(request: Request) -> Feed:
    return request.app.state.feed


def _disk(request: Request) -> Disk:
    return request.app.state.disk


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
    peer_id: Annotated[
        str | None,
        Meta(
            description="Only rows whose source or target is this workspace.",
            extra_json_schema={"format": "uuid"},
        ),
    ] = None
    before_ts: Annotated[
        str | None,
        Meta(
            description="Only rows older than this; with the `created_at` of a row, those before "
            "that row.",
            extra_json_schema={"format": "date-time"},
        ),
    ] = None
    limit: Annotated[
        Annotated[int, Meta(ge=1, le=rules.MAX_PAGE)] | str,
        Meta(
            description="How many at most. A larger number counts as the most, and any other text "
            "as the default."
        ),
    ] = rules.DEFAULT_PAGE
    wait: Annotated[
        float,
        Meta(ge=0, le=rules.LONGEST_WAIT_SECONDS, description="Seconds to wait for a first row."),
    ] = 0


@operation(
    summary="Read the feed: newest first, or after a row, oldest first.",
    caller="workspace or admin",
    query=FeedQuery,
    details="With `wait` the request is held until a row arrives or the time is over; an empty "
    "array then means that there was none. A page ends at `limit` rows or after 2 MiB, and then "
    "there are more. A 410 says with `lowest_seq` and `latest_seq` which rows are kept: start over "
    "with `since_seq` one below the lowest, or without a cursor.",
    answers={200: list[wire.ActivityRow]},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown, CursorGone, TooManyAtOnce),
    answer_headers={
        wire.LOWEST_SEQ: "The lowest seq that is kept; rows below it are gone.",
        wire.LATEST_SEQ: "The seq of the newest row; 0 if there was never one.",
        wire.ACKED_SEQ: "The seq up to which the workspace has acknowledged its feed.",
        wire.READ_SEQ: "Rows after this seq were not looked at: there are more if it is below the "
        "latest. Go on after the last row, or with this as `since_seq`.",
    },
)
async def read(request: Request) -> Response:
    workspace = await auth.owner_or_admin(request)
    query = _query(query_of(request, FeedQuery))
    recheck = partial(auth.owner_or_admin, request)
    return PageAnswer(_feed(request), workspace.id, query, recheck)


def _query(sent: FeedQuery) -> Query:
    if sent.since_id is not None and sent.since_seq is not None:
        raise BadRequest("since_seq is wrong: send since_id or since_seq, not both.")
    since = _uuid("since_id", sent.since_id, "the id of a row")
    return Query(
        since_id=None if since is None else ActivityId(since),
        since_seq=sent.since_seq,
        wanted=_filter(sent),
        limit=rules.page_size(str(sent.limit)),
        # Rows that are still to come are not older.
        wait_seconds=0 if sent.before_ts else sent.wait,
    )


def _uuid(name: str, sent: str | None, what: str) -> UUID | None:
    if sent is None:
        return None
    found = as_uuid(sent)
    if found is None:
        raise BadRequest(f"{name} is wrong: it must be {what}, a UUID.")
    return found


def _filter(sent: FeedQuery) -> Filter:
    not_before = None
    if sent.since_secs is not None:
        seconds = min(sent.since_secs, rules.LONGEST_LOOK_BACK_SECONDS)
        not_before = datetime.now(UTC) - timedelta(seconds=seconds)
    from_agents = None if sent.source is None else sent.source == "agent"
    peer = _uuid("peer_id", sent.peer_id, "the id of a workspace")
    return Filter(sent.type, from_agents, not_before, peer, _before(sent.before_ts))


def _before(sent: str | None) -> datetime | None:
    if sent is None:
        return None
    before = rules.moment(sent)
    if before is None:
        raise BadRequest(
            "before_ts is wrong: it must be a time with its zone, such as 2030-01-31T12:00:00Z."
        )
    return before


@operation(
    summary="Acknowledge rows of the feed up to a seq; a stale mark changes nothing.",
    caller="workspace or admin",
    body=wire.FeedAck,
    answers={200: wire.FeedAcked},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown, *BODY_REFUSALS),
)
async def acknowledge(request: Request) -> Response:
    workspace = await auth.owner_or_admin(request)
    sent = await json_body(request, wire.FeedAck)
    row = ActivityId(sent.acked_id) if sent.acked_id else None
    mark = await _disk(request).with_room(
        lambda: _feed(request).acknowledge(workspace.id, sent.acked_seq, row)
    )
    return json_response(wire.FeedAcked(mark, mark))


_ACTIVITY = "/workspaces/{workspace_id}/activity"

ROUTES = [
    Route(_ACTIVITY, read),
    Route(_ACTIVITY + "/ack", acknowledge, methods=["POST"]),
]
