"""Registration, heartbeat, and workspaces as the operator sees them."""

from typing import Annotated, Any, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from restante.wire.common import Moment

CALLER_ID = "X-Workspace-ID"

Mode = Literal["poll", "push"]

_CARD = {"examples": [{"name": "laptop"}]}
_INTEGRAL = {"multipleOf": 1, "examples": [1]}
_SENT_AS_BEARER = "What we send as bearer when we call the workspace at its url."


class Registration(Struct, frozen=True):
    """A workspace registers."""

    id: Annotated[UUID, Meta(description="Chosen by the workspace, and kept by it.")]
    agent_card: Annotated[
        dict[str, Any],
        Meta(
            description="Describes the workspace. Without a `name`, the first 8 characters of the "
            "id are its name. A push workspace without a `url` is called at the card's `url`.",
            extra_json_schema=_CARD,
        ),
    ]
    delivery_mode: Annotated[
        Literal["poll", "push", ""] | None,
        Meta(
            description="Whether it polls or is called at its url; push if never set.",
            examples=["poll"],
        ),
    ] = None
    url: Annotated[
        str | None,
        Meta(
            description="Where a push workspace is called, http or https. One of a poll workspace "
            "that cannot be called is ignored."
        ),
    ] = None


class _Secretive(Struct, frozen=True):
    """What has tokens: they are in its JSON, but neither in its `repr` nor in a log."""

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        names = self.__struct_fields__
        shown = (name for name in names if not name.endswith(("token", "secret")))
        return [(name, getattr(self, name)) for name in shown]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({shown})"


class Registered(_Secretive, frozen=True, omit_defaults=True):
    """The token appears only when it is issued, at the first registration."""

    status: Literal["registered"]
    delivery_mode: Mode
    # Servers of the previous release do not send it.
    platform_inbound_secret: Annotated[str, Meta(description=_SENT_AS_BEARER)] = ""
    auth_token: str | None = None
    inbound_secret: Annotated[
        str | None, Meta(description="The same, of a push workspace, for older programs.")
    ] = None


class Heartbeat(Struct, frozen=True):
    """The workspace is alive."""

    workspace_id: UUID
    active_tasks: Annotated[
        int | float | None,
        Meta(
            description="How many tasks it has; a negative number counts as 0.",
            extra_json_schema=_INTEGRAL,
        ),
    ] = 0
    current_task: Annotated[
        str | None,
        Meta(description="What it is doing, for people.", examples=["reading a report"]),
    ] = ""


class HeartbeatNoted(_Secretive, frozen=True):
    """That the heartbeat was noted; a workspace that lost its secret finds it here."""

    status: Literal["ok"]
    platform_inbound_secret: Annotated[str, Meta(description=_SENT_AS_BEARER)]


class WorkspaceChanges(Struct, frozen=True):
    """What an operator can change about a workspace."""

    name: Annotated[str | None, Meta(examples=["the laptop in the attic"])] = None
    url: str | None = None
    delivery_mode: Literal["poll", "push", ""] | None = None
    parent_id: Annotated[
        str | UnsetType | None,
        Meta(
            description="Null: it has no parent any more; empty: it keeps the one that it has.",
            extra_json_schema={"format": "uuid"},
        ),
    ] = UNSET


class _Workspace(Struct, frozen=True, kw_only=True):
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
    last_seen_at: Annotated[
        Moment, Meta(description="When a request last carried its token, to the minute.")
    ]
    # The previous release does not send these.
    is_online: Annotated[
        bool, Meta(description="Whether it was seen in the last two and a half minutes.")
    ] = False
    waiting_files: Annotated[int, Meta(description="Files that it has not acknowledged.")] = 0
    waiting_bytes: Annotated[int, Meta(description="The bytes of these files.")] = 0
    unread_rows: Annotated[
        int, Meta(description="Rows of its feed that it has not acknowledged.")
    ] = 0


class WorkspaceEntry(_Workspace, frozen=True, kw_only=True):
    """A workspace in a list, without its secrets and its card."""

    agent_card: None = None  # clients of the previous release require the field


class WorkspaceView(_Workspace, frozen=True, kw_only=True):
    """A workspace as the operator sees it, without its secrets."""

    agent_card: Raw


class WorkspacePage(Struct, frozen=True):
    """Workspaces in the order of their ids; `next_after` is missing on the last page."""

    workspaces: list[WorkspaceEntry]
    next_after: UUID | UnsetType = UNSET


class IssuedToken(_Secretive, frozen=True, omit_defaults=True):
    """A new token, shown only once; with a push workspace's inbound secret."""

    auth_token: str
    inbound_secret: str | None = None
