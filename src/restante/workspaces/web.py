"""Registration and heartbeat; the operator's view of workspaces."""

from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, Raw
from starlette.requests import Request
from starlette.responses import Response

from restante import wire
from restante.errors import BadRequest, NotAuthenticated, WorkspaceUnknown
from restante.feed.rules import MAX_DEPTH, is_too_deep
from restante.http.operations import BODY_REFUSALS, json_body, operation, query_of
from restante.http.problems import json_response
from restante.ids import WorkspaceId
from restante.server.context import context
from restante.workspaces import auth
from restante.workspaces.rules import Changes, Workspace, clean_label, opens


@operation(
    summary="Register a workspace, or renew what it says about itself.",
    caller="anyone",
    heeds_token=True,
    details="The first registration of an id answers with its token, once. Later ones must carry "
    "that token, and what they do not send stays as it was. Whether a new id needs the server's "
    "registration token or the admin's is the operator's choice.",
    body=wire.Registration,
    answers={200: wire.Registered},
    refusals=(BadRequest, NotAuthenticated, *BODY_REFUSALS),
)
async def register(request: Request) -> Response:
    sent = await json_body(request, wire.Registration)
    name = sent.agent_card.get("name")
    if not isinstance(name, str) or not name.strip():
        raise BadRequest("agent_card is wrong: it needs a name.")
    if is_too_deep(sent.agent_card):
        raise BadRequest(f"agent_card is wrong: it is nested deeper than {MAX_DEPTH} levels.")
    changes = Changes(
        name=clean_label(name),
        delivery_mode=sent.delivery_mode,
        url=sent.url or None,
        agent_card=msgspec.json.encode(sent.agent_card).decode(),
    )
    done = await context(request).registry.register(
        WorkspaceId(sent.id), changes, token=auth.bearer(request)
    )
    return json_response(
        wire.Registered("registered", done.delivery_mode, done.auth_token, done.inbound_secret)
    )


@operation(
    summary="Say that the workspace lives and what it is doing.",
    caller="workspace",
    body=wire.Heartbeat,
    answers={200: wire.Status},
    refusals=(BadRequest, NotAuthenticated, *BODY_REFUSALS),
)
async def heartbeat(request: Request) -> Response:
    sent = await json_body(request, wire.Heartbeat)
    token, registry = auth.bearer(request), context(request).registry
    workspace = await registry.find(WorkspaceId(sent.workspace_id)) if token else None
    if token is None or workspace is None or not opens(workspace, token):
        raise NotAuthenticated("Send the token of this workspace with its heartbeat.")
    await registry.heartbeat(workspace, sent.active_tasks, sent.current_task)
    return json_response(wire.Status("ok"))


@operation(
    summary="Change a workspace.",
    caller="admin",
    body=wire.WorkspaceChanges,
    details="What is not sent stays as it was.",
    answers={200: wire.Status},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown, *BODY_REFUSALS),
)
async def change(request: Request) -> Response:
    auth.admin(request)
    workspace_id = auth.workspace_id(request)
    sent = await json_body(request, wire.WorkspaceChanges)
    changes = Changes(
        name=None if sent.name is None else clean_label(sent.name),
        url=sent.url or None,
        delivery_mode=sent.delivery_mode,
        parent_id=sent.parent_id,
    )
    await context(request).registry.change(workspace_id, changes)
    return json_response(wire.Status("updated"))


class Removal(msgspec.Struct, frozen=True):
    """Removing takes a word of confirmation."""

    confirm: Annotated[
        bool, Meta(description="Must be true.", extra_json_schema={"const": True})
    ] = False


@operation(
    summary="Remove a workspace; what waits for it leaves by its own time.",
    caller="workspace or admin",
    query=Removal,
    answers={200: wire.Status},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown),
)
async def remove(request: Request) -> Response:
    workspace = await auth.owner_or_admin(request)
    if not query_of(request, Removal).confirm:
        raise BadRequest("Removing a workspace cannot be undone by it; repeat with ?confirm=true.")
    await context(request).registry.remove(workspace.id)
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
    found = await context(request).registry.page(after=wanted.after, limit=wanted.limit)
    more = found[-1].id if len(found) == wanted.limit else UNSET
    return json_response(wire.WorkspacePage([_view(workspace) for workspace in found], more))


@operation(
    summary="Show a workspace.",
    caller="admin",
    answers={200: wire.WorkspaceView},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown),
)
async def show(request: Request) -> Response:
    auth.admin(request)
    return json_response(_view(await context(request).registry.show(auth.workspace_id(request))))


@operation(
    summary="Give a workspace a new token; the old one is worth nothing from then on.",
    caller="admin",
    answers={200: wire.IssuedToken},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown),
)
async def reissue_token(request: Request) -> Response:
    auth.admin(request)
    issued = await context(request).registry.reissue_token(auth.workspace_id(request))
    return json_response(wire.IssuedToken(issued.auth_token, issued.inbound_secret))


@operation(
    summary="Revoke a workspace's token.",
    details="It stays registered, and files and messages still wait for it.",
    caller="admin",
    answers={200: wire.Status},
    refusals=(BadRequest, NotAuthenticated, WorkspaceUnknown),
)
async def revoke_token(request: Request) -> Response:
    auth.admin(request)
    await context(request).registry.revoke_token(auth.workspace_id(request))
    return json_response(wire.Status("revoked"))


def _view(workspace: Workspace) -> wire.WorkspaceView:
    return wire.WorkspaceView(
        id=workspace.id,
        name=workspace.name,
        delivery_mode=workspace.delivery_mode,
        url=workspace.url,
        agent_card=Raw(workspace.agent_card.encode()),
        parent_id=workspace.parent_id,
        status=workspace.status,
        has_token=workspace.token_hash is not None,
        active_tasks=workspace.active_tasks,
        current_task=workspace.current_task,
        created_at=workspace.created_at,
        last_seen_at=workspace.last_seen_at,
    )
