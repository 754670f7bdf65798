"""Who is calling, and may they act for this workspace."""

import base64
import binascii
import hmac
import time
from collections import OrderedDict
from collections.abc import Hashable
from uuid import UUID

from starlette.requests import HTTPConnection

from restante import wire
from restante.database.pool import Database
from restante.errors import BadRequest, NotAuthenticated, WorkspaceUnknown
from restante.http.networks import network_of
from restante.ids import WorkspaceId, as_uuid
from restante.workspaces import store
from restante.workspaces.concurrency import ACCOUNT, Account
from restante.workspaces.rules import Workspace, is_token, token_hash, token_matches
from restante.workspaces.seen import Seen

# Longer ones are not hashed; ours have 43 characters, and the operator chooses the admin's.
_MAX_TOKEN = 4096

TRUSTED_SECONDS = 2.0

_MAX_RECENT_TOKENS = 65_536  # about 10 MB

_REFUSED = "Send the token of this workspace as `Authorization: Bearer <token>`."
_REFUSED_ADMIN = "Send the admin token as `Authorization: Bearer <token>`."


class RecentTokens:
    """
    The workspaces and peers whose tokens were valid a moment ago, a bounded number of them.

    This only says whose share of the database a look-up uses; it authenticates nobody.
    """

    def __init__(self, limit: int = _MAX_RECENT_TOKENS) -> None:
        self._limit = limit
        self._owners: OrderedDict[bytes, Hashable] = OrderedDict()

    def note(self, token: str, owner: Hashable) -> None:
        """The token was just found to be this owner's."""
        hashed = token_hash(token)
        self._owners[hashed] = owner
        self._owners.move_to_end(hashed)
        if len(self._owners) > self._limit:
            self._owners.popitem(last=False)

    def owner_of(self, token: str | None) -> Hashable | None:
        """The owner, unless that was long ago; it may have another token now."""
        return self._owners.get(token_hash(token)) if token else None


class Access:
    """Knows the operator's token, and looks workspaces up by theirs."""

    def __init__(self, db: Database, *, admin_token: str) -> None:
        self._db = db
        self._admin_token = admin_token.encode()
        self.recent_tokens = RecentTokens()
        self.seen = Seen()

    def is_admin(self, token: str | None) -> bool:
        """Whether the token is the operator's, compared in constant time."""
        given = (token or "").encode("utf-8", "surrogateescape")
        return bool(given) and hmac.compare_digest(self._admin_token, given)

    def caller(self, request: HTTPConnection) -> Hashable | None:
        """
        Whose share of the database the look-up of a token uses; the operator's has no limit.

        Anyone can make up tokens.  So all that were not valid recently use the share of the
        client's network.  Those that were do not wait for them, even behind the same proxy.
        """
        token = presented_token(request)
        if self.is_admin(token):
            return None
        known = self.recent_tokens.owner_of(token)
        return known or network_of(request.client.host if request.client else "")

    async def find(self, workspace_id: WorkspaceId) -> Workspace | None:
        """The workspace, unless it was removed."""
        async with self._db.connection() as connection:
            found = await store.get(connection, workspace_id)
        return found if found and found.status == "active" else None

    async def find_own(self, workspace_id: WorkspaceId, token: str | None) -> Workspace | None:
        """The workspace, if this is its token; the look-up costs the same if it is not."""
        if token is None or not is_token(token):
            return None
        found = await self.find(workspace_id)
        if found is None or not token_matches(found, token):
            return None
        self._note(token, found)
        return found

    async def find_by_token(self, token: str) -> Workspace | None:
        """The workspace that this token belongs to."""
        if not is_token(token):
            return None
        async with self._db.connection() as connection:
            found = await store.by_token(connection, token_hash(token))
        if found is not None:
            self._note(token, found)
        return found

    def _note(self, token: str, workspace: Workspace) -> None:
        self.recent_tokens.note(token, workspace.id)
        self.seen.note(workspace.id)


def access(request: HTTPConnection) -> Access:
    """The access checks of the application that this request came to."""
    return request.app.state.access


def account(request: HTTPConnection) -> Account:
    """What the request is charged to, once it is known who sent it."""
    return request.scope[ACCOUNT]


def bearer(request: HTTPConnection) -> str | None:
    """The bearer token, if one was sent."""
    header = request.headers.get("authorization", "")
    if len(header) > _MAX_TOKEN:
        return None
    scheme, _, token = header.partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def presented_token(request: HTTPConnection) -> str | None:
    """The bearer token, or the password of Basic with any name, if one was sent."""
    scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic" or len(encoded) > _MAX_TOKEN:
        return bearer(request)
    try:
        decoded = base64.b64decode(encoded.strip(), validate=True)
    except (binascii.Error, ValueError):
        return None
    _, _, password = decoded.decode("utf-8", "surrogateescape").partition(":")
    return password or None


