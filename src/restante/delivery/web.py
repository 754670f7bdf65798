"""Files are sent to a workspace, listed, fetched and acknowledged."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from restante import wire
from restante.database.pool import Database
from restante.delivery import acknowledge as acknowledging, fetch, multipart, store
from restante.delivery.blobs import Blobs
from restante.delivery.download import Download, entity_tag, file_headers
from restante.delivery.ranges import matches_tag, wanted_range
from restante.delivery.receive import Receiver
from restante.delivery.rules import ReceivePolicy, request_too_large, seconds_allowed
from restante.errors import (
    AddressRefused,
    BadRequest,
    DiskLow,
    FeedFull,
    FileTooLarge,
    KeyReused,
    NotAuthenticated,
    OutcomeUnknown,
    QuotaTooSmall,
    RangeNotSatisfiable,
    RequestTooLarge,
    RestanteError,
    ServerFull,
    TooManyAtOnce,
    TooManyFiles,
    TooMuchWritten,
    UploadGone,
    UploadMalformed,
    UploadTooSlow,
    WorkspaceFull,
    WorkspaceHasNoCallback,
    WorkspaceUnknown,
    WorkspaceUnreachable,
)
from restante.http.bodies import pieces
from restante.http.operations import operation, query_of
from restante.http.problems import json_response
from restante.ids import FileId, WorkspaceId, as_uuid
from restante.workspaces import auth, relay
from restante.workspaces.rules import Workspace

TAG = "uploads"


def _db(request: Request) -> Database:
    return request.app.state.db


def _receiver(request: Request) -> Receiver:
    return request.app.state.receiver


def _blobs(request: Request) -> Blobs:
    return request.app.state.blobs


def _file_id(request: Request) -> FileId:
    """The file that the path names."""
    found = as_uuid(request.path_params["file_id"])
    if found is None:
        raise BadRequest("invalid file_id")
    return FileId(found)


@operation(
    summary="Upload limits of this server.",
    caller="anyone",
    answers={200: wire.UploadLimits},
)
async def limits(request: Request) -> Response:
    return json_response(request.app.state.upload_limits)


class UploadQuery(msgspec.Struct, frozen=True):
    """How long the files are kept for their workspace."""

    ttl_seconds: Annotated[
        Annotated[int, Meta(ge=1, le=31_536_000)] | None,
        Meta(description="How long they are kept to be fetched, within the operator's limits."),
    ] = None


@operation(
    summary="Send files to a workspace.",
    caller="workspace or admin",
    query=UploadQuery,
    files=True,
    details="All of the files are stored and announced, or none. "
    "A file may have $per_file_bytes bytes, a request $per_request_bytes bytes in "
    "$max_attachments_per_message files. In push mode the body is forwarded to the workspace as it "
    "arrives, and the workspace's answer is relayed with its status.",
    answers={200: wire.UploadAnswer},
    refusals=(
        BadRequest,
        UploadMalformed,
        TooManyFiles,
        NotAuthenticated,
        WorkspaceUnknown,
        UploadTooSlow,
        FileTooLarge,
        RequestTooLarge,
        QuotaTooSmall,
        WorkspaceHasNoCallback,
        KeyReused,
        WorkspaceFull,
        TooMuchWritten,
        FeedFull,
        TooManyAtOnce,
        WorkspaceUnreachable,
        AddressRefused,
        OutcomeUnknown,
        ServerFull,
        DiskLow,
    ),
    headers={
        wire.IDEMPOTENCY_KEY: "Makes a repeated request return the first answer.",
        wire.CALLER_ID: "With the workspace's own token and id: the files come from it, and the "
        "rows of its feed say so in `source_id`.",
        wire.ATTEMPT: relay.ATTEMPT_MEANING,
    },
)
async def upload(request: Request) -> Response:
    workspace = await auth.owner_or_admin(request)
    source_id = auth.claimed_source(request, workspace)
    try:
        if workspace.delivery_mode == "push" and workspace.url:
            relay.refuse_repetition(request)
            return _forward(request, workspace)
        if workspace.delivery_mode == "push" or not request.app.state.staging_enabled:
            raise WorkspaceHasNoCallback("workspace has no callback URL")
        answer = await _receive(request, workspace, source_id)
    except RestanteError as refusal:
        relay.log_refusal(workspace, refusal)
        raise
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _forward(request: Request, workspace: Workspace) -> Response:
    policy = _receiver(request).policy
    limits = relay.BodyLimits(
        max_bytes=policy.max_body_bytes,
        too_large=request_too_large(policy.max_request_bytes),
        within_seconds=_within_seconds(multipart.accepted_length(request, policy), policy),
        idle_seconds=policy.pace.idle_seconds,
    )
    return relay.upload(request, workspace, limits)


def _within_seconds(declared: int | None, policy: ReceivePolicy) -> Callable[[int], float]:
    """How long a body may take in all, by how many of its bytes have arrived."""
    length = policy.max_body_bytes if declared is None else declared
    return partial(seconds_allowed, declared=length, pace=policy.pace)


async def _receive(
    request: Request, workspace: Workspace, source_id: WorkspaceId | None
) -> wire.UploadAnswer:
    receiver = _receiver(request)
    policy = receiver.policy
    declared = multipart.accepted_length(request, policy)
    key, now = _idempotency_key(request), datetime.now(UTC)
    permission = auth.Permission(request)
    ttl = query_of(request, UploadQuery).ttl_seconds
    async with receiver.receive(
        workspace.id,
        declared,
        ttl=None if ttl is None else timedelta(seconds=ttl),
        source_id=source_id,
        repeats_key=key is not None and await _is_remembered(request, workspace, key, now=now),
    ) as incoming:
        body = pieces(
            request,
            within_seconds=_within_seconds(declared, policy),
            idle_seconds=policy.pace.idle_seconds,
        )
        await multipart.receive_files(request, body, incoming, policy)
        await permission.check()
        if not incoming.is_stored:
            return await incoming.repeated_answer(key, now=now)
        return await incoming.publish(now=datetime.now(UTC), key=key)


async def _is_remembered(
    request: Request, workspace: Workspace, key: str, *, now: datetime
) -> bool:
    async with _db(request).connection() as connection:
        return await store.remembered(connection, workspace.id, key, now=now) is not None


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get(wire.IDEMPOTENCY_KEY)
    longest = wire.MAX_IDEMPOTENCY_KEY
    if key is not None and not (0 < len(key) <= longest and key.isascii() and key.isprintable()):
        raise BadRequest(f"{wire.IDEMPOTENCY_KEY} must have 1 to {longest} printable characters.")
    return key


class WaitingQuery(msgspec.Struct, frozen=True):
    """Where a page of unacknowledged files begins, and how long it is."""

    after: Annotated[UUID | None, Meta(description="The `next_after` of the page before.")] = None
    limit: Annotated[int, Meta(ge=1, le=500, description="How many at most.")] = 100


@operation(
    summary="List the unacknowledged files, oldest first.",
    caller="workspace or admin",
    query=WaitingQuery,
    answers={200: wire.PendingUploads},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown, UploadGone),
)
async def waiting(request: Request) -> Response:
    workspace = await auth.owner_or_admin(request)
    query = query_of(request, WaitingQuery)
    found = await fetch.unacked(
        _db(request),
        workspace.id,
        after=query.after,
        limit=query.limit,
        now=datetime.now(UTC),
    )
    more = found[-1].file_id if len(found) == query.limit else UNSET
    return json_response(wire.PendingUploads(found, more))


@operation(
    summary="Fetch a file; repeatable until it is acknowledged.",
    caller="workspace or admin",
    details="The Content-Type is the file's own. A range that cannot be parsed, or several at "
    "once, are answered with the whole file. A server can be set to serve acknowledged files too, "
    "while it keeps them.",
    answers={200: "*/*", 206: "*/*", 304: None},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown, UploadGone, RangeNotSatisfiable),
    answer_headers={
        "ETag": "The SHA-256 of the whole file, as hex in quotes.",
        "Repr-Digest": "The SHA-256 of the whole file, as `sha-256=:<base64>:`.",
        "Accept-Ranges": "`bytes`.",
        "Content-Disposition": "An attachment with the file's name, and as `filename*` the name "
        "for people.",
    },
    headers={
        "Range": "One byte range, to resume after an interruption.",
        "If-Range": "Apply the range only if the file is still this one.",
        "If-None-Match": "Answer 304 if the file is this one.",
    },
)
async def content(request: Request) -> Response:
    file_id = _file_id(request)
    workspace = await auth.owner_or_admin(request)
    upload = await fetch.get(
        _db(request),
        workspace.id,
        file_id,
        or_acked=request.app.state.serve_acked,
        now=datetime.now(UTC),
    )
    tag, headers = entity_tag(upload), request.headers
    if matches_tag(headers.get("if-none-match"), tag):
        return Response(status_code=304, headers=file_headers(upload))
    range_header = headers.get("range")
    if request.method != "GET" or headers.get("if-range", tag) != tag:
        range_header = None
    wanted = wanted_range(range_header, upload.size)
    return Download(_db(request), _blobs(request), upload, wanted, auth.Permission(request))


@operation(
    summary="Acknowledge a file: the workspace has it.",
    caller="workspace or admin",
    details="Idempotent: the first acknowledgement counts. The content cannot be fetched any more, "
    "unless the server is set to serve acknowledged files while it keeps them.",
    answers={200: wire.Acked},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown, UploadGone),
)
async def acknowledge(request: Request) -> Response:
    file_id = _file_id(request)
    workspace = await auth.owner_or_admin(request)
    existed = await _receiver(request).disk.with_room(
        lambda: acknowledging.acknowledge(
            _db(request), workspace.id, file_id, now=datetime.now(UTC)
        )
    )
    return json_response(wire.Acked(acked=True, raced=not existed))


@operation(
    summary="Reopen an acknowledged file: it can be fetched, and is announced, again.",
    details="For a workspace that acknowledged a file and then lost it, while the file is kept.",
    caller="workspace or admin",
    answers={200: wire.Status},
    refusals=(
        BadRequest,
        NotAuthenticated,
        WorkspaceUnknown,
        UploadGone,
        TooMuchWritten,
        FeedFull,
        DiskLow,
    ),
)
async def reopen(request: Request) -> Response:
    file_id = _file_id(request)
    workspace = await auth.owner_or_admin(request)
    await acknowledging.reopen(
        _receiver(request),
        workspace.id,
        file_id,
        ack_retention=request.app.state.ack_retention,
        now=datetime.now(UTC),
    )
    return json_response(wire.Status("reopened"))


_WORKSPACE = "/workspaces/{workspace_id}"
_FILE = _WORKSPACE + "/pending-uploads/{file_id}"

ROUTES = [
    Route("/uploads/limits", limits),
    Route(_WORKSPACE + "/chat/uploads", upload, methods=["POST"]),
    Route(_WORKSPACE + "/pending-uploads", waiting),
    Route(_FILE + "/content", content),
    Route(_FILE + "/ack", acknowledge, methods=["POST"]),
    Route(_FILE + "/reopen", reopen, methods=["POST"]),
]
