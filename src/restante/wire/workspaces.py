"""Registration, heartbeat, and workspaces as the operator sees them."""

from typing import Annotated, Any, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from restante.wire.common import Moment

CALLER_ID = "X-Workspace-ID"

Mode = Literal["poll", "push"]

_CARD = {
    "required": ["name"],
    "properties": {"name": {"type": "string", "pattern": r"\S"}},
    "examples": [{"name": "laptop"}],
}


class Registration(Struct, frozen=True):
    """A workspace registers."""

    id: Annotated[UUID, Meta(description="Chosen by the workspace, and kept by it.")]
    agent_card: Annotated[
        dict[str, Any],
        Meta(description="Describes the workspace; needs a name.", extra_json_schema=_CARD),
    ]
    delivery_mode: Annotated[
        Mode | None,
        Meta(
            description="Whether it polls or is called at its url; push if never set.",
            examples=["poll"],
        ),
    ] = None
    url: Annotated[
        str | None, Meta(description="Where a push workspace is called, http or https.")
    ] = None


class Registered(Struct, frozen=True, omit_defaults=True):
    """The secrets appear only when they are issued, at the first registration."""

    status: Literal["registered"]
    delivery_mode: Mode
    auth_token: str | None = None
    inbound_secret: Annotated[
        str | None, Meta(description="What we send as bearer when we call a push workspace.")
    ] = None


class Heartbeat(Struct, frozen=True):
    """The workspace is alive."""

    workspace_id: UUID
    active_tasks: Annotated[
        int, Meta(ge=0, le=2**31 - 1, description="How many tasks it has.", examples=[1])
    ] = 0
    current_task: Annotated[
        str, Meta(description="What it is doing, for people.", examples=["reading a report"])
    ] = ""


class WorkspaceChanges(Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator can change about a workspace."""

    name: Annotated[str | None, Meta(examples=["the laptop in the attic"])] = None
    url: str | None = None
    delivery_mode: Mode | None = None
    parent_id: UUID | None = None


class _Workspace(Struct, frozen=True):
    id: UUID
    name: str
    delivery_mode: Mode
    url: str | None
    parent_id: UUID | None
    status: Literal["active", "removed"]
    has_token: bool
    active_tasks: int
    current_task: str
    created_at: Moment
    last_seen_at: Moment


class WorkspaceEntry(_Workspace, frozen=True):
    """A workspace in a list, without its secrets and its card."""

    agent_card: None = None  # clients of the previous release require the field


class WorkspaceView(_Workspace, frozen=True):
    """A workspace as the operator sees it, without its secrets."""

    agent_card: Raw


class WorkspacePage(Struct, frozen=True):
    """Workspaces in the order of their ids; `next_after` is missing on the last page."""

    workspaces: list[WorkspaceEntry]
    next_after: UUID | UnsetType = UNSET


class IssuedToken(Struct, frozen=True, omit_defaults=True):
    """A new token, shown only once; with a push workspace's inbound secret."""

    auth_token: str
    inbound_secret: str | None = None
