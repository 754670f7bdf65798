"""Registration and heartbeat; the operator's view of workspaces."""

from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from restante import wire
from restante.errors import (
    BadRequest,
    DiskLow,
    MessageTooLarge,
    NotAuthenticated,
    NotJson,
    OriginRefused,
    TooManyAtOnce,
    TooManyMessages,
    WorkspaceUnknown,
)
from restante.http.forwarded import is_from_elsewhere
from restante.http.operations import (
    BODY_REFUSALS,
    MAX_DEPTH,
    SMALL_JSON_BYTES,
    is_too_deep,
    json_body,
    operation,
    query_of,
)
from restante.http.origins import CrossOrigin, origin_of
from restante.http.problems import json_response
from restante.ids import WorkspaceId, as_uuid
from restante.retention.disk import Disk
from restante.workspaces import auth
from restante.workspaces.admin import WorkspaceAdmin
from restante.workspaces.registry import Registry
from restante.workspaces.rules import MAX_CARD_BYTES, Changes, Sender, clean_label, task_count

TAG = "workspaces"


def _registry(request: Request) -> Registry:
    return request.app.state.registry


def _admin(request: Request) -> WorkspaceAdmin:
    return request.app.state.workspace_admin


def _disk(request: Request) -> Disk:
    return request.app.state.disk


@operation(
    summary="Register a workspace, or update its registration.",
    caller="anyone",
    reads_token=True,
    details="The first registration of an id answers with its token, once. Later ones must carry "
    "that token; fields that are not sent keep their values. Whether a new id needs the server's "
    "registration token or the admin's is the operator's choice. Without a token, the request must "
    "go to a loopback address, must not come from a web page unless the operator has listed its "
    "origin, and must say that it is JSON.",
    body=wire.Registration,
    answers={200: wire.Registered},
    refusals=(
        BadRequest,
        NotAuthenticated,
        OriginRefused,
        NotJson,
        *BODY_REFUSALS,
        TooManyMessages,
        TooManyAtOnce,
        DiskLow,
    ),
)
async def register(request: Request) -> Response:
    sent = await json_body(request, wire.Registration, max_bytes=MAX_CARD_BYTES + SMALL_JSON_BYTES)
    return json_response(
        await _registry(request).register(
            WorkspaceId(sent.id),
            _changes(sent),
            token=auth.bearer(request),
            sender=_sender(request),
        )
    )


def _sender(request: Request) -> Sender:
    headers, origin = request.headers, origin_of(request.scope)
    cross_origin: CrossOrigin = request.app.state.cross_origin
    return Sender(
        headers.get("host"),
        origin,
        headers.get("content-type"),
        cross_origin.allows(origin),
        is_from_elsewhere(headers.raw),
    )


def _changes(sent: wire.Registration) -> Changes:
    if is_too_deep(sent.agent_card):
        raise BadRequest(f"agent_card is wrong: it is nested deeper than {MAX_DEPTH} levels.")
    card = msgspec.json.encode(sent.agent_card)
    if len(card) > MAX_CARD_BYTES:
        raise MessageTooLarge(
            f"agent_card has {len(card)} bytes; {MAX_CARD_BYTES} are allowed.", max=MAX_CARD_BYTES
        )
    card_url = sent.agent_card.get("url")
    return Changes(
        name=_name(sent.agent_card.get("name")),
        delivery_mode=sent.delivery_mode or None,
        url=sent.url or None,
        agent_card=card.decode(),
        card_url=card_url if isinstance(card_url, str) else None,
    )


def _name(given: object) -> str | None:
    """A name for people; None if it is missing, or anything but a text to read."""
    return clean_label(given).strip() or None if isinstance(given, str) else None


@operation(
    summary="Report that the workspace is alive and what it is doing.",
    caller="workspace",
    body=wire.Heartbeat,
    answers={200: wire.HeartbeatNoted},
    refusals=(BadRequest, NotAuthenticated, *BODY_REFUSALS),
)
async def heartbeat(request: Request) -> Response:
    sent = await json_body(request, wire.Heartbeat)
    workspace = await auth.owner_of(
        request,
        WorkspaceId(sent.workspace_id),
        otherwise="Send the token of this workspace with its heartbeat.",
    )
    tasks, doing = task_count(sent.active_tasks), sent.current_task or ""
    return json_response(
        await _disk(request).with_room(
            lambda: _registry(request).heartbeat(workspace, tasks, doing)
        )
    )


