"""Files come in from the canvas, are listed, fetched and acknowledged by their workspace."""

from typing import Annotated
from uuid import UUID

import msgspec
import structlog
from msgspec import UNSET, Meta
from starlette.requests import Request
from starlette.responses import Response

from restante import wire
from restante.core.ranges import matches_tag, wanted_range
from restante.core.uploads import MAX_REQUEST_BYTES, Upload, pending_uri
from restante.core.workspaces import Workspace
from restante.errors import BadRequest, RestanteError, WorkspaceHasNoCallback
from restante.web import auth, multipart, push
from restante.web.context import context
from restante.web.downloads import Download, entity_tag, file_headers
from restante.web.operations import operation, query_of
from restante.web.problems import json_response

log = structlog.get_logger()

_MAX_KEY = 255


@operation(
    summary="Send files to a workspace.",
    caller="workspace or admin",
    files=True,
    answers={200: wire.UploadAnswer},
    refusals=(400, 401, 404, 408, 413, 422, 429, 502, 507),
    headers={wire.IDEMPOTENCY_KEY: "Makes a repeated request return the first answer."},
)
async def upload(request: Request) -> Response:
    workspace = await auth.owner_or_admin(request)
    here = context(request)
    if workspace.delivery_mode == "push" and workspace.url:
        return await push.upload(request, workspace)
    if workspace.delivery_mode == "push" or not here.staging_enabled:
        raise WorkspaceHasNoCallback("workspace has no callback URL")
    try:
        answer = await _stage(request, workspace)
    except RestanteError as refusal:
        log.info("upload_refused", workspace=str(workspace.id), code=refusal.code, **refusal.facts)
        await multipart.drain(request)
        raise
    return Response(answer, media_type="application/json")


async def _stage(request: Request, workspace: Workspace) -> bytes:
    staging = context(request).delivery.staging
    declared = multipart.declared_length(request)
    length = MAX_REQUEST_BYTES if declared is None else declared
    key = _idempotency_key(request)
    is_repeat = key is not None and await staging.is_known(workspace.id, key)
    async with staging.intake(workspace.id, length, keep=not is_repeat) as intake:
        within_seconds = staging.time_allowed(length).total_seconds()
        await multipart.take_files(request, intake, within_seconds=within_seconds)
        if is_repeat and key is not None:
            return await staging.repeat(intake, key)
        return await staging.publish(intake, key=key)


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get(wire.IDEMPOTENCY_KEY)
    if key is not None and not (0 < len(key) <= _MAX_KEY and key.isascii() and key.isprintable()):
        raise BadRequest(f"{wire.IDEMPOTENCY_KEY} must have 1 to {_MAX_KEY} printable characters.")
    return key


class WaitingQuery(msgspec.Struct, frozen=True):
    """Where a page of waiting files begins, and how long it is."""

    after: UUID | None = None
    limit: Annotated[int, Meta(ge=1, le=500)] = 100


@operation(
    summary="List the files that wait, oldest first.",
    caller="workspace or admin",
    query=WaitingQuery,
    answers={200: wire.PendingUploads},
    refusals=(400, 401, 404),
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
    answers={200: "application/octet-stream", 206: "application/octet-stream", 304: None},
    refusals=(400, 401, 404, 416),
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
    if "if-range" in headers and headers["if-range"] != tag:
        range_header = None
    wanted = wanted_range(range_header, upload.size)
    return Download(delivery, upload, wanted)


@operation(
    summary="Acknowledge a file: the workspace has it.",
    caller="workspace",
    answers={200: wire.Acked},
    refusals=(400, 401, 404),
)
async def acknowledge(request: Request) -> Response:
    file_id = auth.file_id(request)
    workspace = await auth.owner(request)
    was_there = await context(request).delivery.acknowledge(workspace.id, file_id)
    return json_response(wire.Acked(acked=True, raced=not was_there))
