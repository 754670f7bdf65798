"""Files come in from the canvas, are listed, fetched and acknowledged by their workspace."""

from datetime import timedelta
from typing import Annotated
from uuid import UUID

import msgspec
import structlog
from msgspec import UNSET, Meta
from starlette.requests import Request
from starlette.responses import Response

from restante import wire
from restante.delivery import multipart
from restante.delivery.download import Download, entity_tag, file_headers
from restante.delivery.ranges import matches_tag, wanted_range
from restante.delivery.rules import (
    MAX_FILE_BYTES,
    MAX_FILES_PER_REQUEST,
    MAX_REQUEST_BYTES,
    Upload,
    pending_uri,
)
from restante.errors import (
    AddressRefused,
    BadRequest,
    FileTooLarge,
    KeyReused,
    NotAuthenticated,
    QuotaTooSmall,
    RangeNotSatisfiable,
    RequestTooLarge,
    RestanteError,
    ServerFull,
    TooManyFiles,
    UploadGone,
    UploadMalformed,
    UploadTooSlow,
    WorkspaceFull,
    WorkspaceHasNoCallback,
    WorkspaceUnknown,
    WorkspaceUnreachable,
)
from restante.http.operations import operation, query_of
from restante.http.problems import json_response, on_restante_error
from restante.server.context import context
from restante.workspaces import auth
from restante.workspaces import relay as push
from restante.workspaces.rules import Workspace

log = structlog.get_logger()


class UploadQuery(msgspec.Struct, frozen=True):
    """How long the files may wait."""

    ttl_seconds: Annotated[
        Annotated[int, Meta(ge=1, le=31_536_000)] | None,
        Meta(description="How long they wait to be fetched, within the operator's bounds."),
    ] = None


@operation(
    summary="Send files to a workspace.",
    caller="workspace or admin",
    query=UploadQuery,
    files=True,
    details="All of the files are stored and announced, or none. "
    f"A file may have {MAX_FILE_BYTES} bytes, a request {MAX_REQUEST_BYTES} bytes "
    f"in {MAX_FILES_PER_REQUEST} files. In push mode the body is handed to the workspace as it "
    "arrives, and the workspace's own answer comes back with its status.",
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
        WorkspaceUnreachable,
        AddressRefused,
        ServerFull,
    ),
    headers={wire.IDEMPOTENCY_KEY: "Makes a repeated request return the first answer."},
)
async def upload(request: Request) -> Response:
    workspace = await auth.owner_or_admin(request)
    here = context(request)
    if workspace.delivery_mode == "push" and workspace.url:
        return await push.upload(request, workspace)
    try:
        if workspace.delivery_mode == "push" or not here.staging_enabled:
            raise WorkspaceHasNoCallback("workspace has no callback URL")
        answer = await _stage(request, workspace)
    except RestanteError as refusal:
        log.info("upload_refused", workspace=str(workspace.id), code=refusal.code, **refusal.facts)
        return await _refused(request, refusal)
    return Response(answer, media_type="application/json")


async def _refused(request: Request, refusal: RestanteError) -> Response:
    """The refusal; a body that does not end, or comes too slowly, ends with its connection."""
    answer = await on_restante_error(request, refusal)
    if isinstance(refusal, UploadTooSlow) or not await multipart.drain(request):
        answer.headers["Connection"] = "close"
    return answer


async def _stage(request: Request, workspace: Workspace) -> bytes:
    staging = context(request).delivery.staging
    declared = multipart.declared_length(request)
    length = MAX_REQUEST_BYTES if declared is None else declared
    key = _idempotency_key(request)
    is_repeat = key is not None and await staging.is_known(workspace.id, key)
    asked = query_of(request, UploadQuery).ttl_seconds
    ttl = None if asked is None else timedelta(seconds=asked)
    async with staging.intake(workspace.id, length, keep=not is_repeat, ttl=ttl) as intake:
        within_seconds = staging.time_allowed(length).total_seconds()
        await multipart.take_files(request, intake, within_seconds=within_seconds)
        if is_repeat and key is not None:
            return await staging.repeat(intake, key)
        return await staging.publish(intake, key=key)


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get(wire.IDEMPOTENCY_KEY)
    longest = wire.MAX_IDEMPOTENCY_KEY
    if key is not None and not (0 < len(key) <= longest and key.isascii() and key.isprintable()):
        raise BadRequest(f"{wire.IDEMPOTENCY_KEY} must have 1 to {longest} printable characters.")
    return key