def workspace_id(request: HTTPConnection) -> WorkspaceId:
    """The workspace that the path names."""
    found = as_uuid(request.path_params["workspace_id"])
    if found is None:
        raise BadRequest("invalid workspace ID")
    return WorkspaceId(found)


def is_admin(request: HTTPConnection) -> bool:
    """Whether the operator is calling."""
    if not access(request).is_admin(bearer(request)):
        return False
    account(request).trust()
    return True


def admin(request: HTTPConnection) -> None:
    """Raise NotAuthenticated unless the operator is calling."""
    if not is_admin(request):
        raise NotAuthenticated(_REFUSED_ADMIN)


async def owner(request: HTTPConnection) -> Workspace:
    """The workspace, if it is calling itself; the same refusal whether it exists or not."""
    return await owner_of(request, workspace_id(request))


async def owner_of(
    request: HTTPConnection, wanted: WorkspaceId, *, otherwise: str = _REFUSED
) -> Workspace:
    """The same for a workspace that the body names."""
    found = await access(request).find_own(wanted, bearer(request))
    if found is None:
        raise NotAuthenticated(otherwise)
    paying = account(request)
    paying.charge(found.id)
    paying.workspace = found
    return found


async def owner_or_admin(request: HTTPConnection) -> Workspace:
    """The workspace, if it or the operator is calling; only the operator learns what is missing."""
    return await owner_or_admin_of(request, workspace_id(request))


async def owner_or_admin_of(request: HTTPConnection, wanted: WorkspaceId) -> Workspace:
    """The same for a workspace that is named elsewhere than in the path."""
    if not is_admin(request):
        return await owner_of(request, wanted)
    return await _known(request, wanted)


class Permission:
    """
    That of a request which was just authenticated for its workspace, and takes long.

    Its token may be revoked and its workspace removed meanwhile, at this server or another.
    """

    def __init__(self, request: HTTPConnection) -> None:
        self._request = request
        self._checked_at = time.monotonic()

    async def check(self) -> None:
        """Raise NotAuthenticated or WorkspaceUnknown, if the last look was not a moment ago."""
        if time.monotonic() - self._checked_at >= TRUSTED_SECONDS:
            await owner_or_admin(self._request)
            self._checked_at = time.monotonic()


async def _known(request: HTTPConnection, wanted: WorkspaceId) -> Workspace:
    found = await access(request).find(wanted)
    if found is None:
        raise WorkspaceUnknown
    account(request).workspace = found
    return found


def claimed_source(request: HTTPConnection, caller: Workspace) -> WorkspaceId | None:
    """
    The workspace itself if it names itself as the source of what it sends; None for the canvas.

    Raises NotAuthenticated for another id.  The operator acts for the canvas, whatever it names.
    """
    claimed = request.headers.get(wire.CALLER_ID) or None
    if claimed is None or is_admin(request):
        return None
    if as_uuid(claimed) != caller.id:
        raise NotAuthenticated(f"{wire.CALLER_ID}, if sent, must be the id of this workspace.")
    return caller.id


async def sender(request: HTTPConnection) -> UUID | None:
    """
    Who sends a message: any workspace with its own token, or the operator.

    None for the operator, whose messages come from the canvas.  The recipient is not looked up, so
    that only who may send can learn whether it exists.
    """
    workspace_id(request)  # a malformed id is refused for everybody
    if is_admin(request):
        return None
    return (await owner_by_token(request, request.headers.get(wire.CALLER_ID) or None)).id


async def owner_by_token(request: HTTPConnection, claimed: str | None) -> Workspace:
    """The workspace that a token belongs to; an id that is claimed must be its own."""
    token = bearer(request)
    caller = await access(request).find_by_token(token) if token else None
    if caller is None or (claimed is not None and as_uuid(claimed) != caller.id):
        raise NotAuthenticated(
            "Send your own workspace's token as `Authorization: Bearer <token>`; "
            f"{wire.CALLER_ID}, if sent, must be its id."
        )
    paying = account(request)
    paying.charge(caller.id)
    paying.workspace = caller
    return caller


async def recipient(request: HTTPConnection) -> Workspace:
    """To whom a message is sent, for a sender that was checked; raises WorkspaceUnknown."""
    return await _known(request, workspace_id(request))