@operation(
    summary="Change a workspace.",
    caller="admin",
    body=wire.WorkspaceChanges,
    details="Fields that are not sent keep their values.",
    answers={200: wire.Status},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown, *BODY_REFUSALS),
)
async def change(request: Request) -> Response:
    auth.admin(request)
    workspace_id = auth.workspace_id(request)
    sent = await json_body(request, wire.WorkspaceChanges)
    changes = Changes(
        name=_name(sent.name),
        url=sent.url or None,
        delivery_mode=sent.delivery_mode or None,
        parent_id=_parent(sent.parent_id),
    )
    await _admin(request).change(workspace_id, changes)
    return json_response(wire.Status("updated"))


def _parent(sent: str | UnsetType | None) -> UUID | UnsetType | None:
    """The parent as it is to be; unset if nothing, or an empty text, was sent."""
    if not sent:
        return None if sent is None else UNSET
    if (found := as_uuid(sent)) is None:
        raise BadRequest("parent_id is wrong: it must be a UUID.")
    return found


class Removal(msgspec.Struct, frozen=True):
    """Removing a workspace must be confirmed."""

    confirm: Annotated[
        bool, Meta(description="Must be true.", extra_json_schema={"const": True})
    ] = False


@operation(
    summary="Remove a workspace; its files stay until they expire or are swept.",
    caller="workspace or admin",
    query=Removal,
    answers={200: wire.Status},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown),
)
async def remove(request: Request) -> Response:
    workspace = await auth.owner_or_admin(request)
    if not query_of(request, Removal).confirm:
        raise BadRequest("A workspace cannot undo its removal; repeat with ?confirm=true.")
    await _admin(request).remove(workspace.id)
    return json_response(wire.Status("removed"))


class WorkspaceQuery(msgspec.Struct, frozen=True):
    """Where a page of workspaces begins, and how long it is."""

    after: Annotated[UUID, Meta(description="The `next_after` of the page before.")] = UUID(int=0)
    limit: Annotated[int, Meta(ge=1, le=500, description="How many at most.")] = 100


@operation(
    summary="List workspaces, the removed ones too.",
    caller="admin",
    query=WorkspaceQuery,
    answers={200: wire.WorkspacePage},
    refusals=(BadRequest, NotAuthenticated),
)
async def page(request: Request) -> Response:
    auth.admin(request)
    wanted = query_of(request, WorkspaceQuery)
    found = await _admin(request).page(after=wanted.after, limit=wanted.limit)
    more = found[-1].id if len(found) == wanted.limit else UNSET
    return json_response(wire.WorkspacePage(found, more))


@operation(
    summary="Show a workspace.",
    caller="admin",
    answers={200: wire.WorkspaceView},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown),
)
async def show(request: Request) -> Response:
    auth.admin(request)
    return json_response(await _admin(request).show(auth.workspace_id(request)))


@operation(
    summary="Give a workspace a new token; the old one stops working.",
    caller="admin",
    answers={200: wire.IssuedToken},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown),
)
async def reissue_token(request: Request) -> Response:
    auth.admin(request)
    return json_response(await _admin(request).reissue_token(auth.workspace_id(request)))


@operation(
    summary="Revoke a workspace's token.",
    details="It stays registered, and can still be sent files and messages.",
    caller="admin",
    answers={200: wire.Status},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown),
)
async def revoke_token(request: Request) -> Response:
    auth.admin(request)
    await _admin(request).revoke_token(auth.workspace_id(request))
    return json_response(wire.Status("revoked"))


_WORKSPACE = "/workspaces/{workspace_id}"
_ADMIN = "/admin/workspaces/{workspace_id}"

ROUTES = [
    Route("/registry/register", register, methods=["POST"]),
    Route("/registry/heartbeat", heartbeat, methods=["POST"]),
    Route(_WORKSPACE, change, methods=["PATCH"]),
    Route(_WORKSPACE, remove, methods=["DELETE"]),
    Route("/admin/workspaces", page),
    Route(_ADMIN, show),
    Route(_ADMIN + "/token", reissue_token, methods=["POST"]),
    Route(_ADMIN + "/token", revoke_token, methods=["DELETE"]),
]