class WaitingQuery(msgspec.Struct, frozen=True):
    """Where a page of waiting files begins, and how long it is."""

    after: Annotated[UUID | None, Meta(description="The `next_after` of the page before.")] = None
    limit: Annotated[int, Meta(ge=1, le=500, description="How many at most.")] = 100


@operation(
    summary="List the files that wait, oldest first.",
    caller="workspace or admin",
    query=WaitingQuery,
    answers={200: wire.PendingUploads},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown, UploadGone),
)
async def waiting(request: Request) -> Response:
    workspace = await auth.owner_or_admin(request)
    query = query_of(request, WaitingQuery)
    found = await context(request).delivery.waiting(
        workspace.id, after=query.after, limit=query.limit
    )
    more = found[-1].file_id if len(found) == query.limit else UNSET
    return json_response(wire.PendingUploads([_pending(upload) for upload in found], more))


def _pending(upload: Upload) -> wire.PendingUpload:
    return wire.PendingUpload(
        file_id=upload.file_id,
        uri=pending_uri(upload.workspace_id, upload.file_id),
        name=upload.name,
        mime_type=upload.mimetype,
        size=upload.size,
        sha256=upload.sha256.hex(),
        created_at=upload.created_at,
        fetched_at=upload.fetched_at,
        expires_at=upload.expires_at,
    )


@operation(
    summary="Fetch a file; repeatable until it is acknowledged.",
    caller="workspace",
    details="The Content-Type is the file's own. A range that is not understood, or several at "
    "once, are answered with the whole file.",
    answers={200: "*/*", 206: "*/*", 304: None},
    refusals=(BadRequest, NotAuthenticated, UploadGone, RangeNotSatisfiable),
    gives={
        "ETag": "The SHA-256 of the whole file, as hex in quotes.",
        "Repr-Digest": "The SHA-256 of the whole file, as `sha-256=:<base64>:`.",
        "Accept-Ranges": "`bytes`.",
        "Content-Disposition": "An attachment with the file's name.",
    },
    headers={
        "Range": "One byte range, to go on after an interruption.",
        "If-Range": "Heed the range only if the file is still this one.",
        "If-None-Match": "Answer 304 if the file is this one.",
    },
)
async def content(request: Request) -> Response:
    file_id = auth.file_id(request)
    workspace = await auth.owner(request)
    delivery = context(request).delivery
    upload = await delivery.get(workspace.id, file_id)
    tag, headers = entity_tag(upload), request.headers
    if matches_tag(headers.get("if-none-match"), tag):
        return Response(status_code=304, headers=file_headers(upload))
    range_header = headers.get("range")
    if request.method != "GET" or headers.get("if-range", tag) != tag:
        range_header = None
    wanted = wanted_range(range_header, upload.size)
    return Download(delivery, upload, wanted)


@operation(
    summary="Acknowledge a file: the workspace has it.",
    caller="workspace",
    details="The first acknowledgement counts; repeating it changes nothing. The content is gone "
    "from then on.",
    answers={200: wire.Acked},
    refusals=(BadRequest, NotAuthenticated, UploadGone),
)
async def acknowledge(request: Request) -> Response:
    file_id = auth.file_id(request)
    workspace = await auth.owner(request)
    was_there = await context(request).delivery.acknowledge(workspace.id, file_id)
    return json_response(wire.Acked(acked=True, raced=not was_there))


@operation(
    summary="Reopen an acknowledged file: it waits and is announced again.",
    details="For a workspace that acknowledged a file and then lost it, while its retention lasts.",
    caller="workspace or admin",
    answers={200: wire.Status},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown, UploadGone),
)
async def reopen(request: Request) -> Response:
    file_id = auth.file_id(request)
    workspace = await auth.owner_or_admin(request)
    await context(request).delivery.reopen(workspace.id, file_id)
    return json_response(wire.Status("reopened"))
